// Which Blackwell tile programs are compiled. Their launch on the GPU: sm100_launch.h; on the host emulator:
// tests/cuda/sm100_layer_host.cc. Their task lists are those of task_list.h, with Pairs::kNone. Untested on hardware.
#pragma once

#include "gemm_arguments.h"

namespace moe {

// A compiled tile program of a kind: one block of 128 x 256, or a pair of 256 x 256 (narrower tiles read more from the L2 than it is
// expected to give: benchmarks/gpu_model.py). All take work by Cluster Launch Control.
struct Sm100Tile {
  int blocks;  // 1 or 2
  bool mx;     // MXFP8, else BF16
};
MOE_HOST_FN constexpr int sm100_tile_m(Sm100Tile tile) { return 128 * tile.blocks; }
constexpr int kSm100TileN = 256;

}  // namespace moe
