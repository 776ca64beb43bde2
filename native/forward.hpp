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
  float early, late;  // what scores are multiplied by as they are made, and when they are read
  float *scores, *next_scores, *out, *lanes, *exact_lanes, *m;
  uint8_t* odd;  // panels of V that hold NaN or an infinity
  // Of the block of rows at hand: its first row, how many exist, and groups of them. Few rows: those of several heads.
  long b, h, i0, valid, groups;

  Forward(const Plan& p, char* base)
      : plan(p), c(*p.call), wd(c.d), wv(c.dv), keys(up(c.n_key, kPanel)),
        held(c.n_key / kPanel * kPanel + width_of(c.n_key % kPanel)),
        step(c.recipe == HALFULP_RECIPE_PUBLISHED ? kTieKeys : BK),
        few(c.n_query <= Multiply<E>::few), once(few || p.groups * p.row_blocks == p.spans), packed_keys(once ? least(step, keys) : keys), packed_from(0) {
    const float scale = score_factor(c);
    early = scaled_when_read<E>(c) ? 1.f : scale, late = scaled_when_read<E>(c) ? scale : 1.f;
    Scratch s{base};
    key = s.take<Unit>(packed_keys * wd.units);
    value = s.take<Unit>(packed_keys / KP * wv.columns);
    rows = s.take<Unit>(kPanel * most(row_stride(wd), row_stride(wv)));
    query = s.take<Unit>(kRows * row_stride(wd));
    turned = s.take<Unit>(16 * up(wd.units, 16));
    weights = s.take<Unit>(kRows * BK / KP);
    scores = s.take<float>(kRows * BK);
    next_scores = s.take<float>(few ? Multiply<E>::few * BK : 0);
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
    const long heads = f.few ? most(1, Multiply<E>::few / f.c.n_query) : 1;  // that are read K and V for at once
    if (!f.few) E::enter(kRows);
    if (!f.once) f.pack(b, hk, 0, f.keys_before(from, to));
    for (long block = from; block < to; block += heads) {
      const long h = hk * p.groups + block / p.row_blocks, i0 = block % p.row_blocks * kRows;
      f.rows_of(b, h, i0, least(heads, to - block));
      if (!f.few || !f.lost_in_sums()) {
        f.finish();
        continue;
      }
      f.few = false;
      E::enter(kRows);
      for (long g = 0; g < least(heads, to - block); ++g) {
        f.rows_of(b, h + g, i0, 1);
        f.finish();
      }
      f.few = true;
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

  // Head and number of a row of the block.
  long head_of(long r) const { return few ? h + r / c.n_query : h; }
  long row_of(long r) const { return few ? r % c.n_query : i0 + r; }

  void rows_of(long of_batch, long first_head, long first_row, long heads) {
    b = of_batch, h = first_head, i0 = first_row;
    const long rows_each = least(kRows, c.n_query - i0);
    valid = heads * rows_each, groups = (valid + G - 1) / G;
    const long padded = few ? up(valid, 4) : groups * G;  // the least that a product of them touches
    for (long g = 0; g < heads; ++g)  // the zeros behind one head's rows make way for the next
      read_rows<E>(c.query, b, h + g, i0, padded - g * rows_each, rows_each, wd,
                   query + g * rows_each * row_stride(wd));
    if (few) {
      E::enter(valid);
      Multiply<E>::turn(query, row_stride(wd), wd.units, turned);
    }
    std::memset(out, 0, size_t(padded * wv.columns) * sizeof(float));
    std::memset(lanes, 0, sizeof(float) * size_t(valid) * 16);
    std::memset(exact_lanes, 0, sizeof(float) * size_t(valid) * 16);
    for (long r = 0; r < valid; ++r) {
      const float sink = c.sinks ? float(double(c.sinks[head_of(r)]) * 1.4426950408889634) : -HALFULP_INF;
      m[r] = sink;
      if (sink != -HALFULP_INF) lanes[16 * r] = exact_lanes[16 * r] = std::exp2(sink - shift_of(sink));
    }
    const Span block = seen_by(c, i0, kRows, 0, keys);
    const long first = block.from / step * step;
    if (few && first < block.to) scores_of(0, first, next_scores);
    for (long k0 = first; k0 < block.to; k0 += step) {
      if (few) {
        // Few rows wait for memory. The next block's K is read before this one's weights are computed, which depend on
        // nothing that is still on its way: the processor does both at once.
        std::swap(scores, next_scores);
        if (k0 + step < block.to) scores_of(0, k0 + step, next_scores);
      } else {
        if (once) pack(b, h / plan.groups, k0, least(block.to, k0 + step));
      }
      keys_of(k0);
    }
  }

  // The keys of a block that the rows of a group see.
  Span span_of(long g, long k0) const { return seen_by(c, i0 + G * g, G, k0, least(keys, k0 + step)); }

  void scores_of(long g, long k0, float* all) {
    const Span span = span_of(g, k0);
    for (long j = span.from; j < span.to; j += kPanel) {
      const long width = least(kPanel, span.to - j), real = least(kPanel, c.n_key - j);
      const Unit* q = query + G * g * row_stride(wd);
      float* to = all + G * g * BK + j - k0;
      if (few)
        Multiply<E>::few_rows(valid, q, row_stride(wd), turned,
                              rows_of_panel<E>(c.key, b, h / plan.groups, j, real, wd, rows), width, wd.units, to, BK,
                              early);
      else
        Multiply<E>::template group<kSet>(rows_in(g), q, row_stride(wd), key_at(j), width_of(real),
                                          least(width, width_of(real)), wd.units, to, BK, &early);
    }
  }

  // One block of keys, a group of rows after another, whose scores so stay in the nearest cache: weights from scores, and
  // their product with V.
  void keys_of(long k0) {
    Span span[GROUPS];
    float rescale[kRows];
    for (long g = 0; g < groups; ++g) {
      span[g] = span_of(g, k0);
      if (span[g].empty()) continue;
      if (!few) scores_of(g, k0, scores);
      for (long r = G * g; r < G * g + rows_in(g); ++r) rescale[r] = softmax(r, k0, span[g]);
      for (long col = 0; col < wv.columns && !few; col += 64)
        Multiply<E>::template group<kScaleAdd>(
            rows_in(g), weights + (G * g * BK + span[g].from - k0) / KP, BK / KP, value_at(col, span[g].from),
            wv.panel(col), wv.panel(col), (least(span[g].to, held) - span[g].from) / KP, out + G * g * wv.columns + col, wv.columns,
            rescale + G * g);
    }
    if (few) return values_of(k0, span[0], rescale);
    for (long j = k0; j < least(keys, k0 + step); j += kPanel)
      if (odd[j / kPanel]) add_odd(k0, j, span);
  }

  // The weights of a block of keys times V, for few rows: floats are read where they lie.
  void values_of(long k0, Span s, const float* rescale) {
    for (long j = s.from; j < s.to; j += kPanel) {
      const long width = least(kPanel, s.to - j), real = least(kPanel, c.n_key - j);
      const Rows v = rows_of_panel<E>(c.value, b, h / plan.groups, j, real, wv, rows);
      const float* factor = j == s.from ? rescale : nullptr;
      for (long col = 0; col < wv.columns; col += 64) {
        const Unit *w = weights + (j - k0) / KP, *at = KP == 2 ? value : v.at + col;
        const long columns = wv.panel(col), ld = KP == 2 ? columns : v.stride;
        const Rows lying{v.at + col / KP, v.stride};
        if (valid == 1 && Multiply<E>::one_row(w, lying, width, columns, out + col, factor ? *factor : 1.f)) continue;
        if (KP == 2) pair_rows<E>(v, width, col, columns, value, columns);
        if (factor)
          Multiply<E>::template group<kScaleAdd>(valid, w, BK / KP, at, ld, columns, width / KP, out + col, wv.columns,
                                                 factor);
        else
          Multiply<E>::template group<kAdd>(valid, w, BK / KP, at, ld, columns, width / KP, out + col, wv.columns,
                                            nullptr);
      }
    }
  }

  long rows_in(long g) const { return least(G, valid - G * g); }

  // What is not finite in one panel of V, for the rows that see it.
  __attribute__((noinline)) void add_odd(long k0, long from, const Span* span) {
    float v[256];
    for (long j = from; j < least(c.n_key, from + kPanel); ++j) {
      E::widen(row_at<const typename E::Element>(c.value, b, h / plan.groups, j), v, c.dv);
      for (long col = 0; col < c.dv; ++col)
        for (long r = 0; r < valid && !finite(v[col]); ++r) {
          const float s = scores[r * BK + j - k0] * late;
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
  float softmax(long r, long k0, Span s) {
    float* row = scores + r * BK - k0;
    if (c.softcap > 0.f) cap(c, row + s.from, s.to - s.from, nullptr);
    hide(c, b, head_of(r), row_of(r), row + s.from, s.from, s.to);
    float now = !integer && c.recipe == HALFULP_RECIPE_PUBLISHED ? stabilized(row, s.from, s.to)
                                                                 : row_largest(row, s.from, s.to) * late;
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
        const V s0 = read_scores<E>(row + at, late), s1 = read_scores<E>(row + at + 16, late);
        const V w0 = weight<integer>(s0, set1(shift)), w1 = weight<integer>(s1, set1(shift));
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
      drop<KP>(dst + s.from / KP, word_of_row(c, (b * c.heads + head_of(r)) * c.n_query + row_of(r)), c.drop_below, s.from,
               s.to - s.from);
    return factor;
  }

  void finish() {
    for (long r = 0; r < valid; ++r) {
      const long head = head_of(r), i = row_of(r), at = stat_at(c, b, head, i);
      const float exact = tree(exact_lanes + 16 * r), l = integer ? tree(lanes + 16 * r) : exact;
      const bool seen = m[r] != -HALFULP_INF || exact != exact;  // the maximum does not tell of NaN
      const V divisor = set1(seen ? l : 1.f);
      float *row = out + r * wv.columns, *to = row;
      auto* result = row_at<typename E::Element>(c.out, b, head, i);
      if constexpr (E::exact_operands)
        if (wv.d == wv.columns && !c.residual) to = result;  // floats without padding need no copy
      for (long j = 0; j < wv.columns; j += 16) store(to + j, div(load(row + j), divisor));
      for (long j = 0; j < wv.columns && c.drop_below; j += 16) store(to + j, mul(load(to + j), set1(c.kept_scale)));
      if (to == row) round_out<E>(row, result, residual_at(c, b, head, i), c.dv);
      if (c.row_max) c.row_max[at] = m[r];
      if (c.row_sum) c.row_sum[at] = l;
      if (!c.own_lse && !c.lse) continue;
      const double lse = seen ? double(shift_of(m[r])) + std::log2(double(exact)) : -HALFULP_INF;
      if (c.own_lse) c.own_lse[at] = float(lse);
      if (c.lse) c.lse[at] = float(lse * 0.6931471805599453);
    }
  }
};

}  // namespace HALFULP_ISA
}  // namespace halfulp
