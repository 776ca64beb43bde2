// The C interface of the emulator: which instruction set runs, and how the work is cut up.
#include "call.hpp"
#include "threads.hpp"

namespace halfulp {
namespace {

const Emulations& emulations_for(int isa) {
  const int best = best_isa();
  if (isa < 0 || isa > best) isa = best;
#if defined(HALFULP_X86)
  if (isa >= HALFULP_AVX512) return avx512_emulations;
  if (isa == HALFULP_AVX2) return avx2_emulations;
#endif
  return portable_emulations;
}

// A thread more is worth about a tenth of a millisecond: waking it takes longer where other programs hold the cores.
constexpr long kNumbers = 1 << 17, kProducts = 1 << 22;

long least_of(long a, long b) { return a < b ? a : b; }

long parts_of(long count, long threads) {
  const long parts = least_of(count / kNumbers, 4 * threads);
  return parts < 1 || threads == 1 ? 1 : parts;
}

long threads_of(const halfulp_emulation& call) {
  const long products = call.batch * call.heads * call.n_query * call.n_key * (call.d + call.dv);
  return least_of(call.threads, products / kProducts + 1);
}

// Parts of one head that keep every thread busy; rows, and sums over them, are independent of the cut.
Emulation cut(const halfulp_emulation& call, bool fine) {
  const long heads = call.batch * call.heads;
  const long threads = threads_of(call);
  const bool whole = threads == 1 || heads >= (fine ? 2 * threads : threads) || heads == 0;
  const long wanted = whole ? 1 : (4 * threads + heads - 1) / heads;
  const long tiles = (call.n_query + call.block_query - 1) / call.block_query;
  return {&call, wanted < tiles ? wanted : tiles < 1 ? 1 : tiles};
}

}  // namespace
}  // namespace halfulp

using namespace halfulp;

extern "C" {

const char* halfulp_step_name(int32_t step) {
  static const char* const names[] = {
#define HALFULP_STEP(name) #name,
      HALFULP_STEPS(HALFULP_STEP)
#undef HALFULP_STEP
  };
  return step >= 0 && step < HALFULP_STEP_COUNT ? names[step] : nullptr;
}

void halfulp_round(int32_t isa, int32_t threads, int32_t wide, const halfulp_format* format, const void* x, void* y,
                   int64_t n) {
  Numbers numbers{};
  numbers.x = x, numbers.y = y, numbers.count = n, numbers.parts = parts_of(n, threads);
  numbers.wide = wide, numbers.format = format;
  spread(numbers, emulations_for(isa).round, 0, numbers.parts, threads);
}

void halfulp_running(int32_t isa, int32_t threads, int32_t wide, const halfulp_format* format, const void* x, void* y,
                     int64_t terms, int64_t sums) {
  Numbers numbers{};
  numbers.x = x, numbers.y = y, numbers.count = terms, numbers.columns = sums;
  numbers.parts = least_of(sums, parts_of(terms * sums, threads));
  numbers.wide = wide, numbers.format = format;
  spread(numbers, emulations_for(isa).running, 0, numbers.parts, threads);
}

void halfulp_exp(int32_t isa, int32_t threads, int32_t base2, const float* x, float* y, int64_t n) {
  Numbers numbers{};
  numbers.x = x, numbers.y = y, numbers.count = n, numbers.parts = parts_of(n, threads), numbers.wide = base2;
  spread(numbers, emulations_for(isa).exp, 0, numbers.parts, threads);
}

void halfulp_row_sum(int32_t isa, int32_t threads, const float* x, float* sums, int64_t rows, int64_t n) {
  Numbers numbers{};
  numbers.x = x, numbers.y = sums, numbers.count = rows, numbers.columns = n;
  numbers.parts = least_of(rows, parts_of(rows * n, threads));
  spread(numbers, emulations_for(isa).row_sum, 0, numbers.parts, threads);
}

void halfulp_residual(int32_t isa, int32_t threads, const float* exact, const float* out, float* residual, int64_t n,
                      int32_t mantissa_bits, int32_t bits, int32_t lowest) {
  Numbers numbers{};
  numbers.x = exact, numbers.out = out, numbers.y = residual, numbers.count = n, numbers.parts = parts_of(n, threads);
  numbers.mantissa_bits = mantissa_bits, numbers.bits = bits, numbers.lowest = lowest;
  spread(numbers, emulations_for(isa).residual, 0, numbers.parts, threads);
}

int32_t halfulp_product(int32_t isa, int32_t threads, int64_t batch, int64_t m, int64_t n, int64_t k,
                        const halfulp_matrix* left, const halfulp_matrix* right, float* out) {
  const Emulations& emulations = emulations_for(isa);
  const Product product{left, right, out, m, n, k};
  const long units = batch * ((n + 63) / 64) * ((m + kProductRows - 1) / kProductRows);
  const long worthwhile = batch * m * n * k / kProducts + 1;
  return spread(product, emulations.product, emulations.product_bytes(), units, least_of(worthwhile, threads));
}

int32_t halfulp_emulate_forward(const halfulp_emulation* call) {
  const Emulations& emulations = emulations_for(call->isa);
  const Emulation whole = cut(*call, true);
  return spread(whole, emulations.forward, emulations.bytes(whole, false), call->batch * call->heads * whole.parts,
                threads_of(*call));
}

int32_t halfulp_emulate_backward(const halfulp_emulation* call) {
  const Emulations& emulations = emulations_for(call->isa);
  const Emulation whole = cut(*call, false);
  const long units = call->batch * call->heads * (whole.parts == 1 ? 1 : 2 * whole.parts);
  return spread(whole, emulations.backward, emulations.bytes(whole, true), units, threads_of(*call));
}

int32_t halfulp_emulate_delta(const halfulp_emulation* call) {
  const Emulations& emulations = emulations_for(call->isa);
  const Emulation whole = cut(*call, true);
  return spread(whole, emulations.delta, emulations.bytes(whole, true), call->batch * call->heads * whole.parts,
                threads_of(*call));
}

}  // extern "C"
