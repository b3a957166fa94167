// Host side of the Blackwell GEMMs: which tile programs are compiled, and their launch (sm100_kernels.cu). Their task lists are those of
// task_list.h, with Pairs::kNone. Untested on hardware.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "sm100_config.h"

namespace moe {

// A compiled tile program of a kind: one block of 128 x 256, or a pair of 256 x 256 (narrower tiles read more from the L2 than it is
// expected to give: benchmarks/gpu_model.py). All take work by Cluster Launch Control.
struct Sm100Tile {
  int blocks;  // 1 or 2
  bool mx;     // MXFP8, else BF16
};
MOE_HOST_FN constexpr int sm100_tile_m(Sm100Tile tile) { return 128 * tile.blocks; }
constexpr int kSm100TileN = 256;

// Launches a cluster per task of the list's capacity `max_tasks` (clusters beyond *batch.num_tasks have no work and are drained).
// Returns the first CUDA error.
cudaError_t launch_sm100_gemm(Kind kind, Sm100Tile tile, const Sm100Batch<CUtensorMap>& batch, int max_tasks, cudaStream_t stream);

}  // namespace moe
