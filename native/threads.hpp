// Work cut into units, on the threads of the OpenMP runtime that torch has loaded.
#pragma once
#include <cstddef>

namespace halfulp {

struct Units {
  virtual void run(long unit, char* scratch) const = 0;

 protected:
  ~Units() = default;
};

// Every unit once, with `bytes` of scratch memory each, on up to `threads` threads. 0, or 1 where memory ran out.
int spread(const Units& work, size_t bytes, long units, long threads);

// As above for a function and what it works on.
template <class What>
int spread(const What& what, void (*run)(const What&, long, char*), size_t bytes, long units, long threads) {
  struct Of final : Units {
    const What& what;
    void (*function)(const What&, long, char*);
    Of(const What& w, void (*f)(const What&, long, char*)) : what(w), function(f) {}
    void run(long unit, char* scratch) const override { function(what, unit, scratch); }
  };
  return spread(static_cast<const Units&>(Of(what, run)), bytes, units, threads);
}

int best_isa();

}  // namespace halfulp
