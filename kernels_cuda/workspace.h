// Memory of a layer: pieces of one workspace, handed out in order, so that measuring and taking are the same code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe {

// Pieces are aligned to 1024 bytes; with a null base it only measures.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<uint8_t*>(base)) {}
  template <class T>
  T* take(int64_t elements) {
    uint8_t* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<size_t>(elements) * sizeof(T) + 1023) / 1024 * 1024;
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

}  // namespace moe
