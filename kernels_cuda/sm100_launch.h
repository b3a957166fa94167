// Launches of the Blackwell GEMMs (sm100_kernels.cu).
#pragma once

#include <cuda.h>

#include "moe.h"
#include "sm100_kernels.h"

namespace moe {

// Launches a cluster per task of the list's capacity `max_tasks` (clusters beyond *batch.num_tasks have no work and are drained).
Status launch_sm100_gemm(Kind kind, Sm100Tile tile, const Sm100Batch<CUtensorMap>& batch, int max_tasks, cudaStream_t stream);

}  // namespace moe
