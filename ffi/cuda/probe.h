// A kernel that says which instruction set it was compiled for: shows that the module, its launch and its cubins work on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moejax::cuda {

// out[i] = in[i] + arch, where arch is 90 on sm_90a and 100 on sm_100f.
cudaError_t LaunchProbe(cudaStream_t stream, const int32_t* in, int32_t* out, int64_t n);

// Loads the module's kernels on the current device, outside of any step: loading later takes a process-wide lock.
cudaError_t LoadKernels();

}  // namespace moejax::cuda
