// Rounding to any scalar format, as formats/general.py specifies it: on the bits of the magnitude, so that one addition
// and one mask round every normal number, and in units of the least subnormal below them.
#pragma once
#include <cmath>
#include <cstring>

#include "call.hpp"

namespace halfulp {
namespace HALFULP_ISA {

template <class Real>
struct Container;
template <>
struct Container<float> {
  using Bits = uint32_t;
  static constexpr int mantissa_bits = 23, bias = 127;
};
template <>
struct Container<double> {
  using Bits = uint64_t;
  static constexpr int mantissa_bits = 52, bias = 1023;
};

template <class To, class From>
static inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// One format's constants in one container.
template <class Real>
struct Rounder {
  using C = Container<Real>;
  using Bits = typename C::Bits;
  static constexpr Bits kSign = Bits(1) << (8 * sizeof(Bits) - 1);
  static constexpr Bits kInfinity = (Bits(2 * C::bias + 1)) << C::mantissa_bits;
  static constexpr Bits kQuiet = Bits(1) << (C::mantissa_bits - 1);

  bool active = false, tiny = false;  // tiny: below min_normal the spacing is not the container's
  int rounding = 0, drop = 0;
  Bits mask = 0, half = 0, below_half = 0, odd = 0, parity = 0, min_normal = 0, flush = 0, max = 0, beyond = 0, infinity = 0;
  Real to_units[2] = {1, 1}, from_units[2] = {1, 1};

  Rounder() = default;
  explicit Rounder(const halfulp_format& f) : active(f.active != 0) {
    if (!active) return;
    rounding = f.rounding;
    drop = C::mantissa_bits - f.mantissa_bits;
    mask = (Bits(1) << drop) - 1;
    half = drop > 0 ? Bits(1) << (drop - 1) : 0;
    below_half = drop > 0 ? half - 1 : 0;
    odd = drop > 0;
    // Without mantissa bits the last bit of a code is that of its exponent field.
    parity = f.mantissa_bits == 0 ? Bits(f.bias - C::bias) & 1 : 0;
    min_normal = Bits(f.min_exponent + C::bias) << C::mantissa_bits;
    flush = f.subnormals ? 0 : min_normal;
    tiny = f.min_exponent > 1 - C::bias;
    max = bits_as<Bits>(Real(f.max));
    const Bits nan = kInfinity | kQuiet;
    beyond = f.overflow == HALFULP_TO_INFINITY ? kInfinity : f.overflow == HALFULP_TO_NAN ? nan : max;
    infinity = f.overflow == HALFULP_TO_MAX ? max : f.infinities ? kInfinity : nan;
    const int exponent = f.mantissa_bits - f.min_exponent, part = exponent / 2;
    to_units[0] = std::ldexp(Real(1), part), to_units[1] = std::ldexp(Real(1), exponent - part);
    from_units[0] = std::ldexp(Real(1), -part), from_units[1] = std::ldexp(Real(1), part - exponent);
  }

  // n numbers of x to y, which may be x.
  void operator()(const Real* x, Real* y, long n) const {
    switch (2 * rounding + tiny) {
      case 2 * HALFULP_NEAREST_EVEN: return all<HALFULP_NEAREST_EVEN, false>(x, y, n);
      case 2 * HALFULP_NEAREST_EVEN + 1: return all<HALFULP_NEAREST_EVEN, true>(x, y, n);
      case 2 * HALFULP_NEAREST_AWAY: return all<HALFULP_NEAREST_AWAY, false>(x, y, n);
      case 2 * HALFULP_NEAREST_AWAY + 1: return all<HALFULP_NEAREST_AWAY, true>(x, y, n);
      case 2 * HALFULP_TOWARD_ZERO: return all<HALFULP_TOWARD_ZERO, false>(x, y, n);
      case 2 * HALFULP_TOWARD_ZERO + 1: return all<HALFULP_TOWARD_ZERO, true>(x, y, n);
      case 2 * HALFULP_UP: return all<HALFULP_UP, false>(x, y, n);
      case 2 * HALFULP_UP + 1: return all<HALFULP_UP, true>(x, y, n);
      case 2 * HALFULP_DOWN: return all<HALFULP_DOWN, false>(x, y, n);
      default: return all<HALFULP_DOWN, true>(x, y, n);
    }
  }
  void operator()(Real* x, long n) const {
    if (active) (*this)(x, x, n);
  }
  Real operator()(Real x) const {
    if (active) (*this)(&x, &x, 1);
    return x;
  }

 private:
  template <int mode, bool with_tiny>
  void all(const Real* x, Real* y, long n) const {
    const Rounder f = *this;  // in registers: y might alias this
    for (long i = 0; i < n; ++i) y[i] = f.template one<mode, with_tiny>(x[i]);
  }

  template <int mode, bool with_tiny>
  Real one(Real x) const {
    const Bits u = bits_as<Bits>(x), sign = u & kSign, a = u ^ sign;
    const bool outward = mode == HALFULP_UP ? sign == 0 : mode == HALFULP_DOWN && sign != 0;
    Bits more = 0;
    if constexpr (mode == HALFULP_NEAREST_EVEN) more = below_half + (((a >> drop) + parity) & odd);
    if constexpr (mode == HALFULP_NEAREST_AWAY) more = half;
    if constexpr (mode == HALFULP_UP || mode == HALFULP_DOWN) more = outward ? mask : 0;
    Bits v = (a + more) & ~mask;
    if constexpr (with_tiny) {
      constexpr Real whole = Real(Bits(1) << C::mantissa_bits);
      const Real t = bits_as<Real>(a) * to_units[0] * to_units[1];
      Real w = (t + whole) - whole;
      if constexpr (mode != HALFULP_NEAREST_EVEN) {
        w = w > t ? w - 1 : w;
        if constexpr (mode == HALFULP_NEAREST_AWAY) w = t - w >= Real(0.5) ? w + 1 : w;
        if constexpr (mode == HALFULP_UP || mode == HALFULP_DOWN) w = outward && (t > w || (w == 0 && a != 0)) ? w + 1 : w;
      }
      const Bits s = bits_as<Bits>(w * from_units[0] * from_units[1]);
      v = a < min_normal ? s : v;
    }
    v = v < flush ? 0 : v;
    Bits over = beyond;
    if constexpr (mode == HALFULP_TOWARD_ZERO) over = max;
    if constexpr (mode == HALFULP_UP || mode == HALFULP_DOWN) over = outward ? beyond : max;
    v = v > max ? over : v;
    v = a == kInfinity ? infinity : a > kInfinity ? a : v;
    return bits_as<Real>(v | sign);
  }
};

}  // namespace HALFULP_ISA
}  // namespace halfulp
