// Attention forward and backward for one operand engine E and one exponential; native/README.md is the specification.
//
// Forward: a block of query rows against blocks of keys, online softmax. Backward: a part of one head's keys, block of
// query rows outside, panels of 64 keys inside; dK and dV are kept transposed, so that the weights enter every product
// in the layout in which they were computed.
#pragma once
#include <cmath>
#include <cstring>
#include <utility>

#include "tiles.hpp"

namespace halfulp {
namespace HALFULP_ISA {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLowest = -3.4028235e38f;  // stands for −∞ where a difference must not be NaN
constexpr float kRepeated = 7.f;  // β of the published shift
#define HALFULP_INF __builtin_inff()

// 2^f for |f| ≤ 1/2: relative error 1e-7, exactly 1 at 0.
static inline V exp2_fraction(V f) {
  V p = set1(0x1.5bba14p-10f);
  p = fma(p, f, set1(0x1.3cea88p-7f));
  p = fma(p, f, set1(0x1.c6b752p-5f));
  p = fma(p, f, set1(0x1.ebf9bcp-3f));
  p = fma(p, f, set1(0x1.62e42ap-1f));
  return fma(p, f, set1(1.f));
}

// 2^(s − m). With an integer m the bits before the last power of two do not depend on m, so neither on the tiling.
template <bool integer>
static inline V weight(V s, V m) {
  if constexpr (integer) {
    s = max(set1(kLowest), s);
    const V n = round_even(s);
    return scale2(exp2_fraction(sub(s, n)), sub(n, m));
  } else {
    const V x = max(set1(kLowest), sub(s, m));
    const V n = round_even(x);
    return scale2(exp2_fraction(sub(x, n)), n);
  }
}

// tanh x and, unless null, its derivative, relative error below 4e-7, from e²ˣ − 1 = (2ⁿ − 1) + 2ⁿ (2^f − 1): nothing
// cancels near 0, nor does the slope 4e/(1 + e)² where tanh is all but ±1. Beyond e = 2^±126 the slope goes on as e^−2|x|.
static inline V tanh_and_slope(V x, V* slope) {
  const V given = mul(x, set1(2.f * kLog2E)), y = min(set1(126.f), max(set1(-126.f), given));
  const V n = round_even(y), f = sub(y, n), power = scale2(set1(1.f), n);
  V p = set1(0x1.4308d6p-13f);
  p = fma(p, f, set1(0x1.5f07b4p-10f));
  p = fma(p, f, set1(0x1.3b2bap-7f));
  p = fma(p, f, set1(0x1.c6af6ep-5f));
  p = fma(p, f, set1(0x1.ebfbdep-3f));
  p = fma(p, f, set1(0x1.62e43p-1f));
  p = mul(p, f);
  const V grown = fma(power, p, sub(power, set1(1.f))), inverse = div(set1(1.f), add(grown, set1(2.f)));
  if (slope) {
    // e/(1 + e) is at most 1, where 4e would be 2¹²⁸
    const V beyond = sub(given, y), farther = max(sub(y, given), beyond);
    const V near = mul(mul(fma(power, p, power), inverse), mul(set1(4.f), inverse));
    *slope = mul(near, weight<false>(set1(0.f), farther));
  }
  return mul(grown, inverse);
}

// What products of query and key are multiplied by: their scale in base 2, or what tanh takes.
static inline float score_factor(const halfulp_call& c) {
  return float(c.softcap > 0.f ? double(c.scale) / double(c.softcap) : double(c.scale) * 1.4426950408889634);
}
// What tiles have stored would have to be loaded again to be scaled. So scores are left as products until they are read,
// which is the same multiplication, where nothing comes between that adds to them or asks whether they are equal.
template <class E>
static inline bool scaled_when_read(const halfulp_call& c) {
  return E::group == 32 && c.scale > 0.f && c.softcap == 0.f && c.mask_kind != HALFULP_FLOAT_MASK &&
         c.recipe != HALFULP_RECIPE_PUBLISHED;
}
template <class E>
static inline V read_scores(const float* at, float late) {
  return E::group == 32 ? mul(load(at), set1(late)) : load(at);
}
// Scores of base 2 from what tanh takes, for [row, row + n) and, unless it is null, their slopes.
__attribute__((noinline)) static void cap(const halfulp_call& c, float* row, long n, float* slopes) {
  const V height = set1(float(double(c.softcap) * 1.4426950408889634));
  for (long j = 0; j < n; j += 16) {
    V slope;
    store(row + j, mul(tanh_and_slope(load(row + j), slopes ? &slope : nullptr), height));
    if (slopes) store(slopes + j, slope);
  }
}

// Dropout's words: formats/counter.py is the specification.
static inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
static inline uint32_t word_of_row(const halfulp_call& c, long row) {
  return mix(mix(mix(uint32_t(c.seed)) ^ uint32_t(c.seed >> 32)) ^ uint32_t(row));
}
static inline uint32_t word_of(uint32_t row_word, long key) { return mix(row_word ^ uint32_t(key) * 0x9e3779b1u); }

// Packed weights of one row, `count` keys from `key` on: the dropped ones become 0.
template <long KP>
__attribute__((noinline)) static void drop(Unit* row, uint32_t row_word, uint32_t below, long key, long count) {
  for (long u = 0; u < count / KP; ++u) {
    if constexpr (KP == 2) {
      const Unit low = word_of(row_word, key + 2 * u) >= below ? 0xffffu : 0u;
      const Unit high = word_of(row_word, key + 2 * u + 1) >= below ? 0xffff0000u : 0u;
      row[u] &= low | high;
    } else {
      row[u] = word_of(row_word, key + u) >= below ? row[u] : 0u;
    }
  }
}

// NaN and infinities. A hidden pair's weight is 0, and 0 · NaN would carry a NaN to rows that do not see it. So operands
// whose rows meet weights of 0 lose what is not finite, and it is added where it is seen. Asked first, of all operands,
// is what costs least: whether an exponent has its two highest bits, which is 2⁶⁵ and more.
template <long KP>
__attribute__((noinline)) static bool large(const Unit* x, long units) {
  Unit found = 0;
  for (long u = 0; u < units; ++u) found |= x[u] & x[u] << 1;
  return found & (KP == 2 ? 0x40004000u : 0x40000000u);
}
template <class E>
static inline bool large_panel(Rows rows, long count, Width<E> w) {
  if (rows.stride == w.units) return large<E::KP>(rows.at, count * w.units);
  bool found = false;
  for (long r = 0; r < count; ++r) found |= large<E::KP>(rows.at + r * rows.stride, w.units);
  return found;
}
constexpr Unit kNotFinite = 255;  // the exponent of NaN and infinities
template <long KP>
__attribute__((noinline)) static bool infinite(const Unit* x, long units) {
  bool found = false;
  for (long u = 0; u < units; ++u)
    found |= (KP == 2 && (x[u] >> 7 & 255) == kNotFinite) || (x[u] >> 23 & 255) == kNotFinite;
  return found;
}
template <class E>
static inline bool infinite_panel(Rows rows, long count, Width<E> w) {
  bool found = false;
  for (long r = 0; r < count; ++r) found |= infinite<E::KP>(rows.at + r * rows.stride, w.units);
  return found;
}
template <long KP>
__attribute__((noinline)) static void finite_only(Unit* x, long units) {
  for (long u = 0; u < units; ++u) {
    const bool low = KP == 2 && (x[u] >> 7 & 255) == kNotFinite, high = (x[u] >> 23 & 255) == kNotFinite;
    x[u] &= KP == 2 ? (low ? 0u : 0xffffu) | (high ? 0u : 0xffff0000u) : high ? 0u : 0xffffffffu;
  }
}
// Of one row and panel of scores and dP: which pairs are seen, which weights dV takes, as masks of bits; dP with dropout
// undone, 0 where nothing is seen.
__attribute__((noinline)) static void veil(const halfulp_call& c, const float* __restrict scores,
                                           float* __restrict grad_weights, long row, long key, long width,
                                           Unit* __restrict seen, Unit* __restrict kept) {
  for (long k = 0; k < width; ++k) kept[k] = seen[k] = scores[k] == -HALFULP_INF ? 0u : ~0u;
  if (c.drop_below) {
    const uint32_t word = word_of_row(c, row), below = c.drop_below;
    const float scale = c.kept_scale;
    for (long k = 0; k < width; ++k) kept[k] &= word_of(word, key + k) >= below ? ~0u : 0u;
    for (long k = 0; k < width; ++k) grad_weights[k] *= scale;
  }
  for (long k = 0; k < width; ++k) grad_weights[k] = kept[k] ? grad_weights[k] : 0.f;
}

static inline bool finite(float x) { return x - x == 0.f; }

// The fixed tree of every row sum: lanes i and i + 8, i + 4, i + 2, i + 1.
static inline float tree(const float* lanes) {
  float t[8];
  for (int i = 0; i < 8; ++i) t[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; ++i) t[i] += t[i + 4];
  for (int i = 0; i < 2; ++i) t[i] += t[i + 2];
  return t[0] + t[1];
}

// A bump allocator over one thread's scratch; with a null base it measures.
struct Scratch {
  char* at;
  template <class T>
  T* take(long count) {
    T* p = reinterpret_cast<T*>(at);
    at += up(count * long(sizeof(T)), 64) + 64;  // the gap keeps equal sizes off the same cache sets
    return p;
  }
  long size() const { return long(reinterpret_cast<intptr_t>(at)); }
};

// Rows of the call's tensors and statistics.
template <class T>
static inline T* row_at(const halfulp_tensor& x, long b, long h, long i) {
  return static_cast<T*>(x.data) + b * x.batch + h * x.head + i * x.row;
}
static inline long stat_at(const halfulp_call& c, long b, long h, long i) {
  return b * c.stat_batch + h * c.stat_head + i;
}
static inline int8_t* residual_at(const halfulp_call& c, long b, long h, long i) {
  return c.residual ? c.residual + b * c.out.batch + h * c.out.head + i * c.out.row : nullptr;
}

static inline long first_key(const halfulp_call& c, long i) {
  return c.left < 0 ? 0 : most(0, least(c.n_key, i + c.offset - c.left));
}
static inline long end_key(const halfulp_call& c, long i) {
  return c.right < 0 ? c.n_key : most(0, least(c.n_key, i + c.offset + c.right + 1));
}

// The keys that `rows` rows from i on touch, from a panel's first to a half panel's last, inside [from, to).
struct Span {
  long from, to;
  bool empty() const { return from >= to; }
};
static inline Span seen_by(const halfulp_call& c, long i, long rows, long from, long to) {
  const long last = least(i + rows, c.n_query) - 1;
  if (last < i) return {0, 0};
  const long lo = first_key(c, i), hi = end_key(c, last);
  if (lo >= hi) return {0, 0};
  return {most(from, lo / kPanel * kPanel), least(to, up(hi, kHalf))};
}

// Whether any of the keys [from, to) is hidden from any of `rows` rows from i on, or their scores take a mask.
static inline bool hides(const halfulp_call& c, long i, long rows, long from, long to) {
  return c.mask_kind != HALFULP_NO_MASK || first_key(c, i + rows - 1) > from || end_key(c, i) < to;
}

// Scores of one row take the mask, and outside of what the row may see become −∞; `row` starts at key `from`.
static inline void hide(const halfulp_call& c, long b, long h, long i, float* row, long from, long to) {
  if (c.mask_kind != HALFULP_NO_MASK && i < c.n_query) {
    const long count = least(to, c.n_key) - from, at = b * c.mask.batch + h * c.mask.head + i * c.mask.row + from;
    if (c.mask_kind == HALFULP_BOOL_MASK) {
      const uint8_t* mask = static_cast<const uint8_t*>(c.mask.data) + at;
      for (long j = 0; j < count; ++j) row[j] = mask[j] ? row[j] : -HALFULP_INF;
    } else {
      const float* mask = static_cast<const float*>(c.mask.data) + at;
      for (long j = 0; j < count; ++j) row[j] = mask[j] == -HALFULP_INF ? mask[j] : row[j] + mask[j] * kLog2E;
    }
  }
  const long lo = least(to, first_key(c, i)), hi = most(from, end_key(c, i));
  for (long j = from; j < lo; ++j) row[j - from] = -HALFULP_INF;
  for (long j = hi; j < to; ++j) row[j - from] = -HALFULP_INF;
}

// The residual of O is kept in units of 2⁻⁸ ulp of O; small O share one unit, and 0 has that of 1/2, as frexp has it.
template <class E>
static inline int32_t unit_exponent(float out) {
  uint32_t bits;
  std::memcpy(&bits, &out, 4);
  const int32_t exponent = int32_t((bits >> 23) & 255) - 127;
  const int32_t held = exponent < E::lowest_exponent ? E::lowest_exponent : exponent;
  return (out == 0.f ? -1 : held) - E::mantissa_bits - 8;
}
static inline float power_of_two(int32_t exponent) {
  const uint32_t bits = uint32_t(127 + exponent) << 23;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// O and its residual in 8 bits (recipes: residual_bits = 8).
template <class E>
static void round_out(const float* exact, void* out, int8_t* residual, long n) {
  E::narrow(exact, out, n);
  if (!residual) return;
  float rounded[64];
  for (long from = 0; from < n; from += 64) {
    const long count = least(64, n - from);
    E::widen(static_cast<typename E::Element*>(out) + from, rounded, count);
    for (long j = 0; j < count; ++j) {
      const float scaled = (exact[from + j] - rounded[j]) * power_of_two(-unit_exponent<E>(rounded[j]));
      const float held = scaled > 127.f ? 127.f : scaled < -128.f ? -128.f : scaled;
      // 1.5 · 2²³ rounds to an even integer by addition; NaN becomes 0
      const float whole = (held + 12582912.f) - 12582912.f;
      residual[from + j] = whole == whole ? int8_t(whole) : int8_t(0);
    }
  }
}

// O of one row as δ takes it: O plus its residual.
template <class E>
static void read_out(const void* out, const int8_t* residual, float* dst, long n) {
  E::widen(out, dst, n);
  if (!residual) return;
  for (long j = 0; j < n; ++j) dst[j] += float(residual[j]) * power_of_two(unit_exponent<E>(dst[j]));
}

}  // namespace HALFULP_ISA
}  // namespace halfulp
