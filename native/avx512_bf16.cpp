// Compiled for AVX-512 with vdpbf16ps: bf16 by pairs; fp16 and fp32 come from the AVX-512 table.
#define HALFULP_ISA avx512_bf16
#include "vec_avx512.hpp"
// after the lanes
#include "backward.hpp"

namespace halfulp {
static const Kernels kernels_of[1][2] = {
    {avx512_bf16::kernels<avx512_bf16::PairEngine, false>(), avx512_bf16::kernels<avx512_bf16::PairEngine, true>()}};
Table avx512_bf16_table = kernels_of;
}  // namespace halfulp
