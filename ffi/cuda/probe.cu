#include "cuda/probe.h"

namespace moejax::cuda {
namespace {

__global__ void Probe(const int32_t* in, int32_t* out, int64_t n) {
#if defined(__CUDA_ARCH__)
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) out[i] = in[i] + __CUDA_ARCH__ / 10;
#endif
}

}  // namespace

cudaError_t LaunchProbe(cudaStream_t stream, const int32_t* in, int32_t* out, int64_t n) {
  if (n == 0) return cudaSuccess;
  constexpr int kThreads = 256;
  const int64_t blocks = (n + kThreads - 1) / kThreads;
  Probe<<<static_cast<unsigned>(blocks < 1024 ? blocks : 1024), kThreads, 0, stream>>>(in, out, n);
  return cudaGetLastError();
}

cudaError_t LoadKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, Probe);
}

}  // namespace moejax::cuda
