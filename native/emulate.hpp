// Attention in any recipe, tile by tile, with the roundings and the order of operations of algorithms/flash2.py and
// algorithms/backward.py; native/README.md says what is fixed to the bit. Steps that a recipe does not round cost a
// branch a row.
#pragma once
#include "attention.hpp"
#include "exponential.hpp"
#include "gemm.hpp"

namespace halfulp {
namespace HALFULP_ISA {

constexpr long kTileFloats = 1 << 14;  // of one tile's scores at a time, so that four such buffers lie in the cache

static inline bool any_nan(const float* x, long n) {
  uint32_t found = 0;
  for (long j = 0; j < n; ++j) found |= uint32_t((bits_as<uint32_t>(x[j]) & 0x7fffffffu) > 0x7f800000u);
  return found != 0;
}

static inline float maximum(const float* x, long n) {  // n: whole vectors
  V top = load(x);
  for (long j = 16; j < n; j += 16) top = max(load(x + j), top);
  return any_nan(x, n) ? __builtin_nanf("") : largest(top);
}

// The sum of a row of whole vectors: sixteen lanes in increasing order, then the tree.
static inline V lane_sums(const float* x, long n) {
  V sum = load(x);
  for (long j = 16; j < n; j += 16) sum = add(sum, load(x + j));
  return sum;
}
static inline float row_sum(const float* x, long n) {
  float lanes[16];
  store(lanes, lane_sums(x, n));
  return tree(lanes);
}

struct Range {
  long from, to;
  long size() const { return to - from; }
};

struct Emulator {
  const halfulp_emulation& e;
  Rounder<float> round[HALFULP_STEP_COUNT];
  long head = 0, batch_index = 0, head_index = 0;
  long dp, dvp;  // widths in whole vectors
  long widest;   // of a column tile, in whole vectors
  long rows_at_once;
  const float *query, *grad_out;
  // packed operands of one head, and one tile's buffers
  float *key_over_d, *value_over_d, *key_panels, *value_panels, *query_panels, *grad_out_panels;
  float *scores, *weights, *powers, *gradients, *wide, *block_key, *block_value;
  float *acc, *m, *l, *exact, *tops, *tile_scale;
  size_t bytes;

  Emulator(const halfulp_emulation& call, bool backward, char* base)
      : e(call), dp(up(call.d, 16)), dvp(up(call.dv, 16)), widest(up(least(call.block_key, call.n_key), 16)) {
    for (int s = 0; s < HALFULP_STEP_COUNT; ++s) round[s] = Rounder<float>(call.formats[s]);
    rows_at_once = least(most(kTileFloats / widest, 6), least(call.block_query, call.n_query));
    const long tiles = (call.n_key + call.block_key - 1) / call.block_key, keys = call.n_key + 16 * tiles;
    char* at = base;
    auto take = [&](long count) {
      float* p = reinterpret_cast<float*>(at);
      at += up(count * long(sizeof(float)), 64) + 64;
      return p;
    };
    key_over_d = take(keys * call.d);
    value_panels = take(backward ? 0 : call.n_key * dvp);
    value_over_d = take(backward ? keys * call.dv : 0);
    key_panels = take(backward ? call.n_key * dp : 0);
    query_panels = take(backward ? call.n_query * dp : 0);
    grad_out_panels = take(backward ? call.n_query * dvp : 0);
    scores = take(rows_at_once * widest);
    weights = take(backward ? rows_at_once * widest : 0);
    gradients = take(backward ? rows_at_once * widest : 0);
    powers = take(widest);
    wide = take(rows_at_once * most(dp, dvp));
    block_key = take(backward ? widest * dp : 0);
    block_value = take(backward ? widest * dvp : 0);
    acc = take(rows_at_once * dvp);
    m = take(rows_at_once), l = take(rows_at_once), exact = take(rows_at_once);
    tops = take(rows_at_once), tile_scale = take(rows_at_once);
    bytes = size_t(at - base);
  }

  long row_tiles() const { return (e.n_query + e.block_query - 1) / e.block_query; }
  long col_tiles() const { return (e.n_key + e.block_key - 1) / e.block_key; }
  Range rows_of(long tile) const { return {tile * e.block_query, least((tile + 1) * e.block_query, e.n_query)}; }
  Range cols_of(long tile) const { return {tile * e.block_key, least((tile + 1) * e.block_key, e.n_key)}; }
  bool hides(Range rows, Range cols) const {
    return (e.bounded_above && cols.from - (rows.to - 1) > e.greatest) ||
           (e.bounded_below && cols.to - 1 - rows.from < e.least);
  }

  void take_head(long which, bool backward) {
    head = which, batch_index = which / e.heads, head_index = which % e.heads;
    query = e.query + which * e.n_query * e.d;
    const float *key = e.key + which * e.n_key * e.d, *value = e.value + which * e.n_key * e.dv;
    for (long t = 0; t < col_tiles(); ++t) {
      const Range cols = cols_of(t);
      pack_transposed(key + cols.from * e.d, e.d, cols.size(), tile_of(key_over_d, cols, e.d));
      if (backward) pack_transposed(value + cols.from * e.dv, e.dv, cols.size(), tile_of(value_over_d, cols, e.dv));
    }
    if (!backward) {
      pack_panels(value, e.dv, 1, e.n_key, e.dv, value_panels);
      return;
    }
    grad_out = e.grad_out + which * e.n_query * e.dv;
    pack_panels(key, e.d, 1, e.n_key, e.d, key_panels);
    pack_panels(query, e.d, 1, e.n_query, e.d, query_panels);
    pack_panels(grad_out, e.dv, 1, e.n_query, e.dv, grad_out_panels);
  }
  // Where one tile's transposed panels begin: a tile takes up to 15 columns more than it has.
  float* tile_of(float* packed, Range cols, long d) const {
    return packed + (cols.from + 16 * (cols.from / e.block_key)) * d;
  }

  // Masked scores of rows i .. i + count against one tile of columns, in the recipe's base; −∞ beyond the last column.
  void score(long i, long count, Range cols) {
    const long width = up(cols.size(), 16);
    multiply(query + i * e.d, e.d, 1, count, {tile_of(key_over_d, cols, e.d), e.d, width}, 0, e.d, scores, width, false);
    for (long r = 0; r < count; ++r) {
      float* s = scores + r * width;
      round[HALFULP_STEP_product](s, width);
      for (long j = 0; j < width; ++j) s[j] *= e.score_factor;
      round[HALFULP_STEP_scores](s, width);
      hide(s, i + r, cols);
      for (long j = cols.size(); j < width; ++j) s[j] = -HALFULP_INF;
    }
  }

  void hide(float* s, long i, Range cols) const {
    if (e.mask_kind != HALFULP_NO_MASK) {
      const long at = batch_index * e.mask.batch + head_index * e.mask.head + i * e.mask.row + cols.from;
      if (e.mask_kind == HALFULP_BOOL_MASK) {
        const uint8_t* mask = static_cast<const uint8_t*>(e.mask.data) + at;
        for (long j = 0; j < cols.size(); ++j) s[j] = mask[j] ? s[j] : -HALFULP_INF;
      } else {
        const float* mask = static_cast<const float*>(e.mask.data) + at;
        for (long j = 0; j < cols.size(); ++j) s[j] += mask[j] * e.mask_factor;
      }
    }
    if (e.bounded_above)
      for (long j = most(0, i + e.greatest + 1 - cols.from); j < cols.size(); ++j) s[j] = -HALFULP_INF;
    if (e.bounded_below)
      for (long j = 0, end = least(cols.size(), i + e.least - cols.from); j < end; ++j) s[j] = -HALFULP_INF;
  }

  void exp(float* x, long n) const { e.base2 ? exponential<true>(x, x, n) : exponential<false>(x, x, n); }
  float exp(float x) const {
    exp(&x, 1);
    return x;
  }

  // exp(s − shift) in place, before any rounding of the weights; 0 beyond the last column.
  void weigh(float* s, float shift, long columns, long width) {
    if (e.split) {
      for (long j = 0; j < width; ++j) {
        const float whole = std::rint(s[j]), held = whole < -0x1p100f ? -0x1p100f : whole;
        powers[j] = held - shift;
        s[j] -= held;
      }
      round[HALFULP_STEP_shifted_scores](s, width);
      exponential<true>(s, s, width);
      exponential<true>(powers, powers, width);
      for (long j = 0; j < width; ++j) s[j] *= powers[j];
    } else {
      for (long j = 0; j < width; ++j) s[j] -= shift;
      round[HALFULP_STEP_shifted_scores](s, width);
      exp(s, width);
    }
    for (long j = columns; j < width; ++j) s[j] = 0;
  }

  // The weights as they enter a product.
  void make_operand(float* w, long width) {
    const float c = e.weights_scale;
    if (c != 1)
      for (long j = 0; j < width; ++j) w[j] *= c;
    round[HALFULP_STEP_weights_operand](w, width);
    if (c != 1)
      for (long j = 0; j < width; ++j) w[j] /= c;
  }

  float row_shift(const float* s, float top, long columns) const {
    if (e.shift == HALFULP_INTEGER) return std::ceil(top);
    if (e.shift == HALFULP_OFFSET) return top + e.offset;
    if (e.shift == HALFULP_STABILIZED && std::isfinite(top)) {
      const float from = round[HALFULP_STEP_tie_threshold](top - e.tie_tolerance);
      long repeated = 0;
      for (long j = 0; j < columns; ++j) repeated += s[j] >= from;
      if (e.unconditional || repeated > 1) return (top > 0 ? e.beta : e.gamma) * top;
    }
    return top;
  }

  // --- forward

  void forward_rows(Range rows) {
    const bool divided = e.algorithm != HALFULP_FLASH2;  // O is normalized in every step
    for (long i = rows.from; i < rows.to; i += rows_at_once) {
      const long count = least(rows_at_once, rows.to - i);
      bool started = e.algorithm == HALFULP_FLASH1;  // from a state of nothing
      for (long r = 0; r < count; ++r) m[r] = tops[r] = -HALFULP_INF, l[r] = exact[r] = 0;
      std::memset(acc, 0, size_t(count * dvp) * sizeof(float));
      for (long t = 0; t < col_tiles(); ++t) {
        if (e.algorithm != HALFULP_STANDARD && hides(rows, cols_of(t))) continue;
        forward_tile(i, count, cols_of(t), started);
        started = true;
      }
      for (long r = 0; r < count; ++r) {
        const long at = head * e.n_query + i + r;
        const float divisor = divided || m[r] == -HALFULP_INF ? 1.f : l[r];
        for (long j = 0; j < e.dv; ++j) e.out[at * e.dv + j] = acc[r * dvp + j] / divisor;
        e.row_max[at] = m[r], e.row_sum[at] = l[r], e.exact_row_sum[at] = exact[r], e.largest[at] = tops[r];
      }
    }
  }

  // What one tile of one row adds, shifted by its own maximum in FlashAttention-1.
  struct TileSums {
    float sum, exact;
  };
  TileSums weigh_row(float* s, float shift, long columns, long width) {
    weigh(s, shift, columns, width);
    round[HALFULP_STEP_weights](s, width);
    float sum = 0, exact_sum = 0;
    if (!e.row_sum_rounded || e.row_sum_exact) sum = exact_sum = row_sum(s, width);
    if (e.algorithm != HALFULP_STANDARD) make_operand(s, width);
    if (e.row_sum_rounded) sum = row_sum(s, width);
    if (!e.row_sum_exact) exact_sum = sum;
    sum = round[HALFULP_STEP_block_sum](sum);
    return {sum < e.row_sum_floor ? e.row_sum_floor : sum, exact_sum};
  }
  static float shift_of(float m) { return m == -HALFULP_INF ? 0.f : m; }
  static float greater(float a, float b) { return a != a ? a : b != b || b > a ? b : a; }  // as torch.maximum: NaN wins
  float rescale(float m, float shift) const {
    const float change = round[HALFULP_STEP_max_change](m - shift);
    return round[HALFULP_STEP_rescale](change == 0 ? 1.f : exp(change));
  }
  float rescaled(float x) const { return round[HALFULP_STEP_rescaled](x); }

  void forward_tile(long i, long count, Range cols, bool started) {
    const long columns = cols.size(), width = up(columns, 16);
    score(i, count, cols);
    for (long r = 0; r < count; ++r) {
      float *s = scores + r * width, *a = acc + r * dvp;
      const float largest = maximum(s, width), top = row_shift(s, largest, columns);
      tops[r] = greater(tops[r], largest);
      if (e.algorithm == HALFULP_FLASH1) {
        const float m_tile = round[HALFULP_STEP_row_max](top), m_new = greater(m[r], m_tile), shift = shift_of(m_new);
        const TileSums tile = weigh_row(s, shift_of(m_tile), columns, width);
        const float old_scale = rescale(m[r], shift), l_old = rescaled(l[r] * old_scale);
        tile_scale[r] = rescale(m_tile, shift);
        l[r] = round[HALFULP_STEP_row_sum](l_old + rescaled(tile.sum * tile_scale[r]));
        exact[r] = exact[r] * old_scale + tile.exact * tile_scale[r];
        for (long j = 0; j < dvp; ++j) a[j] *= l_old;
        round[HALFULP_STEP_rescaled](a, dvp);
        m[r] = m_new;
        continue;
      }
      const float m_new = round[HALFULP_STEP_row_max](started ? greater(m[r], top) : top), shift = shift_of(m_new);
      const TileSums tile = weigh_row(s, shift, columns, width);
      if (!started) {
        l[r] = round[HALFULP_STEP_row_sum](tile.sum), exact[r] = tile.exact;
      } else {
        const float scale = rescale(m[r], shift);
        l[r] = round[HALFULP_STEP_row_sum](rescaled(l[r] * scale) + tile.sum);
        exact[r] = exact[r] * scale + tile.exact;
        for (long j = 0; j < dvp; ++j) a[j] *= scale;
        round[HALFULP_STEP_rescaled](a, dvp);
      }
      m[r] = m_new;
      if (e.algorithm == HALFULP_STANDARD) {
        exact[r] = l[r];
        const float divisor = m_new == -HALFULP_INF ? 1.f : l[r];
        for (long j = 0; j < width; ++j) s[j] /= divisor;
        make_operand(s, width);
      }
    }
    multiply(scores, width, 1, count, {value_panels, e.n_key, dvp}, cols.from, columns, wide, dvp, false);
    for (long r = 0; r < count; ++r) take_block(wide + r * dvp, acc + r * dvp, r, started);
  }

  // Row r of a tile's P̄V goes into Ō, or in FlashAttention-1 into O.
  void take_block(float* block, float* a, long r, bool started) {
    round[HALFULP_STEP_block_out](block, dvp);
    if (e.algorithm == HALFULP_FLASH1) {
      for (long j = 0; j < dvp; ++j) block[j] *= tile_scale[r];
      round[HALFULP_STEP_rescaled](block, dvp);
    }
    if (started)
      for (long j = 0; j < dvp; ++j) a[j] += block[j];
    else
      std::memcpy(a, block, size_t(dvp) * sizeof(float));
    round[HALFULP_STEP_accumulator](a, dvp);
    if (e.algorithm != HALFULP_FLASH1) return;
    const float divisor = m[r] == -HALFULP_INF ? 1.f : l[r];
    for (long j = 0; j < dvp; ++j) a[j] /= divisor;
    round[HALFULP_STEP_renormalized](a, dvp);
  }

  // --- backward

  // P of `count` rows against one tile, as dS takes it in `scores` and as dV does before its rounding in `weights`.
  void probabilities(long i, long count, Range cols) {
    const long columns = cols.size(), width = up(columns, 16);
    score(i, count, cols);
    for (long r = 0; r < count; ++r) {
      const long at = head * e.n_query + i + r;
      float *p = scores + r * width, *for_value = weights + r * width;
      weigh(p, e.shifts[at], columns, width);
      if (e.value_divisor)
        for (long j = 0; j < width; ++j) for_value[j] = p[j] / e.value_divisor[at];
      if (e.divisor) {
        round[HALFULP_STEP_weights](p, width);
        if (e.weights_rounded) make_operand(p, width);
        for (long j = 0; j < width; ++j) p[j] /= e.divisor[at];
      }
      round[HALFULP_STEP_probabilities](p, width);
      if (!e.value_divisor) std::memcpy(for_value, p, size_t(width) * sizeof(float));
    }
  }

  void grad_probabilities(long i, long count, Range cols) {
    const long width = up(cols.size(), 16);
    multiply(grad_out + i * e.dv, e.dv, 1, count, {tile_of(value_over_d, cols, e.dv), e.dv, width}, 0, e.dv, gradients,
             width, false);
    for (long r = 0; r < count; ++r) round[HALFULP_STEP_grad_probabilities](gradients + r * width, width);
  }

  // dS of one row in place of dP, from P.
  void grad_scores(float* ds, float* p, float delta, long width) {
    const float alpha = e.gradient_scale;
    if (e.scale_at == HALFULP_AT_PROBABILITIES) {
      for (long j = 0; j < width; ++j) p[j] *= alpha;
      round[HALFULP_STEP_scaled_probabilities](p, width);
    }
    for (long j = 0; j < width; ++j) ds[j] -= delta;
    round[HALFULP_STEP_grad_centered](ds, width);
    for (long j = 0; j < width; ++j) ds[j] *= p[j];
    round[HALFULP_STEP_grad_scores](ds, width);
    if (e.scale_at != HALFULP_AT_SCORES) return;
    for (long j = 0; j < width; ++j) ds[j] *= alpha;
    round[HALFULP_STEP_scaled_grad_scores](ds, width);
  }

  // A tile's contribution to `count` rows of a gradient.
  void add_block(float* block, long ld, float* total, long d, long count) {
    for (long r = 0; r < count; ++r) {
      float *from = block + r * ld, *to = total + r * d;
      round[HALFULP_STEP_grad_block](from, d);
      for (long j = 0; j < d; ++j) to[j] += from[j];
      round[HALFULP_STEP_grad_accumulator](to, d);
    }
  }

  void backward_tile(Range rows, Range cols, bool of_query, bool of_key) {
    const long columns = cols.size(), width = up(columns, 16);
    for (long i = rows.from; i < rows.to; i += rows_at_once) {
      const long count = least(rows_at_once, rows.to - i);
      const bool go_on = i > rows.from;
      probabilities(i, count, cols);
      grad_probabilities(i, count, cols);
      for (long r = 0; r < count; ++r) {
        grad_scores(gradients + r * width, scores + r * width, e.delta[head * e.n_query + i + r], width);
        round[HALFULP_STEP_probabilities_operand](weights + r * width, width);
      }
      if (of_query) {
        multiply(gradients, width, 1, count, {key_panels, e.n_key, dp}, cols.from, columns, wide, dp, false);
        add_block(wide, dp, e.grad_query + (head * e.n_query + i) * e.d, e.d, count);
      }
      if (of_key) {
        multiply(weights, 1, width, columns, {grad_out_panels, e.n_query, dvp}, i, count, block_value, dvp, go_on);
        multiply(gradients, 1, width, columns, {query_panels, e.n_query, dp}, i, count, block_key, dp, go_on);
      }
    }
    if (!of_key) return;
    add_block(block_value, dvp, e.grad_value + (head * e.n_key + cols.from) * e.dv, e.dv, columns);
    add_block(block_key, dp, e.grad_key + (head * e.n_key + cols.from) * e.d, e.d, columns);
  }

  // rowsum(dP ∘ P) of one tile of rows.
  void delta_rows(Range rows) {
    for (long t = 0; t < col_tiles(); ++t) {
      const Range cols = cols_of(t);
      if (hides(rows, cols)) continue;
      const long width = up(cols.size(), 16);
      for (long i = rows.from; i < rows.to; i += rows_at_once) {
        const long count = least(rows_at_once, rows.to - i);
        probabilities(i, count, cols);
        grad_probabilities(i, count, cols);
        for (long r = 0; r < count; ++r) {
          float *terms = gradients + r * width, *p = scores + r * width;
          for (long j = 0; j < width; ++j) terms[j] *= p[j];
          round[HALFULP_STEP_delta_products](terms, width);
          e.summed_delta[head * e.n_query + i + r] += row_sum(terms, width);
        }
      }
    }
  }
};

// --- what the dispatcher runs; the units of one head are cut by rows, or, for dK and dV, by columns

static inline Range part(long total, long which, long parts) { return {total * which / parts, total * (which + 1) / parts}; }

static void emulate_forward(const Emulation& call, long unit, char* scratch) {
  Emulator emulator(*call.call, false, scratch);
  emulator.take_head(unit / call.parts, false);
  const Range tiles = part(emulator.row_tiles(), unit % call.parts, call.parts);
  for (long t = tiles.from; t < tiles.to; ++t) emulator.forward_rows(emulator.rows_of(t));
}

static void emulate_delta(const Emulation& call, long unit, char* scratch) {
  Emulator emulator(*call.call, true, scratch);
  emulator.take_head(unit / call.parts, true);
  const Range tiles = part(emulator.row_tiles(), unit % call.parts, call.parts);
  for (long t = tiles.from; t < tiles.to; ++t) emulator.delta_rows(emulator.rows_of(t));
}

// One part: a whole head. Several: the first half of the units makes dQ of a span of rows, the second dK and dV of a
// span of columns, so that the few heads of a call keep every thread busy. Sums run in the same order either way.
static void emulate_backward(const Emulation& call, long unit, char* scratch) {
  Emulator emulator(*call.call, true, scratch);
  const bool whole = call.parts == 1, of_query = whole || unit % (2 * call.parts) < call.parts, of_key = whole || !of_query;
  emulator.take_head(whole ? unit : unit / (2 * call.parts), true);
  const Range rows = of_key ? Range{0, emulator.row_tiles()} : part(emulator.row_tiles(), unit % call.parts, call.parts);
  const Range cols = of_query ? Range{0, emulator.col_tiles()} : part(emulator.col_tiles(), unit % call.parts, call.parts);
  for (long c = cols.from; c < cols.to; ++c)
    for (long r = rows.from; r < rows.to; ++r)
      if (!emulator.hides(emulator.rows_of(r), emulator.cols_of(c)))
        emulator.backward_tile(emulator.rows_of(r), emulator.cols_of(c), of_query, of_key);
}

static size_t emulate_bytes(const Emulation& call, bool backward) { return Emulator(*call.call, backward, nullptr).bytes; }

// --- the parts of the emulator that are called by themselves

static void round_part(const Numbers& call, long unit, char*) {
  const Range range = part(call.count, unit, call.parts);
  if (call.wide)
    Rounder<double>(*call.format)(static_cast<const double*>(call.x) + range.from, static_cast<double*>(call.y) + range.from,
                                  range.size());
  else
    Rounder<float>(*call.format)(static_cast<const float*>(call.x) + range.from, static_cast<float*>(call.y) + range.from,
                                 range.size());
}

template <class Real>
static void running_sums(const Numbers& call, Range columns) {
  const Rounder<Real> round(*call.format);
  const Real* x = static_cast<const Real*>(call.x);
  Real* y = static_cast<Real*>(call.y);
  for (long k = 0; k < call.count; ++k, x += call.columns, y += call.columns) {
    for (long j = columns.from; j < columns.to; ++j) y[j] = (k ? y[j - call.columns] : 0) + x[j];
    round(y + columns.from, columns.size());
  }
}

static void running_part(const Numbers& call, long unit, char*) {
  const Range columns = part(call.columns, unit, call.parts);
  call.wide ? running_sums<double>(call, columns) : running_sums<float>(call, columns);
}

static void exp_part(const Numbers& call, long unit, char*) {
  const Range range = part(call.count, unit, call.parts);
  const float* x = static_cast<const float*>(call.x) + range.from;
  float* y = static_cast<float*>(call.y) + range.from;
  call.wide ? exponential<true>(x, y, range.size()) : exponential<false>(x, y, range.size());
}

static void row_sum_part(const Numbers& call, long unit, char*) {
  const Range range = part(call.count, unit, call.parts);
  const long whole = call.columns / 16 * 16, rest = call.columns - whole;
  for (long r = range.from; r < range.to; ++r) {
    const float* x = static_cast<const float*>(call.x) + r * call.columns;
    float lanes[16] = {};
    if (whole) store(lanes, lane_sums(x, whole));
    if (rest) {
      float last[16] = {};
      std::memcpy(last, x + whole, size_t(rest) * sizeof(float));
      for (int i = 0; i < 16; ++i) lanes[i] = whole ? lanes[i] + last[i] : last[i];
    }
    static_cast<float*>(call.y)[r] = tree(lanes);
  }
}

static void residual_part(const Numbers& call, long unit, char*) {
  const Range range = part(call.count, unit, call.parts);
  const float steps = float(1 << (call.bits - 1)), *exact = static_cast<const float*>(call.x), *out = call.out;
  float* residual = static_cast<float*>(call.y);
  for (long i = range.from; i < range.to; ++i) {
    const int32_t field = int32_t(bits_as<uint32_t>(out[i]) >> 23 & 255) - 127;
    const int32_t exponent = out[i] == 0.f ? -1 : field;  // as frexp has it: 0 is in the binade of 1/2
    const int32_t unit_exponent = (exponent < call.lowest ? call.lowest : exponent) - call.mantissa_bits - call.bits;
    const float scaled = (exact[i] - out[i]) * bits_as<float>(uint32_t(127 - unit_exponent) << 23);
    float whole = std::rint(scaled);
    whole = whole < -steps ? -steps : whole;
    whole = whole > steps - 1 ? steps - 1 : whole;
    residual[i] = whole * bits_as<float>(uint32_t(127 + unit_exponent) << 23);
  }
}

constexpr long kProductK = 256;

static size_t product_bytes() { return size_t(64 * (kProductK + kProductRows)) * sizeof(float); }

static void product_part(const Product& p, long unit, char* scratch) {
  const long panels = (p.n + 63) / 64, blocks = (p.m + kProductRows - 1) / kProductRows;
  const long item = unit / (panels * blocks), column = unit / blocks % panels * 64, row = unit % blocks * kProductRows;
  const long columns = least(64, p.n - column), rows = least(kProductRows, p.m - row), width = up(columns, 16);
  float *packed = reinterpret_cast<float*>(scratch), *sums = packed + 64 * kProductK;
  const float* left = p.left->data + item * p.left->batch + row * p.left->row;
  const float* right = p.right->data + item * p.right->batch + column * p.right->column;
  if (p.k == 0) std::memset(sums, 0, size_t(rows * width) * sizeof(float));
  for (long k = 0; k < p.k; k += kProductK) {
    const long count = least(kProductK, p.k - k);
    const Panels panel = pack_panels(right + k * p.right->row, p.right->row, p.right->column, count, columns, packed);
    multiply(left + k * p.left->column, p.left->row, p.left->column, rows, panel, 0, count, sums, width, k > 0);
  }
  for (long r = 0; r < rows; ++r)
    std::memcpy(p.out + (item * p.m + row + r) * p.n + column, sums + r * width, size_t(columns) * sizeof(float));
}

static const Emulations emulations = {emulate_bytes, emulate_forward, emulate_backward, emulate_delta,
                                      round_part,    running_part,    exp_part,         row_sum_part,
                                      residual_part, product_bytes,   product_part};

}  // namespace HALFULP_ISA
}  // namespace halfulp
