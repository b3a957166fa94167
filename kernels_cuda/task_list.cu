#include "task_list.h"

#include <cuda_runtime.h>

#include "kernel_check.h"

namespace moe {
namespace {

constexpr int kThreads = 256;

struct Lists {
  TaskList list[kMaxLists];
};

// One block per expert and list: adds up the tasks of the experts before it, then writes its own.
__global__ void __launch_bounds__(kThreads)
    build_kernel(Lists lists, int experts, const int32_t* __restrict__ count_E, const int32_t* __restrict__ start_E) {
  const TaskList& list = lists.list[blockIdx.y];
  const int expert = blockIdx.x;
  __shared__ int first_task;
  if (threadIdx.x == 0) first_task = 0;
  __syncthreads();
  int before = 0;
  for (int e = threadIdx.x; e < expert; e += kThreads) before += task_grid(list, count_E[e]).total;
  atomicAdd(&first_task, before);  // integers: the sum has no order
  __syncthreads();
  const int rows = count_E[expert];
  const TaskGrid own = task_grid(list, rows);
  if (expert == experts - 1 && threadIdx.x == 0) *list.num_tasks = first_task + own.total;
  for (int i = threadIdx.x; i < own.total; i += kThreads) {
    list.tasks[first_task + i] = make_task(list, own, i, expert, start_E[expert], rows);
  }
}

}  // namespace

Status build_tasks(int64_t experts, const int32_t* count_E, const int32_t* start_E, const TaskList* lists, int num_lists,
                   cudaStream_t stream) {
  if (num_lists < 1 || num_lists > kMaxLists) return {"build_tasks: num_lists is " + std::to_string(num_lists)};
  Lists all = {};
  for (int i = 0; i < num_lists; ++i) all.list[i] = lists[i];
  build_kernel<<<dim3(static_cast<unsigned>(experts), static_cast<unsigned>(num_lists)), kThreads, 0, stream>>>(
      all, static_cast<int>(experts), count_E, start_E);
  return launched("build_tasks");
}

}  // namespace moe
