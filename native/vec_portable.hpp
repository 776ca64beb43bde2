// Sixteen float lanes as plain loops, for any machine. Products are not fused with additions: those of bf16 and fp16
// operands are exact, so only the exponential's last bits differ from the other instruction sets.
#pragma once
#include <cmath>
#include <cstring>

#include "call.hpp"

namespace halfulp {
namespace HALFULP_ISA {

struct V {
  float x[16];
};
constexpr int kTileRows = 2, kTileVectors = 1;

template <class F>
static inline V each(F f) {
  V r;
  for (int i = 0; i < 16; ++i) r.x[i] = f(i);
  return r;
}
static inline V load(const float* p) {
  V r;
  std::memcpy(r.x, p, sizeof r.x);
  return r;
}
static inline void store(float* p, const V& v) { std::memcpy(p, v.x, sizeof v.x); }
static inline V set1(float s) {
  return each([&](int) { return s; });
}
static inline V add(const V& a, const V& b) {
  return each([&](int i) { return a.x[i] + b.x[i]; });
}
static inline V sub(const V& a, const V& b) {
  return each([&](int i) { return a.x[i] - b.x[i]; });
}
static inline V mul(const V& a, const V& b) {
  return each([&](int i) { return a.x[i] * b.x[i]; });
}
static inline V div(const V& a, const V& b) {
  return each([&](int i) { return a.x[i] / b.x[i]; });
}
static inline V fma(const V& a, const V& b, const V& c) {
  return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
}
static inline V max(const V& a, const V& b) {  // of max and min: b where one is NaN
  return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
static inline V min(const V& a, const V& b) {
  return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
}
static inline V both(const V& a, const V& b) {  // the bits that both have
  uint32_t x[16], y[16];
  std::memcpy(x, a.x, sizeof x);
  std::memcpy(y, b.x, sizeof y);
  for (int i = 0; i < 16; ++i) x[i] &= y[i];
  V r;
  std::memcpy(r.x, x, sizeof x);
  return r;
}
static inline float largest(const V& a) {
  float top = a.x[0];
  for (int i = 1; i < 16; ++i) top = a.x[i] > top ? a.x[i] : top;
  return top;
}
// 1.5 · 2²³ rounds to even by addition; beyond 2²² a float has no more than a half to round
static inline V round_even(const V& a) {
  return each([&](int i) {
    const float whole = (a.x[i] + 12582912.f) - 12582912.f;
    return std::fabs(a.x[i]) < 4194304.f ? whole : std::nearbyint(a.x[i]);
  });
}
// x · 2ⁿ for integer n; below 2⁻¹²⁶ the factor is 0.
static inline V scale2(const V& a, const V& n) {
  return each([&](int i) {
    const float held = n.x[i] > -127.f ? (n.x[i] < 127.f ? n.x[i] : 127.f) : -127.f;
    const uint32_t bits = uint32_t(int32_t(held) + 127) << 23;
    float factor;
    std::memcpy(&factor, &bits, 4);
    return a.x[i] * factor;
  });
}
static inline float rounded_bf16(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  b = (b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&x, &b, 4);
  return x;
}
static inline uint16_t half_of(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  const uint32_t sign = (b >> 16) & 0x8000u;
  b &= 0x7fffffffu;
  if (b > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (b >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above
  if (b < 0x38800000u) {  // subnormal: adding 1/2 puts the unit 2⁻²⁴ at the last bit
    float magnitude;
    std::memcpy(&magnitude, &b, 4);
    magnitude += 0.5f;
    std::memcpy(&b, &magnitude, 4);
    return uint16_t(sign | (b - 0x3f000000u));
  }
  b += 0xc8000fffu + ((b >> 13) & 1);
  return uint16_t(sign | (b >> 13));
}
static inline float float_of(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ffu;
  uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
  if (exponent == 31) bits = sign | 0x7f800000u | fraction << 13;
  float x;
  if (exponent == 0) {
    x = float(fraction) * 0x1p-24f;
    return sign ? -x : x;
  }
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline V round_bf16(const V& a) {
  return each([&](int i) { return rounded_bf16(a.x[i]); });
}
static inline V round_fp16(const V& a) {
  return each([&](int i) { return float_of(half_of(a.x[i])); });
}

// 16 × 16 units: rows of `src` become columns of `dst`, of which `keep` rows are written.
static inline void transpose16(const Unit* src, long ld, Unit* dst, long ldd, long keep) {
  for (long i = 0; i < (keep < 16 ? keep : 16); ++i)
    for (long j = 0; j < 16; ++j) dst[i * ldd + j] = src[j * ld + i];
}

// `n` elements of a dtype to float and back.
static inline void widen_bf16(const void* src, float* dst, long n) {
  for (long j = 0; j < n; ++j) {
    const uint32_t bits = uint32_t(static_cast<const uint16_t*>(src)[j]) << 16;
    std::memcpy(dst + j, &bits, 4);
  }
}
static inline void narrow_bf16(const float* src, void* dst, long n) {
  for (long j = 0; j < n; ++j) {
    uint32_t bits;
    const float x = rounded_bf16(src[j]);
    std::memcpy(&bits, &x, 4);
    static_cast<uint16_t*>(dst)[j] = uint16_t(bits >> 16);
  }
}
static inline void widen_fp16(const void* src, float* dst, long n) {
  for (long j = 0; j < n; ++j) dst[j] = float_of(static_cast<const uint16_t*>(src)[j]);
}
static inline void narrow_fp16(const float* src, void* dst, long n) {
  for (long j = 0; j < n; ++j) static_cast<uint16_t*>(dst)[j] = half_of(src[j]);
}

}  // namespace HALFULP_ISA
}  // namespace halfulp
