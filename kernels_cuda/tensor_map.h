// One tensor map per buffer: four dimensions (inner, outer, half, expert), boxes of one panel (64 rows of 128 bytes), 128-byte
// swizzle. Out-of-range elements load as zero and are not stored.
#pragma once

#include <cuda.h>

#include "moe.h"

namespace moe {

enum class Element { kBf16, kFp32, kE4m3 };

struct TensorShape {
  int64_t inner = 1, outer = 1, halves = 1, experts = 1;
};

Status encode_tensor_map(CUtensorMap* map, const char* name, Element element, const void* address, const TensorShape& shape);

}  // namespace moe
