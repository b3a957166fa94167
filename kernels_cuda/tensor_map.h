// One tensor map per buffer: four dimensions (inner, outer, half, expert), boxes of one panel (64 rows of 128 bytes, or what `box_rows`
// says), 128-byte swizzle; L2 asks memory for `l2_bytes` at once, 128 or 256. Out-of-range elements load as zero and are not stored. kScaleAtom
// is not an element but 4 bytes of Blackwell's scale atoms: inner is 128, a box is one atom of 512 bytes, without swizzle.
#pragma once

#include <cuda.h>

#include "isa/portable.h"
#include "moe.h"
#include "tensor_shape.h"

namespace moe {

Status encode_tensor_map(CUtensorMap* map, const char* name, Element element, const void* address, const TensorShape& shape,
                         int box_rows = kPanelRows, int l2_bytes = 256);

// Of gate and up (shape.halves is 2, shape.outer a multiple of 8), E4M3: boxes of 32 rows of each, eight of one and eight of the other in turn.
Status encode_joint_map(CUtensorMap* map, const char* name, const void* address, const TensorShape& shape);

}  // namespace moe
