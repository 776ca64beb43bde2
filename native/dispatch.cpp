// The C interface: which instruction set runs, how the work is cut up, and on which threads.
//
// Threads are those of the OpenMP runtime that torch has loaded, found by name in the process, so that nobody's threads
// spin against another's; where there is none, threads are started for the call. Work units are cut by the shape alone
// wherever a sum depends on it, and taken from a counter: bits do not depend on the number of threads.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif
#if defined(HALFULP_X86)
#include <cpuid.h>
#endif

#include "call.hpp"

namespace halfulp {
namespace {

struct Buffer {
  char* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
  char* at_least(size_t bytes) {
    if (bytes > size) {
      std::free(data);
      size = (bytes + 4095) / 4096 * 4096;
      data = static_cast<char*>(std::aligned_alloc(4096, size));
      if (!data) size = 0;
    }
    return data;
  }
  // Kept for the next call unless it is large.
  void trim() {
    if (size <= size_t(32) << 20) return;
    std::free(data);
    data = nullptr, size = 0;
  }
};
thread_local Buffer scratch, partials;

struct Work {
  const Plan* plan;
  void (*run)(const Plan&, long, char*);
  size_t bytes;
  long units;
  std::atomic<long> next{0};
  std::atomic<int> failed{0};
};

void work_on(void* argument) {
  Work& work = *static_cast<Work*>(argument);
  char* memory = scratch.at_least(work.bytes);
  if (!memory) {
    work.failed = 1;
    return;
  }
  for (long unit; (unit = work.next.fetch_add(1)) < work.units;) work.run(*work.plan, unit, memory);
  scratch.trim();
}

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

Parallel openmp_of_the_process() {
#if defined(__unix__) || defined(__APPLE__)
  static const Parallel found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
#else
  return nullptr;
#endif
}

int spread(Work& work, long threads) {
  if (threads > work.units) threads = work.units;
  if (threads <= 1) {
    work_on(&work);
  } else if (Parallel parallel = openmp_of_the_process()) {
    parallel(work_on, &work, unsigned(threads), 0);
  } else {
    std::vector<std::thread> others;
    for (long t = 1; t < threads; ++t) others.emplace_back(work_on, &work);
    work_on(&work);
    for (std::thread& other : others) other.join();
  }
  return work.failed;
}

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

int best_isa() {
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
  Work work{&plan, kernels.forward, kernels.forward_bytes(plan), call->batch * call->key_heads * plan.spans};
  return spread(work, call->threads);
}

static void add_chunks(const Plan& plan, long unit, char*) {
  kernels_for(plan.call->isa, plan.call->dtype, plan.call->recipe).add_chunks(plan, unit);
}

int32_t halfulp_backward(const halfulp_call* call) {
  const Kernels& kernels = kernels_for(call->isa, call->dtype, call->recipe);
  Plan plan = plan_of(*call);
  if (plan.chunks > 1) {
    const size_t size = size_t(plan.chunks * call->batch * call->heads * call->n_query * call->d) * sizeof(float);
    plan.partial = reinterpret_cast<float*>(partials.at_least(size));
    if (!plan.partial) return 1;
  }
  Work work{&plan, kernels.backward, kernels.backward_bytes(plan), call->batch * call->key_heads * plan.chunks};
  if (spread(work, call->threads)) return 1;
  if (plan.chunks == 1) return 0;
  Work sum{&plan, add_chunks, 64, call->batch * call->heads};
  const int failed = spread(sum, call->threads);
  partials.trim();
  return failed;
}

int32_t halfulp_round_out(int32_t isa, int32_t dtype, const float* exact, void* out, int8_t* residual, int64_t n) {
  kernels_for(isa, dtype, HALFULP_RECIPE_HALFULP).round_out(exact, out, residual, n);
  return 0;
}

}  // extern "C"
