// Schedule on the GPU: a stable counting sort of slots by expert, in two kernels and without host synchronisation. Integer work
// only; every position follows from counts and prefixes, so no order of arrival can show in the result.
#include <cuda_runtime.h>

#include "kernel_check.h"
#include "moe.h"

namespace moe {
namespace {

constexpr int kBlockSlots = 1024;
constexpr int kWarps = kBlockSlots / 32;
constexpr int kMaxExperts = 4096;  // a warp-by-expert table of one byte each must fit in shared memory

__device__ int local_expert(const int32_t* expert_TxK, int64_t slot, int64_t slots, int first, int experts) {
  if (slot >= slots) return -1;
  int e = expert_TxK[slot] - first;
  return e >= 0 && e < experts ? e : -1;
}

// count_BxE: slots of each expert in each block of 1024; also marks every row as padding.
__global__ void __launch_bounds__(kBlockSlots)
    count_slots(const int32_t* __restrict__ expert_TxK, int64_t slots, int first, int experts, int32_t* __restrict__ count_BxE,
                int32_t* __restrict__ slot_M, int64_t rows) {
  extern __shared__ int32_t histogram[];
  for (int e = threadIdx.x; e < experts; e += kBlockSlots) histogram[e] = 0;
  __syncthreads();
  int e = local_expert(expert_TxK, static_cast<int64_t>(blockIdx.x) * kBlockSlots + threadIdx.x, slots, first, experts);
  if (e >= 0) atomicAdd(&histogram[e], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < experts; i += kBlockSlots) count_BxE[static_cast<int64_t>(blockIdx.x) * experts + i] = histogram[i];
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kBlockSlots + threadIdx.x; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kBlockSlots) {
    slot_M[row] = -1;
  }
}

__device__ int64_t block_exclusive_sum(int64_t value, int64_t* warp_sums) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t sum = value;
  for (int d = 1; d < 32; d *= 2) {
    int64_t other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int64_t w = warp_sums[lane];
    for (int d = 1; d < 32; d *= 2) {
      int64_t other = __shfl_up_sync(0xffffffffu, w, d);
      if (lane >= d) w += other;
    }
    warp_sums[lane] = w;
  }
  __syncthreads();
  int64_t before = warp > 0 ? warp_sums[warp - 1] : 0;
  __syncthreads();
  return before + sum - value;
}

// Every block derives the expert starts again from the counts (a few microseconds, instead of a third kernel), then places its
// own slots: row = start + slots of earlier blocks + earlier warps + earlier lanes.
__global__ void __launch_bounds__(kBlockSlots)
    place_slots(const int32_t* __restrict__ expert_TxK, int64_t slots, int first, int experts, const int32_t* __restrict__ count_BxE,
                int capacity, int64_t rows, Plan plan) {
  extern __shared__ int32_t shared[];
  int32_t* start = shared;             // [experts]
  int32_t* limit = start + experts;    // [experts] rows after capacity
  int32_t* before = limit + experts;   // [experts] slots of earlier blocks
  uint8_t* warp_count = reinterpret_cast<uint8_t*>(before + experts);  // [kWarps][experts]
  __shared__ int64_t warp_sums[32];
  const int blocks = gridDim.x;

  int64_t running = 0;  // padded rows of the experts in earlier rounds of 1024
  for (int base = 0; base < experts; base += kBlockSlots) {
    int e = base + threadIdx.x;
    int64_t total = 0;
    int64_t earlier = 0;
    if (e < experts) {
      for (int b = 0; b < blocks; ++b) {
        int c = count_BxE[static_cast<int64_t>(b) * experts + e];
        if (b < static_cast<int>(blockIdx.x)) earlier += c;
        total += c;
      }
    }
    int64_t kept = total < capacity ? total : capacity;
    int64_t padded = (kept + kGroupRows - 1) / kGroupRows * kGroupRows;
    int64_t begin = running + block_exclusive_sum(padded, warp_sums);
    int64_t end_of_round = warp_sums[31];
    running += end_of_round;
    if (e < experts) {
      // Never past M: only reachable when a token names an expert twice, or with a caller's own smaller M.
      if (begin > rows) begin = rows;
      if (kept > rows - begin) kept = rows - begin;
      start[e] = static_cast<int32_t>(begin);
      limit[e] = static_cast<int32_t>(kept);
      before[e] = static_cast<int32_t>(earlier);
      if (blockIdx.x == 0) {
        plan.count_E[e] = static_cast<int32_t>(kept);
        plan.start_E[e] = static_cast<int32_t>(begin);
        plan.routed_E[e] = static_cast<int32_t>(total);
      }
    }
    __syncthreads();
  }

  for (int i = threadIdx.x; i < kWarps * experts; i += kBlockSlots) warp_count[i] = 0;
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kBlockSlots + threadIdx.x;
  const int e = local_expert(expert_TxK, slot, slots, first, experts);
  const unsigned peers = __match_any_sync(0xffffffffu, e);
  const int rank_in_warp = __popc(peers & ((1u << lane) - 1u));
  if (e >= 0 && rank_in_warp == 0) warp_count[warp * experts + e] = static_cast<uint8_t>(__popc(peers));
  __syncthreads();
  if (slot >= slots) return;
  int32_t row = -1;
  if (e >= 0) {
    int rank = before[e] + rank_in_warp;
    for (int w = 0; w < warp; ++w) rank += warp_count[w * experts + e];
    if (rank < limit[e]) {
      row = start[e] + rank;
      plan.slot_M[row] = static_cast<int32_t>(slot);
    }
  }
  plan.row_TxK[slot] = row;
}

int64_t num_blocks(const LayerShape& s) {
  int64_t blocks = (s.tokens * s.top_k + kBlockSlots - 1) / kBlockSlots;
  return blocks > 0 ? blocks : 1;
}

}  // namespace

int64_t rows_bound(int64_t tokens, int64_t top_k, int64_t experts) {
  int64_t rows = tokens * (top_k < experts ? top_k : experts) + (kGroupRows - 1) * experts;
  return (rows + kGroupRows - 1) / kGroupRows * kGroupRows;
}

size_t schedule_workspace_bytes(const LayerShape& shape) {
  return static_cast<size_t>(num_blocks(shape)) * static_cast<size_t>(shape.experts) * sizeof(int32_t);
}

Status schedule(const LayerShape& shape, const int32_t* expert_TxK, int32_t first_expert, int32_t capacity, const Plan& plan,
                void* workspace, cudaStream_t stream) {
  if (shape.experts < 1 || shape.experts > kMaxExperts) {
    return {"experts is " + std::to_string(shape.experts) + ", must be 1 to " + std::to_string(kMaxExperts)};
  }
  if (shape.rows % kGroupRows != 0 || shape.rows > INT32_MAX) {
    return {"rows is " + std::to_string(shape.rows) + ", must be a multiple of 128 below 2^31"};
  }
  if (shape.tokens * shape.top_k > INT32_MAX) {
    return {"tokens * top_k is " + std::to_string(shape.tokens * shape.top_k) + ", must be below 2^31"};
  }
  if (capacity < 0) return {"capacity is " + std::to_string(capacity) + ", must not be negative"};
  const int experts = static_cast<int>(shape.experts);
  const int64_t slots = shape.tokens * shape.top_k;
  const unsigned blocks = static_cast<unsigned>(num_blocks(shape));
  auto* count_BxE = static_cast<int32_t*>(workspace);
  count_slots<<<blocks, kBlockSlots, experts * sizeof(int32_t), stream>>>(expert_TxK, slots, first_expert, experts, count_BxE, plan.slot_M,
                                                                           shape.rows);
  Status status = launched("count_slots");
  if (!status.ok()) return status;
  const int shared_bytes = experts * (3 * static_cast<int>(sizeof(int32_t)) + kWarps);
  if (shared_bytes > 48 * 1024) {
    cudaError_t error = cudaFuncSetAttribute(place_slots, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return failed("place_slots", error);
  }
  place_slots<<<blocks, kBlockSlots, shared_bytes, stream>>>(expert_TxK, slots, first_expert, experts, count_BxE, capacity, shape.rows,
                                                             plan);
  return launched("place_slots");
}

}  // namespace moe
