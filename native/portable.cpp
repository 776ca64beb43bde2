// Compiled for any machine: plain loops over sixteen lanes.
#define HALFULP_ISA portable
#include "vec_portable.hpp"
// after the lanes
#include "float_engine.hpp"
#include "backward.hpp"
#include "emulate.hpp"

namespace halfulp {
using namespace portable;
static const Kernels kernels_of[3][2] = {{kernels<FloatEngine<Bf16>, false>(), kernels<FloatEngine<Bf16>, true>()},
                                         {kernels<FloatEngine<Fp16>, false>(), kernels<FloatEngine<Fp16>, true>()},
                                         {kernels<FloatEngine<Fp32>, false>(), kernels<FloatEngine<Fp32>, true>()}};
Table portable_table = kernels_of;
const Emulations portable_emulations = emulations;
}  // namespace halfulp
