#include "task_list.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "kernel_check.h"

namespace moe {
namespace {

constexpr int kThreads = 256, kBlocks = 16;
static_assert(2 * sizeof(int) * (kMostOrdered + 1) < 48 << 10, "dynamic shared memory of a block, without being asked for");

struct Lists {
  TaskList list[kMaxLists];
};

// The sum of `value` over the threads before this one, and over all.
__device__ uint64_t sum_before(uint64_t value, uint64_t& all, uint64_t (&warps)[kThreads / 32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t sum = value;
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
  __syncthreads();  // all have read those of the call before
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  uint64_t before = sum - value;
  all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += warps[w];
    all += warps[w];
  }
  return before;
}

// kBlocks blocks per list. Each adds up all experts, then writes its part of the list.
__global__ void __launch_bounds__(kThreads)
    build_kernel(Lists lists, int experts, int clusters, const int32_t* __restrict__ count_E, const int32_t* __restrict__ start_E) {
  extern __shared__ int prefix[];
  __shared__ uint64_t warps[kThreads / 32];
  const TaskList& list = lists.list[blockIdx.y];
  int *first = prefix, *light = prefix + experts + 1;
  uint64_t running = 0;  // tasks, and above them light ones
  for (int base = 0; base <= experts; base += kThreads) {
    const int e = base + threadIdx.x;
    const TaskGrid grid = e < experts ? task_grid(list, count_E[e]) : TaskGrid{};
    uint64_t all;
    const uint64_t before = running + sum_before(static_cast<uint64_t>(grid.light) << 32 | static_cast<uint32_t>(grid.total), all, warps);
    running += all;
    if (e <= experts) {
      first[e] = static_cast<int>(before & 0xffffffffu);
      light[e] = static_cast<int>(before >> 32);
    }
  }
  __syncthreads();
  const ListOrder order = {first, light, experts, clusters};
  const int count = order.count();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    list.num_tasks[kWhole] = count;
    if (list.cut.front > 0) list.num_tasks[kFront] = list.cut.in_front(count), list.num_tasks[kBack] = count - list.cut.in_front(count);
  }
  for (int task = blockIdx.x * kThreads + threadIdx.x; task < count; task += kBlocks * kThreads) {
    const int e = order.expert_of(task), rows = count_E[e];
    list.tasks[list.cut.place(order.place(task, e), count)] = make_task(list, task_grid(list, rows), task - first[e], e, start_E[e], rows);
  }
}

// Of more than kMostOrdered experts, all layers of a stack: one block per expert and list adds up the tasks of the experts before it, then writes its
// own, in the order of the experts.
__global__ void __launch_bounds__(kThreads)
    build_stack_kernel(Lists lists, int experts, const int32_t* __restrict__ count_E, const int32_t* __restrict__ start_E) {
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

// Clusters that run a product of Hopper: a block on each multiprocessor, in pairs. Where fewer fit, lists are in another order than the best.
cudaError_t count_clusters(int* clusters) {
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  *clusters = std::max(sms / 2, 1);
  return error;
}

}  // namespace

Status build_tasks(int64_t experts, const int32_t* count_E, const int32_t* start_E, const TaskList* lists, int num_lists,
                   cudaStream_t stream) {
  if (num_lists < 1 || num_lists > kMaxLists) return {"build_tasks: num_lists is " + std::to_string(num_lists)};
  Lists all = {};
  for (int i = 0; i < num_lists; ++i) all.list[i] = lists[i];
  if (experts > kMostOrdered) {
    build_stack_kernel<<<dim3(static_cast<unsigned>(experts), static_cast<unsigned>(num_lists)), kThreads, 0, stream>>>(
        all, static_cast<int>(experts), count_E, start_E);
    return launched("build_tasks");
  }
  const size_t shared = 2 * sizeof(int) * (static_cast<size_t>(experts) + 1);
  int clusters = 0;
  const cudaError_t error = count_clusters(&clusters);
  if (error != cudaSuccess) return failed("build_tasks", error);
  build_kernel<<<dim3(kBlocks, static_cast<unsigned>(num_lists)), kThreads, shared, stream>>>(all, static_cast<int>(experts), clusters, count_E, start_E);
  return launched("build_tasks");
}

}  // namespace moe
