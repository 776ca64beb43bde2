// bf16 operands in pairs of neighboring k as PairEngine's, products by tdpbf16ps: tiles of 16 rows by 16 units. Within a
// step of 32 k a tile sums the even and the odd ones apart and adds both sums to the accumulator.
#pragma once
#include <immintrin.h>

#include "tiles.hpp"

namespace halfulp {
namespace HALFULP_ISA {

struct TileEngine : PairEngine {
  static constexpr long group = 32, k_step = 16;
  // For up to sixteen rows alone tiles 0, 1 and 4 have as many, and 2, 3 and 5 as many columns; no others are used then.
  static void enter(long count) {
    const uint8_t n = count < 16 ? uint8_t(count) : 16;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    shape.rows[0] = shape.rows[1] = shape.rows[4] = n;
    shape.bytes[2] = shape.bytes[3] = shape.bytes[5] = uint16_t(4 * n);
    _tile_loadconfig(&shape);
  }
  static void leave() { _tile_release(); }
};

// 32 rows, or 16, of C by 32 columns; K in steps of 16 units.
template <bool both, bool go_on>
static inline void tiles(const Unit* A, long lda, const Unit* B, long ldb, long K, float* C, long ldc) {
  const long row = 4 * lda, b_row = 4 * ldb, c_row = 4 * ldc;
  if constexpr (go_on) {
    _tile_loadd(0, C, c_row);
    _tile_loadd(1, C + 16, c_row);
    if (both) _tile_loadd(2, C + 16 * ldc, c_row);
    if (both) _tile_loadd(3, C + 16 * ldc + 16, c_row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (both) _tile_zero(2);
    if (both) _tile_zero(3);
  }
  for (long k = 0; k < K; k += 16) {
    _tile_loadd(4, A + k, row);
    _tile_loadd(6, B + k * ldb, b_row);
    _tile_loadd(7, B + k * ldb + 16, b_row);
    if (both) _tile_loadd(5, A + 16 * lda + k, row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) _tile_dpbf16ps(2, 5, 6);
    if (both) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, C, c_row);
  _tile_stored(1, C + 16, c_row);
  if (both) _tile_stored(2, C + 16 * ldc, c_row);
  if (both) _tile_stored(3, C + 16 * ldc + 16, c_row);
}

template <Mode mode>
static inline void multiply_tiles(long rows, const Unit* A, long lda, const Unit* B, long ldb, long width, long K,
                                  float* C, long ldc, const float* factor) {
  if constexpr (mode == kScaleAdd)
    for (long r = 0; r < rows; ++r)
      for (long n = 0; n < width && factor[r] != 1.f; n += 16)
        store(C + r * ldc + n, mul(load(C + r * ldc + n), set1(factor[r])));
  for (long n = 0; n < width; n += 32) {
    if (rows > 16)
      tiles<true, mode != kSet>(A, lda, B + n, ldb, K, C + n, ldc);
    else
      tiles<false, mode != kSet>(A, lda, B + n, ldb, K, C + n, ldc);
  }
  if constexpr (mode == kSet)
    for (long r = 0; r < rows && *factor != 1.f; ++r)
      for (long n = 0; n < width; n += 16) store(C + r * ldc + n, mul(load(C + r * ldc + n), set1(*factor)));
}

// One row of C = factor·C + A V, 32 N columns of V as it lies: for tiles it would be paired first, which takes longer than
// one row's product. To the bit what tiles do: of 32 keys the even and the odd ones apart, each sum by fused multiply-adds
// from 0, and no subnormal numbers. A register holds the even or the odd ones of 32 columns.
template <int N>
__attribute__((noinline)) static void weigh(const Unit* A, Rows rows, long K, float* C, float factor) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1)), high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000u));
  V acc[N][2];
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    const V x = mul(load(C + 32 * n), set1(factor)), y = mul(load(C + 32 * n + 16), set1(factor));
    acc[n][0] = _mm512_permutex2var_ps(x, even, y), acc[n][1] = _mm512_permutex2var_ps(x, odd, y);
  }
  const unsigned modes = _mm_getcsr();
  _mm_setcsr(modes | 0x8040);  // subnormal operands and results are 0
  for (long u = 0; u < K; u += 16) {
    V sum[2][N][2];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) sum[0][n][0] = sum[0][n][1] = sum[1][n][0] = sum[1][n][1] = set1(0.f);
    alignas(64) float weight[2][16];
    _mm512_store_si512(weight[0], _mm512_slli_epi32(_mm512_loadu_si512(A + u), 16));
    _mm512_store_si512(weight[1], _mm512_and_si512(_mm512_loadu_si512(A + u), upper));
    for (int k = 0; k < 16; ++k)
#pragma GCC unroll 2
      for (int x = 0; x < 2; ++x) {
        const Unit* at = rows.at + (2 * (u + k) + x) * rows.stride;
        const V w = set1(weight[x][k]);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          __builtin_prefetch(at + 16 * rows.stride + 16 * n);
          const __m512i pairs = _mm512_loadu_si512(at + 16 * n);
          sum[x][n][0] = fma(w, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), sum[x][n][0]);
          sum[x][n][1] = fma(w, _mm512_castsi512_ps(_mm512_and_si512(pairs, upper)), sum[x][n][1]);
        }
      }
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
      for (int x = 0; x < 2; ++x) acc[n][x] = add(acc[n][x], add(sum[0][n][x], sum[1][n][x]));
  }
  _mm_setcsr(modes);
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    store(C + 32 * n, _mm512_permutex2var_ps(acc[n][0], low, acc[n][1]));
    store(C + 32 * n + 16, _mm512_permutex2var_ps(acc[n][0], high, acc[n][1]));
  }
}

template <>
struct Multiply<TileEngine> {
  // Keys as they lie are the left operand, the rows turned the right one: products and their order are the same.
  static constexpr long few = 16;
  static void turn(const Unit* rows, long ld, long K, Unit* turned) {
    for (long u = 0; u < K; u += 16) transpose16(rows + u, ld, turned + 16 * u, 16, 16);
  }
  static void few_rows(long rows, const Unit*, long, const Unit* turned, Rows keys, long width, long K, float* C,
                       long ldc, float factor) {
    alignas(64) float product[2][256];
    Ahead ahead{keys.at + 32 * keys.stride, keys.stride, K};
    for (long j = 0; j < width; j += 32) {
      _tile_zero(2);
      _tile_zero(3);
      for (long u = 0; u < K; u += 16) {
        if (rows > 1) ahead.ask(32);
        _tile_loadd(5, turned + 16 * u, 64);
        _tile_loadd(6, keys.at + j * keys.stride + u, 4 * keys.stride);
        _tile_loadd(7, keys.at + (j + 16) * keys.stride + u, 4 * keys.stride);
        _tile_dpbf16ps(2, 6, 5);
        _tile_dpbf16ps(3, 7, 5);
      }
      if (rows == 1) {  // a column is the row
        _tile_stored(2, C + j, 4);
        _tile_stored(3, C + j + 16, 4);
        continue;
      }
      _tile_stored(2, product[0], 64);
      _tile_stored(3, product[1], 64);
      for (int n = 0; n < 2; ++n)
        transpose16(reinterpret_cast<Unit*>(product[n]), 16, reinterpret_cast<Unit*>(C + j + 16 * n), ldc, rows);
    }
    for (long r = 0; r < rows && factor != 1.f; ++r)
      for (long j = 0; j < width; j += 16) store(C + r * ldc + j, mul(load(C + r * ldc + j), set1(factor)));
  }
  static bool one_row(const Unit* A, Rows keys, long count, long width, float* C, float factor) {
    (width == 64 ? weigh<2> : weigh<1>)(A, keys, count / 2, C, factor);
    return true;
  }
  // A group of rows of which `rows` count.
  template <Mode mode>
  static void group(long rows, const Unit* A, long lda, const Unit* B, long ldb, long width, long K, float* C,
                    long ldc, const float* factor) {
    multiply_tiles<mode>(rows, A, lda, B, ldb, width, K, C, ldc, factor);
  }
  static void add_rows(long rows, const Unit* A, long lda, const Unit* B, long ldb, long width, long K, float* C,
                       long ldc) {
    for (long r = 0; r < rows; r += 32)
      multiply_tiles<kAdd>(32, A + r * lda, lda, B, ldb, width, K, C + r * ldc, ldc, nullptr);
  }
};

}  // namespace HALFULP_ISA
}  // namespace halfulp
