#include "tensor_map.h"

#include <cudaTypedefs.h>

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

}  // namespace

Status encode_tensor_map(CUtensorMap* map, const char* name, Element element, const void* address, const TensorShape& shape,
                         int box_rows) {
  auto encode = encoder();
  if (encode == nullptr) return {"cuTensorMapEncodeTiled not found: the driver must support CUDA 12.0 or later"};
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    return {std::string(name) + " is not aligned to 16 bytes, which bulk tensor copies need"};
  }
  const int size = element_bytes(element);
  if (shape.inner * size % 16 != 0) {
    return {std::string(name) + " has rows of " + std::to_string(shape.inner) + " elements, must be a multiple of " +
            std::to_string(16 / size)};
  }
  cuuint64_t dims[4] = {static_cast<cuuint64_t>(shape.inner), static_cast<cuuint64_t>(shape.outer),
                        static_cast<cuuint64_t>(shape.halves), static_cast<cuuint64_t>(shape.experts)};
  cuuint64_t strides[3];
  strides[0] = dims[0] * size;
  strides[1] = strides[0] * dims[1];
  strides[2] = strides[1] * dims[2];
  const bool atoms = element == Element::kScaleAtom;
  cuuint32_t box[4] = {static_cast<cuuint32_t>(kPanelRowBytes / size), static_cast<cuuint32_t>(box_rows), 1, 1};
  if (atoms) box[0] = dims[0], box[1] = 1;
  cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = element == Element::kE4m3   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : element == Element::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : atoms                     ? CU_TENSOR_MAP_DATA_TYPE_UINT32
                                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  CUresult result = encode(map, type, 4, const_cast<void*>(address), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           atoms ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return {std::string("tensor map of ") + name + " (" + std::to_string(shape.inner) + " x " + std::to_string(shape.outer) + " x " +
            std::to_string(shape.halves) + " x " + std::to_string(shape.experts) + "): CUDA driver error " +
            std::to_string(static_cast<int>(result))};
  }
  return {};
}

}  // namespace moe
