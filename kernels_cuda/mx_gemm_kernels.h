// Host side of the FP8 grouped GEMMs: launch a task list. See mx_gemm_kernels.cu.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "gemm_kernels.h"
#include "mx_resident.h"
#include "mx_tokens_n.h"

namespace moe {

// Launches every task of a list of one kind, with tokens on either side; the list and its length are on the device. Returns the first CUDA error.
cudaError_t launch_mx_gemm(Kind kind, const MxBatch<CUtensorMap>& batch, cudaStream_t stream, Layout layout);

}  // namespace moe
