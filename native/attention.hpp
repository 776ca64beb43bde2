// Attention forward and backward for one operand engine E and one exponential; native/README.md is the specification.
//
// Forward: a block of query rows against blocks of keys, online softmax. Backward: a part of one head's keys, block of
// query rows outside, panels of 64 keys inside; dK and dV are kept transposed, so that the weights enter every product
// in the layout in which they were computed.
#pragma once
#include <cmath>
#include <cstring>

#include "tiles.hpp"

namespace halfulp {
namespace HALFULP_ISA {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNever = -1e30f;  // stands for −∞ in the exponential: 2^kNever is 0
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
    s = max(set1(kNever), s);
    const V n = round_even(s);
    return scale2(exp2_fraction(sub(s, n)), sub(n, m));
  } else {
    const V x = max(set1(kNever), sub(s, m));
    const V n = round_even(x);
    return scale2(exp2_fraction(sub(x, n)), n);
  }
}

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

static inline long first_key(const halfulp_call& c, long i) {
  return c.left < 0 ? 0 : most(0, least(c.n_key, i + c.offset - c.left));
}
static inline long end_key(const halfulp_call& c, long i) {
  return c.right < 0 ? c.n_key : most(0, least(c.n_key, i + c.offset + c.right + 1));
}

// The keys that rows i .. i + 5 of a block touch, in whole panels, inside [from, to).
struct Span {
  long from, to;
  bool empty() const { return from >= to; }
};
static inline Span seen_by(const halfulp_call& c, long i, long rows, long from, long to) {
  const long last = least(i + rows, c.n_query) - 1;
  if (last < i) return {0, 0};
  const long lo = first_key(c, i), hi = end_key(c, last);
  if (lo >= hi) return {0, 0};
  return {most(from, lo / kPanel * kPanel), least(to, up(hi, kPanel))};
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
      for (long j = 0; j < count; ++j) row[j] += mask[j] * kLog2E;
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
