// The forward pass; see attention.hpp.
#pragma once
#include "attention.hpp"

namespace halfulp {
namespace HALFULP_ISA {

template <class E, bool integer>
struct Forward {
  static constexpr long KP = E::KP, BK = kForwardKeys, G = E::group, GROUPS = kRows / G;
  const Plan& plan;
  const halfulp_call& c;
  Width<E> wd, wv;
  long keys;  // of a head, in whole panels
  long held;  // of them as operands
  long step;  // keys of a block
  bool few;   // rows, for which nothing is packed that needs not be
  bool once;  // this unit has one block of rows, for which a block of keys is packed when its turn comes
  long packed_keys, packed_from;  // what K and V as operands hold
  Unit *key, *value, *query, *turned, *weights, *rows;
  float *scores, *out, *lanes, *exact_lanes, *m;
  uint8_t* odd;  // panels of V that hold NaN or an infinity
  long valid;    // rows of the block that exist

  Forward(const Plan& p, char* base)
      : plan(p), c(*p.call), wd(c.d), wv(c.dv), keys(up(c.n_key, kPanel)),
        held(c.n_key / kPanel * kPanel + width_of(c.n_key % kPanel)),
        step(c.recipe == HALFULP_RECIPE_PUBLISHED ? kTieKeys : BK),
        few(c.n_query <= Multiply<E>::few), once(few || p.groups * p.row_blocks == p.spans), packed_keys(once ? least(step, keys) : keys), packed_from(0) {
    Scratch s{base};
    key = s.take<Unit>(packed_keys * wd.units);
    value = s.take<Unit>(packed_keys / KP * wv.columns);
    rows = s.take<Unit>(kPanel * most(row_stride(wd), row_stride(wv)));
    query = s.take<Unit>(kRows * row_stride(wd));
    turned = s.take<Unit>(16 * up(wd.units, 16));
    weights = s.take<Unit>(kRows * BK / KP);
    scores = s.take<float>(kRows * BK);
    out = s.take<float>(kRows * wv.columns);
    lanes = s.take<float>(kRows * 16);
    exact_lanes = s.take<float>(kRows * 16);
    m = s.take<float>(kRows);
    odd = s.take<uint8_t>(keys / kPanel);
    bytes = s.at - base;
  }
  size_t bytes;

  static size_t needed(const Plan& p) { return Forward(p, nullptr).bytes; }

  static void run(const Plan& p, long unit, char* scratch) {
    Forward f(p, scratch);
    const long span = unit % p.spans, head = unit / p.spans, total = p.groups * p.row_blocks;
    const long from = total * span / p.spans, to = total * (span + 1) / p.spans;
    const long b = head / f.c.key_heads, hk = head % f.c.key_heads;
    E::enter(f.few ? f.c.n_query : kRows);
    if (!f.once) f.pack(b, hk, 0, f.keys_before(from, to));
    for (long block = from; block < to; ++block) {
      const long h = hk * p.groups + block / p.row_blocks, i0 = block % p.row_blocks * kRows;
      f.rows_of(b, h, i0);
      if (f.few && f.lost_in_sums()) {
        f.few = false;
        f.rows_of(b, h, i0);
        f.few = true;
      }
      f.finish(b, h, i0);
    }
    E::leave();
  }

  // Whether a sum is not finite: V may hold what rows that do not see it must not take.
  bool lost_in_sums() const { return infinite<1>(reinterpret_cast<const Unit*>(out), valid * wv.columns); }

  // The first key that no row of these blocks sees, nor any after it.
  long keys_before(long from, long to) const {
    const bool one_head = from / plan.row_blocks == (to - 1) / plan.row_blocks;
    const long last = one_head ? least(c.n_query, ((to - 1) % plan.row_blocks + 1) * kRows) : c.n_query;
    return last > 0 ? end_key(c, last - 1) : 0;
  }

  // Keys of a panel as operands, of which `real` exist: floats go by sixteen where that is all there are.
  static long width_of(long real) { return KP == 1 && real > 0 && real <= 16 ? 16 : panel_width(real); }

  // K and V of one head as operands.
  void pack(long b, long hk, long from, long end) {
    packed_from = from;
    for (long j = from; j < end; j += kPanel) {
      const long real = least(kPanel, c.n_key - j), width = width_of(real);
      panel_over_features<E>(rows_of_panel<E>(c.key, b, hk, j, real, wd, rows, width), width, wd, key_at(j));
      const Rows v = rows_of_panel<E>(c.value, b, hk, j, real, wv, rows, width);
      odd[j / kPanel] = large_panel<E>(v, real, wv) && infinite_panel<E>(v, real, wv);
      for (long col = 0; col < wv.columns; col += 64) {
        pair_rows<E>(v, width, col, wv.panel(col), value_at(col, j), wv.panel(col));
        if (odd[j / kPanel]) finite_only<KP>(value_at(col, j), width / KP * wv.panel(col));
      }
    }
  }
  Unit* key_at(long j) { return key + (j - packed_from) * wd.units; }
  Unit* value_at(long col, long j) {
    return value + col * (packed_keys / KP) + (j - packed_from) / KP * wv.panel(col);
  }

  void rows_of(long b, long h, long i0) {
    valid = least(kRows, c.n_query - i0);
    const long groups = (valid + G - 1) / G;
    read_rows<E>(c.query, b, h, i0, groups * G, valid, wd, query);
    if (few) Multiply<E>::turn(query, row_stride(wd), wd.units, turned);
    std::memset(out, 0, size_t(groups * G * wv.columns) * sizeof(float));
    std::memset(lanes, 0, sizeof(float) * size_t(valid) * 16);
    std::memset(exact_lanes, 0, sizeof(float) * size_t(valid) * 16);
    const float sink = c.sinks ? float(double(c.sinks[h]) * 1.4426950408889634) : -HALFULP_INF;
    for (long r = 0; r < valid; ++r) {
      m[r] = sink;
      if (sink != -HALFULP_INF) lanes[16 * r] = exact_lanes[16 * r] = std::exp2(sink - shift_of(sink));
    }
    const Span block = seen_by(c, i0, kRows, 0, keys);
    for (long k0 = block.from / step * step; k0 < block.to; k0 += step) {
      if (once && !few) pack(b, h / plan.groups, k0, least(block.to, k0 + step));
      keys_of(b, h, i0, groups, k0);
    }
  }

  // One block of keys: scores, weights, and their product with V.
  void keys_of(long b, long h, long i0, long groups, long k0) {
    const float scale = score_factor(c);
    Span span[GROUPS];
    for (long g = 0; g < groups; ++g) span[g] = seen_by(c, i0 + G * g, G, k0, least(keys, k0 + step));
    for (long j = k0; j < least(keys, k0 + step); j += kPanel)
      for (long g = 0; g < groups; ++g) {
        if (j < span[g].from || span[g].to <= j) continue;
        const long width = least(kPanel, span[g].to - j), real = least(kPanel, c.n_key - j);
        const Unit* q = query + G * g * row_stride(wd);
        float* to = scores + G * g * BK + j - k0;
        if (few)
          Multiply<E>::few_rows(valid, q, row_stride(wd), turned,
                                rows_of_panel<E>(c.key, b, h / plan.groups, j, real, wd, rows), width, wd.units, to, BK,
                                scale);
        else
          Multiply<E>::template group<kSet>(rows_in(g), q, row_stride(wd), key_at(j), width_of(real),
                                            least(width, width_of(real)), wd.units, to, BK, &scale);
      }
    float rescale[kRows];
    for (long g = 0; g < groups; ++g)
      if (!span[g].empty())
        for (long r = G * g; r < G * g + rows_in(g); ++r) rescale[r] = softmax(b, h, i0 + r, r, k0, span[g]);
    if (few) return values_of(b, h, k0, span[0], rescale);
    for (long col = 0; col < wv.columns; col += 64)
      for (long g = 0; g < groups; ++g)
        if (!span[g].empty())
          Multiply<E>::template group<kScaleAdd>(
              rows_in(g), weights + (G * g * BK + span[g].from - k0) / KP, BK / KP, value_at(col, span[g].from),
              wv.panel(col), wv.panel(col), (least(span[g].to, held) - span[g].from) / KP, out + G * g * wv.columns + col, wv.columns,
              rescale + G * g);
    for (long j = k0; j < least(keys, k0 + step); j += kPanel)
      if (odd[j / kPanel]) add_odd(b, h / plan.groups, k0, j, span);
  }

  // The weights of a block of keys times V, for few rows: floats are read where they lie.
  void values_of(long b, long h, long k0, Span s, const float* rescale) {
    for (long j = s.from; j < s.to; j += kPanel) {
      const long width = least(kPanel, s.to - j), real = least(kPanel, c.n_key - j);
      const Rows v = rows_of_panel<E>(c.value, b, h / plan.groups, j, real, wv, rows);
      for (long col = 0; col < wv.columns; col += 64) {
        if (KP == 2) pair_rows<E>(v, width, col, wv.panel(col), value, wv.panel(col));
        const Unit *w = weights + (j - k0) / KP, *at = KP == 2 ? value : v.at + col;
        const long ld = KP == 2 ? wv.panel(col) : v.stride;
        if (j == s.from)
          Multiply<E>::template group<kScaleAdd>(valid, w, BK / KP, at, ld, wv.panel(col), width / KP, out + col,
                                                 wv.columns, rescale);
        else
          Multiply<E>::template group<kAdd>(valid, w, BK / KP, at, ld, wv.panel(col), width / KP, out + col, wv.columns,
                                            nullptr);
      }
    }
  }

  long rows_in(long g) const { return least(G, valid - G * g); }

  // What is not finite in one panel of V, for the rows that see it.
  __attribute__((noinline)) void add_odd(long b, long hk, long k0, long from, const Span* span) {
    float v[256];
    for (long j = from; j < least(c.n_key, from + kPanel); ++j) {
      E::widen(row_at<const typename E::Element>(c.value, b, hk, j), v, c.dv);
      for (long col = 0; col < c.dv; ++col)
        for (long r = 0; r < valid && !finite(v[col]); ++r) {
          const float s = scores[r * BK + j - k0];
          if (j >= span[r / G].from && j < span[r / G].to && s != -HALFULP_INF)
            out[r * wv.columns + col] += std::exp2(s - shift_of(m[r])) * v[col];
        }
    }
  }

  // What a row of maximum m is shifted by.
  static float shift_of(float m) { return integer ? std::ceil(m) : m; }

  static float row_largest(const float* row, long from, long to) {
    V top = load(row + from), top2 = load(row + from + 16);
    for (long j = from + 32; j < to; j += 32) {
      top = max(load(row + j), top);
      top2 = max(load(row + j + 16), top2);
    }
    return largest(max(top, top2));
  }

  // The published shift: the maximum of a block times β if it is repeated and positive, 0 if it is repeated and negative.
  __attribute__((noinline)) static float stabilized(const float* row, long from, long to) {
    const float top = row_largest(row, from, to);
    long count = 0;
    for (long j = from; j < to; ++j) count += row[j] == top;
    return count > 1 && finite(top) ? top * (top > 0.f ? kRepeated : 0.f) : top;
  }

  // Weights of one row; the factor by which what was summed before is shifted anew.
  float softmax(long b, long h, long i, long r, long k0, Span s) {
    float* row = scores + r * BK - k0;
    if (c.softcap > 0.f) cap(c, row + s.from, s.to - s.from, nullptr);
    hide(c, b, h, i, row + s.from, s.from, s.to);
    float now = !integer && c.recipe == HALFULP_RECIPE_PUBLISHED ? stabilized(row, s.from, s.to)
                                                                 : row_largest(row, s.from, s.to);
    if (now < m[r]) now = m[r];
    const float before = shift_of(m[r]), shift = now == -HALFULP_INF ? 0.f : shift_of(now);
    const float factor = before == -HALFULP_INF ? 0.f : before == shift ? 1.f : std::exp2(before - shift);
    m[r] = now;
    V l = mul(load(lanes + 16 * r), set1(factor)), exact = mul(load(exact_lanes + 16 * r), set1(factor));
    Unit* dst = weights + (r * BK - k0) / KP;
    for (long j = s.from; j < s.to; j += 64) {
      V sum[2] = {set1(0.f), set1(0.f)};
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const long at = j + kHalf * half;
        if (at >= s.to) break;
        const V w0 = weight<integer>(load(row + at), set1(shift)), w1 = weight<integer>(load(row + at + 16), set1(shift));
        const auto packed = E::pack(w0, w1);
        E::put_row(dst + at / KP, packed);
        sum[half] = add(w0, w1);
        if constexpr (integer) l = E::sum(l, packed);
      }
      exact = add(exact, add(sum[0], sum[1]));
    }
    store(lanes + 16 * r, l);
    store(exact_lanes + 16 * r, exact);
    if (c.drop_below)
      drop<KP>(dst + s.from / KP, word_of_row(c, (b * c.heads + h) * c.n_query + i), c.drop_below, s.from, s.to - s.from);
    return factor;
  }

  void finish(long b, long h, long i0) {
    const long at = stat_at(c, b, h, i0);
    for (long r = 0; r < valid; ++r) {
      const float exact = tree(exact_lanes + 16 * r), l = integer ? tree(lanes + 16 * r) : exact;
      const bool seen = m[r] != -HALFULP_INF || exact != exact;  // the maximum does not tell of NaN
      const V divisor = set1(seen ? l : 1.f);
      float* row = out + r * wv.columns;
      for (long j = 0; j < wv.columns; j += 16) store(row + j, div(load(row + j), divisor));
      for (long j = 0; j < wv.columns && c.drop_below; j += 16) store(row + j, mul(load(row + j), set1(c.kept_scale)));
      round_out<E>(row, row_at<typename E::Element>(c.out, b, h, i0 + r), residual_at(c, b, h, i0 + r), c.dv);
      if (c.row_max) c.row_max[at + r] = m[r];
      if (c.row_sum) c.row_sum[at + r] = l;
      if (!c.own_lse && !c.lse) continue;
      const double lse = seen ? double(shift_of(m[r])) + std::log2(double(exact)) : -HALFULP_INF;
      if (c.own_lse) c.own_lse[at + r] = float(lse);
      if (c.lse) c.lse[at + r] = float(lse * 0.6931471805599453);
    }
  }
};

}  // namespace HALFULP_ISA
}  // namespace halfulp
