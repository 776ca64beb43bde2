// Sixteen float lanes on AVX-512 (F, BW, DQ, VL), and the operand engine of vdpbf16ps where that is compiled in.
#pragma once
#include <immintrin.h>

#include "call.hpp"

namespace halfulp {
namespace HALFULP_ISA {

using V = __m512;
constexpr int kTileRows = 6, kTileVectors = 4;

static inline V load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
static inline V set1(float x) { return _mm512_set1_ps(x); }
static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V div(V a, V b) { return _mm512_div_ps(a, b); }
static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V max(V a, V b) { return _mm512_max_ps(a, b); }  // of max and min: b where one is NaN
static inline V min(V a, V b) { return _mm512_min_ps(a, b); }
static inline V round_even(V x) { return _mm512_roundscale_ps(x, 8); }
static inline V scale2(V x, V n) { return _mm512_scalef_ps(x, n); }  // x · 2ⁿ for integer n, n very negative too

static inline float largest(V x) { return _mm512_reduce_max_ps(x); }
static inline V both(V a, V b) { return _mm512_and_ps(a, b); }  // the bits that both have

static inline V round_bf16(V x) {
  __m512i b = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  b = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_castsi512_ps(_mm512_and_si512(b, _mm512_set1_epi32(int(0xffff0000u))));
}
static inline V round_fp16(V x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, 8)); }

// 16 × 16 units: rows of `src` become columns of `dst`, of which `keep` rows are written.
static inline void transpose16(const Unit* src, long ld, Unit* dst, long ldd, long keep) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src + i * ld);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
  if (keep >= 16) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(dst + i * ldd, r[i]);
  } else {
    for (int i = 0; i < keep; ++i) _mm512_storeu_si512(dst + i * ldd, r[i]);
  }
}

// `n` elements of a dtype to float and back.
static inline void widen_bf16(const void* src, float* dst, long n) {
  const uint16_t* s = static_cast<const uint16_t*>(src);
  for (long j = 0; j < n; j += 16) {
    __mmask16 m = n - j >= 16 ? __mmask16(0xffff) : __mmask16((1u << (n - j)) - 1);
    __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, s + j));
    _mm512_mask_storeu_epi32(dst + j, m, _mm512_slli_epi32(x, 16));
  }
}
static inline void widen_fp16(const void* src, float* dst, long n) {
  const uint16_t* s = static_cast<const uint16_t*>(src);
  for (long j = 0; j < n; j += 16) {
    __mmask16 m = n - j >= 16 ? __mmask16(0xffff) : __mmask16((1u << (n - j)) - 1);
    _mm512_mask_storeu_ps(dst + j, m, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, s + j)));
  }
}
static inline void narrow_bf16(const float* src, void* dst, long n) {
  uint16_t* d = static_cast<uint16_t*>(dst);
  for (long j = 0; j < n; j += 16) {
    __mmask16 m = n - j >= 16 ? __mmask16(0xffff) : __mmask16((1u << (n - j)) - 1);
    V x = round_bf16(_mm512_maskz_loadu_ps(m, src + j));
    _mm256_mask_storeu_epi16(d + j, m, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)));
  }
}
static inline void narrow_fp16(const float* src, void* dst, long n) {
  uint16_t* d = static_cast<uint16_t*>(dst);
  for (long j = 0; j < n; j += 16) {
    __mmask16 m = n - j >= 16 ? __mmask16(0xffff) : __mmask16((1u << (n - j)) - 1);
    _mm256_mask_storeu_epi16(d + j, m, _mm512_cvtps_ph(_mm512_maskz_loadu_ps(m, src + j), 8));
  }
}

#ifdef __AVX512BF16__
// bf16 operands in pairs of neighboring k, products by vdpbf16ps.
struct PairEngine {
  using Element = uint16_t;
  static constexpr long KP = 2;
  static constexpr long group = 6, k_step = 1;  // rows that are multiplied together; of a product's units
  static void enter(long) {}
  static void leave() {}
  static constexpr int mantissa_bits = 7, lowest_exponent = -101;
  static constexpr bool exact_operands = false;
  static constexpr bool elements_are_units = true;  // two of them
  using U = __m512i;
  using Packed = __m512i;  // 32 weights of one row
  static U units(const Unit* p) { return _mm512_loadu_si512(p); }
  static U spread(const Unit* p) { return _mm512_set1_epi32(int(*p)); }
  static V dot(V c, U a, U b) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
  static Packed pack(V x0, V x1) { return (__m512i)_mm512_cvtne2ps_pbh(x1, x0); }
  static void unpack(Packed p, V& x0, V& x1) {
    const __m512i low = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0,
                                         3, 0, 2, 0, 1, 0, 0, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    x0 = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, low, p));
    x1 = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, high, p));
  }
  static V sum(V c, Packed p) { return _mm512_dpbf16_ps(c, (__m512bh)p, (__m512bh)_mm512_set1_epi16(0x3f80)); }
  static void put_row(Unit* dst, Packed p) { _mm512_storeu_si512(dst, p); }
  // Rows r0 and r0 + 1, which are neighbors in k, as 32 units of one k pair.
  static void put_pair(Unit* dst, long, Packed r0, Packed r1) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(dst, _mm512_permutex2var_epi16(r0, low, r1));
    _mm512_storeu_si512(dst + 16, _mm512_permutex2var_epi16(r0, high, r1));
  }
  static Packed get_row(const Unit* src) { return _mm512_loadu_si512(src); }
  // n elements of a tensor's row as units, zero up to `units`.
  static void read(const void* src, long n, Unit* dst, long units) {
    const uint16_t* s = static_cast<const uint16_t*>(src);
    for (long u = 0; u < units; u += 16) {
      const long left = n - 2 * u;
      __m512i x = _mm512_setzero_si512();  // a load that is masked out, of an address that is none, takes 0.2 µs
      if (left > 0) x = _mm512_maskz_loadu_epi16(left >= 32 ? 0xffffffffu : (1u << left) - 1, s + 2 * u);
      _mm512_storeu_si512(dst + u, x);
    }
  }
  static void widen(const void* src, float* dst, long n) { widen_bf16(src, dst, n); }
  static void narrow(const float* src, void* dst, long n) { narrow_bf16(src, dst, n); }
};
#endif

}  // namespace HALFULP_ISA
}  // namespace halfulp
