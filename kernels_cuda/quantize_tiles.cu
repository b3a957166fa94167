// The quantiser over tiles of 128 x 128: any form along either axis, both from one read. See quantize.h.
//
// A block of 256 threads owns a tile. Warp w covers 32 columns (w % 4) of 64 rows (w / 4); a lane holds 8 rows of 8 columns in
// registers, so that a block along a row is four neighbouring lanes and a block along a column four lanes that lie 4 apart. Codes meet
// in shared memory, where re-basing finds the largest of a group; elements are packed so that eight of them lie along the axis that
// will be contiguous, and leave through swizzled shared memory in whole 128-byte lines.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernel_check.h"
#include "quantize_gathered.h"
#include "quantize_tile.h"

namespace moe {

// quantize_transposed.cu: BF16, transposed columns.
bool has_transposed_form(Form row, Form column);
Status quantize_transposed_tiles(const TileParams& p, Form row, Form column, unsigned blocks, cudaStream_t stream);

namespace {

constexpr int kThreads = 256;
// Byte of a staged tile: line (row or column), byte in the line; 16-byte chunks are swizzled so that neither side meets bank conflicts.
__device__ __forceinline__ int staged(int line, int byte) { return line * kTile + ((byte / 16) ^ ((line / 4) % 8)) * 16 + byte % 16; }

// 8 x 8 values of a lane. FP32 bits of (row i, column c); magnitudes are compared as integers: NaN above Inf above every number.
template <class T>
struct Patch;

template <>
struct Patch<__nv_bfloat16> {
  uint4 v[8];
  __device__ __forceinline__ void load(int i, const __nv_bfloat16* at) { v[i] = __ldg(reinterpret_cast<const uint4*>(at)); }
  __device__ __forceinline__ void clear(int i) { v[i] = make_uint4(0, 0, 0, 0); }
  __device__ __forceinline__ uint32_t word(int i, int pair) const {
    return pair == 0 ? v[i].x : pair == 1 ? v[i].y : pair == 2 ? v[i].z : v[i].w;
  }
  __device__ __forceinline__ float value(int i, int c) const {
    const uint32_t w = word(i, c / 2);
    return __uint_as_float(c % 2 ? w & 0xFFFF0000u : w << 16);
  }
  __device__ __forceinline__ uint32_t row_amax(int i) const {
    uint32_t m = 0;
#pragma unroll
    for (int p = 0; p < 4; ++p) m = __vmaxu2(m, word(i, p) & 0x7FFF7FFFu);
    return max(m & 0xFFFF0000u, m << 16);
  }
  __device__ __forceinline__ void column_amax(uint32_t (&amax)[8]) const {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      uint32_t m = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) m = __vmaxu2(m, word(i, p) & 0x7FFF7FFFu);
      m = __vmaxu2(m, __shfl_xor_sync(0xFFFFFFFFu, m, 4));
      m = __vmaxu2(m, __shfl_xor_sync(0xFFFFFFFFu, m, 8));
      amax[2 * p] = m << 16;
      amax[2 * p + 1] = m & 0xFFFF0000u;
    }
  }
};

template <>
struct Patch<float> {
  float v[8][8];
  __device__ __forceinline__ void load(int i, const float* at) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(at)), b = __ldg(reinterpret_cast<const float4*>(at) + 1);
    v[i][0] = a.x, v[i][1] = a.y, v[i][2] = a.z, v[i][3] = a.w;
    v[i][4] = b.x, v[i][5] = b.y, v[i][6] = b.z, v[i][7] = b.w;
  }
  __device__ __forceinline__ void clear(int i) {
#pragma unroll
    for (int c = 0; c < 8; ++c) v[i][c] = 0.0f;
  }
  __device__ __forceinline__ float value(int i, int c) const { return v[i][c]; }
  __device__ __forceinline__ uint32_t row_amax(int i) const {
    uint32_t m = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) m = max(m, __float_as_uint(v[i][c]) & 0x7FFFFFFFu);
    return m;
  }
  __device__ __forceinline__ void column_amax(uint32_t (&amax)[8]) const {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      uint32_t m = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) m = max(m, __float_as_uint(v[i][c]) & 0x7FFFFFFFu);
      m = max(m, __shfl_xor_sync(0xFFFFFFFFu, m, 4));
      amax[c] = max(m, __shfl_xor_sync(0xFFFFFFFFu, m, 8));
    }
  }
};

// Eight packed elements from four pairs, re-based if need be.
template <bool kRebase>
__device__ __forceinline__ uint2 pack8(const float (&x)[8], const float (&scale)[8], const uint32_t (&factor)[8]) {
  uint32_t half[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    half[p] = mx::pack_e4m3(x[2 * p] * scale[2 * p], x[2 * p + 1] * scale[2 * p + 1]);
    if (kRebase) half[p] = mx::rebase_e4m3(half[p], (factor[2 * p] & 0xFFFFu) | (factor[2 * p + 1] & 0xFFFF0000u));
  }
  return make_uint2(half[0] | half[1] << 16, half[2] | half[3] << 16);
}

// What eight elements stand for, in BF16.
__device__ __forceinline__ uint4 unpack8(uint2 q, const float (&value)[8]) {
  uint32_t out[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const uint32_t pair = (p < 2 ? q.x : q.y) >> (16 * (p % 2)) & 0xFFFFu;
    const float lo = mx::from_e4m3(pair & 0xFF) * value[2 * p], hi = mx::from_e4m3(pair >> 8) * value[2 * p + 1];
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out[p]) : "f"(hi), "f"(lo));
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// A staged tile to memory: lines of up to 128 bytes at `pitch` bytes from each other.
__device__ __forceinline__ void write_tile(const uint8_t* tile, uint8_t* at, int64_t pitch, int lines, int bytes) {
  const int chunk = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int line = threadIdx.x / 8 + 32 * i;
    if (line < lines && 16 * chunk < bytes) {
      *reinterpret_cast<uint4*>(at + line * pitch + 16 * chunk) = *reinterpret_cast<const uint4*>(tile + staged(line, 16 * chunk));
    }
  }
}

__device__ __forceinline__ uint32_t tile_common(const uint8_t* common) {
  const uint32_t four = reinterpret_cast<const uint32_t*>(common)[threadIdx.x % 32];  // no poison among them
  return __reduce_max_sync(0xFFFFFFFFu, common_code(four));
}

MOE_HOST_FN constexpr bool is_aligned(Form form) { return form == Form::kAligned || form == Form::kAlignedTile; }
MOE_HOST_FN constexpr bool staged_form(Form form) { return form != Form::kNone && form != Form::kDequantized; }

template <class T, Form kRow, Form kColumn, bool kTransposed>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 3) quantize_tile(const TileParams p) {
  constexpr bool kRows = kRow != Form::kNone, kColumns = kColumn != Form::kNone;
  constexpr int kStagedTiles = (staged_form(kRow) ? 1 : 0) + (staged_form(kColumn) ? 1 : 0);
  __shared__ __align__(16) uint8_t tiles[kStagedTiles > 0 ? kStagedTiles : 1][kStagedTiles > 0 ? kTile * kTile : 16];
  __shared__ __align__(16) uint32_t codes[2 * kTile];  // four per line: rows, then columns
  __shared__ __align__(16) uint8_t commons[2 * kTile];  // the largest of each line's
  uint32_t* const row_codes = codes;
  uint32_t* const column_codes = codes + kTile;
  uint8_t* const row_tile = tiles[0];
  uint8_t* const column_tile = tiles[staged_form(kRow) && staged_form(kColumn) ? 1 : 0];

  const TileIndex at(p, blockIdx.x);
  const int64_t matrix = at.matrix, row0 = at.row0, column0 = at.column0;
  if (p.slot_M != nullptr && p.slot_M[row0] < 0) return;  // groups begin at tiles: no row of this one is real

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int r = 64 * (warp / 4) + 8 * (lane / 4), c = 32 * (warp % 4) + 8 * (lane % 4);  // first row and column of this lane
  const T* const source = static_cast<const T*>(p.data);
  const bool column_inside = column0 + c < p.columns;

  Patch<T> patch;
  if (p.slot_M == nullptr) {
    const T* at = source + (matrix * p.rows + row0 + r) * p.columns + column0 + c;
#pragma unroll
    for (int i = 0; i < 8; ++i, at += p.columns) {
      if (column_inside && row0 + r + i < p.rows) {
        patch.load(i, at);
      } else {
        patch.clear(i);
      }
    }
  } else {  // M is a multiple of 128
    const int4* slots = reinterpret_cast<const int4*>(p.slot_M + row0 + r);
    const int4 a = __ldg(slots), b = __ldg(slots + 1);
    const int slot[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t row = p.gather ? p.slots_per_token.divide(slot[i]) : matrix * p.rows + row0 + r + i;
      if (column_inside && slot[i] >= 0) {
        patch.load(i, source + row * p.columns + column0 + c);
      } else {
        patch.clear(i);
      }
    }
  }

  uint32_t row_code[8], column_code[8];
  if (kRows) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t m = patch.row_amax(i);
      m = max(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
      m = max(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
      row_code[i] = mx::scale_code(m);
      if (lane % 4 == i % 4) reinterpret_cast<uint8_t*>(row_codes)[4 * (r + i) + warp % 4] = row_code[i];
    }
  }
  if (kColumns) {
    uint32_t amax[8];
    patch.column_amax(amax);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      column_code[k] = mx::scale_code(amax[k]);
      if (lane / 4 % 4 == k % 4) reinterpret_cast<uint8_t*>(column_codes)[4 * (c + k) + (r / 32)] = column_code[k];
    }
  }
  __syncthreads();

  uint32_t row_tile_code = 0, column_tile_code = 0;
  uint2 row_commons = {}, column_commons = {};  // eight codes, of this lane's rows and columns
  if (is_aligned(kRow) || is_aligned(kColumn)) {
    commons[threadIdx.x] = common_code(codes[threadIdx.x]);  // as many threads as lines
    __syncthreads();
    if (kRow == Form::kAlignedTile) row_tile_code = tile_common(commons);
    if (kColumn == Form::kAlignedTile) column_tile_code = tile_common(commons + kTile);
    if (kRow == Form::kAligned) row_commons = *reinterpret_cast<const uint2*>(commons + r);
    if (kColumn == Form::kAligned) column_commons = *reinterpret_cast<const uint2*>(commons + kTile + c);
  }
  auto eighth = [](uint2 bytes, int i) { return (i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)) & 0xFF; };

  if (kRows) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x[8], scale[8];
      uint32_t factor[8];
      const uint32_t common = kRow == Form::kAligned ? eighth(row_commons, i) : row_tile_code;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        x[k] = patch.value(i, k);
        scale[k] = mx::reciprocal_scale(row_code[i]);
        factor[k] = is_aligned(kRow) ? mx::rebase_factor(row_code[i], common) : 0;
      }
      const uint2 q = pack8<is_aligned(kRow)>(x, scale, factor);
      if (kRow == Form::kDequantized) {
        float value[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] = mx::scale_value(row_code[i]);
        if (column_inside && row0 + r + i < p.rows) {
          reinterpret_cast<uint4*>(p.row_elements)[((matrix * p.rows + row0 + r + i) * p.columns + column0 + c) / 8] = unpack8(q, value);
        }
      } else {
        *reinterpret_cast<uint2*>(row_tile + staged(r + i, c)) = q;
      }
    }
  }
  if (kColumns && kTransposed) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float x[8], scale[8];
      uint32_t factor[8];
      const uint32_t common = kColumn == Form::kAligned ? eighth(column_commons, k) : column_tile_code;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = patch.value(i, k);
        scale[i] = mx::reciprocal_scale(column_code[k]);
        factor[i] = is_aligned(kColumn) ? mx::rebase_factor(column_code[k], common) : 0;
      }
      *reinterpret_cast<uint2*>(column_tile + staged(c + k, r)) = pack8<is_aligned(kColumn)>(x, scale, factor);
    }
  }
  if (kColumns && !kTransposed) {
    float scale[8], value[8];
    uint32_t factor[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      scale[k] = mx::reciprocal_scale(column_code[k]);
      value[k] = mx::scale_value(column_code[k]);
      const uint32_t common = kColumn == Form::kAligned ? eighth(column_commons, k) : column_tile_code;
      factor[k] = is_aligned(kColumn) ? mx::rebase_factor(column_code[k], common) : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = patch.value(i, k);
      const uint2 q = pack8<is_aligned(kColumn)>(x, scale, factor);
      if (kColumn == Form::kDequantized) {
        if (column_inside && row0 + r + i < p.rows) {
          reinterpret_cast<uint4*>(p.column_elements)[((matrix * p.rows + row0 + r + i) * p.columns + column0 + c) / 8] = unpack8(q, value);
        }
      } else {
        *reinterpret_cast<uint2*>(column_tile + staged(r + i, c)) = q;
      }
    }
  }
  if (kStagedTiles > 0) __syncthreads();

  const int rows_here = static_cast<int>(min(static_cast<int64_t>(kTile), p.rows - row0));
  const int columns_here = static_cast<int>(min(static_cast<int64_t>(kTile), p.columns - column0));
  if (staged_form(kRow)) {
    uint8_t* at = static_cast<uint8_t*>(p.row_elements) + (matrix * p.rows + row0) * p.columns + column0;
    write_tile(row_tile, at, p.columns, rows_here, columns_here);
    write_codes<kRow>(threadIdx.x, row_codes, commons, p.row_codes, p.row_layout, false, matrix, row0, p.rows, column0 / 32, p.columns);
    if (kRow == Form::kAlignedTile && threadIdx.x == 0) p.row_codes[blockIdx.x] = row_tile_code;
  }
  if (staged_form(kColumn)) {
    uint8_t* const base = static_cast<uint8_t*>(p.column_elements) + matrix * p.rows * p.columns;
    if (kTransposed) {
      write_tile(column_tile, base + column0 * p.rows + row0, p.rows, columns_here, rows_here);
    } else {
      write_tile(column_tile, base + row0 * p.columns + column0, p.columns, rows_here, columns_here);
    }
    write_codes<kColumn>(threadIdx.x, column_codes, commons + kTile, p.column_codes, p.column_layout, !kTransposed, matrix, column0, p.columns, row0 / 32, p.rows);
    if (kColumn == Form::kAlignedTile && threadIdx.x == 0) {
      p.column_codes[(matrix * p.column_tiles + at.column_tile) * p.row_tiles + at.row_tile] = column_tile_code;
    }
  }
}

template <class T, Form kRow, Form kColumn, bool kTransposed>
Status launch(const TileParams& p, unsigned blocks, cudaStream_t stream) {
  quantize_tile<T, kRow, kColumn, kTransposed><<<blocks, kThreads, 0, stream>>>(p);
  return launched("quantize");
}

template <class T>
Status choose(Form row, Form column, bool transposed, const TileParams& p, unsigned blocks, cudaStream_t stream) {
  using F = Form;
#define MOE_CASE(ROW, COLUMN, TRANSPOSED) \
  if (row == ROW && column == COLUMN && (column == F::kNone || transposed == TRANSPOSED)) return launch<T, ROW, COLUMN, TRANSPOSED>(p, blocks, stream)
  if constexpr (sizeof(T) == 4) {
    MOE_CASE(F::kNone, F::kMx, true);
    MOE_CASE(F::kMx, F::kMx, true);
    MOE_CASE(F::kNone, F::kAligned, true);
    MOE_CASE(F::kAligned, F::kAligned, true);
  } else if (transposed && has_transposed_form(row, column)) {
    return quantize_transposed_tiles(p, row, column, blocks, stream);
  }
  MOE_CASE(F::kMx, F::kNone, false);
  MOE_CASE(F::kNone, F::kMx, false);
  MOE_CASE(F::kMx, F::kMx, false);
  MOE_CASE(F::kAligned, F::kNone, false);
  MOE_CASE(F::kAlignedTile, F::kAlignedTile, true);
  MOE_CASE(F::kDequantized, F::kNone, false);
  MOE_CASE(F::kNone, F::kDequantized, false);
  MOE_CASE(F::kDequantized, F::kDequantized, false);
#undef MOE_CASE
  return {"quantize: this pair of forms and storage is not built: rows " + std::to_string(static_cast<int>(row)) + ", columns " +
          std::to_string(static_cast<int>(column)) + (transposed ? ", transposed" : "")};
}

}  // namespace

Status quantize_tiles(const QuantizeSource& s, const MxOutput& by_rows, const MxOutput& by_columns, cudaStream_t stream) {
  TileParams p = {};
  p.data = s.data;
  p.rows = s.rows;
  p.columns = s.columns;
  p.row_tiles = static_cast<uint32_t>((s.rows + kTile - 1) / kTile);
  p.column_tiles = static_cast<uint32_t>((s.columns + kTile - 1) / kTile);
  if (p.row_tiles == 0) return {};
  p.by_row_tiles = Divisor(p.row_tiles);
  p.by_column_tiles = Divisor(p.column_tiles);
  p.slot_M = s.slot_M;
  p.gather = s.gather > 0;
  if (p.gather) p.slots_per_token = Divisor(static_cast<uint32_t>(s.gather));
  p.row_elements = by_rows.elements;
  p.row_codes = by_rows.codes;
  p.column_elements = by_columns.elements;
  p.column_codes = by_columns.codes;
  p.row_layout = by_rows.layout;
  p.column_layout = by_columns.layout;
  const int64_t blocks = s.batch * p.row_tiles * static_cast<int64_t>(p.column_tiles);
  if (blocks > INT32_MAX) return {"quantize: " + std::to_string(blocks) + " tiles of 128 x 128, must be below 2^31"};
  if (blocks == 0) return {};
  if (can_keep_tokens(s, by_rows, by_columns)) return quantize_kept_tokens(&s, &by_columns, 1, stream);
  const auto run = s.fp32 ? choose<float> : choose<__nv_bfloat16>;
  return run(by_rows.form, by_columns.form, by_columns.transposed, p, static_cast<unsigned>(blocks), stream);
}

}  // namespace moe
