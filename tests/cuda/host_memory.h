// Memory of a layer on the host, as a GPU's allocator gives it: full of NaN, and with guards that show a write past an end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace moe {

class Arena {
 public:
  ~Arena() {
    for (const auto& block : blocks_) ::operator delete(block.first, std::align_val_t{kAlignment});
  }
  template <class T>
  T* make(size_t count) {
    const size_t bytes = count * sizeof(T);
    void* p = ::operator new(bytes + kGuard, std::align_val_t{kAlignment});
    blocks_.emplace_back(static_cast<uint8_t*>(p), bytes);
    std::memset(p, 0xFF, bytes + kGuard);
    return static_cast<T*>(p);
  }
  template <class T>
  T* put(const T* from, size_t count) {
    T* p = make<T>(count);
    if (count > 0) std::memcpy(p, from, count * sizeof(T));
    return p;
  }
  // Whether nothing was written past any piece.
  bool intact() const {
    return std::all_of(blocks_.begin(), blocks_.end(), [](const auto& block) {
      const uint8_t* guard = block.first + block.second;
      return std::all_of(guard, guard + kGuard, [](uint8_t byte) { return byte == 0xFF; });
    });
  }

 private:
  static constexpr size_t kAlignment = 1024, kGuard = 4096;
  std::vector<std::pair<uint8_t*, size_t>> blocks_;
};

}  // namespace moe
