// The shape of a GEMM tile on Blackwell, and its shared and tensor memory. Read sm100_roles.h next. Nothing of this has
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

#include "gemm_arguments.h"
#include "gemm_load.h"
#include "isa/sm100_layout.h"

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
  static constexpr bool kOnlyKMajor = false;
  static constexpr bool kMulticast = false;            // the blocks of a pair read each other's operands instead
  static constexpr int kRowsA = 128;                   // of a stage, in this block
  static constexpr int kRowsB = kTileN / kBlocks;
  static constexpr int kBoxRowsB = kRowsB % 64 == 0 ? 64 : 32;  // of a K-major B: what the tensor map must say
  static constexpr int kBytesA = kRowsA * kPanelRowBytes;
  static constexpr int kBytesB = kRowsB * kPanelRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kScaleAtoms = kMx ? 3 : 0;      // one of A, up to two of B
  static constexpr int kScaleAtomBytes = sm100::kScaleAtomBytes;
  static constexpr int kScaleStageBytes = kScaleAtoms * kScaleAtomBytes;

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

// Tile widths that a kind can run with: MN-major B needs whole 128-byte rows in each block; gate and up need their scale atoms to start
// at whole tensor-memory columns, in a pair one half in each block; partial sums of d(weight) must not cross tiles.
template <class Config>
MOE_HOST_FN constexpr bool sm100_supports(Kind kind) {
  if (mn_major_b<Config>(kind) && Config::kRowsB * Config::kElementBytes % 128 != 0) return false;
  if (kind == kGateUp && (Config::kTileN % 128 != 0 || (Config::kMx && Config::kBlocks == 2 && Config::kTileN != 256))) return false;
  return kind != kDgradDown || Config::kTileN % Config::kWeightChunk == 0;
}

}  // namespace moe
