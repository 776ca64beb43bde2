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

enum { HALFULP_ABI = 1 };
enum halfulp_isa { HALFULP_PORTABLE = 0, HALFULP_AVX2 = 1, HALFULP_AVX512 = 2, HALFULP_AVX512_BF16 = 3 };
enum halfulp_dtype { HALFULP_BF16 = 0, HALFULP_FP16 = 1, HALFULP_FP32 = 2 };
// Masks: bool (0: hidden) or float (added to the scaled scores), rows of n_key neighboring elements, strides may be 0.
enum halfulp_mask { HALFULP_NO_MASK = 0, HALFULP_BOOL_MASK = 1, HALFULP_FLOAT_MASK = 2 };
enum halfulp_recipe { HALFULP_RECIPE_HALFULP = 0, HALFULP_RECIPE_STOCK = 1, HALFULP_RECIPE_EXACT_DELTA = 2 };

// One tensor [batch, heads, rows, width] of the call's dtype: strides in elements, the last one is 1.
typedef struct {
  void* data;
  int64_t batch, head, row;
} halfulp_tensor;

// One call. Row statistics are contiguous float [batch, heads, n_query]; outputs are contiguous.
typedef struct {
  int32_t isa, dtype, recipe, threads;
  int64_t batch, heads, key_heads, n_query, n_key, d, dv;
  int64_t left, right, offset;  // query i sees keys i + offset - left .. i + offset + right; negative: no bound
  float scale;                  // of the scores, in natural units
  int32_t chunks;               // key chunks of the backward pass; 0: chosen by the shape
  int32_t mask_kind, reserved;
  halfulp_tensor query, key, value, grad_out, mask;
  void* out;                    // [B, H, N, Dv]; read again by the backward pass
  int8_t* residual;             // [B, H, N, Dv] or null
  float *lse, *row_max, *row_sum, *own_lse;  // own_lse, row_max: base 2
  const float* grad_lse;        // or null
  void *grad_query, *grad_key, *grad_value;  // [B, H, N, D], [B, Hk, Nk, D], [B, Hk, Nk, Dv]
} halfulp_call;

HALFULP_API int32_t halfulp_abi(void);
HALFULP_API int32_t halfulp_best_isa(void);
// 0, or 1 where memory ran out.
HALFULP_API int32_t halfulp_forward(const halfulp_call* call);
HALFULP_API int32_t halfulp_backward(const halfulp_call* call);
// The rounding of O that closes the forward pass: `n` exact values to out (dtype) and 8-bit residual (may be null).
HALFULP_API int32_t halfulp_round_out(int32_t isa, int32_t dtype, const float* exact, void* out, int8_t* residual, int64_t n);

#ifdef __cplusplus
}
#endif
