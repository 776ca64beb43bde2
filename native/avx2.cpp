// Compiled for AVX2, FMA and F16C: operands of every dtype as floats.
#define HALFULP_ISA avx2
#include "vec_avx2.hpp"
// after the lanes
#include "float_engine.hpp"
#include "backward.hpp"
#include "emulate.hpp"

namespace halfulp {
using namespace avx2;
static const Kernels kernels_of[3][2] = {{kernels<FloatEngine<Bf16>, false>(), kernels<FloatEngine<Bf16>, true>()},
                                         {kernels<FloatEngine<Fp16>, false>(), kernels<FloatEngine<Fp16>, true>()},
                                         {kernels<FloatEngine<Fp32>, false>(), kernels<FloatEngine<Fp32>, true>()}};
Table avx2_table = kernels_of;
const Emulations avx2_emulations = emulations;
}  // namespace halfulp
