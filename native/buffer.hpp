// Memory that a thread keeps from call to call.
#pragma once
#include <cstddef>
#include <cstdlib>

namespace halfulp {

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

}  // namespace halfulp
