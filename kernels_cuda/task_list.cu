// Builds task lists: expert by expert; inside an expert, groups of up to 16 row tiles, all column tiles of a group before the next
// (so that what runs together reads few distinct rows and columns from memory); row tiles innermost. Neighbouring row tiles pair
// up and share weights; a last odd one pairs along the columns and shares its rows.
#include "task_list.h"

#include <cuda_runtime.h>

#include "gemm_resident.h"
#include "gemm_tokens_n.h"
#include "kernel_check.h"

namespace moe {
namespace {

constexpr int kThreads = 256;
constexpr int kTileM = 128;
constexpr int kTileTokens = TokensNConfig::kTokens;
constexpr int kStripRows = ResidentConfig::kStripTiles * kTileM;
constexpr int kGroupPairs = 8;

struct Lists {
  TaskList list[kMaxLists];
};

__host__ __device__ int div_up(int a, int b) { return (a + b - 1) / b; }

struct Count {
  int m_pairs, n_tiles, odd, halves, total;
};

__host__ __device__ Count count_tasks(const TaskList& list, int count) {
  Count c;
  const bool wgrad = is_wgrad(list.kind);
  const int m_tiles = div_up(wgrad ? list.m_extent : count, kTileM);
  c.halves = list.kind == kWgradGateUp ? 2 : 1;
  c.m_pairs = m_tiles / 2;
  c.odd = m_tiles % 2;
  c.n_tiles = div_up(list.n_extent, list.tile_n);
  if (list.tokens_on_n || list.strips) {  // everything pairs along the columns
    c.m_pairs = 0;
    c.odd = list.strips ? div_up(list.m_extent, kStripRows) : div_up(count, kTileTokens);
  }
  const bool none = wgrad && count == 0 && list.skip_empty;
  c.total = none ? 0 : c.halves * (c.m_pairs * c.n_tiles + c.odd * div_up(c.n_tiles, 2));
  return c;
}

__device__ Task make_task(const TaskList& list, const Count& c, int i, int expert, int start, int rows) {
  const int per_half = c.total / c.halves;
  const int half = i / per_half;
  int j = i % per_half;
  int m_pair, n_tile, tile_m = 2 * kTileM;
  const bool along_m = j < c.m_pairs * c.n_tiles;
  if (along_m) {
    const int group = j / (kGroupPairs * c.n_tiles);
    const int in_group = min(kGroupPairs, c.m_pairs - group * kGroupPairs);
    j -= group * kGroupPairs * c.n_tiles;
    m_pair = group * kGroupPairs + j % in_group;
    n_tile = j / in_group;
  } else if (list.tokens_on_n || list.strips) {
    tile_m = list.strips ? kStripRows : kTileTokens;
    m_pair = j % c.odd;
    n_tile = 2 * (j / c.odd);
  } else {
    m_pair = c.m_pairs;
    n_tile = 2 * (j - c.m_pairs * c.n_tiles);
  }
  const bool wgrad = is_wgrad(list.kind);
  const int m0 = tile_m * m_pair;
  Task task;
  task.kind = list.kind;
  task.pair = along_m ? kPairM : kPairN;
  task.half = static_cast<uint8_t>(half);
  task.unused = 0;
  task.expert = expert;
  task.row0 = start + (wgrad ? 0 : m0);
  task.rows = wgrad ? rows : rows - m0;
  task.m0 = wgrad ? m0 : 0;
  task.n0 = n_tile * list.tile_n;
  task.wait = -1;
  task.signal = -1;
  return task;
}

// One block per expert and list: adds up the tasks of the experts before it, then writes its own.
__global__ void __launch_bounds__(kThreads)
    build_kernel(Lists lists, int experts, const int32_t* __restrict__ count_E, const int32_t* __restrict__ start_E) {
  const TaskList& list = lists.list[blockIdx.y];
  const int expert = blockIdx.x;
  __shared__ int first_task;
  if (threadIdx.x == 0) first_task = 0;
  __syncthreads();
  int before = 0;
  for (int e = threadIdx.x; e < expert; e += kThreads) before += count_tasks(list, count_E[e]).total;
  atomicAdd(&first_task, before);  // integers: the sum has no order
  __syncthreads();
  const int rows = count_E[expert];
  const Count own = count_tasks(list, rows);
  if (expert == experts - 1 && threadIdx.x == 0) *list.num_tasks = first_task + own.total;
  for (int i = threadIdx.x; i < own.total; i += kThreads) {
    list.tasks[first_task + i] = make_task(list, own, i, expert, start_E[expert], rows);
  }
}

}  // namespace

int64_t max_tasks(const LayerShape& shape, const TaskList& list) {
  const int64_t n_tiles = div_up(list.n_extent, list.tile_n);
  if (is_wgrad(list.kind)) {
    const int64_t m_tiles = div_up(list.m_extent, kTileM);
    return shape.experts * (list.kind == kWgradGateUp ? 2 : 1) * (m_tiles / 2 * n_tiles + m_tiles % 2 * ((n_tiles + 1) / 2));
  }
  if (list.tokens_on_n) return (shape.rows / kTileTokens + shape.experts) * ((n_tiles + 1) / 2);
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
