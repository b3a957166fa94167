#include "tensor_map.h"

#include <cudaTypedefs.h>

#include <algorithm>

#include "isa/portable.h"
#include "kernel_check.h"

namespace moe {
namespace {

// From the runtime, so that nothing links against the driver library.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static PFN_cuTensorMapEncodeTiled_v12000 function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found ? entry : nullptr);
  }();
  return function;
}

std::string say(const TensorShape& shape) {
  return std::to_string(shape.inner) + " x " + std::to_string(shape.outer) + " x " + std::to_string(shape.halves) + " x " +
         std::to_string(shape.experts);
}

template <int kDims>
Status encode(CUtensorMap* map, const char* name, CUtensorMapDataType type, const void* address, const TensorShape& shape, const cuuint64_t (&dims)[kDims],
              const cuuint64_t (&strides)[kDims - 1], const cuuint32_t (&box)[kDims], bool swizzled, int l2_bytes) {
  auto encode_tiled = encoder();
  if (encode_tiled == nullptr) return {"cuTensorMapEncodeTiled not found: the driver must support CUDA 12.0 or later"};
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    return {std::string(name) + " is not aligned to 16 bytes, which bulk tensor copies need"};
  }
  cuuint32_t steps[kDims];
  std::fill(steps, steps + kDims, 1);
  const CUtensorMapSwizzle swizzle = swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUtensorMapL2promotion fetch = l2_bytes == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  const CUresult result = encode_tiled(map, type, kDims, const_cast<void*>(address), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                       swizzle, fetch, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {std::string("tensor map of ") + name + " (" + say(shape) + "): CUDA driver error " + std::to_string(static_cast<int>(result))};
}

}  // namespace

Status encode_tensor_map(CUtensorMap* map, const char* name, Element element, const void* address, const TensorShape& shape,
                         int box_rows, int l2_bytes) {
  const int size = element_bytes(element);
  if (shape.inner * size % 16 != 0) {
    return {std::string(name) + " has rows of " + std::to_string(shape.inner) + " elements, must be a multiple of " +
            std::to_string(16 / size)};
  }
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(shape.inner), static_cast<cuuint64_t>(shape.outer),
                              static_cast<cuuint64_t>(shape.halves), static_cast<cuuint64_t>(shape.experts)};
  const cuuint64_t row = dims[0] * size, strides[3] = {row, row * dims[1], row * dims[1] * dims[2]};
  const bool atoms = element == Element::kScaleAtom;
  cuuint32_t box[4] = {static_cast<cuuint32_t>(kPanelRowBytes / size), static_cast<cuuint32_t>(box_rows), 1, 1};
  if (atoms) box[0] = dims[0], box[1] = 1;
  const CUtensorMapDataType type = element == Element::kE4m3   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : element == Element::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : atoms                     ? CU_TENSOR_MAP_DATA_TYPE_UINT32
                                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return encode(map, name, type, address, shape, dims, strides, box, !atoms, l2_bytes);
}

Status encode_joint_map(CUtensorMap* map, const char* name, const void* address, const TensorShape& shape) {
  const cuuint64_t row = static_cast<cuuint64_t>(shape.inner), matrix = row * static_cast<cuuint64_t>(shape.outer);
  const cuuint64_t dims[5] = {row, 8, 2, static_cast<cuuint64_t>(shape.outer) / 8, static_cast<cuuint64_t>(shape.experts)};
  const cuuint64_t strides[4] = {row, matrix, 8 * row, 2 * matrix};
  const cuuint32_t box[5] = {kPanelRowBytes, 8, 2, 4, 1};
  return encode(map, name, CU_TENSOR_MAP_DATA_TYPE_UINT8, address, shape, dims, strides, box, true, 128);
}

}  // namespace moe
