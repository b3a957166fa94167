// What a tensor map describes, without CUDA headers: the host emulators make maps of it too. tensor_map.h encodes them for the GPU.
#pragma once

#include <cstdint>

namespace moe {

enum class Element { kBf16, kFp32, kE4m3, kScaleAtom };

constexpr int element_bytes(Element element) { return element == Element::kE4m3 ? 1 : element == Element::kBf16 ? 2 : 4; }

struct TensorShape {
  int64_t inner = 1, outer = 1, halves = 1, experts = 1;
};

}  // namespace moe
