// Sums over an expert's rows, for the gradients of its biases, and a dot product per row. All are bound by memory, and only layers with
// biases run them. Every sum has one owner and one order.
#include "bias.h"

#include <cuda_runtime.h>

#include "kernel_check.h"

namespace moe {
namespace {

constexpr int kLanes = 32;    // of a block: two columns each
constexpr int kGroups = 8;    // of rows: group g sums rows g, g + 8, ... in order, then the groups are added in order
constexpr int kThreads = kLanes * kGroups;
constexpr int kRowBlocks = 32;  // blocks that share the rows of an expert in weight_kernel

__device__ float2 unpack(uint32_t packed) { return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)); }

// Where a row of an expert lies, and its factor.
struct DispatchedRows {  // rows_MxN
  const uint16_t* rows_MxN;
  int64_t columns;
  __device__ const uint16_t* at(int64_t row) const { return rows_MxN + row * columns; }
  __device__ float factor(int64_t) const { return 1.0f; }
};
struct TokenRows {  // weight * dy_TxD
  const uint16_t* dy_TxD;
  const float* weight_TxK;
  const int32_t* slot_M;
  int64_t columns;
  int top_k;
  __device__ const uint16_t* at(int64_t row) const { return dy_TxD + static_cast<int64_t>(slot_M[row] / top_k) * columns; }
  __device__ float factor(int64_t row) const { return weight_TxK[slot_M[row]]; }
};

// out[expert] = sum of the expert's rows, 64 columns a block.
template <class Rows>
__global__ void __launch_bounds__(kThreads)
    column_sum_kernel(Rows rows, float* __restrict__ out, int64_t out_pitch, bool accumulate, const int32_t* __restrict__ count_E,
                      const int32_t* __restrict__ start_E) {
  const int expert = blockIdx.x, group = threadIdx.x / kLanes;
  const int64_t column = 64 * static_cast<int64_t>(blockIdx.y) + 2 * (threadIdx.x % kLanes);
  const int count = count_E[expert];
  const int64_t first = start_E[expert];
  if (count == 0 && accumulate) return;
  float2 sum = make_float2(0.0f, 0.0f);
  if (column < rows.columns) {
    for (int r = group; r < count; r += kGroups) {
      const float2 value = unpack(*reinterpret_cast<const uint32_t*>(rows.at(first + r) + column));
      const float factor = rows.factor(first + r);
      sum.x = __fmaf_rn(factor, value.x, sum.x);
      sum.y = __fmaf_rn(factor, value.y, sum.y);
    }
  }
  __shared__ float2 sums[kThreads];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (group != 0 || column >= rows.columns) return;
  float2* to = reinterpret_cast<float2*>(out + expert * out_pitch + column);
  float2 total = accumulate ? *to : make_float2(0.0f, 0.0f);
  for (int g = 0; g < kGroups; ++g) {
    total.x = __fadd_rn(total.x, sums[g * kLanes + threadIdx.x].x);
    total.y = __fadd_rn(total.y, sums[g * kLanes + threadIdx.x].y);
  }
  *to = total;
}

// One warp per row: lanes sum their columns in order, then the lanes are added as a tree.
__global__ void __launch_bounds__(kThreads)
    weight_kernel(const uint16_t* __restrict__ dy_TxD, const float* __restrict__ b_down_ExD, float* __restrict__ partial_M, int d_model,
                  int top_k, const int32_t* __restrict__ slot_M, const int32_t* __restrict__ count_E, const int32_t* __restrict__ start_E) {
  const int expert = blockIdx.x, lane = threadIdx.x % 32;
  const int count = count_E[expert];
  const float* bias = b_down_ExD + static_cast<int64_t>(expert) * d_model;
  for (int r = blockIdx.y * kGroups + threadIdx.x / 32; r < count; r += kRowBlocks * kGroups) {
    const int64_t row = static_cast<int64_t>(start_E[expert]) + r;
    const uint16_t* dy = dy_TxD + static_cast<int64_t>(slot_M[row] / top_k) * d_model;
    float sum = 0.0f;
    for (int d = 2 * lane; d < d_model; d += 64) {
      const float2 value = unpack(*reinterpret_cast<const uint32_t*>(dy + d));
      sum = __fmaf_rn(value.x, bias[d], sum);
      sum = __fmaf_rn(value.y, bias[d + 1], sum);
    }
    for (int step = 16; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
    if (lane == 0) partial_M[row] = sum;
  }
}

template <class Rows>
void column_sum(const LayerShape& s, const Plan& plan, const Rows& rows, float* out, int64_t out_pitch, bool accumulate, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(s.experts), static_cast<unsigned>((rows.columns + 63) / 64));
  column_sum_kernel<<<grid, kThreads, 0, stream>>>(rows, out, out_pitch, accumulate, plan.count_E, plan.start_E);
}

}  // namespace

Status bias_gradients(const LayerShape& s, const Plan& plan, const uint16_t* d_gate_up_2xMxF, const uint16_t* dy_TxD,
                      const float* weight_TxK, float* db_gate_up_Ex2xF, float* db_down_ExD, bool accumulate, cudaStream_t stream) {
  for (int64_t half = 0; half < 2; ++half) {
    const DispatchedRows rows = {d_gate_up_2xMxF + half * s.rows * s.width, s.width};
    column_sum(s, plan, rows, db_gate_up_Ex2xF + half * s.width, 2 * s.width, accumulate, stream);
  }
  const TokenRows rows = {dy_TxD, weight_TxK, plan.slot_M, s.d_model, static_cast<int>(s.top_k)};
  column_sum(s, plan, rows, db_down_ExD, s.d_model, accumulate, stream);
  return launched("bias_gradients");
}

Status bias_weight_partial(const LayerShape& s, const Plan& plan, const uint16_t* dy_TxD, const float* b_down_ExD, float* partial_M,
                           cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(s.experts), kRowBlocks);
  weight_kernel<<<grid, kThreads, 0, stream>>>(dy_TxD, b_down_ExD, partial_M, static_cast<int>(s.d_model), static_cast<int>(s.top_k),
                                               plan.slot_M, plan.count_E, plan.start_E);
  return launched("bias_weight_partial");
}

}  // namespace moe
