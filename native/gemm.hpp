// Products of float matrices in which every element is one accumulator that starts at 0 and takes k in increasing order
// by fused multiply-add: the emulator's products. The left operand may have any strides, the right one is packed.
#pragma once
#include "tiles.hpp"

namespace halfulp {
namespace HALFULP_ISA {

// Columns in panels of 64, the last one as narrow as whole vectors allow: element (row, column) of panel p at
// data + 64 · p · rows + row · (width of p) + column.
struct Panels {
  const float* data;
  long rows, width;  // width: in whole vectors
};

#ifdef __FMA__
static inline V fused(V a, V b, V c) { return fma(a, b, c); }
#else
static inline V fused(const V& a, const V& b, const V& c) {
  V r;
  for (int i = 0; i < 16; ++i) r.x[i] = std::fma(a.x[i], b.x[i], c.x[i]);
  return r;
}
#endif

template <int MR, int NR>
__attribute__((noinline)) static void gemm_tile(const float* A, long row, long k_step, const float* B, long ldb, long K,
                                                float* C, long ldc, bool go_on) {
  V acc[MR][NR];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) acc[r][n] = go_on ? load(C + r * ldc + 16 * n) : set1(0.f);
  for (long k = 0; k < K; ++k) {
    V b[NR];
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) b[n] = load(B + k * ldb + 16 * n);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const V a = set1(A[r * row + k * k_step]);
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) acc[r][n] = fused(a, b[n], acc[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) store(C + r * ldc + 16 * n, acc[r][n]);
}

template <int NR>
static void gemm_strip(const float* A, long row, long k_step, long M, const float* B, long ldb, long K, float* C,
                       long ldc, bool go_on) {
  constexpr int MR = kTileRows;
  long r = 0;
  for (; r + MR <= M; r += MR) gemm_tile<MR, NR>(A + r * row, row, k_step, B, ldb, K, C + r * ldc, ldc, go_on);
  if (MR > 4 && M - r >= 4) {
    gemm_tile<4, NR>(A + r * row, row, k_step, B, ldb, K, C + r * ldc, ldc, go_on);
    r += 4;
  }
  if (MR > 2 && M - r >= 2) {
    gemm_tile<2, NR>(A + r * row, row, k_step, B, ldb, K, C + r * ldc, ldc, go_on);
    r += 2;
  }
  if (M - r >= 1) gemm_tile<1, NR>(A + r * row, row, k_step, B, ldb, K, C + r * ldc, ldc, go_on);
}

// C [M, B.width] = A [M, K] times rows `from` .. `from + K` of B; element (r, k) of A at A + r · row + k · k_step. With
// `go_on`, C is where its accumulators stand.
static inline void multiply(const float* A, long row, long k_step, long M, Panels B, long from, long K, float* C, long ldc,
                            bool go_on) {
  for (long column = 0; column < B.width; column += 64) {
    const long width = least(64, B.width - column);
    const float* b = B.data + column * B.rows + from * width;
    long n = 0;
    if constexpr (kTileVectors == 4) {
      if (width == 64) {
        gemm_strip<4>(A, row, k_step, M, b, width, K, C + column, ldc, go_on);
        continue;
      }
      for (; n + 32 <= width; n += 32) gemm_strip<2>(A, row, k_step, M, b + n, width, K, C + column + n, ldc, go_on);
    }
    for (; n < width; n += 16) gemm_strip<1>(A, row, k_step, M, b + n, width, K, C + column + n, ldc, go_on);
  }
}

// `rows` rows of `columns` numbers as panels, zero beyond the last column.
static inline Panels pack_panels(const float* src, long row, long column, long rows, long columns, float* dst) {
  const long width = up(columns, 16);
  for (long c = 0; c < width; c += 64) {
    const long w = least(64, width - c), valid = least(w, columns - c);
    float* panel = dst + c * rows;
    for (long r = 0; r < rows; ++r) {
      const float* from = src + r * row + c * column;
      if (column == 1)
        std::memcpy(panel + r * w, from, size_t(valid) * sizeof(float));
      else
        for (long j = 0; j < valid; ++j) panel[r * w + j] = from[j * column];
      std::memset(panel + r * w + valid, 0, size_t(w - valid) * sizeof(float));
    }
  }
  return {dst, rows, width};
}

// The transpose: `columns` rows of `rows` numbers each, contiguous, become panels of `columns` columns.
static inline Panels pack_transposed(const float* src, long rows, long columns, float* dst) {
  const long width = up(columns, 16);
  for (long c = 0; c < width; c += 64) {
    const long w = least(64, width - c);
    float* panel = dst + c * rows;
    for (long j = 0; j < w; j += 16) {
      long r = 0;
      if (c + j + 16 <= columns)
        for (; r + 16 <= rows; r += 16)
          transpose16(reinterpret_cast<const Unit*>(src + (c + j) * rows + r), rows,
                      reinterpret_cast<Unit*>(panel + r * w + j), w, 16);
      for (; r < rows; ++r)
        for (long x = j; x < j + 16; ++x) panel[r * w + x] = c + x < columns ? src[(c + x) * rows + r] : 0.f;
    }
  }
  return {dst, rows, width};
}

}  // namespace HALFULP_ISA
}  // namespace halfulp
