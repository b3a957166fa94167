// The quantiser of BF16 sources whose column form is stored transposed, alone or with the row form from one read: the operands of FP8 weight
// gradients. See quantize.h; other forms: quantize_tiles.cu.
//
// A block copies a tile of 128 x 128 into shared memory and writes both forms from registers, whole sectors of 32 bytes by four lanes. A warp
// takes 16 rows, a row per half warp, then 16 columns: ldmatrix transposes, and the rows of every 32 are kept in an order that gives each
// lane eight neighbouring rows of a column. Pairs of BF16 stay packed until they are multiplied by their scale.
#include "isa/sm90.cuh"
#include "kernel_check.h"
#include "quantize_tile.h"

namespace moe {
namespace {

constexpr int kThreads = 256;
constexpr int kLine = 256;  // bytes of a row of the tile

// Of every 32 rows, row 8 q + 2 m + b lies in line 8 m + 2 q + b, so that matrix m of an ldmatrix, eight neighbouring lines, has the m-th pair of
// rows of each quarter q. 16-byte chunks are swizzled.
__device__ __forceinline__ uint32_t place(uint32_t line, uint32_t chunk) { return line * kLine + (chunk ^ line % 8) * 16; }

// The largest magnitudes of two blocks, of which four lanes hold eight values each.
__device__ __forceinline__ uint32_t block_maxima(const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  uint32_t both = mx::larger_halves(mx::largest_pair(a[0], a[1], a[2], a[3]), mx::largest_pair(b[0], b[1], b[2], b[3]));
  both = __vmaxu2(both, __shfl_xor_sync(0xFFFFFFFFu, both, 1));
  return __vmaxu2(both, __shfl_xor_sync(0xFFFFFFFFu, both, 2));
}

template <bool kRebase>
__device__ __forceinline__ uint2 quantize8(const uint32_t (&v)[4], const mx::TwoScales& scales, int k, uint32_t common) {
  uint32_t bytes[2];
  mx::quantize_eight<kRebase>(v[0], v[1], v[2], v[3], scales.scale[k], mx::half_of(scales.raised, k), common, bytes);
  return make_uint2(bytes[0], bytes[1]);
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
  {  // a half warp copies every other row of the warp's 16, whose places in the source a lane each knows
    const bool inside = 8 * static_cast<int>(chunk) < columns_here;
    const uint8_t* const source = static_cast<const uint8_t*>(p.data) + 2 * (matrix * p.rows * p.columns + column0 + (inside ? 8 * chunk : 0));
    const uint32_t pitch = 2 * static_cast<uint32_t>(p.columns);
    const int row = 16 * warp + chunk;
    int own = row < rows_here ? static_cast<int>(row0) + row : -1;  // -1: zeros
    if (p.slot_M != nullptr) {
      const int slot = p.slot_M[row0 + row];
      own = slot < 0 ? -1 : p.gather ? static_cast<int>(p.slots_per_token.divide(slot)) : own;
    }
    const uint32_t line = 32 * (warp / 2) + 4 * (warp % 2) + lane / 16;  // of this half warp's first row
    const uint32_t to[2] = {base + place(line, chunk), base + place(line + 2, chunk)};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int from = __shfl_sync(0xFFFFFFFFu, own, 2 * i + lane / 16);
      const bool real = inside && from >= 0;
      Sm90::gather_vector(to[i / 4] + 8 * kLine * (i % 4), source + static_cast<uint64_t>(static_cast<uint32_t>(real ? from : 0)) * pitch, real ? 16 : 0);
    }
    Sm90::gather_wait();
    __syncthreads();
  }

  if (kRows) {
    const bool inside = 8 * static_cast<int>(chunk) < columns_here;
    const uint32_t first_row = 32 * (warp / 2) + 4 * (warp % 2) + lane / 16;
    uint8_t* const out = static_cast<uint8_t*>(p.row_elements) + (matrix * p.rows + row0 + first_row) * p.columns + column0 + 8 * chunk;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t v[2][4];
      uint32_t row[2];  // above first_row
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t line = 16 * warp + 4 * step + 2 * k + lane / 16;
        row[k] = 8 * ((2 * step + k) % 4) + 2 * (step / 2);
        const uint4 loaded = Sm90::load_vector(base + place(line, chunk));
        v[k][0] = loaded.x, v[k][1] = loaded.y, v[k][2] = loaded.z, v[k][3] = loaded.w;
      }
      mx::TwoScales scales[1];
      mx::two_scales({block_maxima(v[0], v[1])}, scales);
      uint32_t common = scales[0].raised;
      if (kRow == Form::kAligned) {
        common = __vmaxu2(common, __shfl_xor_sync(0xFFFFFFFFu, common, 4));
        common = __vmaxu2(common, __shfl_xor_sync(0xFFFFFFFFu, common, 8));
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int in_tile = static_cast<int>(first_row + row[k]);
        if (kRow == Form::kAligned) {
          if (chunk == 0) row_commons[in_tile] = static_cast<uint8_t>(mx::half_of(common, k) - 8);
        } else if (chunk % 4 == 0) {
          reinterpret_cast<uint8_t*>(row_codes)[4 * in_tile + chunk / 4] = static_cast<uint8_t>(scales[0].code(k));
        }
        const uint2 q = quantize8<kRow == Form::kAligned>(v[k], scales[0], k, mx::half_of(common, k));
        if (inside && in_tile < rows_here) *reinterpret_cast<uint2*>(out + row[k] * p.columns) = q;
      }
    }
  }

  {
    const uint32_t quarter = lane % 4, matrix_line = 8 * (lane / 8) + lane % 8;  // whose address this lane gives
    uint8_t* const out = static_cast<uint8_t*>(p.column_elements) + (matrix * p.columns + column0 + 16 * warp + lane / 4) * p.rows + row0 + 8 * quarter;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t v[4][4];
#pragma unroll
      for (int block = 0; block < 4; ++block) Sm90::load_matrices_transposed(base + place(32 * block + matrix_line, 2 * warp + s), v[block]);
      mx::TwoScales scales[2];
      mx::two_scales({block_maxima(v[0], v[1]), block_maxima(v[2], v[3])}, scales);
      const uint32_t common = mx::raised_common(scales[0], scales[1]);
      const uint32_t line = 16 * warp + 8 * s + lane / 4;
      if (quarter == 0) {
        if (kColumn == Form::kAligned) {
          column_commons[line] = static_cast<uint8_t>(common - 8);
        } else {
          column_codes[line] = scales[0].code(0) | scales[0].code(1) << 8 | scales[1].code(0) << 16 | scales[1].code(1) << 24;
        }
      }
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const uint2 q = quantize8<kColumn == Form::kAligned>(v[block], scales[block / 2], block % 2, common);
        const bool inside = static_cast<int>(line) < columns_here && 32 * block + 8 * static_cast<int>(quarter) < rows_here;
        if (inside) *reinterpret_cast<uint2*>(out + 8 * s * p.rows + 32 * block) = q;
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
