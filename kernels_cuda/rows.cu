// Dispatch and combine. Both are bound by memory: 16-byte accesses, one token per warp group, no atomics.
#include "rows.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "kernel_check.h"
#include "row_copy.h"

namespace moe {
namespace {

constexpr int kThreads = 256;

// The first E * kPaddingBlocks blocks zero the padding of their expert; they come first, so that no long block is left at the end.
// The others take one token each: its row is read once and written K times.
constexpr int kPaddingBlocks = 8;

__device__ void zero_padding(uint4* rows_MxV, int vectors, const Plan& plan, int zero_to) {
  const int expert = blockIdx.x / kPaddingBlocks;
  const int count = plan.count_E[expert];
  const int64_t first = static_cast<int64_t>(plan.start_E[expert]) + count;
  const int padding = (count + zero_to - 1) / zero_to * zero_to - count;  // what lies past it is never multiplied
  const int64_t total = static_cast<int64_t>(padding) * vectors;
  for (int64_t i = static_cast<int64_t>(blockIdx.x % kPaddingBlocks) * kThreads + threadIdx.x; i < total; i += kPaddingBlocks * kThreads) {
    rows_MxV[first * vectors + i] = make_uint4(0, 0, 0, 0);
  }
}

__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const uint4* __restrict__ x_TxV, uint4* __restrict__ rows_MxV, int vectors, int experts, int top_k, Plan plan,
                    int zero_to) {
  const int padding_blocks = experts * kPaddingBlocks;
  if (static_cast<int>(blockIdx.x) < padding_blocks) {
    zero_padding(rows_MxV, vectors, plan, zero_to);
    return;
  }
  const int64_t token = blockIdx.x - padding_blocks;
  extern __shared__ int32_t rows[];
  for (int s = threadIdx.x; s < top_k; s += kThreads) rows[s] = plan.row_TxK[token * top_k + s];
  __syncthreads();
  for (int v = threadIdx.x; v < vectors; v += kThreads) {
    uint4 value = x_TxV[token * vectors + v];
    for (int s = 0; s < top_k; ++s) {
      if (rows[s] >= 0) rows_MxV[static_cast<int64_t>(rows[s]) * vectors + v] = value;
    }
  }
}

// Rows in front of a cut, a block each, after the padding on both sides of it.
__global__ void __launch_bounds__(kThreads) dispatch_front_kernel(RowCopy copy, int experts, Plan plan, int zero_to) {
  const int vectors = copy.row_bytes / 16, padding_blocks = experts * kPaddingBlocks;
  uint4* rows_MxV = reinterpret_cast<uint4*>(copy.to);
  if (static_cast<int>(blockIdx.x) < padding_blocks) {
    zero_padding(rows_MxV, vectors, plan, zero_to);
    return;
  }
  const int row = blockIdx.x - padding_blocks, slot = copy.slot_M[row];
  if (slot < 0 || row >= cut_row(copy)) return;
  const uint4* token = reinterpret_cast<const uint4*>(copy.from) + static_cast<int64_t>(slot / copy.top_k) * vectors;
  for (int v = threadIdx.x; v < vectors; v += kThreads) rows_MxV[static_cast<int64_t>(row) * vectors + v] = token[v];
}

__device__ void add_scaled(float (&sum)[8], uint4 value, float weight) {
  const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = __fmaf_rn(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
    sum[2 * i + 1] = __fmaf_rn(weight, __uint_as_float(words[i] & 0xffff0000u), sum[2 * i + 1]);
  }
}

__device__ uint32_t pack(float lo, float hi) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  return packed;
}

// One block per token. Loads of up to four slots are in flight together; the sum stays in slot order.
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const uint4* __restrict__ rows_MxV, const float* __restrict__ weight_TxK, uint4* __restrict__ y_TxV, int vectors,
                   int top_k, const int32_t* __restrict__ row_TxK) {
  const int64_t token = blockIdx.x;
  extern __shared__ int32_t shared[];
  int32_t* rows = shared;
  float* weights = reinterpret_cast<float*>(shared + (top_k + 3) / 4 * 4);
  for (int s = threadIdx.x; s < top_k; s += kThreads) {
    rows[s] = row_TxK[token * top_k + s];
    weights[s] = weight_TxK != nullptr ? weight_TxK[token * top_k + s] : 1.0f;
  }
  __syncthreads();
  for (int v = threadIdx.x; v < vectors; v += kThreads) {
    float sum[8] = {};
    for (int s0 = 0; s0 < top_k; s0 += 4) {
      uint4 values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = s0 + i;
        if (s < top_k && rows[s] >= 0) values[i] = __ldcs(&rows_MxV[static_cast<int64_t>(rows[s]) * vectors + v]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = s0 + i;
        if (s < top_k && rows[s] >= 0) add_scaled(sum, values[i], weights[s]);
      }
    }
    y_TxV[token * vectors + v] = make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
  }
}

__global__ void __launch_bounds__(kThreads)
    zero_unrouted_kernel(uint4* __restrict__ y_TxV, int vectors, int64_t tokens, int top_k, const int32_t* __restrict__ row_TxK) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x / 32 * 32;  // 32 tokens a warp
  const int64_t mine = first + threadIdx.x % 32;
  bool routed = mine >= tokens;
  for (int s = 0; s < top_k && !routed; ++s) routed = row_TxK[mine * top_k + s] >= 0;
  for (unsigned left = __ballot_sync(0xffffffffu, !routed); left != 0; left &= left - 1) {
    const int64_t token = first + __ffs(left) - 1;
    for (int v = threadIdx.x % 32; v < vectors; v += 32) y_TxV[token * vectors + v] = make_uint4(0, 0, 0, 0);
  }
}

__global__ void __launch_bounds__(kThreads)
    weight_partials_kernel(const float* __restrict__ partial_CxM, float* __restrict__ d_weight_TxK, int64_t slots, int chunks, int64_t rows,
                           const int32_t* __restrict__ row_TxK) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= slots) return;
  const int row = row_TxK[slot];
  float sum = 0.0f;
  if (row >= 0) {
    for (int c = 0; c < chunks; ++c) sum = __fadd_rn(sum, partial_CxM[c * rows + row]);
  }
  d_weight_TxK[slot] = sum;
}

}  // namespace

Status dispatch_rows(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, cudaStream_t stream,
                     int zero_to) {
  const unsigned blocks = static_cast<unsigned>(s.tokens + s.experts * kPaddingBlocks);
  dispatch_kernel<<<blocks, kThreads, slot_table_bytes(s.top_k), stream>>>(
      reinterpret_cast<const uint4*>(x_TxD), reinterpret_cast<uint4*>(rows_MxD), static_cast<int>(s.d_model / 8),
      static_cast<int>(s.experts), static_cast<int>(s.top_k), plan, zero_to);
  return launched("dispatch_rows");
}

Status dispatch_front(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, const TaskList& list,
                      cudaStream_t stream, int zero_to) {
  const int64_t rows = std::min(s.rows, most_rows(list, list.cut.front));
  dispatch_front_kernel<<<static_cast<unsigned>(s.experts * kPaddingBlocks + rows), kThreads, 0, stream>>>(
      row_copy(s, x_TxD, plan, rows_MxD, list), static_cast<int>(s.experts), plan, zero_to);
  return launched("dispatch_front");
}

Status combine_rows(const LayerShape& s, const uint16_t* rows_MxD, const float* weight_TxK, const Plan& plan, uint16_t* y_TxD,
                    cudaStream_t stream) {
  if (s.tokens == 0) return {};
  combine_kernel<<<static_cast<unsigned>(s.tokens), kThreads, 2 * slot_table_bytes(s.top_k), stream>>>(
      reinterpret_cast<const uint4*>(rows_MxD), weight_TxK, reinterpret_cast<uint4*>(y_TxD), static_cast<int>(s.d_model / 8),
      static_cast<int>(s.top_k), plan.row_TxK);
  return launched("combine_rows");
}

Status zero_unrouted(const LayerShape& s, const Plan& plan, uint16_t* y_TxD, cudaStream_t stream) {
  if (s.tokens == 0) return {};
  zero_unrouted_kernel<<<static_cast<unsigned>((s.tokens + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      reinterpret_cast<uint4*>(y_TxD), static_cast<int>(s.d_model / 8), s.tokens, static_cast<int>(s.top_k), plan.row_TxK);
  return launched("zero_unrouted");
}

Status sum_weight_partials(const LayerShape& s, const float* partial_CxM, const Plan& plan, float* d_weight_TxK, cudaStream_t stream,
                           int more) {
  const int64_t slots = s.tokens * s.top_k;
  if (slots == 0) return {};
  weight_partials_kernel<<<static_cast<unsigned>((slots + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      partial_CxM, d_weight_TxK, slots, static_cast<int>((s.width + 127) / 128) + more, s.rows, plan.row_TxK);
  return launched("sum_weight_partials");
}

}  // namespace moe
