// The grouped GEMM kernel for sm_90a, one instantiation per set of kinds and (where it matters) activation form. Everything of substance is in gemm_roles.h.
#include "gemm_kernels.h"

#include "gemm_roles.h"
#include "isa/sm90.cuh"

namespace moe {
namespace {

template <class Kinds, bool kPlain, class Config>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Config::kThreads, 1)
    grouped_gemm(const __grid_constant__ GemmBatch<CUtensorMap, Kinds::kCount> batch) {
  run_block<Kinds, kPlain, Sm90, Config>(batch);
}

// Blocks that can be resident at once, in whole clusters; asked once per device and kernel.
template <class Kinds, bool kPlain, class Config>
cudaError_t resident_blocks(int* blocks) {
  const auto kernel = grouped_gemm<Kinds, kPlain, Config>;
  const int threads = Config::kThreads, shared_bytes = Config::kSharedBytes;
  static int cached[64] = {};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < 64 && cached[device] > 0) {
    *blocks = cached[device];
    return cudaSuccess;
  }
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  int sms = 0;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(sms / 2 * 2);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 2;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (error != cudaSuccess) return error;
  if (clusters < 1) return cudaErrorLaunchOutOfResources;
  *blocks = 2 * clusters;
  if (device < 64) cached[device] = *blocks;
  return cudaSuccess;
}

using Config = GemmConfig<256>;

template <class Kinds, bool kPlain>
cudaError_t launch(const GemmBatch<CUtensorMap, Kinds::kCount>& batch, cudaStream_t stream) {
  auto kernel = grouped_gemm<Kinds, kPlain, Config>;
  int blocks = 0;
  cudaError_t error = resident_blocks<Kinds, kPlain, Config>(&blocks);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_gemm(Kind kind, const GemmBatch<CUtensorMap, 1>& batch, cudaStream_t stream) {
  const bool plain = is_plain_swiglu(batch.kinds[0].act);
  switch (kind) {
    case kGateUp: return plain ? launch<KindSet<kGateUp>, true>(batch, stream) : launch<KindSet<kGateUp>, false>(batch, stream);
    case kDown: return launch<KindSet<kDown>, true>(batch, stream);
    case kDgradDown: return plain ? launch<KindSet<kDgradDown>, true>(batch, stream) : launch<KindSet<kDgradDown>, false>(batch, stream);
    case kDgradGateUp: return launch<KindSet<kDgradGateUp>, true>(batch, stream);
    case kWgradDown: return launch<KindSet<kWgradDown>, true>(batch, stream);
    case kWgradGateUp: return launch<KindSet<kWgradGateUp>, true>(batch, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moe
