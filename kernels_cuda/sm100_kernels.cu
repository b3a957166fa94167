// The grouped GEMM kernels for Blackwell, sm_100f: one instantiation per kind, tile and (where it matters) activation form. Everything of
// substance is in mma_sm100.h. Compiled and disassembled (tests/cuda/test_sm100_sass.py), never run on a GPU.
#include "isa/sm100.cuh"
#include "kernel_check.h"
#include "sm100_launch.h"
#include "mma_sm100.h"

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

Status launch_sm100_gemm(Kind kind, Sm100Tile tile, const Sm100Batch<CUtensorMap>& batch, int max_tasks, cudaStream_t stream) {
  static const char* kNames[kNumKinds] = {"gate_up", "down", "dgrad_down", "dgrad_gate_up", "wgrad_down", "wgrad_gate_up"};
  cudaError_t error = cudaErrorInvalidValue;
  switch (kind) {
    case kGateUp: error = launch_activated<kGateUp>(tile, batch, max_tasks, stream); break;
    case kDown: error = launch_tile<kDown, true>(tile, batch, max_tasks, stream); break;
    case kDgradDown: error = launch_activated<kDgradDown>(tile, batch, max_tasks, stream); break;
    case kDgradGateUp: error = launch_tile<kDgradGateUp, true>(tile, batch, max_tasks, stream); break;
    case kWgradDown: error = launch_tile<kWgradDown, true>(tile, batch, max_tasks, stream); break;
    case kWgradGateUp: error = launch_tile<kWgradGateUp, true>(tile, batch, max_tasks, stream); break;
    default: return {"there is no Blackwell program of kind " + std::to_string(static_cast<int>(kind))};
  }
  return error == cudaSuccess ? Status{} : failed(kNames[kind], error);
}

}  // namespace moe
