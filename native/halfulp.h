// The C interface of halfulp's native attention: plain pointers and strides, so that no torch header is needed and the
// library outlives every torch version. The caller (kernels/cpu.py) has checked shapes and dtypes.
#pragma once
#include <stdint.h>

#if defined(__GNUC__)
#define HALFULP_API __attribute__((visibility("default")))
#else
#define HALFULP_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { HALFULP_ABI = 5 };
enum halfulp_isa {
  HALFULP_PORTABLE = 0,
  HALFULP_AVX2 = 1,
  HALFULP_AVX512 = 2,
  HALFULP_AVX512_BF16 = 3,
  HALFULP_AMX_BF16 = 4
};
enum halfulp_dtype { HALFULP_BF16 = 0, HALFULP_FP16 = 1, HALFULP_FP32 = 2 };
// Masks: bool (0: hidden) or float (added to the scaled scores), rows of n_key neighboring elements, strides may be 0.
enum halfulp_mask { HALFULP_NO_MASK = 0, HALFULP_BOOL_MASK = 1, HALFULP_FLOAT_MASK = 2 };
enum halfulp_recipe {
  HALFULP_RECIPE_HALFULP = 0,
  HALFULP_RECIPE_STOCK = 1,
  HALFULP_RECIPE_EXACT_DELTA = 2,
  HALFULP_RECIPE_PUBLISHED = 3
};

// One tensor [batch, heads, rows, width]: strides in elements, the last one is 1.
typedef struct {
  void* data;
  int64_t batch, head, row;
} halfulp_tensor;

// One call. Row statistics are float [batch, heads, n_query] with the strides stat_batch, stat_head and 1.
//
// Variable lengths: `sequences` of them one after the other in every tensor and statistic, rows query_ends[i] up to
// query_ends[i + 1] of the queries and key_ends likewise; batch is 1, n_query and n_key are all rows, there is no mask.
// Each is computed as a call of its own would be, `offset` counted from the bottom right.
typedef struct {
  int32_t isa, dtype, recipe, threads;
  int64_t batch, heads, key_heads, n_query, n_key, d, dv;
  int64_t left, right, offset;  // query i sees keys i + offset - left .. i + offset + right; negative: no bound
  float scale;                  // of the scores, in natural units
  int32_t chunks;               // key chunks of the backward pass; 0: chosen by the shape
  int32_t mask_kind;
  float softcap;                // c > 0: scores become c tanh(S / c); 0: none
  uint32_t drop_below;          // dropout: weights are dropped where formats/counter.py's word is below; 0: none
  float kept_scale;             // what makes up for the dropped weights
  uint64_t seed;                // of dropout
  int64_t sequences;            // 0: a batch
  const int64_t *query_ends, *key_ends;  // [sequences + 1], from 0
  const uint64_t* seeds;        // [sequences], in place of seed
  int64_t stat_batch, stat_head;
  int64_t mask_shape[4];        // of grad_mask: each 1 or the scores'
  halfulp_tensor query, key, value, grad_out, mask;
  halfulp_tensor out;           // read again by the backward pass
  halfulp_tensor grad_query, grad_key, grad_value;
  const float* sinks;           // [H], natural units, or null
  int8_t* residual;             // with the strides of out, or null
  // own_lse, row_max: base 2; with an integer shift not yet rounded up. The forward pass leaves out what is null.
  float *lse, *row_max, *row_sum, *own_lse;
  const float* grad_lse;        // or null
  float* grad_sinks;            // [H], where there are sinks
  double* grad_mask;            // [mask_shape], zero at the call, or null: no gradient of the mask
} halfulp_call;

HALFULP_API int32_t halfulp_abi(void);
HALFULP_API int32_t halfulp_best_isa(void);
// The bytes of a structure of this header by its name without "halfulp_"; -1 for any other name.
HALFULP_API int64_t halfulp_size(const char* name);
// 0, or 1 where memory ran out.
HALFULP_API int32_t halfulp_forward(const halfulp_call* call);
HALFULP_API int32_t halfulp_backward(const halfulp_call* call);
// The rounding of O that closes the forward pass: `n` exact values to out (dtype) and 8-bit residual (may be null).
HALFULP_API int32_t halfulp_round_out(int32_t isa, int32_t dtype, const float* exact, void* out, int8_t* residual, int64_t n);


// --- The emulator (recipes, formats): everything in float32 but for the formats that a step is rounded to.

enum halfulp_rounding {
  HALFULP_NEAREST_EVEN = 0,
  HALFULP_NEAREST_AWAY = 1,
  HALFULP_TOWARD_ZERO = 2,
  HALFULP_UP = 3,
  HALFULP_DOWN = 4
};
enum halfulp_overflow { HALFULP_TO_INFINITY = 0, HALFULP_TO_MAX = 1, HALFULP_TO_NAN = 2 };

// A scalar format that lies within the container: exponents and fraction no wider than its own.
typedef struct {
  int32_t active;  // 0: nothing is rounded
  int32_t rounding, overflow, infinities, subnormals;
  int32_t mantissa_bits, min_exponent, bias;
  double max;
} halfulp_format;

// A matrix [rows, columns] in a batch, strides in elements.
typedef struct {
  const float* data;
  int64_t batch, row, column;
} halfulp_matrix;

// What is rounded, in the recipe's words; halfulp_step_name tells them.
#define HALFULP_STEPS(X)                                                                                             \
  X(product) X(scores) X(tie_threshold) X(row_max) X(shifted_scores) X(weights) X(weights_operand) X(block_sum)      \
  X(max_change) X(rescale) X(rescaled) X(row_sum) X(block_out) X(accumulator) X(renormalized) X(delta_products)      \
  X(probabilities) X(probabilities_operand) X(scaled_probabilities) X(grad_probabilities) X(grad_centered)            \
  X(grad_scores) X(scaled_grad_scores) X(grad_block) X(grad_accumulator)
enum halfulp_step {
#define HALFULP_STEP(name) HALFULP_STEP_##name,
  HALFULP_STEPS(HALFULP_STEP)
#undef HALFULP_STEP
  HALFULP_STEP_COUNT
};
enum halfulp_algorithm { HALFULP_FLASH2 = 0, HALFULP_FLASH1 = 1, HALFULP_STANDARD = 2 };
enum halfulp_shift { HALFULP_MAXIMUM = 0, HALFULP_INTEGER = 1, HALFULP_OFFSET = 2, HALFULP_STABILIZED = 3 };
enum halfulp_scale_at { HALFULP_AT_PRODUCTS = 0, HALFULP_AT_SCORES = 1, HALFULP_AT_PROBABILITIES = 2 };

// One emulated call: operands as the recipe reads them, contiguous [batch, heads, n, d], as many key as query heads.
typedef struct {
  int32_t isa, threads, algorithm, reserved;
  int64_t batch, heads, n_query, n_key, d, dv, block_query, block_key;
  int32_t bounded_below, bounded_above;  // query i sees keys i + least .. i + greatest
  int64_t least, greatest;
  halfulp_tensor mask;
  int32_t mask_kind;
  float mask_factor;   // on an additive mask
  float score_factor;  // on the products of query and key
  float gradient_scale;
  int32_t base2, split, shift, unconditional;
  float beta, gamma, tie_tolerance, offset;
  int32_t row_sum_rounded, row_sum_exact;  // l from rounded weights; lse from the others all the same
  float weights_scale, row_sum_floor;
  int32_t weights_rounded, scale_at;  // in the backward pass
  const halfulp_format* formats;      // [HALFULP_STEP_COUNT]
  const float *query, *key, *value;
  float *out, *row_max, *row_sum, *exact_row_sum, *largest;  // forward, before what closes it
  // backward; divisor, value_divisor: null where the weights are probabilities already
  const float *grad_out, *shifts, *divisor, *value_divisor, *delta;
  float *grad_query, *grad_key, *grad_value;  // before what closes it; zero at the call
  float* summed_delta;                        // rowsum(dP P), zero at the call
} halfulp_emulation;

HALFULP_API const char* halfulp_step_name(int32_t step);  // null past the last
// `n` numbers (float, or double if `wide`) rounded; y may be x.
HALFULP_API void halfulp_round(int32_t isa, int32_t threads, int32_t wide, const halfulp_format* format, const void* x,
                               void* y, int64_t n);
// The sums of x [terms, sums] as they run from 0, each rounded after every term; y is not x.
HALFULP_API void halfulp_running(int32_t isa, int32_t threads, int32_t wide, const halfulp_format* format,
                                 const void* x, void* y, int64_t terms, int64_t sums);
// e^x, or 2^x if `base2`, in float64 and rounded once; y may be x.
HALFULP_API void halfulp_exp(int32_t isa, int32_t threads, int32_t base2, const float* x, float* y, int64_t n);
// The residual of O, exact - out, in `bits` bits of half an ulp of `out` each way: in units of 2^-bits ulp; O below
// 2^lowest share one unit.
HALFULP_API void halfulp_residual(int32_t isa, int32_t threads, const float* exact, const float* out, float* residual,
                                  int64_t n, int32_t mantissa_bits, int32_t bits, int32_t lowest);
// The sums of `rows` contiguous rows of n floats: sixteen lanes in increasing order, then the tree.
HALFULP_API void halfulp_row_sum(int32_t isa, int32_t threads, const float* x, float* sums, int64_t rows, int64_t n);
// out [batch, m, n] (contiguous) = left [m, k] right [k, n], k in increasing order by fused multiply-add. 1: no memory.
HALFULP_API int32_t halfulp_product(int32_t isa, int32_t threads, int64_t batch, int64_t m, int64_t n, int64_t k,
                                    const halfulp_matrix* left, const halfulp_matrix* right, float* out);
HALFULP_API int32_t halfulp_emulate_forward(const halfulp_emulation* call);
HALFULP_API int32_t halfulp_emulate_backward(const halfulp_emulation* call);
HALFULP_API int32_t halfulp_emulate_delta(const halfulp_emulation* call);

#ifdef __cplusplus
}
#endif
