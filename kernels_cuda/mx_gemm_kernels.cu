// The FP8 grouped GEMM kernel for sm_90a, one instantiation per kind, side of the tokens and (where it matters) activation form. Everything of
// substance is in mx_roles.h and mx_tokens_n.h.
#include "mx_gemm_kernels.h"

#include "isa/sm90_mx.cuh"

namespace moe {
namespace {

template <class Roles>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Roles::Config::kThreads, 1)
    mx_grouped_gemm(const __grid_constant__ MxBatch<CUtensorMap> batch) {
  run_roles<Roles, Sm90Mx>(batch);
}

// Blocks that can be resident at once, in whole clusters; asked once per device and kernel.
template <class Roles>
cudaError_t resident_blocks(int* blocks) {
  using Config = typename Roles::Config;
  const auto kernel = mx_grouped_gemm<Roles>;
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

template <class Roles>
cudaError_t launch(const MxBatch<CUtensorMap>& batch, cudaStream_t stream) {
  int blocks = 0;
  const cudaError_t error = resident_blocks<Roles>(&blocks);
  if (error != cudaSuccess) return error;
  mx_grouped_gemm<Roles><<<blocks, Roles::Config::kThreads, Roles::Config::kSharedBytes, stream>>>(batch);
  return cudaGetLastError();
}

template <Kind kKind, bool kPlain>
using OnM = MxRoles<kKind, kPlain, Sm90Mx>;
template <Kind kKind, bool kPlain>
using OnN = MxTokensN<kKind, kPlain, Sm90Mx>;

}  // namespace

cudaError_t launch_mx_gemm(Kind kind, const MxBatch<CUtensorMap>& batch, cudaStream_t stream, Layout layout) {
  const bool plain = is_plain_swiglu(batch.kinds[0].act);
  if (layout == Layout::kTokensN) {
    switch (kind) {
      case kGateUp: return plain ? launch<OnN<kGateUp, true>>(batch, stream) : launch<OnN<kGateUp, false>>(batch, stream);
      case kDown: return launch<OnN<kDown, true>>(batch, stream);
      case kDgradGateUp: return launch<OnN<kDgradGateUp, true>>(batch, stream);
      default: return cudaErrorInvalidValue;
    }
  }
  if (layout != Layout::kTokensM) return cudaErrorInvalidValue;
  switch (kind) {
    case kGateUp: return plain ? launch<OnM<kGateUp, true>>(batch, stream) : launch<OnM<kGateUp, false>>(batch, stream);
    case kDown: return launch<OnM<kDown, true>>(batch, stream);
    case kDgradDown: return plain ? launch<OnM<kDgradDown, true>>(batch, stream) : launch<OnM<kDgradDown, false>>(batch, stream);
    case kDgradGateUp: return launch<OnM<kDgradGateUp, true>>(batch, stream);
    case kWgradDown: return launch<OnM<kWgradDown, true>>(batch, stream);
    case kWgradGateUp: return launch<OnM<kWgradGateUp, true>>(batch, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moe
