// Threads are those of the OpenMP runtime that torch has loaded, found by name in the process, so that nobody's threads
// spin against another's; where there is none, and in the child of a fork, where its threads are gone and it would wait
// for them for ever, threads are started for the call. Units are taken from a counter: what depends on their order may
// not be summed across them.
#include "threads.hpp"

#include <atomic>
#include <thread>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#endif

#include "buffer.hpp"

namespace halfulp {
namespace {

thread_local Buffer scratch;

struct Work {
  const Units* units;
  size_t bytes;
  long count;
  std::atomic<long> next{0};
  std::atomic<int> failed{0};
};

void work_on(void* argument) {
  Work& work = *static_cast<Work*>(argument);
  char* memory = scratch.at_least(work.bytes);
  if (!memory && work.bytes) {
    work.failed = 1;
    return;
  }
  for (long unit; (unit = work.next.fetch_add(1)) < work.count;) work.units->run(unit, memory);
  scratch.trim();
}

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

#if (defined(__unix__) || defined(__APPLE__)) && !defined(HALFULP_OWN_THREADS)
// Asked for when the library is loaded: its user may have forked by the first call.
std::atomic<bool> forked{false};
const int asked = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

Parallel openmp_of_the_process() {
#if defined(HALFULP_OWN_THREADS)
  return nullptr;
#elif defined(__unix__) || defined(__APPLE__)
  static const Parallel found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return forked || asked != 0 ? nullptr : found;
#else
  return nullptr;
#endif
}

}  // namespace

int spread(const Units& units, size_t bytes, long count, long threads) {
  Work work{&units, bytes, count};
  if (threads > count) threads = count;
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

}  // namespace halfulp
