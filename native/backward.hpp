// The backward pass; see attention.hpp.
#pragma once
#include "forward.hpp"

namespace halfulp {
namespace HALFULP_ISA {

template <class E, bool integer>
struct Backward {
  static constexpr long KP = E::KP, BK = kBackwardKeys, G = E::group;
  // Every block of rows adds to all of dK and dV: by tiles that is longer in coming from memory than in being computed.
  static constexpr long kRows = (G == 32 ? 2 : 1) * halfulp::kRows;
  static constexpr long kStep = E::k_step * KP > 2 ? E::k_step * KP : 2;  // rows that come and go together
  // Keys of a tile's scores: what tiles store is read soon, and should still be in the nearest cache.
  static constexpr long kStrip = G == 32 ? kHalf : kPanel;
  const Plan& plan;
  const halfulp_call& c;
  Width<E> wd, wv;
  long keys;  // of a chunk, in whole panels
  // of the chunk: K and V with k over features, K with k over keys, dKᵀ and dVᵀ
  Unit *key, *value, *key_rows;
  float *grad_key, *grad_value;
  // of a block of query rows, as rows and with k over rows
  Unit *query, *grad_out, *query_t, *grad_out_t, *rows, *paired;
  float *grad_query, *shift, *inverse, *exact_inverse, *delta, *delta_lanes, *o;
  // of a tile
  float *scores, *grad_weights, *slopes, *terms;
  Unit *seen_bits, *kept_bits, *p, *ds, *ds_rows;
  size_t bytes;

  Backward(const Plan& pl, char* base)
      : plan(pl), c(*pl.call), wd(c.d), wv(c.dv), keys(up(pl.chunk_keys, kPanel)) {
    Scratch s{base};
    key = s.take<Unit>(keys * wd.units);
    value = s.take<Unit>(keys * wv.units);
    key_rows = s.take<Unit>(keys / KP * wd.columns);
    grad_key = s.take<float>(keys * wd.columns);
    grad_value = s.take<float>(keys * wv.columns);
    const long widest = most(wd.columns, wv.columns);
    rows = s.take<Unit>(kPanel * widest);
    paired = s.take<Unit>(kRows / KP * widest);
    query = s.take<Unit>(kRows * row_stride(wd));
    grad_out = s.take<Unit>(kRows * row_stride(wv));
    query_t = s.take<Unit>(kRows / KP * wd.columns);
    grad_out_t = s.take<Unit>(kRows / KP * wv.columns);
    grad_query = s.take<float>(kRows * wd.columns);
    shift = s.take<float>(kRows);
    inverse = s.take<float>(kRows);
    exact_inverse = s.take<float>(kRows);
    delta = s.take<float>(kRows);
    delta_lanes = s.take<float>(kRows * 16);
    o = s.take<float>(2 * widest);
    scores = s.take<float>(G * kPanel);
    grad_weights = s.take<float>(G * kPanel);
    slopes = s.take<float>(G * kPanel);
    terms = s.take<float>(pl.call->grad_mask ? G * kPanel : 0);
    seen_bits = s.take<Unit>(G * kPanel);
    kept_bits = s.take<Unit>(G * kPanel);
    p = s.take<Unit>(kRows / KP * BK);
    ds = s.take<Unit>(kRows / KP * BK);
    ds_rows = s.take<Unit>(kRows * BK / KP);
    bytes = s.at - base;
  }

  static size_t needed(const Plan& pl) { return Backward(pl, nullptr).bytes; }

  static void run(const Plan& pl, long unit, char* scratch) {
    Backward w(pl, scratch);
    const long chunk = unit % pl.chunks, head = unit / pl.chunks;
    E::enter(kRows);
    w.chunk_of(head / w.c.key_heads, head % w.c.key_heads, chunk);
    E::leave();
  }

  long first, count;  // keys of this chunk
  long batch, head;   // of the rows at hand
  long valid, exist;  // of them, how many there are, and these in whole steps of a product
  long wide;          // keys of the tile at hand
  bool odd_keys;      // K or V of this chunk is not finite, or 2⁶⁵ and more
  bool odd_grads;     // dO of the rows at hand is not finite
  float late;         // what scores are multiplied by when they are read
  bool careful;       // the rows at hand have an option, or something is not finite or large

  void chunk_of(long b, long hk, long chunk) {
    first = chunk * plan.chunk_keys;
    count = least(c.n_key - first, plan.chunk_keys);
    odd_keys = false;
    for (long j = 0; j < G * kPanel; ++j) slopes[j] = 1.f;
    for (long j = 0; j < count; j += kPanel) {
      const long real = least(kPanel, count - j), width = panel_width(real);
      const Rows k = rows_of_panel<E>(c.key, b, hk, first + j, real, wd, rows);
      panel_over_features<E>(k, width, wd, key + j * wd.units);
      odd_keys |= large_panel<E>(k, real, wd);
      for (long col = 0; col < wd.columns; col += 64) {
        Unit* to = key_rows + col * (keys / KP) + j / KP * wd.panel(col);
        pair_rows<E>(k, width, col, wd.panel(col), to, wd.panel(col));
        if (odd_keys) finite_only<KP>(to, width / KP * wd.panel(col));
      }
      const Rows v = rows_of_panel<E>(c.value, b, hk, first + j, real, wv, rows);
      odd_keys |= large_panel<E>(v, real, wv);
      panel_over_features<E>(v, width, wv, value + j * wv.units);
    }
    std::memset(grad_key, 0, size_t(up(count, kHalf) * wd.columns) * sizeof(float));
    std::memset(grad_value, 0, size_t(up(count, kHalf) * wv.columns) * sizeof(float));
    for (long g = 0; g < plan.groups; ++g)
      for (long i0 = 0; i0 < c.n_query; i0 += kRows) rows_of(b, hk * plan.groups + g, i0, chunk);
    write_transposed(grad_key, wd, c.scale, c.grad_key, b, hk);
    write_transposed(grad_value, wv, c.drop_below ? c.kept_scale : 1.f, c.grad_value, b, hk);
  }

  // Keys that rows i .. i + rows touch, counted from the chunk's first, inside [from, to).
  Span seen(long i, long n, long from, long to) const {
    const Span s = seen_by(c, i, n, first + from, first + to);
    return s.empty() ? Span{0, 0} : Span{s.from - first, s.to - first};
  }

  void rows_of(long b, long h, long i0, long chunk) {
    batch = b, head = h, valid = least(kRows, c.n_query - i0);
    exist = up(valid, kStep);
    const long groups = (valid + G - 1) / G, flat = (b * c.heads + h) * c.n_query + i0;
    const Span block = seen(i0, kRows, 0, up(count, kPanel));
    std::memset(grad_query, 0, size_t(exist * wd.columns) * sizeof(float));
    const bool for_sinks = plan.sink_rows && chunk == 0;
    for (long r = 0; r < valid && plan.terms; ++r)
      std::memset(terms_at(r, 0, i0), 0, size_t(count) * sizeof(float));
    if (!block.empty() || for_sinks) {
      careful = odd_keys || c.softcap > 0.f || c.drop_below || c.grad_mask;
      read_block(c.query, b, h, i0, wd, query, query_t);
      read_block(c.grad_out, b, h, i0, wv, grad_out, grad_out_t);
      odd_grads = careful && infinite<KP>(grad_out, valid * row_stride(wv));
      statistics(b, h, i0);
      if (for_sinks) sink_terms(h, flat);
      for (long k0 = block.from / BK * BK; k0 < block.to; k0 += BK) keys_of(i0, groups, k0);
    }
    if (plan.chunks > 1) {
      float* dst = plan.partial + (chunk * c.batch * c.heads * c.n_query + flat) * c.d;
      for (long r = 0; r < valid; ++r) std::memcpy(dst + r * c.d, grad_query + r * wd.columns, size_t(c.d) * 4);
      return;
    }
    for (long r = 0; r < valid; ++r)
      write_row(grad_query + r * wd.columns, wd, c.scale, row_at<typename E::Element>(c.grad_query, b, h, i0 + r));
  }

  // dS of a row of the block from a key of the chunk on, kept for the mask's gradient.
  float* terms_at(long r, long key_of_chunk, long i0) const {
    return plan.terms + ((batch * c.heads + head - plan.first_head) * c.n_query + i0 + r) * c.n_key + first + key_of_chunk;
  }

  static void write_row(float* row, Width<E> w, float scale, typename E::Element* dst) {
    float* to = row;
    if constexpr (E::exact_operands)
      if (w.d == w.columns) to = dst;  // floats without padding need no copy
    for (long j = 0; j < w.columns; j += 16) store(to + j, mul(load(row + j), set1(scale)));
    if (to == row) E::narrow(row, dst, w.d);
  }

  void read_block(const halfulp_tensor& x, long b, long h, long i0, Width<E> w, Unit* as_rows, Unit* t) {
    const long count = up(valid, 16 * KP);  // in whole tiles to transpose
    read_rows<E>(x, b, h, i0, count, valid, w, as_rows);
    const bool odd = large<KP>(as_rows, count * row_stride(w));
    const Unit* from = KP == 1 && !odd ? as_rows : paired;
    if (from == paired) pair_rows<E>({as_rows, row_stride(w)}, count, 0, w.columns, paired, w.columns);
    if (odd) {
      careful = true;
      finite_only<KP>(paired, count / KP * w.columns);
    }
    for (long k = 0; k < count / KP; k += 16)
      for (long col = 0; col < w.columns; col += 16)
        transpose16(from + k * w.columns + col, w.columns, t + col * (kRows / KP) + k, kRows / KP, 16);
  }

  // What dS's weights are divided by; algorithms/backward.py says why. The largest weight, 2^score, is at most 1.
  static float balance(float score, float l, float rounded) {
    if (l >= 2.f) return rounded;
    const float share = l / std::exp2(score) - 1.f;
    return l + (share < 0.f ? 0.f : share > 1.f ? 1.f : share) * (rounded - l);
  }

  // What a row's weights are shifted and divided by, and its δ.
  void statistics(long b, long h, long i0) {
    const long at = stat_at(c, b, h, i0);
    for (long r = 0; r < exist; ++r) {
      const bool seen = r < valid && c.own_lse[at + r] != -HALFULP_INF;
      shift[r] = inverse[r] = exact_inverse[r] = delta[r] = 0.f;
      if (!seen) {
        // a row sum that underflowed, in the published recipe alone
        if (r < valid && c.row_max[at + r] != -HALFULP_INF) inverse[r] = exact_inverse[r] = __builtin_nanf("");
        continue;
      }
      if constexpr (!integer) {
        shift[r] = c.own_lse[at + r], inverse[r] = exact_inverse[r] = 1.f;
        continue;
      }
      shift[r] = std::ceil(c.row_max[at + r]);
      // lse is rounded: in bf16 and fp16 that is nothing, in float32 it is most of the error
      const float l = E::exact_operands ? c.row_sum[at + r] : std::exp2(c.own_lse[at + r] - shift[r]);
      inverse[r] = 1.f / balance(c.row_max[at + r] - shift[r], l, c.row_sum[at + r]);
      exact_inverse[r] = 1.f / l;
    }
    const bool summed = !integer && c.recipe == HALFULP_RECIPE_EXACT_DELTA;
    if (!summed) delta_of_out(b, h, i0);
    if constexpr (!integer)
      if (summed) exact_delta(i0, (valid + G - 1) / G);
    for (long r = 0; r < valid; ++r)
      if (c.grad_lse && c.own_lse[at + r] != -HALFULP_INF) delta[r] -= c.grad_lse[at + r];
    for (long r = 0; r < valid; ++r) careful |= !finite(delta[r] + shift[r] + inverse[r] + exact_inverse[r]);
  }

  // δ = Σ dO ∘ O.
  void delta_of_out(long b, long h, long i0) {
    std::memset(o, 0, size_t(2 * wv.columns) * sizeof(float));
    const float *x = o, *y = o + wv.columns;
    for (long r = 0; r < valid; ++r) {
      const auto* out = row_at<const typename E::Element>(c.out, b, h, i0 + r);
      const auto* go = row_at<const typename E::Element>(c.grad_out, b, h, i0 + r);
      bool lie = false;  // as floats without padding
      if constexpr (E::exact_operands)
        if ((lie = wv.d == wv.columns && !c.residual)) x = out, y = go;
      if (!lie) {
        read_out<E>(out, residual_at(c, b, h, i0 + r), o, c.dv);
        E::widen(go, o + wv.columns, c.dv);
      }
      V sum = set1(0.f);
      for (long j = 0; j < wv.columns; j += 16) sum = fma(load(x + j), load(y + j), sum);
      float lanes[16];
      store(lanes, sum);
      delta[r] = tree(lanes);
    }
  }

  // A sink is a score whose value is 0: its dS is −P (δ − dLSE).
  void sink_terms(long h, long flat) {
    const float sink = float(double(c.sinks[h]) * 1.4426950408889634);
    for (long r = 0; r < valid; ++r)
      plan.sink_rows[flat + r] = sink == -HALFULP_INF ? 0.f : -(std::exp2(sink - shift[r]) * inverse[r]) * delta[r];
  }

  // S and dP of a group of rows and `wide` keys from s on of panel j.
  void products(long i0, long g, long j, long s) {
    const float scale = score_factor(c), one = 1.f;
    const bool waits = !careful && scaled_when_read<E>(c);
    late = waits ? scale : one;
    const long n = rows_in(g), ld = panel_width(count - j);
    Multiply<E>::template group<kSet>(n, query + G * g * row_stride(wd), row_stride(wd), key + j * wd.units + s, ld, wide,
                                      wd.units, scores, kPanel, waits ? &one : &scale);
    Multiply<E>::template group<kSet>(n, grad_out + G * g * row_stride(wv), row_stride(wv), value + j * wv.units + s, ld,
                                      wide, wv.units, grad_weights, kPanel, &one);
    for (long r = 0; r < n && careful && c.softcap > 0.f; ++r)
      cap(c, scores + r * kPanel, wide, slopes + r * kPanel);
    for (long r = 0; r < n && hides(c, i0 + G * g, n, first + j + s, first + j + s + wide); ++r)
      hide(c, batch, head, i0 + G * g + r, scores + r * kPanel, first + j + s, first + j + s + wide);
    if (careful) veil_rows(i0, G * g, n, first + j + s);
  }
  long rows_in(long g) const { return least(G, exist - G * g); }

  __attribute__((noinline)) void veil_rows(long i0, long from, long n, long key) {
    for (long r = 0; r < n; ++r) {
      float* row = scores + r * kPanel;
      for (long k = 0; k < wide && from + r >= valid; ++k) row[k] = -HALFULP_INF;
      veil(c, row, grad_weights + r * kPanel, (batch * c.heads + head) * c.n_query + i0 + from + r, key, wide,
           seen_bits + r * kPanel, kept_bits + r * kPanel);
    }
  }

  // δ = Σ dP ∘ P over all keys: one more pass.
  void exact_delta(long i0, long groups) {
    std::memset(delta_lanes, 0, sizeof(float) * kRows * 16);
    for (long j = 0; j < up(count, kPanel); j += kPanel)
      for (long g = 0; g < groups; ++g) {
        const Span s = seen(i0 + G * g, G, j, j + kPanel);
        if (s.empty()) continue;
        for (long from = 0; from < s.to - j; from += kStrip) {
          wide = least(kStrip, s.to - j - from);
          products(i0, g, j, from);
          for (long r = 0; r < rows_in(g); ++r) {
            const V m = set1(shift[G * g + r]), l = set1(inverse[G * g + r]);
            V sum = load(delta_lanes + (G * g + r) * 16);
            for (long k = 0; k < wide; k += 16)
              sum = fma(mul(weight<integer>(read_scores<E>(scores + r * kPanel + k, late), m), l),
                        load(grad_weights + r * kPanel + k), sum);
            store(delta_lanes + (G * g + r) * 16, sum);
          }
        }
      }
    for (long r = 0; r < exist; ++r) delta[r] = tree(delta_lanes + 16 * r);
  }

  void keys_of(long i0, long groups, long k0) {
    const long end = least(up(count, kPanel), k0 + BK);
    for (long j = k0; j < end; j += kPanel) {
      const Span block = seen(i0, kRows, j, j + kPanel);
      if (block.empty()) continue;
      const long panel = block.to - j;  // what some row of the block sees of it
      long g0 = groups, g1 = 0;
      for (long g = 0; g < groups; ++g) {
        const Span s = seen(i0 + G * g, G, j, j + kPanel);
        if (s.empty()) continue;
        g0 = least(g0, g), g1 = g + 1;
        for (long from = 0; from < panel; from += kStrip) {
          wide = least(kStrip, panel - from);
          products(i0, g, j, from);
          if (!careful) {
            for (long r = 0; r < rows_in(g); r += 2) pair_of<false>(G * g + r, r, j - k0 + from);
            continue;
          }
          for (long r = 0; r < rows_in(g); r += 2) pair_of<true>(G * g + r, r, j - k0 + from);
          if (odd_grads) add_odd(i0, G * g, j, from);
          if (plan.terms) keep_terms(i0, G * g, j + from);
        }
      }
      if (g0 >= g1) continue;
      const long k = G * g0 / KP, length = least(G * g1, exist) / KP - k, tile = (j - k0) * (kRows / KP) + k * kPanel;
      const long ld = panel_width(count - j);
      Multiply<E>::add_rows(wv.even, grad_out_t + k, kRows / KP, p + tile, kPanel, panel, length,
                            grad_value + j * wv.columns, ld);
      Multiply<E>::add_rows(wd.even, query_t + k, kRows / KP, ds + tile, kPanel, panel, length,
                            grad_key + j * wd.columns, ld);
    }
    for (long col = 0; col < wd.columns; col += 64)
      for (long g = 0; g < groups; ++g) {
        const Span s = seen(i0 + G * g, G, k0, end);
        if (!s.empty())
          Multiply<E>::template group<kAdd>(rows_in(g), ds_rows + (G * g * BK + s.from - k0) / KP, BK / KP,
                                            key_rows + col * (keys / KP) + s.from / KP * wd.panel(col), wd.panel(col),
                                            wd.panel(col), (s.to - s.from) / KP, grad_query + G * g * wd.columns + col, wd.columns,
                                            nullptr);
      }
  }

  __attribute__((noinline)) void keep_terms(long i0, long from, long j) {
    for (long r = 0; r < least(G, valid - from); ++r)
      std::memcpy(terms_at(from + r, j, i0), terms + r * kPanel, size_t(least(wide, count - j)) * sizeof(float));
  }

  // What is not finite in dO, for dV of the keys that its rows see.
  __attribute__((noinline)) void add_odd(long i0, long from, long j, long strip) {
    float* go = o + wv.columns;
    for (long r = from; r < least(from + G, valid); ++r) {
      E::widen(row_at<const typename E::Element>(c.grad_out, batch, head, i0 + r), go, c.dv);
      for (long col = 0; col < c.dv; ++col)
        for (long k = 0; k < wide && !finite(go[col]); ++k) {
          const float s = scores[(r - from) * kPanel + k], p = integer ? exact_inverse[r] : 1.f;
          if (s != -HALFULP_INF) grad_value[j * wv.columns + col * panel_width(count - j) + strip + k] += std::exp2(s - shift[r]) * p * go[col];
        }
    }
  }

  // dS before its rounding and without softcap's slope: what a mask that is added to the capped scores takes.
  __attribute__((noinline)) void term_of(long at, V m, V l, V s0, V s1, V dp0, V dp1) {
    V w0 = weight<integer>(s0, m), w1 = weight<integer>(s1, m);
    if constexpr (integer) E::unpack(E::pack(w0, w1), w0, w1);
    store(terms + at, both(mul(mul(w0, l), dp0), bits(seen_bits + at)));
    store(terms + at + 16, both(mul(mul(w1, l), dp1), bits(seen_bits + at + 16)));
  }

  // P and dS of rows r and r + 1 of the block (t and t + 1 of the tile), in both layouts. `careful`: hidden pairs count
  // 0 whatever stands there, dropout and the slope of softcap come in.
  static V bits(const Unit* at) { return load(reinterpret_cast<const float*>(at)); }
  template <bool careful>
  void pair_of(long r, long t, long column) {
    const long pair = column / kPanel * kPanel * (kRows / KP) + r / KP * kPanel + column % kPanel;
    Unit *p_at = p + pair, *ds_at = ds + pair;
    for (long j = 0; j < wide; j += 32) {
      typename E::Packed pp[2], pds[2];
#pragma GCC unroll 2
      for (int x = 0; x < 2; ++x) {
        const long at = (t + x) * kPanel + j;
        const V s0 = read_scores<E>(scores + at, late), s1 = read_scores<E>(scores + at + 16, late);
        const V m = set1(shift[r + x]), d = set1(delta[r + x]);
        V w0 = weight<integer>(s0, m), w1 = weight<integer>(s1, m);
        V dp0 = sub(load(grad_weights + at), d), dp1 = sub(load(grad_weights + at + 16), d);
        if constexpr (careful) if (plan.terms) term_of(at, m, set1(inverse[r + x]), s0, s1, dp0, dp1);
        if constexpr (careful) dp0 = mul(dp0, load(slopes + at)), dp1 = mul(dp1, load(slopes + at + 16));
        // a padded or fully masked row has inverses of 0
        const V l = set1(inverse[r + x]), le = integer ? set1(exact_inverse[r + x]) : l;
        V v0 = mul(w0, le), v1 = mul(w1, le);
        if constexpr (careful) v0 = both(v0, bits(kept_bits + at)), v1 = both(v1, bits(kept_bits + at + 16));
        pp[x] = E::pack(v0, v1);
        if constexpr (integer) E::unpack(E::pack(w0, w1), w0, w1);
        dp0 = mul(mul(w0, l), dp0), dp1 = mul(mul(w1, l), dp1);
        if constexpr (careful) dp0 = both(dp0, bits(seen_bits + at)), dp1 = both(dp1, bits(seen_bits + at + 16));
        pds[x] = E::pack(dp0, dp1);
        E::put_row(ds_rows + ((r + x) * BK + column + j) / KP, pds[x]);
      }
      E::put_pair(p_at + j, kPanel, pp[0], pp[1]);
      E::put_pair(ds_at + j, kPanel, pds[0], pds[1]);
    }
  }

  void write_transposed(float* grad, Width<E> w, float scale, const halfulp_tensor& dst, long b, long hk) {
    float* turned = reinterpret_cast<float*>(rows);
    for (long j = 0; j < count; j += kPanel) {
      const long width = panel_width(count - j);
      for (long col = 0; col < w.columns; col += 16)
        for (long k = 0; k < width; k += 16)
          transpose16(reinterpret_cast<Unit*>(grad + j * w.columns + col * width + k), width,
                      reinterpret_cast<Unit*>(turned + k * w.columns + col), w.columns, 16);
      for (long r = 0; r < least(kPanel, count - j); ++r)
        write_row(turned + r * w.columns, w, scale, row_at<typename E::Element>(dst, b, hk, first + j + r));
    }
  }

  // dQ of one head as the sum of its chunks, in their order.
  static void add_chunks(const Plan& pl, long unit) {
    const halfulp_call& c = *pl.call;
    const long all = c.batch * c.heads * c.n_query * c.d;
    alignas(64) float sum[256];
    for (long i = 0; i < c.n_query; ++i) {
      const float* from = pl.partial + (unit * c.n_query + i) * c.d;
      for (long k = 0; k < c.d; ++k) sum[k] = from[k];
      for (long chunk = 1; chunk < pl.chunks; ++chunk)
        for (long k = 0; k < c.d; ++k) sum[k] += from[chunk * all + k];
      for (long k = 0; k < c.d; ++k) sum[k] *= c.scale;
      E::narrow(sum, row_at<typename E::Element>(c.grad_query, unit / c.heads, unit % c.heads, i), c.d);
    }
  }
};

template <class E, bool integer>
constexpr Kernels kernels() {
  return {Forward<E, integer>::needed, Forward<E, integer>::run, Backward<E, integer>::needed,
          Backward<E, integer>::run, Backward<E, integer>::add_chunks, round_out<E>};
}

}  // namespace HALFULP_ISA
}  // namespace halfulp
