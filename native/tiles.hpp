// Matrix products on packed operands, and the packing.
//
// A operand: [m][k units], rows `lda` apart. B operand: panels [k units][width], width 64, 32 or 16. C: floats. Each
// element of C is one accumulator that takes the k units in increasing order, so its bits depend on nothing but the
// operands.
#pragma once
#include "call.hpp"

namespace halfulp {
namespace HALFULP_ISA {

enum Mode { kSet, kScaleAdd, kAdd };  // C = f₀·AB; C = f_row·C + AB; C += AB

template <class E, int MR, int NR, Mode mode>
__attribute__((noinline)) static void tile(const Unit* A, long lda, const Unit* B, long ldb, long K, float* C,
                                           long ldc, const float* factor) {
  V acc[MR][NR];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) {
      if constexpr (mode == kSet) acc[r][n] = set1(0.f);
      if constexpr (mode == kAdd) acc[r][n] = load(C + r * ldc + 16 * n);
      if constexpr (mode == kScaleAdd) acc[r][n] = mul(load(C + r * ldc + 16 * n), set1(factor[r]));
    }
  }
  for (long k = 0; k < K; ++k) {
    typename E::U b[NR];
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) b[n] = E::units(B + k * ldb + 16 * n);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const typename E::U a = E::spread(A + r * lda + k);
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) acc[r][n] = E::dot(acc[r][n], a, b[n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) {
      V x = acc[r][n];
      if constexpr (mode == kSet) x = mul(x, set1(*factor));
      store(C + r * ldc + 16 * n, x);
    }
  }
}

// MR rows of C against `width` columns of one panel, in the widest tiles that the registers hold.
template <class E, int MR, Mode mode>
static inline void strip(const Unit* A, long lda, const Unit* B, long ldb, long width, long K, float* C, long ldc,
                         const float* factor) {
  if constexpr (kTileVectors == 4) {
    if (width == 64) return tile<E, MR, 4, mode>(A, lda, B, ldb, K, C, ldc, factor);
    if (width == 16) return tile<E, MR, 1, mode>(A, lda, B, ldb, K, C, ldc, factor);
    return tile<E, MR, 2, mode>(A, lda, B, ldb, K, C, ldc, factor);
  } else {
    for (long n = 0; n < width; n += 16) tile<E, MR, 1, mode>(A, lda, B + n, ldb, K, C + n, ldc, factor);
  }
}

// Rows of units: a tensor's own, where its elements are units already and none is missing, or a copy.
struct Rows {
  const Unit* at;
  long stride;
};

// Asks for rows before they are read, line by line as they lie: memory's own guesses, which follow neighboring lines, miss
// rows that are read sixteen at a time.
struct Ahead {
  const Unit* at;
  long stride, units, unit = 0;
  void ask(int lines) {
    for (; lines > 0; --lines) {
      __builtin_prefetch(at + unit);
      unit += 16;
      if (unit >= units) unit = 0, at += stride;
    }
  }
};

// MR rows of C = f AB where the rows of B are keys as they lie: turned sixteen by sixteen, `width` of them (32 or 64).
template <class E, int MR>
__attribute__((noinline)) static void dots(const Unit* A, long lda, Rows keys, long width, long K, float* C, long ldc,
                                           float factor) {
  alignas(64) Unit turned[2][256];
  Ahead ahead{keys.at + 32 * keys.stride, keys.stride, K};
  for (long j = 0; j < width; j += 32) {
    V acc[MR][2];
    for (int r = 0; r < MR; ++r) acc[r][0] = acc[r][1] = set1(0.f);
    for (long u = 0; u < K; u += 16) {
      const long count = K - u < 16 ? K - u : 16;
      for (int n = 0; n < 2; ++n) {
        if (E::elements_are_units) ahead.ask(16);
        transpose16(keys.at + (j + 16 * n) * keys.stride + u, keys.stride, turned[n], 16, count);
      }
      for (long k = 0; k < count; ++k)
        for (int r = 0; r < MR; ++r) {
          const typename E::U a = E::spread(A + r * lda + u + k);
          for (int n = 0; n < 2; ++n) acc[r][n] = E::dot(acc[r][n], a, E::units(turned[n] + 16 * k));
        }
    }
    for (int r = 0; r < MR; ++r)
      for (int n = 0; n < 2; ++n) store(C + r * ldc + j + 16 * n, mul(acc[r][n], set1(factor)));
  }
}

// Rows of C against one panel, for an engine of vectors. The engine of tiles has its own.
template <class E>
struct Multiply {
  // Up to `few` rows against keys that are not packed: for so few that takes longer than the product.
  static constexpr long few = 4;
  static void turn(const Unit*, long, long, Unit*) {}
  static void few_rows(long rows, const Unit* A, long lda, const Unit*, Rows keys, long width, long K, float* C, long ldc,
                       float factor) {
    if (rows > 2) return dots<E, 4>(A, lda, keys, width, K, C, ldc, factor);
    if (rows == 2) return dots<E, 2>(A, lda, keys, width, K, C, ldc, factor);
    dots<E, 1>(A, lda, keys, width, K, C, ldc, factor);
  }
  // Whether one row has a way of its own to V as it lies.
  static bool one_row(const Unit*, Rows, long, long, float*, float) { return false; }
  // A group of six rows of which `rows` count; the others may be left as they are.
  template <Mode mode>
  static void group(long rows, const Unit* A, long lda, const Unit* B, long ldb, long width, long K, float* C,
                    long ldc, const float* factor) {
    if constexpr (kTileRows == 6) {
      if (rows > 4) return strip<E, 6, mode>(A, lda, B, ldb, width, K, C, ldc, factor);
      if (rows > 2) return strip<E, 4, mode>(A, lda, B, ldb, width, K, C, ldc, factor);
      if (rows == 2) return strip<E, 2, mode>(A, lda, B, ldb, width, K, C, ldc, factor);
      strip<E, 1, mode>(A, lda, B, ldb, width, K, C, ldc, factor);
    } else {
      for (long r = 0; r < rows; r += kTileRows)
        strip<E, kTileRows, mode>(A + r * lda, lda, B, ldb, width, K, C + r * ldc, ldc,
                                  mode == kScaleAdd ? factor + r : factor);
    }
  }
  // C += A B for an even number of rows.
  static void add_rows(long rows, const Unit* A, long lda, const Unit* B, long ldb, long width, long K, float* C,
                       long ldc) {
    while (rows > 0) {
      const long taken = kTileRows == 6 && rows >= 6 && rows != 8 ? 6 : kTileRows == 6 && rows >= 4 ? 4 : 2;
      if constexpr (kTileRows == 6) {
        if (taken == 6) strip<E, 6, kAdd>(A, lda, B, ldb, width, K, C, ldc, nullptr);
        if (taken == 4) strip<E, 4, kAdd>(A, lda, B, ldb, width, K, C, ldc, nullptr);
      }
      if (taken == 2) strip<E, 2, kAdd>(A, lda, B, ldb, width, K, C, ldc, nullptr);
      rows -= taken, A += taken * lda, C += taken * ldc;
    }
  }
};

static inline long up(long x, long to) { return (x + to - 1) / to * to; }
static inline long least(long a, long b) { return a < b ? a : b; }
static inline long most(long a, long b) { return a > b ? a : b; }

// Widths of one feature dimension `d` as a column dimension (panels) and as a k dimension (units).
template <class E>
struct Width {
  long d, columns, units, even;
  explicit Width(long width)
      : d(width), columns(up(width, 32)), units(up((width + E::KP - 1) / E::KP, E::k_step)), even(up(width, 2)) {}
  long stride() const { return up(units, 16); }  // of rows of units
  long panel(long column) const { return least(64, columns - column); }
};

// Rows `from` .. `from + rows` of one head, of which `valid` exist, as rows of units; the others are zero.
template <class E>
static inline void read_rows(const halfulp_tensor& x, long b, long h, long from, long rows, long valid, Width<E> w,
                             Unit* dst) {
  constexpr long size = sizeof(typename E::Element);
  const char* base = static_cast<const char*>(x.data) + (b * x.batch + h * x.head) * size;
  const long ld = E::KP == 2 ? w.stride() : w.columns;
  for (long r = 0; r < rows; ++r) {
    const bool real = r < valid;
    E::read(real ? base + (from + r) * x.row * size : nullptr, real ? w.d : 0, dst + r * ld, ld);
  }
}

// Where rows of units lie: wide enough for both uses.
template <class E>
static inline long row_stride(Width<E> w) {
  return E::KP == 2 ? w.stride() : w.columns;
}

// The keys of a panel of which `real` exist, as operands have them.
static inline long panel_width(long real) { return least(kPanel, up(real, kHalf)); }

template <class E>
static inline Rows rows_of_panel(const halfulp_tensor& x, long b, long h, long from, long valid, Width<E> w,
                                 Unit* copy, long width = 0) {
  if (width == 0) width = panel_width(valid);
  if (E::elements_are_units && valid == width && w.d % (16 * E::KP) == 0 && w.d == w.columns && x.row % E::KP == 0) {
    const auto* first = static_cast<const typename E::Element*>(x.data) + b * x.batch + h * x.head + from * x.row;
    if (reinterpret_cast<uintptr_t>(first) % sizeof(Unit) == 0)
      return {reinterpret_cast<const Unit*>(first), x.row / E::KP};
  }
  read_rows<E>(x, b, h, from, width, valid, w, copy);
  return {copy, row_stride(w)};
}

// B operand whose k runs over features: rows of units to a panel [units][width].
template <class E>
static inline void panel_over_features(Rows rows, long width, Width<E> w, Unit* panel) {
  for (long u = 0; u < w.units; u += 16)
    for (long j = 0; j < width; j += 16)
      transpose16(rows.at + j * rows.stride + u, rows.stride, panel + u * width + j, width, least(16, w.units - u));
}

// `count` (even) rows of units with their neighbors in k paired: element (k unit, column) at dst[k · ld + column].
template <class E>
static inline void pair_rows(Rows rows, long count, long column, long width, Unit* dst, long ld) {
  for (long r = 0; r < count; r += 2)
    for (long c = 0; c < width; c += 32) {
      const Unit* at = rows.at + r * rows.stride + (column + c) / E::KP;
      E::put_pair(dst + r / E::KP * ld + c, ld, E::get_row(at), E::get_row(at + rows.stride));
    }
}

}  // namespace HALFULP_ISA
}  // namespace halfulp
