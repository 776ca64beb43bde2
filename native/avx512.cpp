// Compiled for AVX-512 (F, BW, DQ, VL): operands of every dtype as floats.
#define HALFULP_ISA avx512
#include "vec_avx512.hpp"
// after the lanes
#include "float_engine.hpp"
#include "backward.hpp"
#include "emulate.hpp"

namespace halfulp {
using namespace avx512;
static const Kernels kernels_of[3][2] = {{kernels<FloatEngine<Bf16>, false>(), kernels<FloatEngine<Bf16>, true>()},
                                         {kernels<FloatEngine<Fp16>, false>(), kernels<FloatEngine<Fp16>, true>()},
                                         {kernels<FloatEngine<Fp32>, false>(), kernels<FloatEngine<Fp32>, true>()}};
Table avx512_table = kernels_of;
const Emulations avx512_emulations = emulations;
}  // namespace halfulp
