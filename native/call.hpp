// What the dispatcher and the kernels of one instruction set agree on. Only plain data and constants: a template or an
// inline function here would be compiled once per instruction set, and the linker could keep the wrong copy.
#pragma once
#include <cstddef>
#include <cstdint>

#include "halfulp.h"

namespace halfulp {

using Unit = uint32_t;             // 32 bits of an operand: two bf16 of neighboring k, or one float
constexpr long kRows = 96;         // query rows of a block
static_assert(kRows % 96 == 0, "groups of 6 or 32 rows, and sixteen pairs to a transpose");
constexpr long kPanel = 64;        // keys of a panel
constexpr long kHalf = 32;         // what the last panel is cut to, and what rows see is counted in
constexpr long kForwardKeys = 256; // keys of a forward block
constexpr long kBackwardKeys = 128;
constexpr long kTieKeys = 128;     // keys of a forward block of the published recipe, whose ties are counted in a block

struct Plan {
  const halfulp_call* call;
  long groups;      // query heads per key head
  long row_blocks;  // of one head
  long spans;       // forward: parts of one key head's row blocks, one work unit each
  long chunks;      // backward: parts of one key head's keys, one work unit each
  long chunk_keys;
  float* partial;   // backward with several chunks: dQ of each, [chunks, B, H, N, D]
  float* sink_rows; // backward with sinks: each row's share of their gradient, [B, H, N]
  float* terms;     // backward with a mask's gradient: dS of the heads from first_head on, [.., N, Nk]
  long first_head;
};

// The kernels of one instruction set for one dtype and one exponential.
struct Kernels {
  size_t (*forward_bytes)(const Plan&);
  void (*forward)(const Plan&, long unit, char* scratch);
  size_t (*backward_bytes)(const Plan&);
  void (*backward)(const Plan&, long unit, char* scratch);
  void (*add_chunks)(const Plan&, long unit);  // one head's dQ from its chunks
  void (*round_out)(const float*, void*, int8_t*, long);
};

// [dtype][integer shift]
using Table = const Kernels (*)[2];
extern Table portable_table, avx2_table, avx512_table, avx512_bf16_table, amx_bf16_table;

// --- the emulator

struct Emulation {
  const halfulp_emulation* call;
  long parts;  // of one head
};
struct Numbers {
  const void* x;
  void* y;
  long count, parts;
  int wide;      // rounding, running sums: doubles; exponential: base 2
  long columns;  // of a row, of which there are `count`
  const halfulp_format* format;
  const float* out;  // with what follows: of a residual
  int32_t mantissa_bits, bits, lowest;
};
struct Product {
  const halfulp_matrix *left, *right;
  float* out;
  long m, n, k;
};
constexpr long kProductRows = 240;

// The emulator on one instruction set.
struct Emulations {
  size_t (*bytes)(const Emulation&, bool backward);
  void (*forward)(const Emulation&, long unit, char* scratch);
  void (*backward)(const Emulation&, long unit, char* scratch);
  void (*delta)(const Emulation&, long unit, char* scratch);
  void (*round)(const Numbers&, long unit, char*);
  void (*running)(const Numbers&, long unit, char*);
  void (*exp)(const Numbers&, long unit, char*);
  void (*row_sum)(const Numbers&, long unit, char*);
  void (*residual)(const Numbers&, long unit, char*);
  size_t (*product_bytes)();
  void (*product)(const Product&, long unit, char* scratch);
};
extern const Emulations portable_emulations, avx2_emulations, avx512_emulations;

}  // namespace halfulp
