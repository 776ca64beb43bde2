// Operands of any dtype as floats, products by fused multiply-add: the engine where no instruction multiplies them.
#pragma once
#include <cstring>

#include "call.hpp"

namespace halfulp {
namespace HALFULP_ISA {

struct Bf16 {
  using Element = uint16_t;
  static constexpr int mantissa_bits = 7, lowest_exponent = -101;
  static constexpr bool exact = false;
  static V round(V x) { return round_bf16(x); }
  static void widen(const void* src, float* dst, long n) { widen_bf16(src, dst, n); }
  static void narrow(const float* src, void* dst, long n) { narrow_bf16(src, dst, n); }
};
struct Fp16 {
  using Element = uint16_t;
  static constexpr int mantissa_bits = 10, lowest_exponent = -14;
  static constexpr bool exact = false;
  static V round(V x) { return round_fp16(x); }
  static void widen(const void* src, float* dst, long n) { widen_fp16(src, dst, n); }
  static void narrow(const float* src, void* dst, long n) { narrow_fp16(src, dst, n); }
};
struct Fp32 {
  // for rows of a few dozen elements memcpy's call takes longer than the copy
  static void copy(const float* src, float* dst, long n) {
    long j = 0;
    for (; j + 16 <= n; j += 16) store(dst + j, load(src + j));
    if (j < n) std::memcpy(dst + j, src + j, size_t(n - j) * sizeof(float));
  }
  using Element = float;
  static constexpr int mantissa_bits = 23, lowest_exponent = -126;
  static constexpr bool exact = true;
  static V round(V x) { return x; }
  static void widen(const void* src, float* dst, long n) { copy(static_cast<const float*>(src), dst, n); }
  static void narrow(const float* src, void* dst, long n) { copy(src, static_cast<float*>(dst), n); }
};

template <class Dtype>
struct FloatEngine {
  using Element = typename Dtype::Element;
  static constexpr long KP = 1;
  static constexpr long group = 6, k_step = 1;  // rows that are multiplied together; of a product's units
  static void enter(long) {}
  static void leave() {}
  static constexpr int mantissa_bits = Dtype::mantissa_bits, lowest_exponent = Dtype::lowest_exponent;
  static constexpr bool exact_operands = Dtype::exact;
  static constexpr bool elements_are_units = Dtype::exact;
  using U = V;
  struct Packed {
    V x0, x1;
  };
  static U units(const Unit* p) { return load(reinterpret_cast<const float*>(p)); }
  static U spread(const Unit* p) { return set1(*reinterpret_cast<const float*>(p)); }
  static V dot(V c, U a, U b) { return fma(a, b, c); }
  static Packed pack(V x0, V x1) { return {Dtype::round(x0), Dtype::round(x1)}; }
  static void unpack(const Packed& p, V& x0, V& x1) { x0 = p.x0, x1 = p.x1; }
  static V sum(V c, const Packed& p) { return add(add(c, p.x0), p.x1); }
  static void put_row(Unit* dst, const Packed& p) {
    store(reinterpret_cast<float*>(dst), p.x0);
    store(reinterpret_cast<float*>(dst) + 16, p.x1);
  }
  static void put_pair(Unit* dst, long ld, const Packed& r0, const Packed& r1) {
    put_row(dst, r0);
    put_row(dst + ld, r1);
  }
  static Packed get_row(const Unit* src) { return {units(src), units(src + 16)}; }
  static void read(const void* src, long n, Unit* dst, long units) {
    if (src) Dtype::widen(src, reinterpret_cast<float*>(dst), n);
    const long from = src ? n : 0;
    if (from < units) std::memset(dst + from, 0, size_t(units - from) * sizeof(Unit));
  }
  static void widen(const void* src, float* dst, long n) { Dtype::widen(src, dst, n); }
  static void narrow(const float* src, void* dst, long n) { Dtype::narrow(src, dst, n); }
};

}  // namespace HALFULP_ISA
}  // namespace halfulp
