// Launches of the Hopper products: a block per SM, in clusters of two, as many as fit at once.
#pragma once

#include <cuda_runtime.h>

namespace moe {

inline cudaLaunchAttribute cluster_of_two() {
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 2;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  return cluster;
}

// Blocks of `kernel` that can be resident at once, in whole clusters; asked once per device.
template <class Config, auto kernel>
cudaError_t resident_blocks(int* blocks) {
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
  cudaLaunchAttribute cluster = cluster_of_two();
  cudaLaunchConfig_t config = {dim3(static_cast<unsigned>(sms / 2 * 2)), dim3(static_cast<unsigned>(Config::kThreads)), Config::kSharedBytes};
  config.attrs = &cluster;
  config.numAttrs = 1;
  error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (error != cudaSuccess) return error;
  if (clusters < 1) return cudaErrorLaunchOutOfResources;
  *blocks = 2 * clusters;
  if (device < 64) cached[device] = *blocks;
  return cudaSuccess;
}

// `kernel` has its cluster's size from __cluster_dims__. `spare`: so many blocks fewer than fit, whole clusters.
template <class Config, auto kernel, class Batch>
cudaError_t launch_blocks(const Batch& batch, cudaStream_t stream, int spare = 0) {
  int blocks = 0;
  const cudaError_t error = resident_blocks<Config, kernel>(&blocks);
  if (error != cudaSuccess) return error;
  kernel<<<blocks - spare, Config::kThreads, Config::kSharedBytes, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace moe
