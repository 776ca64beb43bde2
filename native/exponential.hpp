// The exponential as the emulator has it: that of float64, rounded once to float32. A polynomial gives it with an error
// far below half an ulp of float32; where rounding could go either way within that error, the C library decides.
#pragma once
#include "round.hpp"

namespace halfulp {
namespace HALFULP_ISA {

// 2^f for |f| ≤ 1/2, and e^f for |f| ≤ ln 2 / 2: relative error below 2⁻⁴⁴.
// Fused where that is one instruction: the last bits do not matter here.
static inline double horner(double p, double f, double c) {
#ifdef __FMA__
  return __builtin_fma(p, f, c);
#else
  return p * f + c;
#endif
}
static inline double exp2_of_fraction(double f) {
  double p = 0x1.b63880a30e9ffp-24;
  p = horner(p, f, 0x1.63d136366db24p-20);
  p = horner(p, f, 0x1.ffcb9515a8016p-17);
  p = horner(p, f, 0x1.4308ac85aa947p-13);
  p = horner(p, f, 0x1.5d87fe86fe88ep-10);
  p = horner(p, f, 0x1.3b2ab7181b755p-7);
  p = horner(p, f, 0x1.c6b08d7047e52p-5);
  p = horner(p, f, 0x1.ebfbdff823cedp-3);
  p = horner(p, f, 0x1.62e42fefa39efp-1);
  p = horner(p, f, 1.);
  return p;
}
static inline double exp_of_fraction(double f) {
  double p = 0x1.72c72ca338df0p-19;
  p = horner(p, f, 0x1.a15a600528a0fp-16);
  p = horner(p, f, 0x1.a019ada3609f3p-13);
  p = horner(p, f, 0x1.6c164de86dafdp-10);
  p = horner(p, f, 0x1.1111111c478ebp-7);
  p = horner(p, f, 0x1.555555742d965p-5);
  p = horner(p, f, 0x1.5555555553b78p-3);
  p = horner(p, f, 0x1.fffffffff71b2p-2);
  p = horner(p, f, 0x1.0000000000000p+0);
  p = horner(p, f, 1.);
  return p;
}

template <bool base2>
static double exp_by_library(float x) {
  return base2 ? std::exp2(double(x)) : std::exp(double(x));
}

// exp2(x) or exp(x) of n floats; y may be x.
template <bool base2>
static void exponential(const float* x, float* y, long n) {
  constexpr double kShifter = 0x1.8p52, kSure = 0x1p-43;
  constexpr double kLow = base2 ? -400. : -280., kHigh = base2 ? 400. : 280.;
  constexpr long kBlock = 64;
  float held[kBlock];
  for (long from = 0; from < n; from += kBlock) {
    const long count = n - from < kBlock ? n - from : kBlock;
    std::memcpy(held, x + from, size_t(count) * sizeof(float));
    float* out = y + from;
    uint32_t unsure = 0;
    for (long i = 0; i < count; ++i) {
      const float given = held[i];
      double v = given;
      v = v > kLow ? v : kLow;
      v = v < kHigh ? v : kHigh;
      const double shifted = (base2 ? v : v * 0x1.71547652b82fep0) + kShifter, whole = shifted - kShifter;
      const double f = base2 ? v - whole : (v - whole * 0x1.62e42feep-1) - whole * 0x1.a39ef35793c76p-33;
      const double p = base2 ? exp2_of_fraction(f) : exp_of_fraction(f);
      // the whole number lies in the last bits of `shifted`
      const double result = bits_as<double>(bits_as<uint64_t>(p) + (bits_as<uint64_t>(shifted) << 52));
      const float low = float(result * (1 - kSure)), high = float(result * (1 + kSure));
      unsure |= bits_as<uint32_t>(low) ^ bits_as<uint32_t>(high);
      out[i] = given != given ? given : low;
    }
    if (unsure)
      for (long i = 0; i < count; ++i) out[i] = held[i] != held[i] ? held[i] : float(exp_by_library<base2>(held[i]));
  }
}

}  // namespace HALFULP_ISA
}  // namespace halfulp
