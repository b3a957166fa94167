// The quantiser along rows alone: a stream over memory without shared memory, and the dispatch that quantises on the way. See
// quantize.h. A lane holds 8 neighbouring elements, four lanes a block of 32, sixteen a group of 128.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernel_check.h"
#include "quantize.h"
#include "quantize_gathered.h"
#include "rows.h"

namespace moe {

Status quantize_tiles(const QuantizeSource& source, const MxOutput& by_rows, const MxOutput& by_columns, cudaStream_t stream);

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // independent loads of a thread

template <class T>
struct Eight;

template <>
struct Eight<__nv_bfloat16> {
  uint4 v;
  __device__ __forceinline__ void load(const __nv_bfloat16* at) { v = __ldcs(reinterpret_cast<const uint4*>(at)); }
  __device__ __forceinline__ void clear() { v = make_uint4(0, 0, 0, 0); }
  __device__ __forceinline__ uint32_t word(int p) const { return p == 0 ? v.x : p == 1 ? v.y : p == 2 ? v.z : v.w; }
  __device__ __forceinline__ float value(int k) const { return __uint_as_float(k % 2 ? word(k / 2) & 0xFFFF0000u : word(k / 2) << 16); }
  __device__ __forceinline__ uint32_t amax() const {
    uint32_t m = 0;
#pragma unroll
    for (int p = 0; p < 4; ++p) m = __vmaxu2(m, word(p) & 0x7FFF7FFFu);
    return max(m & 0xFFFF0000u, m << 16);
  }
};

template <>
struct Eight<float> {
  float4 a, b;
  __device__ __forceinline__ void load(const float* at) {
    a = __ldcs(reinterpret_cast<const float4*>(at));
    b = __ldcs(reinterpret_cast<const float4*>(at) + 1);
  }
  __device__ __forceinline__ void clear() { a = b = make_float4(0, 0, 0, 0); }
  __device__ __forceinline__ float value(int k) const {
    const float4& f = k < 4 ? a : b;
    return k % 4 == 0 ? f.x : k % 4 == 1 ? f.y : k % 4 == 2 ? f.z : f.w;
  }
  __device__ __forceinline__ uint32_t amax() const {
    uint32_t m = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) m = max(m, __float_as_uint(value(k)) & 0x7FFFFFFFu);
    return m;
  }
};

struct Quantized {
  uint2 elements;
  uint32_t code;    // of the block of 32
  uint32_t common;  // kAligned: of the 128
};

// All 32 lanes take part; lanes without data hold zeros.
template <bool kRebase, class E>
__device__ __forceinline__ Quantized quantize8(const E& x) {
  uint32_t m = x.amax();
  m = max(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
  m = max(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
  Quantized q;
  q.code = mx::scale_code(m);
  const float scale = mx::reciprocal_scale(q.code);
  uint32_t factor = 0;
  if (kRebase) {
    q.common = q.code == mx::kPoison ? 0 : q.code;
    q.common = max(q.common, __shfl_xor_sync(0xFFFFFFFFu, q.common, 4));
    q.common = max(q.common, __shfl_xor_sync(0xFFFFFFFFu, q.common, 8));
    factor = mx::rebase_factor(q.code, q.common);
  }
  uint32_t half[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    half[p] = mx::pack_e4m3(x.value(2 * p) * scale, x.value(2 * p + 1) * scale);
    if (kRebase) half[p] = mx::rebase_e4m3(half[p], factor);
  }
  q.elements = make_uint2(half[0] | half[1] << 16, half[2] | half[3] << 16);
  return q;
}

// kMx along rows. Vectors (8 elements) of the flattened source in order; with C a multiple of 32 a block of 32 is always four lanes of one
// warp, and plain codes are in the order of the blocks.
template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(const T* __restrict__ source, uint2* __restrict__ elements, uint8_t* __restrict__ codes, int64_t vectors) {
  // A warp takes 32 * kUnroll neighbouring vectors; this lane's first one.
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * (32 * kUnroll) + threadIdx.x % 32;
  Eight<T> x[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + 32 * i;
    if (at < vectors) {
      x[i].load(source + 8 * at);
    } else {
      x[i].clear();
    }
  }
  uint32_t code = 0;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + 32 * i;
    const Quantized q = quantize8<false>(x[i]);
    if (at < vectors) __stcs(elements + at, q.elements);
    if (threadIdx.x % 4 == i) code = q.code;
  }
  // A warp's 32 codes are neighbours: lane 4 b + i has that of block b of its i-th load.
  const int64_t block = first / 4 + 8 * (threadIdx.x % 4);
  if (block < vectors / 4) codes[block] = code;
}

constexpr int kPaddingBlocks = 8;

// kByToken: elements_V are of tokens; else of rows. token_codes_TxP: of each 128 of a token's row.
template <bool kByToken>
__global__ void __launch_bounds__(kThreads)
    dispatch_quantized_kernel(const __nv_bfloat16* __restrict__ x_TxD, uint2* __restrict__ elements_V, uint8_t* __restrict__ token_codes_TxP,
                              int code_pitch, int zero_to, uint4* __restrict__ rows_MxV, int zero_rows_to, int vectors, int experts, int top_k, Plan plan) {
  const int padding_blocks = experts * kPaddingBlocks;
  if (static_cast<int>(blockIdx.x) < padding_blocks) {
    const int expert = blockIdx.x / kPaddingBlocks;
    const int count = plan.count_E[expert];
    const int64_t first = static_cast<int64_t>(plan.start_E[expert]) + count;
    auto each_vector = [&](int end, auto clear) {  // of padding up to a multiple of so many rows: what lies past it is never read
      const int64_t total = static_cast<int64_t>((count + end - 1) / end * end - count) * vectors;
      for (int64_t i = static_cast<int64_t>(blockIdx.x % kPaddingBlocks) * kThreads + threadIdx.x; i < total; i += kPaddingBlocks * kThreads) {
        clear(first * vectors + i);
      }
    };
    if (!kByToken) each_vector(zero_to, [&](int64_t at) { elements_V[at] = make_uint2(0, 0); });
    if (rows_MxV != nullptr) each_vector(zero_rows_to, [&](int64_t at) { rows_MxV[at] = make_uint4(0, 0, 0, 0); });
    return;
  }
  const int64_t token = blockIdx.x - padding_blocks;
  extern __shared__ int32_t rows[];
  for (int s = threadIdx.x; s < top_k; s += kThreads) rows[s] = plan.row_TxK[token * top_k + s];
  __syncthreads();
  for (int g = (vectors + 15) / 16 + threadIdx.x; g < code_pitch; g += kThreads) token_codes_TxP[token * code_pitch + g] = 0;
  for (int v0 = threadIdx.x / 32 * 32; v0 < vectors; v0 += kThreads) {  // whole warps
    const int v = v0 + threadIdx.x % 32;
    Eight<__nv_bfloat16> x;
    if (v < vectors) {
      x.v = __ldg(reinterpret_cast<const uint4*>(x_TxD) + token * vectors + v);
    } else {
      x.clear();
    }
    const Quantized q = quantize8<true>(x);
    if (v >= vectors) continue;
    if (v % 16 == 0) token_codes_TxP[token * code_pitch + v / 16] = static_cast<uint8_t>(q.common);
    if (kByToken) elements_V[token * vectors + v] = q.elements;
    if (kByToken && rows_MxV == nullptr) continue;
    for (int s = 0; s < top_k; ++s) {
      const int row = rows[s];
      if (row < 0) continue;
      if (!kByToken) elements_V[static_cast<int64_t>(row) * vectors + v] = q.elements;
      if (rows_MxV != nullptr) rows_MxV[static_cast<int64_t>(row) * vectors + v] = x.v;
    }
  }
}

// codes_GxM[g][row] of the row's token, 0 for a row without one; 16 codes a thread.
__global__ void __launch_bounds__(kThreads)
    dispatch_codes_kernel(const uint4* __restrict__ token_codes, int pieces, const int32_t* __restrict__ slot_M, int top_k, int groups,
                          int64_t num_rows, uint8_t* __restrict__ codes_GxM) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= num_rows) return;
  const int slot = slot_M[row], piece = blockIdx.y;
  const uint4 found = slot < 0 ? make_uint4(0, 0, 0, 0) : __ldg(token_codes + static_cast<int64_t>(slot / top_k) * pieces + piece);
  const uint32_t four[4] = {found.x, found.y, found.z, found.w};
  uint8_t* const out = codes_GxM + static_cast<int64_t>(16 * piece) * num_rows + row;
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    if (16 * piece + g < groups) out[g * num_rows] = static_cast<uint8_t>(four[g / 4] >> 8 * (g % 4));
  }
}

// A block per row of one half: 8 elements a thread and step.
__global__ void __launch_bounds__(kThreads)
    dequantize_aligned_kernel(const uint2* __restrict__ elements, const uint8_t* __restrict__ codes, int vectors, int64_t rows,
                              const int32_t* __restrict__ slot_M, uint4* __restrict__ out) {
  const int64_t row = blockIdx.x, half = blockIdx.y;
  if (slot_M[row] < 0) return;
  const int groups = (vectors + 15) / 16;
  for (int v = threadIdx.x; v < vectors; v += kThreads) {
    const uint2 q = elements[(half * rows + row) * vectors + v];
    const float scale = mx::finite_scale_value(codes[(half * groups + v / 16) * rows + row]);
    uint32_t words[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint32_t pair = (p < 2 ? q.x : q.y) >> (16 * (p % 2)) & 0xFFFFu;
      const float lo = mx::from_e4m3(pair & 0xFF) * scale, hi = mx::from_e4m3(pair >> 8) * scale;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[p]) : "f"(hi), "f"(lo));
    }
    out[(half * rows + row) * vectors + v] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Eight scales a thread: four pairs of neighbouring rows, which one lane of a quad will want.
__global__ void __launch_bounds__(kThreads)
    lane_scales_kernel(const uint8_t* __restrict__ codes, int64_t rows, const int32_t* __restrict__ slot_M, uint4* __restrict__ scales) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;  // of the line's eights
  const int64_t group = at / 8 * 64;
  if (group >= rows || slot_M[group] < 0) return;
  const int eighth = static_cast<int>(at % 8);
  const uint8_t* from = codes + blockIdx.y * rows + group + 2 * (eighth / 2) + 32 * (eighth % 2);
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t two = *reinterpret_cast<const uint16_t*>(from + 8 * i);
    pairs[i] = mx::bf16_scales((two & 0xFFu) | (two & 0xFF00u) << 8);
  }
  scales[(blockIdx.y * rows) / 8 + at] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Counts per thread, then per block, then one integer atomic per block and count.
template <class T>
__global__ void __launch_bounds__(kThreads)
    count_losses_kernel(const T* __restrict__ source, int64_t vectors, int vectors_per_row, const int32_t* __restrict__ slot_M, int64_t rows,
                        unsigned long long* __restrict__ counts) {
  unsigned sum[5] = {};  // nonzero, underflowed, saturated, poisoned, elements
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kThreads; base < vectors; base += step) {
    const int64_t at = base + threadIdx.x;
    bool real = at < vectors;
    if (real && slot_M != nullptr) real = slot_M[at / vectors_per_row % rows] >= 0;
    Eight<T> x;
    if (real) {
      x.load(source + 8 * at);
    } else {
      x.clear();
    }
    const Quantized q = quantize8<false>(x);
    if (!real) continue;
    sum[4] += 8;
    if (threadIdx.x % 4 == 0 && q.code == mx::kPoison) ++sum[3];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t magnitude = __float_as_uint(x.value(k)) & 0x7FFFFFFFu;
      const uint32_t byte = (k < 4 ? q.elements.x : q.elements.y) >> (8 * (k % 4)) & 0x7F;
      const bool counted = magnitude > 0 && magnitude < 0x7F800000u;
      sum[0] += counted;
      sum[1] += counted && byte == 0;
      sum[2] += counted && byte == 0x7E;
    }
  }
  __shared__ unsigned totals[5];
  if (threadIdx.x < 5) totals[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const unsigned warp_sum = __reduce_add_sync(0xFFFFFFFFu, sum[i]);
    if (threadIdx.x % 32 == 0) atomicAdd(&totals[i], warp_sum);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(counts + 0, static_cast<unsigned long long>(totals[4]));
    atomicAdd(counts + 1, static_cast<unsigned long long>(totals[0]));
    atomicAdd(counts + 2, static_cast<unsigned long long>(totals[1]));
    atomicAdd(counts + 3, static_cast<unsigned long long>(totals[2]));
    atomicAdd(counts + 4, static_cast<unsigned long long>(totals[4] / 32));
    atomicAdd(counts + 5, static_cast<unsigned long long>(totals[3]));
  }
}

Status check(const QuantizeSource& s, const MxOutput& rows, const MxOutput& columns) {
  auto say = [](const char* name, int64_t value, const char* rule) {
    return Status{std::string("quantize: ") + name + " is " + std::to_string(value) + ", must be " + rule};
  };
  if (s.columns < 32 || s.columns % 32 != 0) return say("columns", s.columns, "a positive multiple of 32 (a block)");
  if (s.columns > (1 << 24)) return say("columns", s.columns, "at most 2^24");
  if (s.rows < 0 || s.rows > INT32_MAX) return say("rows", s.rows, "0 to 2^31 - 1");
  if (s.batch < 0) return say("batch", s.batch, "at least 0");
  if (columns.form != Form::kNone && columns.transposed && s.rows % 16 != 0) {
    return say("rows", s.rows, "a multiple of 16 for transposed elements (16-byte stores)");
  }
  if (s.slot_M != nullptr && s.rows % kGroupRows != 0) return say("rows", s.rows, "a multiple of 128 when grouped");
  if (s.gather < 0 || (s.gather > 0 && (s.slot_M == nullptr || s.batch != 1))) {
    return say("gather", s.gather, "0, or the slots per token of a single matrix with slot_M");
  }
  for (const void* pointer : {s.data, static_cast<const void*>(rows.elements), static_cast<const void*>(columns.elements)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return {"quantize: source and elements must be aligned to 16 bytes"};
  }
  if (s.gather > 0 && reinterpret_cast<uintptr_t>(s.slot_M) % 16 != 0) return {"quantize: slot_M must be aligned to 16 bytes"};  // read in vectors
  for (const MxOutput* out : {&rows, &columns}) {
    const bool needs_codes = out->form != Form::kNone && out->form != Form::kDequantized;
    if (out->form != Form::kNone && out->elements == nullptr) return {"quantize: an output without elements"};
    if (needs_codes && out->codes == nullptr) return {"quantize: an output without codes"};
    if (needs_codes && reinterpret_cast<uintptr_t>(out->codes) % 16 != 0) return {"quantize: codes must be aligned to 16 bytes"};
  }
  return {};
}

template <class T>
Status launch_rows(const QuantizeSource& s, const MxOutput& out, cudaStream_t stream) {
  const int64_t vectors = s.batch * s.rows * (s.columns / 8);
  const int64_t blocks = (vectors + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  if (blocks == 0) return {};
  if (blocks > INT32_MAX) return {"quantize: the source has more than 2^41 elements"};
  quantize_rows_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const T*>(s.data), static_cast<uint2*>(out.elements), out.codes, vectors);
  return launched("quantize_rows");
}

}  // namespace

int64_t code_bytes(const QuantizeSource& s, const MxOutput& out, bool by_rows) {
  const int64_t lines = by_rows ? s.rows : s.columns, elements = by_rows ? s.columns : s.rows;
  const int64_t line_tiles = (lines + 127) / 128, block_tiles = (elements + 127) / 128;
  switch (out.form) {
    case Form::kMx: return s.batch * (out.layout == CodeLayout::kInterleaved ? line_tiles * block_tiles * 512 : lines * ((elements + 31) / 32));
    case Form::kAligned: return s.batch * block_tiles * line_tiles * 128 * (out.layout == CodeLayout::kFragment ? 2 : 1);
    case Form::kAlignedTile: return s.batch * line_tiles * block_tiles;
    default: return 0;
  }
}

Status quantize(const QuantizeSource& s, const MxOutput& by_rows, const MxOutput& by_columns, cudaStream_t stream) {
  const Status bad = check(s, by_rows, by_columns);
  if (!bad.ok()) return bad;
  if (by_rows.form == Form::kMx && by_rows.layout == CodeLayout::kPlain && by_columns.form == Form::kNone && s.slot_M == nullptr) {
    return s.fp32 ? launch_rows<float>(s, by_rows, stream) : launch_rows<__nv_bfloat16>(s, by_rows, stream);
  }
  return quantize_tiles(s, by_rows, by_columns, stream);
}

Status quantize_two(const QuantizeSource (&sources)[2], const MxOutput (&by_columns)[2], cudaStream_t stream) {
  bool together = sources[0].slot_M == sources[1].slot_M && sources[0].gather == sources[1].gather && sources[0].rows == sources[1].rows &&
                  sources[0].columns == sources[1].columns && sources[0].tokens == sources[1].tokens;
  for (int i = 0; i < 2; ++i) {
    const Status bad = check(sources[i], {}, by_columns[i]);
    if (!bad.ok()) return bad;
    together = together && can_keep_tokens(sources[i], {}, by_columns[i]);
  }
  if (together) return quantize_kept_tokens(sources, by_columns, 2, stream);
  const Status status = quantize(sources[0], {}, by_columns[0], stream);
  return status.ok() ? quantize(sources[1], {}, by_columns[1], stream) : status;
}

Status dispatch_quantized(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, const QuantizedTokens& out, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(s.tokens + s.experts * kPaddingBlocks);
  const int top_k = static_cast<int>(s.top_k), pitch = static_cast<int>(token_code_pitch(s.d_model));
  const auto kernel = out.by_token ? dispatch_quantized_kernel<true> : dispatch_quantized_kernel<false>;
  kernel<<<blocks, kThreads, slot_table_bytes(top_k), stream>>>(
      reinterpret_cast<const __nv_bfloat16*>(x_TxD), reinterpret_cast<uint2*>(out.elements), out.token_codes, pitch, out.zero_to,
      reinterpret_cast<uint4*>(out.rows_MxD), out.zero_rows_to, static_cast<int>(s.d_model / 8), static_cast<int>(s.experts), top_k, plan);
  if (const Status status = launched("dispatch_quantized"); !status.ok()) return status;
  const dim3 code_blocks(static_cast<unsigned>((s.rows + kThreads - 1) / kThreads), static_cast<unsigned>(pitch / 16));
  dispatch_codes_kernel<<<code_blocks, kThreads, 0, stream>>>(reinterpret_cast<const uint4*>(out.token_codes), pitch / 16, plan.slot_M, top_k,
                                                              static_cast<int>((s.d_model + 127) / 128), s.rows, out.codes);
  return launched("dispatch_codes");
}

Status lane_scales(const LayerShape& s, const Plan& plan, const uint8_t* codes, int64_t lines, uint16_t* scales, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((s.rows / 8 + kThreads - 1) / kThreads), static_cast<unsigned>(lines));
  lane_scales_kernel<<<grid, kThreads, 0, stream>>>(codes, s.rows, plan.slot_M, reinterpret_cast<uint4*>(scales));
  return launched("lane_scales");
}

Status dequantize_aligned_rows(const LayerShape& s, const Plan& plan, const uint8_t* elements, const uint8_t* codes, int64_t width,
                               int64_t halves, uint16_t* out, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(s.rows), static_cast<unsigned>(halves));
  dequantize_aligned_kernel<<<blocks, kThreads, 0, stream>>>(reinterpret_cast<const uint2*>(elements), codes, static_cast<int>(width / 8),
                                                             s.rows, plan.slot_M, reinterpret_cast<uint4*>(out));
  return launched("dequantize_aligned_rows");
}

Status count_losses(const QuantizeSource& s, uint64_t* counts, cudaStream_t stream) {
  QuantizeSource any_rows = s;  // nothing is written, so rows need not come in whole tiles
  any_rows.slot_M = nullptr;
  const Status bad = check(any_rows, {}, {});
  if (!bad.ok()) return bad;
  if (s.gather != 0) return {"count_losses: works on rows where they lie, gather must be 0"};
  const int64_t vectors = s.batch * s.rows * (s.columns / 8);
  if (vectors == 0) return {};
  const unsigned blocks = static_cast<unsigned>(vectors / kThreads < 2048 ? vectors / kThreads + 1 : 2048);
  auto* sums = reinterpret_cast<unsigned long long*>(counts);
  const int per_row = static_cast<int>(s.columns / 8);
  if (s.fp32) {
    count_losses_kernel<float><<<blocks, kThreads, 0, stream>>>(static_cast<const float*>(s.data), vectors, per_row, s.slot_M, s.rows, sums);
  } else {
    count_losses_kernel<__nv_bfloat16>
        <<<blocks, kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(s.data), vectors, per_row, s.slot_M, s.rows, sums);
  }
  return launched("count_losses");
}

}  // namespace moe
