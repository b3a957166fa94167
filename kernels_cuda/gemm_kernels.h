// Host side of the grouped GEMMs: launch a task list. See gemm_kernels.cu.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "gemm_config.h"

namespace moe {

// Launches every task of a list of one kind; the list and its length are on the device. tokens_on_n: the list was made for that
// (TaskList), and the kind can (gemm_tokens_n.h). strips: the list was made
// of strips; weight gradients that are overwritten only (gemm_resident.h). Returns the first CUDA error.
cudaError_t launch_gemm(Kind kind, const GemmBatch<CUtensorMap, 1>& batch, cudaStream_t stream, bool tokens_on_n = false,
                        bool strips = false);

}  // namespace moe
