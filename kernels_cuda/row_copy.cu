// Launch of the second part of a dispatch. Read row_copy.h.
#include "row_copy.h"

#include <cuda_runtime.h>

#include "isa/sm90_mx.cuh"
#include "kernel_check.h"
#include "rows.h"

namespace moe {
namespace {

// In clusters of two, so that those of a product fit on what is left.
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32 * RowCopyConfig::kMostWarps) copy_kernel(RowCopy copy) {
  const int warps = blockDim.x / 32;
  copy_rows<Sm90Mx, RowCopyConfig>(copy, blockIdx.x * warps + threadIdx.x / 32, gridDim.x * warps);
}

}  // namespace

Status dispatch_back(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, const TaskList& list, int sms,
                     cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(copy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(RowCopyConfig::kSharedBytes));
  if (error != cudaSuccess) return failed("dispatch_back", error);
  const RowCopy copy = row_copy(s, x_TxD, plan, rows_MxD, list);
  copy_kernel<<<static_cast<unsigned>(sms), 32 * RowCopyConfig::warps(copy.row_bytes), RowCopyConfig::kSharedBytes, stream>>>(copy);
  return launched("dispatch_back");
}

}  // namespace moe
