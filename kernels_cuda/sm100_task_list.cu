// Builds a task list on the device: a block per expert adds up the tasks of the experts before it, then writes its own. Untested on
// hardware.
#include <cuda_runtime_api.h>

#include "sm100_kernels.h"

namespace moe {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) build_list(Sm100TaskList list, const int32_t* __restrict__ count_E,
                                                       const int32_t* __restrict__ start_E, Task* tasks, int32_t* num_tasks) {
  const int expert = blockIdx.x;
  __shared__ int first;
  if (threadIdx.x == 0) first = 0;
  __syncthreads();
  int before = 0;
  for (int e = threadIdx.x; e < expert; e += kThreads) before += sm100_count_tasks(list, count_E[e]);
  atomicAdd(&first, before);  // integers: the sum has no order
  __syncthreads();
  const int rows = count_E[expert], own = sm100_count_tasks(list, rows);
  if (expert == static_cast<int>(gridDim.x) - 1 && threadIdx.x == 0) *num_tasks = first + own;
  for (int i = threadIdx.x; i < own; i += kThreads) tasks[first + i] = sm100_make_task(list, i, expert, start_E[expert], rows);
}

}  // namespace

cudaError_t build_sm100_tasks(const Sm100TaskList& list, int experts, const int32_t* count_E, const int32_t* start_E, Task* tasks,
                              int32_t* num_tasks, cudaStream_t stream) {
  if (experts < 1) return cudaErrorInvalidValue;
  build_list<<<static_cast<unsigned>(experts), kThreads, 0, stream>>>(list, count_E, start_E, tasks, num_tasks);
  return cudaGetLastError();
}

}  // namespace moe
