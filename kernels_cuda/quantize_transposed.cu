// The quantiser of BF16 sources whose column form is stored transposed, alone or with the row form from one read: the operands of FP8 weight
// gradients. See quantize.h; other forms: quantize_tiles.cu.
//
// A block copies a tile of 128 x 128 into shared memory and writes both forms from registers, whole sectors of 32 bytes by neighbouring lanes. A warp
// takes 16 rows, a row per half warp, then 16 columns (quantize_columns.h). Rows of few tokens are gathered by another kernel: quantize_gathered.cu.
#include "isa/sm90.cuh"
#include "kernel_check.h"
#include "quantize_columns.h"
#include "quantize_tile.h"

namespace moe {
namespace {

constexpr int kThreads = 256;
constexpr int kLine = 256;  // bytes of a row of the tile

// Line 32 i + l of the tile has the row that lane l gives to ldmatrix i, so that a matrix is eight neighbouring lines; 16-byte chunks are swizzled.
// That is line 32 (r % 4) + 16 (r / 64) + 8 (r / 8 % 2) + 2 (r / 16 % 4) + r / 4 % 2 for row r.
__device__ __forceinline__ uint32_t place(uint32_t line, uint32_t chunk) { return line * kLine + (chunk ^ line % 8) * 16; }
// Of a warp's 16 rows a half warp takes eight, 4 h and three more and the same 8 further on: line and row of its i-th above those of its first.
__device__ __forceinline__ uint32_t first_line(uint32_t warp, uint32_t half) { return 16 * (warp / 4) + 2 * (warp % 4) + half; }
__device__ __forceinline__ constexpr uint32_t line_above(uint32_t i) { return 32 * (i % 4) + 8 * (i / 4); }
__device__ __forceinline__ constexpr uint32_t row_above(uint32_t i) { return i % 4 + 8 * (i / 4); }

// The largest halves of four lanes, kStep apart.
template <uint32_t kStep>
__device__ __forceinline__ uint32_t over_four(uint32_t halves) {
  return mx::larger_of_lanes<Sm90>(mx::larger_of_lanes<Sm90>(halves, kStep), 2 * kStep);
}

// Eight neighbouring elements of two rows by their maxima, which are in halves: of the blocks of 32. Codes are in halves too.
struct RowPair {
  uint2 elements[2];
  uint32_t codes;
};
__device__ __forceinline__ RowPair quantize_rows(const Sm90::Vector (&v)[2], uint32_t maxima) {
  RowPair q;
  mx::TwoScales scales[1];
  mx::two_scales({maxima}, scales);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t scale = scales[0].scale[k];
    q.elements[k] = make_uint2(mx::quantize_quad(v[k].x, v[k].y, scale), mx::quantize_quad(v[k].z, v[k].w, scale));
  }
  q.codes = scales[0].code(0) | scales[0].code(1) << 16;
  return q;
}
// The same re-based over the 16 lanes of a row; as ColumnEight.
__device__ __forceinline__ RowPair quantize_aligned_rows(const Sm90::Vector (&v)[2], uint32_t maxima) {
  RowPair q;
  const uint32_t lines = over_four<4>(maxima);
  uint32_t raised = mx::raised_codes(lines);
  uint32_t fine = 0xFFFFFFFFu;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t scale = mx::reciprocal_bf16(raised >> 16 * k);
    q.elements[k] = make_uint2(mx::quantize_quad(v[k].x, v[k].y, scale), mx::quantize_quad(v[k].z, v[k].w, scale));
    fine &= mx::even_or_normal(q.elements[k].x) & mx::even_or_normal(q.elements[k].y);
  }
  const bool twice = ((fine & 0x80808080u) != 0x80808080u) & (mx::raised_codes(maxima) != raised);
  if (Sm90::any(twice | (mx::poisoned_halves(lines) != 0))) {
    mx::TwoScales own[1];
    mx::two_scales({maxima}, own);
    raised = over_four<4>(own[0].raised);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t bytes[2];
      mx::quantize_eight<true>(v[k].x, v[k].y, v[k].z, v[k].w, own[0].scale[k], mx::half_of(own[0].raised, k), mx::half_of(raised, k), bytes);
      q.elements[k] = make_uint2(bytes[0], bytes[1]);
    }
  }
  q.codes = raised - 0x00080008u;
  return q;
}

template <Form kRow, Form kColumn>
__global__ void __launch_bounds__(kThreads, kRow == Form::kNone ? 5 : 4) quantize_transposed(const TileParams p) {
  constexpr bool kRows = kRow != Form::kNone;
  __shared__ __align__(128) uint8_t tile[kTile * kLine];
  __shared__ __align__(16) uint32_t row_codes[kTile], column_codes[kTile];  // four a line
  __shared__ __align__(16) uint8_t row_commons[kTile], column_commons[kTile];

  const TileIndex at(p, blockIdx.x);
  const int64_t matrix = at.matrix, row0 = at.row0, column0 = at.column0;
  if (p.slot_M != nullptr && p.slot_M[row0] < 0) return;  // groups begin at tiles: no row of this one is real

  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % 16;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  const int rows_here = static_cast<int>(min(static_cast<int64_t>(kTile), p.rows - row0));
  const int columns_here = static_cast<int>(min(static_cast<int64_t>(kTile), p.columns - column0));
  {  // places of the warp's 16 rows in the source are known by a lane each
    const bool inside = 8 * static_cast<int>(chunk) < columns_here;
    const uint8_t* const source = static_cast<const uint8_t*>(p.data) + 2 * (matrix * p.rows * p.columns + column0 + (inside ? 8 * chunk : 0));
    const uint32_t pitch = 2 * static_cast<uint32_t>(p.columns);
    const int row = 16 * warp + chunk;
    int own = row < rows_here ? static_cast<int>(row0) + row : -1;  // -1: zeros
    if (p.slot_M != nullptr) {
      const int slot = p.slot_M[row0 + row];
      own = slot < 0 ? -1 : p.gather ? static_cast<int>(p.slots_per_token.divide(slot)) : own;
    }
    const uint32_t to = base + place(first_line(warp, lane / 16), chunk);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int from = __shfl_sync(0xFFFFFFFFu, own, row_above(i) + 4 * (lane / 16));
      const bool real = inside && from >= 0;
      Sm90::gather_vector(to + kLine * line_above(i), source + static_cast<uint64_t>(static_cast<uint32_t>(real ? from : 0)) * pitch, real ? 16 : 0);
    }
    Sm90::gather_wait();
    __syncthreads();
  }

  if (kRows) {
    const bool inside = 8 * static_cast<int>(chunk) < columns_here;
    const uint32_t first_row = 16 * warp + 4 * (lane / 16), from = base + place(first_line(warp, lane / 16), chunk);
    uint8_t* const out = static_cast<uint8_t*>(p.row_elements) + (matrix * p.rows + row0 + first_row) * p.columns + column0 + 8 * chunk;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Sm90::Vector v[2];
      uint32_t largest[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        v[k] = Sm90::load_vector(from + kLine * line_above(2 * step + k));
        largest[k] = mx::largest_pair(v[k].x, v[k].y, v[k].z, v[k].w);
      }
      const uint32_t maxima = over_four<1>(mx::larger_halves(largest[0], largest[1]));
      const RowPair q = kRow == Form::kAligned ? quantize_aligned_rows(v, maxima) : quantize_rows(v, maxima);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int row = row_above(2 * step + k), in_tile = static_cast<int>(first_row) + row;
        if (kRow == Form::kAligned) {
          if (chunk == 0) row_commons[in_tile] = static_cast<uint8_t>(mx::half_of(q.codes, k));
        } else if (chunk % 4 == 0) {
          reinterpret_cast<uint8_t*>(row_codes)[4 * in_tile + chunk / 4] = static_cast<uint8_t>(mx::half_of(q.codes, k));
        }
        if (inside && in_tile < rows_here) *reinterpret_cast<uint2*>(out + row * p.columns) = q.elements[k];
      }
    }
  }

  {
    const uint32_t quarter = lane % 4;
    uint8_t* const out = static_cast<uint8_t*>(p.column_elements) + (matrix * p.columns + column0 + 16 * warp + lane / 4) * p.rows + row0 + 16 * quarter;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      ColumnEight<Sm90> eight;
#pragma unroll
      for (int i = 0; i < 4; ++i) eight.load(i, base + place(32 * i + lane, 2 * warp + s));
      const uint32_t line = 16 * warp + 8 * s + lane / 4;
      const uint32_t codes = kColumn == Form::kAligned ? eight.quantize_aligned() : eight.quantize();
      if (quarter == 0) {
        if (kColumn == Form::kAligned) {
          column_commons[line] = static_cast<uint8_t>(codes);
        } else {
          column_codes[line] = codes;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool inside = static_cast<int>(line) < columns_here && 64 * half + 16 * static_cast<int>(quarter) < rows_here;
        if (inside) Sm90::store_vector(out + 8 * s * p.rows + 64 * half, eight.elements(half));
      }
    }
  }
  __syncthreads();
  if (kRows) write_codes<kRow>(threadIdx.x, row_codes, row_commons, p.row_codes, p.row_layout, false, matrix, row0, p.rows, column0 / 32, p.columns);
  write_codes<kColumn>(threadIdx.x, column_codes, column_commons, p.column_codes, p.column_layout, false, matrix, column0, p.columns, row0 / 32, p.rows);
}

template <Form kRow, Form kColumn>
Status launch(const TileParams& p, unsigned blocks, cudaStream_t stream) {
  quantize_transposed<kRow, kColumn><<<blocks, kThreads, 0, stream>>>(p);
  return launched("quantize_transposed");
}

}  // namespace

bool has_transposed_form(Form row, Form column) {
  return (column == Form::kMx || column == Form::kAligned) && (row == Form::kNone || row == column);
}

Status quantize_transposed_tiles(const TileParams& p, Form row, Form column, unsigned blocks, cudaStream_t stream) {
  const bool rows = row != Form::kNone;
  if (column == Form::kMx) return rows ? launch<Form::kMx, Form::kMx>(p, blocks, stream) : launch<Form::kNone, Form::kMx>(p, blocks, stream);
  return rows ? launch<Form::kAligned, Form::kAligned>(p, blocks, stream) : launch<Form::kNone, Form::kAligned>(p, blocks, stream);
}

}  // namespace moe
