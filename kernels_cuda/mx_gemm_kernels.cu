// The FP8 grouped GEMM kernel for sm_90a, one instantiation per kind and (where it matters) activation form. Everything of substance is
// in mx_roles.h.
#include "mx_gemm_kernels.h"

#include "isa/sm90_mx.cuh"

namespace moe {
namespace {

using Config = MxConfig<kGateUp>;  // the shape of all kinds

template <Kind kKind, bool kPlain>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Config::kThreads, 1)
    mx_grouped_gemm(const __grid_constant__ MxBatch<CUtensorMap> batch) {
  run_roles<MxRoles<kKind, kPlain, Sm90Mx>, Sm90Mx>(batch);
}

// Blocks that can be resident at once, in whole clusters; asked once per device and kernel.
template <Kind kKind, bool kPlain>
cudaError_t resident_blocks(int* blocks) {
  const auto kernel = mx_grouped_gemm<kKind, kPlain>;
  static int cached[64] = {};
  int device = 0, sms = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < 64 && cached[device] > 0) {
    *blocks = cached[device];
    return cudaSuccess;
  }
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(Config::kSharedBytes));
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(sms / 2 * 2);
  config.blockDim = dim3(static_cast<unsigned>(Config::kThreads));
  config.dynamicSmemBytes = Config::kSharedBytes;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 2;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (error != cudaSuccess) return error;
  if (clusters < 1) return cudaErrorLaunchOutOfResources;
  *blocks = 2 * clusters;
  if (device < 64) cached[device] = *blocks;
  return cudaSuccess;
}

template <Kind kKind, bool kPlain>
cudaError_t launch(const MxBatch<CUtensorMap>& batch, cudaStream_t stream) {
  int blocks = 0;
  const cudaError_t error = resident_blocks<kKind, kPlain>(&blocks);
  if (error != cudaSuccess) return error;
  mx_grouped_gemm<kKind, kPlain><<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_mx_gemm(Kind kind, const MxBatch<CUtensorMap>& batch, cudaStream_t stream) {
  const bool plain = is_plain_swiglu(batch.kinds[0].act);
  switch (kind) {
    case kGateUp: return plain ? launch<kGateUp, true>(batch, stream) : launch<kGateUp, false>(batch, stream);
    case kDown: return launch<kDown, true>(batch, stream);
    case kDgradDown: return plain ? launch<kDgradDown, true>(batch, stream) : launch<kDgradDown, false>(batch, stream);
    case kDgradGateUp: return launch<kDgradGateUp, true>(batch, stream);
    case kWgradDown: return launch<kWgradDown, true>(batch, stream);
    case kWgradGateUp: return launch<kWgradGateUp, true>(batch, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moe
