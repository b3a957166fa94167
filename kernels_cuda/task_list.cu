// Builds task lists: expert by expert; inside an expert, groups of up to 16 row tiles, all column tiles of a group before the next
// (so that what runs together reads few distinct rows and columns from memory); row tiles innermost. Neighbouring row tiles pair
// up and share weights; a last odd one pairs along the columns and shares its rows.
#include "task_list.h"

#include <cuda_runtime.h>

#include "kernel_check.h"

namespace moe {
namespace {

constexpr int kThreads = 256;
constexpr int kTileM = 128;
constexpr int kGroupPairs = 8;

struct Lists {
  TaskList list[kMaxLists];
};

__host__ __device__ int div_up(int a, int b) { return (a + b - 1) / b; }

struct Count {
  int m_pairs, n_tiles, odd, halves, total;
};

__host__ __device__ Count count_tasks(const TaskPart& part, int count) {
  Count c;
  const bool wgrad = is_wgrad(part.kind);
  const int m_tiles = div_up(wgrad ? part.m_extent : count, kTileM);
  c.halves = part.kind == kWgradGateUp ? 2 : 1;
  c.m_pairs = m_tiles / 2;
  c.odd = m_tiles % 2;
  c.n_tiles = div_up(part.n_extent, part.tile_n);
  const bool none = wgrad && count == 0 && part.skip_empty;
  c.total = none ? 0 : c.halves * (c.m_pairs * c.n_tiles + c.odd * div_up(c.n_tiles, 2));
  return c;
}

__device__ Task make_task(const TaskPart& part, const Count& c, int i, int expert, int start, int rows) {
  const int per_half = c.total / c.halves;
  const int half = i / per_half;
  int j = i % per_half;
  int m_pair, n_tile;
  const bool along_m = j < c.m_pairs * c.n_tiles;
  if (along_m) {
    const int group = j / (kGroupPairs * c.n_tiles);
    const int in_group = min(kGroupPairs, c.m_pairs - group * kGroupPairs);
    j -= group * kGroupPairs * c.n_tiles;
    m_pair = group * kGroupPairs + j % in_group;
    n_tile = j / in_group;
  } else {
    m_pair = c.m_pairs;
    n_tile = 2 * (j - c.m_pairs * c.n_tiles);
  }
  const bool wgrad = is_wgrad(part.kind);
  const int m0 = 2 * kTileM * m_pair;
  Task task;
  task.kind = part.kind;
  task.pair = along_m ? kPairM : kPairN;
  task.half = static_cast<uint8_t>(half);
  task.unused = 0;
  task.expert = expert;
  task.row0 = start + (wgrad ? 0 : m0);
  task.rows = wgrad ? rows : rows - m0;
  task.m0 = wgrad ? m0 : 0;
  task.n0 = n_tile * part.tile_n;
  task.wait = -1;
  task.signal = -1;
  return task;
}

// One block per expert and list: adds up the tasks of the experts before it, then writes its own.
__global__ void __launch_bounds__(kThreads) build_kernel(Lists lists, int experts, const int32_t* __restrict__ count_E,
                                                         const int32_t* __restrict__ start_E) {
  const TaskList& list = lists.list[blockIdx.y];
  const int expert = blockIdx.x;
  __shared__ int before[3], total[3];  // of each part: tasks of earlier experts, tasks of all experts
  if (threadIdx.x < 3) before[threadIdx.x] = total[threadIdx.x] = 0;
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    for (int p = 0; p < list.num_parts; ++p) {
      const int tasks = count_tasks(list.parts[p], count_E[e]).total;
      atomicAdd(&total[p], tasks);  // integers: the sum has no order
      if (e < expert) atomicAdd(&before[p], tasks);
    }
  }
  __syncthreads();
  if (expert == 0 && threadIdx.x == 0) *list.num_tasks = total[0] + total[1] + total[2];

  const int rows = count_E[expert];
  Count own[3] = {};
  for (int p = 0; p < list.num_parts; ++p) own[p] = count_tasks(list.parts[p], rows);
  const int64_t first = own[0].total, others = own[1].total + own[2].total;
  for (int p = 0; p < list.num_parts; ++p) {
    for (int i = threadIdx.x; i < own[p].total; i += kThreads) {
      int64_t at;
      if (!list.interleave) {
        at = before[p] + i + (p > 0 ? total[0] : 0) + (p > 1 ? total[1] : 0);
      } else {
        at = before[0] + before[1] + before[2];
        if (p == 0) {  // the i-th of the first kind comes after i others / first others
          at += i + i * others / first;
        } else {
          const int64_t j = i + (p == 2 ? own[1].total : 0);
          at += j + min(first, ((j + 1) * first + others - 1) / others);
        }
      }
      list.tasks[at] = make_task(list.parts[p], own[p], i, expert, start_E[expert], rows);
    }
  }
}

}  // namespace

int64_t max_tasks(const LayerShape& shape, const TaskPart& part) {
  const int64_t n_tiles = div_up(part.n_extent, part.tile_n);
  if (is_wgrad(part.kind)) {
    const int64_t m_tiles = div_up(part.m_extent, kTileM);
    return shape.experts * (part.kind == kWgradGateUp ? 2 : 1) * (m_tiles / 2 * n_tiles + m_tiles % 2 * ((n_tiles + 1) / 2));
  }
  // Every expert may end in an odd tile, whose pairs along N round up once more.
  return (shape.rows / kTileM * n_tiles + 1) / 2 + shape.experts;
}

Status build_tasks(const LayerShape& shape, const Plan& plan, const TaskList* lists, int num_lists, cudaStream_t stream) {
  if (num_lists < 1 || num_lists > kMaxLists) return {"build_tasks: num_lists is " + std::to_string(num_lists)};
  Lists all = {};
  for (int i = 0; i < num_lists; ++i) all.list[i] = lists[i];
  build_kernel<<<dim3(static_cast<unsigned>(shape.experts), static_cast<unsigned>(num_lists)), kThreads, 0, stream>>>(
      all, static_cast<int>(shape.experts), plan.count_E, plan.start_E);
  return launched("build_tasks");
}

}  // namespace moe
