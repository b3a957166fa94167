// The grouped GEMM kernels for Blackwell, sm_100f: one instantiation per kind, tile and (where it matters) activation form. Everything of
// substance is in sm100_roles.h. Compiled and disassembled (tests/cuda/test_sm100_sass.py), never run on a GPU.
#include "sm100_kernels.h"

#include "isa/sm100.cuh"
#include "sm100_roles.h"

namespace moe {
namespace {

template <Kind kKind, bool kPlain, class Config>
__global__ void __cluster_dims__(Config::kBlocks, 1, 1) __launch_bounds__(Config::kThreads, 1)
    sm100_gemm(const __grid_constant__ Sm100Batch<CUtensorMap> batch) {
  sm100_run_block<kKind, kPlain, Sm100, Config>(batch);
}

template <Kind kKind, bool kPlain, class Config>
cudaError_t launch(const Sm100Batch<CUtensorMap>& batch, int max_tasks, cudaStream_t stream) {
  if (max_tasks <= 0) return cudaSuccess;
  const auto kernel = sm100_gemm<kKind, kPlain, Config>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<max_tasks * Config::kBlocks, Config::kThreads, Config::kSharedBytes, stream>>>(batch);
  return cudaGetLastError();
}

template <Kind kKind, bool kPlain>
cudaError_t launch_tile(Sm100Tile tile, const Sm100Batch<CUtensorMap>& batch, int max_tasks, cudaStream_t stream) {
  if (tile.blocks == 1 && tile.mx) return launch<kKind, kPlain, Sm100Config<1, kSm100TileN, true, true>>(batch, max_tasks, stream);
  if (tile.blocks == 1) return launch<kKind, kPlain, Sm100Config<1, kSm100TileN, false, true>>(batch, max_tasks, stream);
  if (tile.blocks == 2 && tile.mx) return launch<kKind, kPlain, Sm100Config<2, kSm100TileN, true, true>>(batch, max_tasks, stream);
  if (tile.blocks == 2) return launch<kKind, kPlain, Sm100Config<2, kSm100TileN, false, true>>(batch, max_tasks, stream);
  return cudaErrorInvalidValue;
}

// Kinds whose epilogue computes the activation.
template <Kind kKind>
cudaError_t launch_activated(Sm100Tile tile, const Sm100Batch<CUtensorMap>& batch, int max_tasks, cudaStream_t stream) {
  return is_plain_swiglu(batch.args.act) ? launch_tile<kKind, true>(tile, batch, max_tasks, stream)
                                         : launch_tile<kKind, false>(tile, batch, max_tasks, stream);
}

}  // namespace

cudaError_t launch_sm100_gemm(Kind kind, Sm100Tile tile, const Sm100Batch<CUtensorMap>& batch, int max_tasks, cudaStream_t stream) {
  switch (kind) {
    case kGateUp: return launch_activated<kGateUp>(tile, batch, max_tasks, stream);
    case kDown: return launch_tile<kDown, true>(tile, batch, max_tasks, stream);
    case kDgradDown: return launch_activated<kDgradDown>(tile, batch, max_tasks, stream);
    case kDgradGateUp: return launch_tile<kDgradGateUp, true>(tile, batch, max_tasks, stream);
    case kWgradDown: return launch_tile<kWgradDown, true>(tile, batch, max_tasks, stream);
    case kWgradGateUp: return launch_tile<kWgradGateUp, true>(tile, batch, max_tasks, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moe
