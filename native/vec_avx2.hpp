// Sixteen float lanes as two registers of AVX2, with FMA and F16C.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "call.hpp"

namespace halfulp {
namespace HALFULP_ISA {

struct V {
  __m256 a, b;
};
constexpr int kTileRows = 6, kTileVectors = 1;

static inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }  // y where one is NaN
static inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline V both(V x, V y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }  // the bits that both have
static inline V round_even(V x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }

static inline float largest(V x) {
  float t[8];
  _mm256_storeu_ps(t, _mm256_max_ps(x.a, x.b));
  for (int w = 4; w; w /= 2)
    for (int i = 0; i < w; ++i) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
  return t[0];
}

// x · 2ⁿ for integer n; below 2⁻¹²⁶ the factor is 0.
static inline __m256 scale2_half(__m256 x, __m256 n) {
  n = _mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-127.f)), _mm256_set1_ps(127.f));
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}
static inline V scale2(V x, V n) { return {scale2_half(x.a, n.a), scale2_half(x.b, n.b)}; }

static inline __m256 round_bf16_half(__m256 x) {
  __m256i b = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  b = _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32(int(0xffff0000u))));
}
static inline V round_bf16(V x) { return {round_bf16_half(x.a), round_bf16_half(x.b)}; }
static inline V round_fp16(V x) {
  return {_mm256_cvtph_ps(_mm256_cvtps_ph(x.a, 8)), _mm256_cvtph_ps(_mm256_cvtps_ph(x.b, 8))};
}

// 16 × 16 units: rows of `src` become columns of `dst`, of which `keep` rows are written.
static inline void transpose16(const Unit* src, long ld, Unit* dst, long ldd, long keep) {
  for (long i = 0; i < (keep < 16 ? keep : 16); ++i)
    for (long j = 0; j < 16; ++j) dst[i * ldd + j] = src[j * ld + i];
}

// `n` elements of a dtype to float and back, eight at a time, the rest by way of a buffer.
static inline void widen_bf16(const void* src, float* dst, long n) {
  const uint16_t* s = static_cast<const uint16_t*>(src);
  for (long j = 0; j < n; ++j) {
    const uint32_t bits = uint32_t(s[j]) << 16;
    std::memcpy(dst + j, &bits, 4);
  }
}
static inline void narrow_bf16(const float* src, void* dst, long n) {
  uint16_t* d = static_cast<uint16_t*>(dst);
  for (long j = 0; j < n; ++j) {
    uint32_t bits;
    std::memcpy(&bits, src + j, 4);
    d[j] = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}
static inline void widen_fp16(const void* src, float* dst, long n) {
  const uint16_t* s = static_cast<const uint16_t*>(src);
  long j = 0;
  for (; j + 8 <= n; j += 8)
    _mm256_storeu_ps(dst + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s + j))));
  for (; j < n; ++j) dst[j] = _cvtsh_ss(s[j]);
}
static inline void narrow_fp16(const float* src, void* dst, long n) {
  uint16_t* d = static_cast<uint16_t*>(dst);
  long j = 0;
  for (; j + 8 <= n; j += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(d + j), _mm256_cvtps_ph(_mm256_loadu_ps(src + j), 8));
  for (; j < n; ++j) d[j] = uint16_t(_cvtss_sh(src[j], 0));
}

}  // namespace HALFULP_ISA
}  // namespace halfulp
