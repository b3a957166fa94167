// Host side of the grouped GEMMs: launch one kind over a task list. See gemm_kernels.cu.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "gemm_config.h"

namespace moe {

// Launches every task of `kind`; the list and its length are on the device. Returns the first CUDA error.
cudaError_t launch_gemm(Kind kind, int tile_n, const GemmArguments<CUtensorMap>& args, cudaStream_t stream);

}  // namespace moe
