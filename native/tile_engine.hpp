// bf16 operands in pairs of neighboring k as PairEngine's, products by tdpbf16ps: tiles of 16 rows by 16 units. Within a
// step of 32 k a tile sums the even and the odd ones apart and adds both sums to the accumulator.
#pragma once
#include <immintrin.h>

#include "tiles.hpp"

namespace halfulp {
namespace HALFULP_ISA {

struct TileEngine : PairEngine {
  static constexpr long group = 32, k_step = 16;
  static void enter() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
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

template <>
struct Multiply<TileEngine> {
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
