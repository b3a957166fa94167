// The transposing quantiser of gathered rows where tokens are few and have many rows each: a block keeps eight columns of all tokens in shared
// memory, 16 bytes a token, and makes the rows of all experts from there, so that a token is read once and not once a row. See quantize.h.
//
// A block takes slice after slice of eight columns. One lies at the low end of the space and the next at the high end; what does not overlap is
// copied while the first is worked on. A warp takes 128 rows at a time; ldmatrix reads rows wherever they are (quantize_columns.h).
#include <algorithm>

#include "isa/sm90.cuh"
#include "kernel_check.h"
#include "quantize_columns.h"
#include "quantize_gathered.h"
#include "quantize_tile.h"

namespace moe {
namespace {

constexpr int kThreads = 768;
constexpr int kWarps = kThreads / 32;
constexpr int kVector = 16;                                  // bytes of a token's slice
constexpr int kSpace = 227 * 1024 / kVector - 1;             // tokens; behind them lies a vector of zeros
constexpr int kSharedBytes = (kSpace + 1) * kVector;

// One set of tokens; two of one plan can share a launch.
struct TokenColumns {
  const uint8_t* data;
  uint8_t* elements;
  uint8_t* codes;
  bool fragment;  // CodeLayout::kFragment
};
struct SlicesParams {
  TokenColumns first, second;
  int count, tokens, columns, tiles;
  int64_t rows;
  const int32_t* slot_M;
  Divisor slots_per_token;
};

// Tokens of a slice on their way to shared memory, a vector of each: those of one thread.
struct Copy {
  const uint8_t* source;  // of token 0
  uint32_t to;
  int64_t pitch;
  int token, end;

  __device__ __forceinline__ void one() {
    if (token >= end) return;
    Sm90::gather_vector(to + kVector * token, source + pitch * token, kVector);
    token += kThreads;
  }
  __device__ __forceinline__ void rest() {
    while (token < end) one();
  }
};

__global__ void __launch_bounds__(kThreads, 1) quantize_gathered(const SlicesParams p) {
  extern __shared__ __align__(128) uint8_t space[];
  const int tokens = p.tokens, columns = p.columns, tiles = p.tiles, slices = columns / 8;  // slices of each set
  const int warp = static_cast<int>(Sm90::warp_index()), lane = threadIdx.x % 32;
  const int high = min(kSpace, 2 * tokens) - tokens;  // where a slice at the high end begins
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(space));
  if (threadIdx.x == 0) *reinterpret_cast<uint4*>(space + kSpace * kVector) = make_uint4(0, 0, 0, 0);

  auto copy = [&](int slice, int begin, int from, int to) -> Copy {
    const bool there = slice < slices * p.count;
    const uint8_t* source = slice < slices ? p.first.data + slice * kVector : p.second.data + (slice - slices) * kVector;
    return {source, base + begin * kVector, int64_t{2} * columns, from + static_cast<int>(threadIdx.x), there ? to : 0};
  };
  const int32_t* const slots = Sm90::not_before(p.slot_M + addressed_row(lane));
  auto load_slots = [&](int tile) { return Sm90::load_global_vector(slots + static_cast<int64_t>(kTile) * min(tile, tiles - 1)); };

  bool at_high = false;
  copy(blockIdx.x, 0, 0, tokens).rest();
  for (int slice = blockIdx.x; slice < slices * p.count; slice += gridDim.x) {
    Sm90::gather_wait();
    __syncthreads();
    // Tokens of the next slice whose room is free come in one by one beside the work on this one.
    const int begin = at_high ? high : 0, next_begin = at_high ? 0 : high, next = slice + static_cast<int>(gridDim.x);
    const int free_from = at_high ? 0 : tokens - high;
    Copy ahead = copy(next, next_begin, free_from, free_from + high);

    const uint32_t tokens_at = Sm90::not_before(base + begin * kVector), zeros = Sm90::not_before(kSpace - begin);
    const bool in_first = slice < slices, fragment = in_first ? p.first.fragment : p.second.fragment;
    const int column = 8 * (in_first ? slice : slice - slices) + lane / 4, in_tile = column % kTile;
    uint8_t* const out = Sm90::not_before((in_first ? p.first.elements : p.second.elements) + column * p.rows + 16 * (lane % 4));
    const int code_at = column - in_tile + (fragment ? mx::fragment_position(in_tile) : in_tile);
    uint8_t* const codes = Sm90::not_before(in_first ? p.first.codes : p.second.codes);
    Sm90::Vector slot = load_slots(warp);
    for (int tile = warp; tile < tiles; tile += kWarps) {
      const bool real = Sm90::any(static_cast<int>(slot.x) >= 0);  // groups begin at tiles: otherwise no row of this one is
      auto address = [&](uint32_t slot) {  // -1, no slot, is more than any token
        return tokens_at + kVector * min(__umulhi(slot, p.slots_per_token.factor) >> (p.slots_per_token.shift - 1), zeros);
      };
      const uint32_t row[4] = {address(slot.x), address(slot.y), address(slot.z), address(slot.w)};
      slot = load_slots(tile + kWarps);
      ahead.one();
      if (!real) continue;
      ColumnEight<Sm90> eight;
#pragma unroll
      for (int i = 0; i < 4; ++i) eight.load(i, row[i]);
      const uint32_t code = eight.quantize_aligned();
      uint8_t* const at = out + static_cast<int64_t>(kTile) * tile;
      __stcs(reinterpret_cast<uint4*>(at), eight.elements(0));
      __stcs(reinterpret_cast<uint4*>(at + 64), eight.elements(1));
      if (lane % 4 != 0) continue;
      if (fragment) {
        reinterpret_cast<uint16_t*>(codes)[columns * tile + code_at] = static_cast<uint16_t>(mx::bf16_scales(code));
      } else {
        codes[columns * tile + code_at] = static_cast<uint8_t>(code);
      }
    }
    ahead.rest();
    __syncthreads();
    copy(next, next_begin, at_high ? high : 0, at_high ? tokens : tokens - high).rest();
    at_high = !at_high;
  }
}

}  // namespace

bool can_keep_tokens(const QuantizeSource& s, const MxOutput& by_rows, const MxOutput& by_columns) {
  constexpr int64_t kRowsPerToken = 3;  // below, reading tokens row by row is as fast
  return !s.fp32 && s.gather > 1 && by_rows.form == Form::kNone && by_columns.form == Form::kAligned && by_columns.transposed &&
         s.columns % kTile == 0 && s.tokens > 0 && s.tokens <= kSpace && s.rows >= kRowsPerToken * s.tokens && s.rows / kTile * s.columns <= INT32_MAX;
}

Status quantize_kept_tokens(const QuantizeSource* sources, const MxOutput* by_columns, int count, cudaStream_t stream) {
  const QuantizeSource& s = sources[0];
  SlicesParams p = {};
  for (int i = 0; i < count; ++i) {
    (i == 0 ? p.first : p.second) = {static_cast<const uint8_t*>(sources[i].data), static_cast<uint8_t*>(by_columns[i].elements), by_columns[i].codes,
                 by_columns[i].layout == CodeLayout::kFragment};
  }
  p.count = count;
  p.tokens = static_cast<int>(s.tokens);
  p.columns = static_cast<int>(s.columns);
  p.tiles = static_cast<int>(s.rows / kTile);
  p.rows = s.rows;
  p.slot_M = s.slot_M;
  p.slots_per_token = Divisor(static_cast<uint32_t>(s.gather));
  int device, sms;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaFuncSetAttribute(quantize_gathered, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) != cudaSuccess) {
    return launched("quantize_gathered");
  }
  quantize_gathered<<<std::min(sms, count * p.columns / 8), kThreads, kSharedBytes, stream>>>(p);
  return launched("quantize_gathered");
}

}  // namespace moe
