// The C interface of attention: which instruction set runs, and how the work is cut up. Units are cut by the shape alone
// wherever a sum depends on it: bits do not depend on the number of threads.
#if defined(HALFULP_X86)
#include <cpuid.h>
#endif

#include "buffer.hpp"
#include "call.hpp"
#include "threads.hpp"

namespace halfulp {
namespace {

#if defined(HALFULP_X86)
// avx512_bf16 by the processor's own word (leaf 7.1, EAX bit 5), for compilers that do not know its name.
bool multiplies_pairs() {
#if defined(HALFULP_PAIRS)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
#else
  return false;
#endif
}
#endif

int ask_for_isa() {
#if defined(HALFULP_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return multiplies_pairs() ? HALFULP_AVX512_BF16 : HALFULP_AVX512;
  // every processor with AVX2 has F16C, which older compilers cannot ask for
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return HALFULP_AVX2;
#endif
  return HALFULP_PORTABLE;
}

}  // namespace

// The instruction that asks takes microseconds where a hypervisor answers it.
int best_isa() {
  static const int best = ask_for_isa();
  return best;
}

namespace {

thread_local Buffer partials;

const Kernels& kernels_for(int isa, int dtype, int recipe) {
  const int best = best_isa();
  if (isa < 0 || isa > best) isa = best;
  const bool integer = recipe == HALFULP_RECIPE_HALFULP;
#if defined(HALFULP_X86)
#if defined(HALFULP_PAIRS)
  if (isa == HALFULP_AVX512_BF16 && dtype == HALFULP_BF16) return avx512_bf16_table[0][integer];
#endif
  if (isa >= HALFULP_AVX512) return avx512_table[dtype][integer];
  if (isa == HALFULP_AVX2) return avx2_table[dtype][integer];
#endif
  return portable_table[dtype][integer];
}

long smaller(long a, long b) { return a < b ? a : b; }

Plan plan_of(const halfulp_call& c) {
  Plan plan{};
  plan.call = &c;
  plan.groups = c.key_heads ? c.heads / c.key_heads : 1;
  plan.row_blocks = (c.n_query + kRows - 1) / kRows;
  const long heads = c.batch * c.key_heads;
  // Rows are independent, so the forward pass may be cut for the threads at hand.
  const long blocks = plan.groups * plan.row_blocks, wanted = heads ? (4 * c.threads + heads - 1) / heads : 1;
  plan.spans = c.threads == 1 ? 1 : smaller(wanted, (blocks + 3) / 4);
  if (plan.spans < 1) plan.spans = 1;
  // dQ is a sum over key chunks: cut by the shape alone.
  const long panels = (c.n_key + kPanel - 1) / kPanel;
  long chunks = c.chunks > 0 ? c.chunks : heads >= 8 || heads == 0 ? 1 : smaller(8 / heads, (panels + 7) / 8);
  if (c.recipe == HALFULP_RECIPE_EXACT_DELTA) chunks = 1;  // δ wants a row's every key
  if (chunks < 1) chunks = 1;
  const long panels_each = chunks ? (panels + chunks - 1) / chunks : 0;
  plan.chunk_keys = (panels_each > 0 ? panels_each : 1) * kPanel;
  plan.chunks = panels ? (panels + panels_each - 1) / panels_each : 1;
  return plan;
}

}  // namespace
}  // namespace halfulp

using namespace halfulp;

extern "C" {

int32_t halfulp_abi(void) { return HALFULP_ABI; }
int32_t halfulp_best_isa(void) { return best_isa(); }

int32_t halfulp_forward(const halfulp_call* call) {
  if (call->n_query == 0) return 0;
  const Kernels& kernels = kernels_for(call->isa, call->dtype, call->recipe);
  const Plan plan = plan_of(*call);
  const long units = call->batch * call->key_heads * plan.spans;
  return spread(plan, kernels.forward, kernels.forward_bytes(plan), units, call->threads);
}

static void add_chunks(const Plan& plan, long unit, char*) {
  kernels_for(plan.call->isa, plan.call->dtype, plan.call->recipe).add_chunks(plan, unit);
}

// The gradient of each sink: its rows in their order.
static void add_sinks(const Plan& plan) {
  const halfulp_call& c = *plan.call;
  for (long h = 0; h < c.heads; ++h) {
    double sum = 0;
    for (long b = 0; b < c.batch; ++b)
      for (long i = 0; i < c.n_query; ++i) sum += double(plan.sink_rows[(b * c.heads + h) * c.n_query + i]);
    c.grad_sinks[h] = float(sum);
  }
}

int32_t halfulp_backward(const halfulp_call* call) {
  const Kernels& kernels = kernels_for(call->isa, call->dtype, call->recipe);
  Plan plan = plan_of(*call);
  const long rows = call->batch * call->heads * call->n_query, partial = plan.chunks > 1 ? plan.chunks * rows * call->d : 0;
  const long of_sinks = call->sinks ? rows : 0;
  if (partial + of_sinks > 0) {
    plan.partial = reinterpret_cast<float*>(partials.at_least(size_t(partial + of_sinks) * sizeof(float)));
    if (!plan.partial) return 1;
    if (of_sinks) plan.sink_rows = plan.partial + partial;
  }
  const long units = call->batch * call->key_heads * plan.chunks, heads = plan.chunks > 1 ? call->batch * call->heads : 0;
  if (spread(plan, kernels.backward, kernels.backward_bytes(plan), units, call->threads)) return 1;
  if (call->sinks) add_sinks(plan);
  const int failed = spread(plan, add_chunks, 64, heads, call->threads);
  partials.trim();
  return failed;
}

int32_t halfulp_round_out(int32_t isa, int32_t dtype, const float* exact, void* out, int8_t* residual, int64_t n) {
  kernels_for(isa, dtype, HALFULP_RECIPE_HALFULP).round_out(exact, out, residual, n);
  return 0;
}

}  // extern "C"
