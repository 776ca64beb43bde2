// Compiled for AMX: bf16 by tiles of 16 rows; fp16 and fp32 come from the AVX-512 table.
#define HALFULP_ISA amx_bf16
#include "vec_avx512.hpp"
// after the lanes
#include "tile_engine.hpp"
#include "backward.hpp"

namespace halfulp {
static const Kernels kernels_of[1][2] = {
    {amx_bf16::kernels<amx_bf16::TileEngine, false>(), amx_bf16::kernels<amx_bf16::TileEngine, true>()}};
Table amx_bf16_table = kernels_of;
}  // namespace halfulp
