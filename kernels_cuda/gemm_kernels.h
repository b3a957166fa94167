// Host side of the grouped GEMMs: launch a task list. See gemm_kernels.cu.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "gemm_arguments.h"

namespace moe {

// How the tasks of a list are laid out, and so which roles run them.
enum class Layout : uint8_t {
  kTokensM,      // mma_sm90.h
  kTokensN,      // gemm_tokens_n.h; kinds that can
  kResident512,   // strips of gemm_resident.h; weight gradients that are overwritten
  kResidentRows,  // those of gemm_resident_rows.h
  kResidentFp8,   // those of mx_resident.h, of FP8 operands
};

// Launches every task of a list of one kind; the list and its length are on the device. `spare`: multiprocessors that
// kGateUp with tokens on the M side leaves free, an even number of them. Returns the first CUDA error.
cudaError_t launch_gemm(Kind kind, const GemmBatch<CUtensorMap, 1>& batch, cudaStream_t stream, Layout layout = Layout::kTokensM,
                        int spare = 0);

// Blocks of a launch that spares none: one on each multiprocessor that clusters of two can use.
cudaError_t count_blocks(int* blocks);

}  // namespace moe
