// The shape of a GEMM tile on Blackwell, its shared and tensor memory, and its arguments. Read sm100_roles.h next. Nothing of this has
// run on a Blackwell GPU; tests/cuda/sm100_programs.cc runs it on the host machine (isa/host/sm100_machine.h).
//
// A cluster of one or two blocks owns a tile of 128 or 256 rows by kTileN columns; each block keeps its own 128 rows of accumulators in
// tensor memory. Warp 0 loads, warp 1 issues products (in a pair, the leading block's only), warp 2 asks for more work, warp 3 allocates
// tensor memory, warps 4 to 7 turn accumulators into results, 32 rows each.
//
// A stage holds 128 bytes of K: 128 rows of A, this block's share of the rows of B, and the scale atoms. There are two accumulators, so
// that a tile's results are drained while the next one is multiplied. MXFP8 with 256 columns has no room for two beside its scales:
// there they share 16 columns, which are drained first (see kShared).
#pragma once

#include "activation.h"
#include "isa/portable.h"
#include "isa/sm100_layout.h"
#include "task.h"

namespace moe {

template <int kBlocks_, int kTileN_, bool kMx_, bool kStealing_>
struct Sm100Config {
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kTileM = 128 * kBlocks;
  static constexpr int kTileN = kTileN_;
  static constexpr bool kMx = kMx_;
  static constexpr bool kStealing = kStealing_;

  static constexpr int kElementBytes = kMx ? 1 : 2;
  static constexpr int kBlockK = 128 / kElementBytes;  // elements of K in a stage
  static constexpr int kProductK = 32 / kElementBytes;
  static constexpr int kProducts = 4;                  // per stage
  static constexpr int kRowsB = kTileN / kBlocks;      // rows of B in this block
  static constexpr int kBoxRowsB = kRowsB % 64 == 0 ? 64 : 32;  // of a K-major B: what the tensor map must say
  static constexpr int kBytesA = 128 * 128;
  static constexpr int kBytesB = kRowsB * 128;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kScaleAtoms = kMx ? 3 : 0;      // one of A, up to two of B
  static constexpr int kScaleStageBytes = kScaleAtoms * sm100::kScaleAtomBytes;

  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kEpilogueWarps = 4;
  static constexpr int kSlots = 3;                     // result panels of 32 rows x 128 bytes per epilogue warp
  static constexpr int kSlotBytes = 32 * 128;
  static constexpr int kClcSlots = 2;                  // answers in flight
  static constexpr int kWeightChunk = 128;             // columns of F in one partial sum of d(weight)

  // Tensor memory: two accumulators, then 4 columns of A scales, then 8 of B scales. kShared: columns that are the last of the first
  // accumulator and the first of the second. The epilogue reads them first; when it has, the previous tile has been read whole, so
  // that one barrier says both that they are free and that the next accumulator is.
  static constexpr int kAccumulators = 2;
  static constexpr int kScaleColumns = kMx ? 12 : 0;
  static constexpr int kShared = 2 * kTileN + kScaleColumns <= sm100::kTmemColumns ? 0 : 16;
  static constexpr int kEmptyBarriers = kShared ? 1 : 2;
  static constexpr int kAccumulatorStep = kTileN - kShared;
  static constexpr int kScaleColumnA = 2 * kTileN - kShared;
  static constexpr int kScaleColumnB = kScaleColumnA + 4;
  static constexpr int kTmemColumns = sm100::tmem_allocation(kScaleColumnA + kScaleColumns);

  // Shared memory: stages, result panels, scale atoms, work-stealing answers, barriers, the tensor-memory address.
  static constexpr int kSharedLimit = 232448;
  static constexpr int kFixedBytes = kEpilogueWarps * kSlots * kSlotBytes + 1024;
  static constexpr int kFit = (kSharedLimit - kFixedBytes) / (kStageBytes + kScaleStageBytes);
  static constexpr int kStages = kFit < 6 ? kFit : 6;
  static constexpr int kSlotOffset = kStages * kStageBytes;
  static constexpr int kScaleOffset = kSlotOffset + kEpilogueWarps * kSlots * kSlotBytes;
  static constexpr int kClcOffset = kScaleOffset + kStages * kScaleStageBytes;
  static constexpr int kBarrierOffset = kClcOffset + kClcSlots * 16;
  static constexpr int kNumBarriers = 2 * kStages + 4 + 2 * kClcSlots;
  static constexpr int kTmemAddressOffset = kBarrierOffset + 8 * kNumBarriers;
  static constexpr int kSharedBytes = kTmemAddressOffset + 16;

  static_assert(kTileN % 64 == 0 && kTileN <= 256, "the epilogue works in pieces of 64 columns");
  static_assert(kMx ? sm100::mx_shape_supported(kBlocks, kTileM, kTileN) : sm100::bf16_shape_supported(kBlocks, kTileM, kTileN));
  static_assert(kSharedBytes <= kSharedLimit, "a block has 227 KiB of shared memory");
  static_assert(kStages >= 3, "loads must run ahead of products");
  static_assert(kTmemColumns <= sm100::kTmemColumns);
};

// Which operand is MN-major (its contiguous dimension is not the contraction).
MOE_HOST_FN constexpr bool sm100_mn_major_a(Kind kind) { return is_wgrad(kind); }
MOE_HOST_FN constexpr bool sm100_mn_major_b(Kind kind) { return kind != kGateUp && kind != kDown; }
// Output columns of a tile: of F for kGateUp, whose tile is half gate and half up.
template <class Config>
MOE_HOST_FN constexpr int sm100_step_n(Kind kind) {
  return kind == kGateUp ? Config::kTileN / 2 : Config::kTileN;
}

// Tile widths that a kind can run with: MN-major B needs whole 128-byte rows in each block; gate and up need their scale atoms to start
// at whole tensor-memory columns, in a pair one half in each block; partial sums of d(weight) must not cross tiles.
template <class Config>
MOE_HOST_FN constexpr bool sm100_supports(Kind kind) {
  if (sm100_mn_major_b(kind) && Config::kRowsB * Config::kElementBytes % 128 != 0) return false;
  if (kind == kGateUp && (Config::kTileN % 128 != 0 || (Config::kMx && Config::kBlocks == 2 && Config::kTileN != 256))) return false;
  return kind != kDgradDown || Config::kTileN % Config::kWeightChunk == 0;
}

// Where a quantising epilogue writes: E4M3 elements in the layout of the source, and scale codes as tcgen05 reads them
// (mx::interleaved_offset), one table per matrix.
struct MxTarget {
  uint8_t* elements;
  uint8_t* codes;
};

// Boxes of the tensor maps, 128 bytes wide under the 128-byte swizzle: a and MN-major b 64 rows, K-major b kBoxRowsB rows, results 32
// rows; scale atoms 512 bytes (128 words) by one, without swizzle: coordinates (word, atom along K, atom along M or N, matrix).
template <class TensorMap>
struct Sm100Arguments {
  TensorMap a;         // rows_MxK, (2, M, F) for kDgradGateUp; weight gradients: (halves, M, m_extent)
  TensorMap b;         // weights (E, halves, N, K) or (E, halves, K, N); weight gradients: (M, n_extent)
  TensorMap scale_a;   // MX
  TensorMap scale_b;
  TensorMap out;       // BF16 h | y | d(gate, up) | dx; FP32 dW. Unused where an MxTarget takes its place
  TensorMap gate_up;   // kGateUp: where gate and up are saved, BF16
  TensorMap scaled_h;  // kDgradDown, BF16: weight * h
  const uint16_t* gate_up_2xMxF;  // kDgradDown: gate and up, BF16
  MxTarget by_row;      // MX: h_MxF (kGateUp), d(gate, up)_2xMxF (kDgradDown), blocks along F
  MxTarget by_column;   // MX, kDgradDown: d(gate, up)_2xMxF, blocks along M
  MxTarget scaled_h_by_column;  // MX, kDgradDown: weight * h, blocks along M
  const int* counters;  // task dependencies, when several kinds share a launch
  const int* targets;
  int* signals;
  const float* weight_TxK;  // kDgradDown: combine weights, by slot
  const int* slot_M;        // kDgradDown: slot of each row, -1 for padding
  float* weight_partial;    // kDgradDown: FP32 [ceil(F / 128)][M]
  float* dw;                // weight gradients that continue: where they are
  int64_t num_rows;         // M
  int m_extent;             // weight gradients: output rows of one matrix
  int n_extent;             // output columns (F for kGateUp and kDgradDown)
  int k_extent;             // row kinds: contraction, of one half for kDgradGateUp
  int save_gate_up;         // kGateUp
  int accumulate;           // weight gradients: add to what is there
  Activation act;
};

template <class TensorMap>
struct Sm100Batch {
  Sm100Arguments<TensorMap> args;
  const Task* tasks;
  const int* num_tasks;
};

}  // namespace moe
