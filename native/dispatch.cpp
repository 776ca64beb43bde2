// The C interface of attention: which instruction set runs, and how the work is cut up. Units are cut by the shape alone
// wherever a sum depends on it: bits do not depend on the number of threads.
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#if defined(HALFULP_X86)
#include <cpuid.h>
#endif
#if defined(HALFULP_TILES)
#include <sys/syscall.h>
#include <unistd.h>
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

// Tiles of bf16 (leaf 7, EDX bits 22 and 24), where the system lets this process have them: their state is large, and
// Linux keeps it for those alone who ask (arch_prctl, ARCH_REQ_XCOMP_PERM of XTILEDATA).
bool multiplies_tiles() {
#if defined(HALFULP_TILES)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) &&
         syscall(SYS_arch_prctl, 0x1023, 18) == 0;
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
    return !multiplies_pairs() ? HALFULP_AVX512 : multiplies_tiles() ? HALFULP_AMX_BF16 : HALFULP_AVX512_BF16;
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
#if defined(HALFULP_TILES)
  if (isa == HALFULP_AMX_BF16 && dtype == HALFULP_BF16) return amx_bf16_table[0][integer];
#endif
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

// One call, or one for each sequence; their units are numbered through.
struct Plans {
  std::unique_ptr<halfulp_call[]> calls;
  std::unique_ptr<Plan[]> plans;
  std::unique_ptr<long[]> first;  // unit of each, and the end
  long count = 0;
  const Kernels* kernels = nullptr;
  long skipped = 0;  // units before the first of a pass

  bool fill(const halfulp_call& c) {
    count = c.sequences > 0 ? c.sequences : 1;
    calls.reset(new (std::nothrow) halfulp_call[size_t(count)]);
    plans.reset(new (std::nothrow) Plan[size_t(count)]);
    first.reset(new (std::nothrow) long[size_t(count) + 1]);
    if (!calls || !plans || !first) return false;
    for (long i = 0; i < count; ++i) {
      calls[i] = c;
      if (c.sequences > 0) narrow_to(calls[i], i);
      plans[i] = plan_of(calls[i]);
    }
    kernels = &kernels_for(c.isa, c.dtype, c.recipe);
    return true;
  }

  static void narrow_to(halfulp_call& c, long i) {
    const long query = c.query_ends[i], key = c.key_ends[i], size = c.dtype == HALFULP_FP32 ? 4 : 2;
    c.n_query = c.query_ends[i + 1] - query, c.n_key = c.key_ends[i + 1] - key;
    c.offset += c.n_key - c.n_query;
    if (c.seeds) c.seed = c.seeds[i];
    const auto move = [size](halfulp_tensor& x, long rows) {
      if (x.data) x.data = static_cast<char*>(x.data) + rows * x.row * size;
    };
    for (halfulp_tensor* x : {&c.query, &c.grad_out, &c.out, &c.grad_query}) move(*x, query);
    for (halfulp_tensor* x : {&c.key, &c.value, &c.grad_key, &c.grad_value}) move(*x, key);
    if (c.residual) c.residual += query * c.out.row;
    for (float** x : {&c.lse, &c.row_max, &c.row_sum, &c.own_lse})
      if (*x) *x += query;
    if (c.grad_lse) c.grad_lse += query;
  }

  // The units of a pass, `of` of each plan; the scratch memory that the largest needs.
  template <class Of>
  size_t number(Of of, size_t (*bytes)(const Plan&)) {
    size_t most = 64;
    first[0] = 0;
    for (long i = 0; i < count; ++i) {
      first[i + 1] = first[i] + of(plans[i]);
      const size_t needed = first[i + 1] > first[i] && bytes ? bytes(plans[i]) : 0;
      most = needed > most ? needed : most;
    }
    return most;
  }
  long units() const { return first[count]; }

  const Plan& of(long& unit) const {
    unit += skipped;
    long low = 0, high = count;
    while (high - low > 1) {
      const long middle = (low + high) / 2;
      (first[middle] <= unit ? low : high) = middle;
    }
    unit -= first[low];
    return plans[low];
  }
};

void forward_unit(const Plans& all, long unit, char* scratch) {
  const Plan& plan = all.of(unit);
  all.kernels->forward(plan, unit, scratch);
}
void backward_unit(const Plans& all, long unit, char* scratch) {
  const Plan& plan = all.of(unit);
  all.kernels->backward(plan, unit, scratch);
}
void chunks_unit(const Plans& all, long unit, char*) {
  const Plan& plan = all.of(unit);
  all.kernels->add_chunks(plan, unit);
}

// The gradient of each sink: its rows in their order, and sequences from the last to the first, as autograd adds calls.
void add_sinks(const Plans& all) {
  const halfulp_call& whole = all.calls[0];
  for (long h = 0; h < whole.heads; ++h) whole.grad_sinks[h] = 0.f;
  for (long s = all.count - 1; s >= 0; --s) {
    const halfulp_call& c = all.calls[s];
    for (long h = 0; h < c.heads; ++h) {
      double sum = 0;
      for (long b = 0; b < c.batch; ++b)
        for (long i = 0; i < c.n_query; ++i) sum += double(all.plans[s].sink_rows[(b * c.heads + h) * c.n_query + i]);
      c.grad_sinks[h] += float(sum);
    }
  }
}

// One row of the mask's gradient from those heads whose dS lies there, in their order; every row where they share one.
struct MaskSum {
  const Plan& plan;
  long heads;
};
void mask_unit(const MaskSum& sum, long unit, char*) {
  const halfulp_call& c = *sum.plan.call;
  const int64_t* shape = c.mask_shape;
  const bool shared = shape[2] == 1;
  for (long at = 0; at < sum.heads; ++at) {
    const long head = sum.plan.first_head + at, b = head / c.heads, h = head % c.heads;
    const long place = (shape[0] == 1 ? 0 : b) * shape[1] + (shape[1] == 1 ? 0 : h);
    for (long i = shared ? 0 : unit; i < (shared ? c.n_query : unit + 1); ++i) {
      double* to = c.grad_mask + (place * shape[2] + (shared ? 0 : i)) * shape[3];
      const float* from = sum.plan.terms + (at * c.n_query + i) * c.n_key;
      if (shape[3] == 1)
        for (long j = 0; j < c.n_key; ++j) to[0] += double(from[j]);
      else
        for (long j = 0; j < c.n_key; ++j) to[j] += double(from[j]);
    }
  }
}

constexpr size_t kTermBytes = size_t(64) << 20;  // of dS that is kept for a mask's gradient, or one head's

// The backward pass by as many heads at a time as dS may be kept of, and the mask's gradient after each.
int backward_with_mask(Plans& all, size_t bytes, long threads) {
  Plan& plan = all.plans[0];
  const halfulp_call& c = *plan.call;
  const size_t each = size_t(plan.groups) * size_t(c.n_query) * size_t(c.n_key) * sizeof(float);
  const long key_heads = c.batch * c.key_heads;
  const long pass = each == 0 || kTermBytes / each < 1 ? 1 : smaller(key_heads, long(kTermBytes / each));
  std::unique_ptr<float[]> terms(new (std::nothrow) float[each / sizeof(float) * size_t(pass)]);
  if (!terms) return 1;
  plan.terms = terms.get();
  for (long from = 0; from < key_heads; from += pass) {
    const long count = smaller(pass, key_heads - from);
    plan.first_head = from * plan.groups;
    all.skipped = from * plan.chunks;
    if (spread(all, backward_unit, bytes, count * plan.chunks, threads)) return 1;
    if (spread(MaskSum{plan, count * plan.groups}, mask_unit, 64, c.mask_shape[2], threads)) return 1;
  }
  all.skipped = 0;
  return 0;
}

// Waking a thread takes about as long as half a million products; a head costs something beside its own.
constexpr double kProductsOfThread = 1 << 19, kProductsOfHead = 1 << 16;

long threads_for(const Plans& all) {
  double products = 0;
  for (long i = 0; i < all.count; ++i) {
    const halfulp_call& c = all.calls[i];
    const double pairs = double(c.n_query) * double(c.n_key);
    products += double(c.batch * c.heads) * (pairs * double(c.d + c.dv) + kProductsOfHead);
  }
  const double worthwhile = products / kProductsOfThread + 1;
  return worthwhile < double(all.calls[0].threads) ? long(worthwhile) : all.calls[0].threads;
}

}  // namespace
}  // namespace halfulp

using namespace halfulp;

extern "C" {

int32_t halfulp_abi(void) { return HALFULP_ABI; }
int32_t halfulp_best_isa(void) { return best_isa(); }

int64_t halfulp_size(const char* name) {
  const struct {
    const char* name;
    size_t bytes;
  } known[] = {{"tensor", sizeof(halfulp_tensor)},
               {"call", sizeof(halfulp_call)},
               {"format", sizeof(halfulp_format)},
               {"matrix", sizeof(halfulp_matrix)},
               {"emulation", sizeof(halfulp_emulation)}};
  for (const auto& one : known)
    if (std::strcmp(one.name, name) == 0) return int64_t(one.bytes);
  return -1;
}

int32_t halfulp_forward(const halfulp_call* call) {
  if (call->n_query == 0) return 0;
  Plans all;
  if (!all.fill(*call)) return 1;
  const size_t bytes = all.number(
      [](const Plan& p) { return p.call->n_query ? p.call->batch * p.call->key_heads * p.spans : 0; },
      all.kernels->forward_bytes);
  return spread(all, forward_unit, bytes, all.units(), threads_for(all));
}

int32_t halfulp_backward(const halfulp_call* call) {
  Plans all;
  if (!all.fill(*call)) return 1;
  const auto rows = [](const halfulp_call& c) { return c.batch * c.heads * c.n_query; };
  const auto partial = [&](const Plan& p) { return p.chunks > 1 ? p.chunks * rows(*p.call) * p.call->d : 0; };
  long floats = 0;
  for (long i = 0; i < all.count; ++i) floats += partial(all.plans[i]) + (call->sinks ? rows(all.calls[i]) : 0);
  if (floats > 0) {
    float* at = reinterpret_cast<float*>(partials.at_least(size_t(floats) * sizeof(float)));
    if (!at) return 1;
    for (long i = 0; i < all.count; ++i) {
      if (all.plans[i].chunks > 1) all.plans[i].partial = at;
      at += partial(all.plans[i]);
      if (call->sinks) all.plans[i].sink_rows = at, at += rows(all.calls[i]);
    }
  }
  const size_t bytes = all.number([](const Plan& p) { return p.call->batch * p.call->key_heads * p.chunks; },
                                  all.kernels->backward_bytes);
  const int failed = call->grad_mask ? backward_with_mask(all, bytes, threads_for(all))
                                     : spread(all, backward_unit, bytes, all.units(), threads_for(all));
  if (failed) return 1;
  if (call->sinks) add_sinks(all);
  all.number([](const Plan& p) { return p.chunks > 1 ? p.call->batch * p.call->heads : 0; }, nullptr);
  const int unfinished = spread(all, chunks_unit, 64, all.units(), threads_for(all));
  partials.trim();
  return unfinished;
}

int32_t halfulp_round_out(int32_t isa, int32_t dtype, const float* exact, void* out, int8_t* residual, int64_t n) {
  kernels_for(isa, dtype, HALFULP_RECIPE_HALFULP).round_out(exact, out, residual, n);
  return 0;
}

}  // extern "C"
