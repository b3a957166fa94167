// The MMA roles of Blackwell: what differs from Hopper (mma_sm90.h) besides the instruction layer. One thread issues the products of a tile
// whose sums lie in tensor memory; four warps turn them into results while the next tile is multiplied. Tasks, ring, loader and
// the maths of results are those of every architecture: scheduler.h, gemm_ring.h, gemm_load.h, gemm_results.h. One source for one block and for
// pairs, MXFP8 and BF16. Nothing of this has run on a Blackwell GPU; tests/cuda/sm100_programs.cc runs it on the host machine
// (isa/host/sm100_machine.h).
//
// A cluster of one or two blocks owns a tile of 128 or 256 rows by kTileN columns; each block keeps its own 128 rows of sums. Warp 0
// loads, warp 1 issues products (in a pair, the leading block's only), warp 2 asks for more work, warp 3 allocates tensor memory, warps 4 to
// 7 write results, 32 rows each.
#pragma once

#include <type_traits>

#include "gemm_arguments.h"
#include "gemm_load.h"
#include "gemm_results.h"
#include "isa/sm100_layout.h"
#include "quantize_math.h"
#include "scheduler.h"

namespace moe {

// --- shape -----------------------------------------------------------------------------------------------------------------------
// A stage holds 128 bytes of K: 128 rows of A, this block's share of the rows of B, and the scale atoms. There are two accumulators, so
// that a tile's results are drained while the next one is multiplied. MXFP8 with 256 columns has no room for two beside its scales:
// there they share 16 columns, which are drained first (see kShared).
template <int kBlocks_, int kTileN_, bool kMx_, bool kStealing_>
struct Sm100Config {
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kTileM = 128;                   // of a block
  static constexpr int kClusterM = kTileM * kBlocks;
  static constexpr int kTileN = kTileN_;
  static constexpr bool kMx = kMx_;
  static constexpr bool kStealing = kStealing_;

  static constexpr int kElementBytes = kMx ? 1 : 2;
  static constexpr int kBlockK = 128 / kElementBytes;  // elements of K in a stage
  static constexpr int kProductK = 32 / kElementBytes;
  static constexpr int kProducts = 4;                  // per stage
  static constexpr bool kOnlyKMajor = false;
  static constexpr bool kMulticast = false;            // the blocks of a pair read each other's operands instead
  static constexpr int kRowsB = kTileN / kBlocks;      // of a stage
  static constexpr int kBoxRowsB = kRowsB % 64 == 0 ? 64 : 32;  // of a K-major B: what the tensor map must say
  static constexpr int kBytesA = kTileM * kPanelRowBytes;
  static constexpr int kBytesB = kRowsB * kPanelRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kScaleAtoms = kMx ? 3 : 0;      // of a stage: one of A, up to two of B
  static constexpr int kScaleAtomBytes = sm100::kScaleAtomBytes;
  static constexpr int kScaleStageBytes = kScaleAtoms * kScaleAtomBytes;

  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kEpilogueWarps = 4;
  static constexpr int kSlots = 3;                     // result panels of 32 rows x 128 bytes per epilogue warp
  static constexpr int kSlotBytes = 32 * 128;
  static constexpr int kClcSlots = 2;                  // answers in flight
  static constexpr int kTakers = 6 * kBlocks + 1;      // loader, scheduler and 4 epilogue warps of every block, and the issuer
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

  // Shared memory: stages, result panels, scale atoms, work-stealing answers, barriers (full and empty of the stages, full and empty of the
  // accumulators, those of scheduler.h), the tensor-memory address.
  static constexpr int kSharedLimit = 232448;
  static constexpr int kFixedBytes = kEpilogueWarps * kSlots * kSlotBytes + 1024;
  static constexpr int kFit = (kSharedLimit - kFixedBytes) / (kStageBytes + kScaleStageBytes);
  static constexpr int kStages = kFit < 6 ? kFit : 6;
  static constexpr int kSlotOffset = kStages * kStageBytes;
  static constexpr int kScaleOffset = kSlotOffset + kEpilogueWarps * kSlots * kSlotBytes;
  static constexpr int kClcOffset = kScaleOffset + kStages * kScaleStageBytes;
  static constexpr int kBarrierOffset = kClcOffset + kClcSlots * 16;
  static constexpr int kSumsBarrierOffset = kBarrierOffset + 2 * kStages * 8;
  static constexpr int kClcBarrierOffset = kSumsBarrierOffset + 2 * kAccumulators * 8;
  static constexpr int kTmemAddressOffset = kClcBarrierOffset + 2 * kClcSlots * 8;
  static constexpr int kSharedBytes = kTmemAddressOffset + 16;

  static_assert(kTileN % 64 == 0 && kTileN <= 256, "the epilogue works in pieces of 64 columns");
  static_assert(kMx ? sm100::mx_shape_supported(kBlocks, kClusterM, kTileN) : sm100::bf16_shape_supported(kBlocks, kClusterM, kTileN));
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

// Barriers of the accumulators; in a pair those of the leading block are the ones that count, except where "each" is said.
//   stages       full: one arrival, the leader's loader, with the bytes of all blocks; the issuer waits. Every operand of a pair's product,
//                the peer's scales too, is counted here (cutlass #3643). empty, each: one arrival by commit, when the products that read the
//                stage are done; the loaders wait.
//   sums_full    each: one arrival by commit; the epilogue warps wait.
//   sums_empty   4 epilogue warps of every block arrive when they have read the accumulator; the issuer waits. One for both where they
//                share columns: arrivals then mean that the shared columns have been read.
template <class Config>
MOE_HOST_FN constexpr uint32_t sums_full_barrier(uint32_t base, uint32_t accumulator) {
  return base + Config::kSumsBarrierOffset + 8 * accumulator;
}
template <class Config>
MOE_HOST_FN constexpr uint32_t sums_empty_barrier(uint32_t base, uint32_t accumulator) {
  return base + Config::kSumsBarrierOffset + 8 * (Config::kAccumulators + accumulator);
}

// --- issuer ----------------------------------------------------------------------------------------------------------------------
// Products in a block of K: the last one issues only what it needs.
template <class Config>
MOE_FN int sm100_products(int k_extent, int half_block) {
  const int left = (k_extent - half_block * Config::kBlockK + Config::kProductK - 1) / Config::kProductK;
  return left < Config::kProducts ? left : Config::kProducts;
}

// Issuer, one thread of the leading block. Scale copies and products of one thread stay in order, so one set of scale columns serves.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void multiply_tile(const Task& task, const Arguments& args, uint32_t base, uint32_t tmem, Ring<Isa, Config>& ring,
                          RingPosition<Config::kAccumulators>& accumulator, RingPosition<Config::kEmptyBarriers>& drained) {
  constexpr int kBlocks = Config::kBlocks;
  constexpr bool kMnA = mn_major_a<Config>(kKind), kMnB = mn_major_b<Config>(kKind);
  // Halves of gate and up that do not fill an atom have their scales in different columns: two products.
  constexpr int kParts = Config::kMx && kKind == kGateUp && Config::kTileN / 2 % 128 != 0 ? 2 : 1;
  constexpr int kPartN = Config::kTileN / kParts;
  constexpr uint32_t kMnStride = Config::kBlockK * 128;
  constexpr uint32_t kInstruction = Config::kMx ? sm100::mx_instruction(Config::kClusterM, kPartN, kMnA, kMnB)
                                                : sm100::bf16_instruction(Config::kClusterM, kPartN, kMnA, kMnB);
  const int k_extent = is_wgrad(kKind) ? task.rows : args.k_extent;
  const int half_blocks = half_k_blocks<kKind, Config>(task, args);
  const int k_blocks = task_k_blocks<kKind, Config>(task, args);
  const uint32_t d = tmem + accumulator.stage * Config::kAccumulatorStep;
  const uint32_t scale_a = tmem + Config::kScaleColumnA;
  const uint32_t scale_b = tmem + Config::kScaleColumnB;
  const uint32_t shift = task.n0 % 128 / 32;  // a tile may start in the middle of an atom

  Isa::template wait_cluster<kBlocks>(sums_empty_barrier<Config>(base, drained.stage), drained.phase ^ 1);
  Isa::fence_after_sync();
  MOE_NO_UNROLL
  for (int kb = 0; kb < k_blocks; ++kb) {
    const int in_half = kKind == kDgradGateUp && kb >= half_blocks ? kb - half_blocks : kb;
    const int products = sm100_products<Config>(k_extent, in_half);
    Isa::barrier_wait(ring.full(), ring.phase);  // block scope: only bytes arrive here, and the tensor core reads them
    Isa::fence_after_sync();
    if constexpr (Config::kMx) {
      const uint32_t scales = base + Config::kScaleOffset + ring.stage * Config::kScaleStageBytes;
      Isa::template copy_scales<kBlocks>(scale_a, sm100::scale_descriptor(scales));
      MOE_NO_UNROLL
      for (int i = 0; i < scale_atoms_b<kKind, Config>(task); ++i) {
        Isa::template copy_scales<kBlocks>(scale_b + 4 * i, sm100::scale_descriptor(scales + (1 + i) * sm100::kScaleAtomBytes));
      }
    }
    const uint32_t stage = ring.data();
    const uint64_t desc_a = sm100::operand_descriptor(stage, kMnA, kMnStride);
    const uint64_t desc_b = sm100::operand_descriptor(stage + Config::kBytesA, kMnB, kMnStride);
    MOE_UNROLL
    for (int i = 0; i < Config::kProducts; ++i) {
      if (i >= products) continue;
      const bool accumulate = kb > 0 || i > 0;
      const uint64_t a = desc_a + i * sm100::operand_k_step(kMnA, Config::kElementBytes);
      const uint64_t b = desc_b + i * sm100::operand_k_step(kMnB, Config::kElementBytes);
      MOE_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const uint64_t b_part = b + part * (kPartN * 128 >> 4);
        if constexpr (Config::kMx) {
          Isa::template mma_mx<kBlocks>(d + part * kPartN, a, b_part, sm100::with_scale_ids(kInstruction, i, i), scale_a,
                                        scale_b + shift + 4 * part, accumulate);
        } else {
          Isa::template mma_bf16<kBlocks>(d + part * kPartN, a, b_part, kInstruction, accumulate);
        }
      }
    }
    Isa::template commit<kBlocks>(ring.empty());
    ring.advance();
  }
  Isa::template commit<kBlocks>(sums_full_barrier<Config>(base, accumulator.stage));  // without products, of an expert without rows, too
  accumulator.advance();
  drained.advance();
}

// --- results ---------------------------------------------------------------------------------------------------------------------
// Warp w of the four reads lanes 32 w .. 32 w + 31, which are those rows of the block's 128; a thread has one row, 32 columns at a time.
// So a block of 32 along a row lies in one thread, and a block of 32 rows in one warp: both orientations of MXFP8 are quantised from
// registers.
//
// BF16 and FP32 results leave through shared panels of 32 rows x 128 bytes (128-byte swizzle) and bulk stores, a ring of panels per warp,
// nothing shared between warps. Quantised elements go straight to memory, 32 bytes a lane: one whole sector.
//
// Rows past the expert's count are written as zeros, scale code 0, inside the padded group; a block of a pair whose 128 rows begin past
// the group writes nothing. Padding may be multiplied: its results are dropped here.
template <Kind kKind, class Isa, class Config>
struct TensorMemoryTile {
  // What gemm_results.h asks: MXFP8 of kDgradDown is written 32 columns at a time, which keeps registers free.
  static constexpr int kRows = 1, kUnroll = 1, kPieces = 1, kSavedPairs = 8;
  static constexpr int kChunk = Config::kMx && kKind == kDgradDown ? 32 : 64;
  static constexpr int kParts = kChunk / 32, kWords = kChunk / 2;
  static constexpr int kColumns = Config::kTileN, kWeightChunk = Config::kWeightChunk;
  using Dot = DotByColumn<Isa>;

  uint32_t base;
  uint32_t warp;  // 0..3
  uint32_t lane;
  uint32_t tmem;
  uint32_t slot = 0;
  RingPosition<Config::kAccumulators> accumulator;
  Task task = {};       // of this block
  int first_row = 0;    // of the warp, in the whole matrix
  bool is_live = false;  // whether this lane's row is real
  bool frees = false;   // whether the issuer may go on after the piece at hand

  MOE_FN TensorMemoryTile(uint32_t base_, uint32_t warp_, uint32_t tmem_) : base(base_), warp(warp_), lane(Isa::lane_index()), tmem(tmem_) {}
  MOE_FN void take(const Task& tile) {
    const int in_block = 32 * static_cast<int>(warp);
    task = tile;
    first_row = (is_wgrad(kKind) ? tile.m0 : tile.row0) + in_block;
    is_live = in_block + static_cast<int>(lane) < tile.rows;
  }

  MOE_FN bool live(int) const { return is_live; }
  template <class Pair>
  MOE_FN uint32_t keep(int, Pair pair) const {
    return is_live ? pair() : 0u;
  }
  MOE_FN int row(int) const { return first_row + static_cast<int>(lane); }
  MOE_FN int first_column() const { return task.n0; }
  template <class Arguments>
  MOE_FN bool scatters(const Arguments&) const {
    return false;
  }
  template <class Arguments>
  MOE_FN bool writes_h(const Arguments&) const {
    return true;
  }
  MOE_FN float sum_of_row(float sum) const { return sum; }
  MOE_FN bool speaks_for_row() const { return true; }

  // --- sums ---
  MOE_FN void begin() const {
    Isa::barrier_wait(sums_full_barrier<Config>(base, accumulator.stage), accumulator.phase);
    Isa::fence_after_sync();
  }
  MOE_FN void load(uint32_t (&v)[32], int column) const {
    Isa::tmem_load(sm100::tmem_address(tmem, 32 * warp, accumulator.stage * Config::kAccumulatorStep + column), v);
    Isa::tmem_wait_load(v);
  }
  MOE_FN void load(float (&v)[32], int column, int, int part) const {
    uint32_t bits[32];
    load(bits, column + 32 * part);
    MOE_UNROLL
    for (int i = 0; i < 32; ++i) v[i] = mx::float_of(bits[i]);
  }
  // Accumulators that share columns start at them: the first from its end. The issuer may go on when the last piece has been read, or
  // the shared columns.
  template <int kPiece>
  MOE_FN int piece(int i, int columns) {
    frees = i == (Config::kShared ? 0 : columns / kPiece - 1);
    return kPiece * (Config::kShared && accumulator.stage == 0 ? columns / kPiece - 1 - i : i);
  }
  MOE_FN void loaded() const {
    if (frees) let_issuer_go_on();
  }
  MOE_FN void let_issuer_go_on() const {
    Isa::fence_before_sync();
    Isa::warp_sync();
    // One lane for the warp: the barrier counts warps, and 32 arrivals would free the sums early (triton #9498).
    if (lane == 0) Isa::template arrive_leader<Config::kBlocks>(sums_empty_barrier<Config>(base, Config::kShared ? 0 : accumulator.stage));
  }
  template <class Arguments>
  MOE_FN void load_gate_up(const Arguments& args, uint32_t (&gate)[8], uint32_t (&up)[8], int column, int, int part, int sector) const {
    const int at = task.n0 + column + 32 * part + 16 * sector;
    const uint16_t* saved = args.gate_up_2xMxF + static_cast<int64_t>(row(0)) * args.n_extent + at;
    const uint16_t* saved_up = saved + args.num_rows * args.n_extent;
    MOE_UNROLL
    for (int i = 0; i < 8; ++i) gate[i] = up[i] = 0u;
    if (!is_live || at >= args.n_extent) return;
    if (Config::kMx || args.n_extent % 16 == 0) {
      Isa::load_sector(saved, gate);
      Isa::load_sector(saved_up, up);
    } else {  // every other row starts in the middle of a sector, and the last 8 columns are alone
      MOE_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (at + 8 * i < args.n_extent) {
          Isa::load_chunk(saved + 8 * i, gate + 4 * i);
          Isa::load_chunk(saved_up + 8 * i, up + 4 * i);
        }
      }
    }
  }

  // --- results ---
  MOE_FN void open(int) const {}
  template <class Arguments>
  MOE_FN void close(const Arguments&, int) const {}
  template <class Arguments>
  MOE_FN void put(const Arguments& args, int r, int column, int, const uint32_t (&words)[kWords]) {
    if constexpr (Config::kMx && (kKind == kGateUp || kKind == kDgradDown)) {
      if (kKind == kDgradDown || r >= 2) return put_quantised(args, r, column, words);
    }
    if constexpr (kWords == 32) {
      const auto place = place_of<kKind>(args, r);
      put_panel(place.map, words, task.n0 + column, place.half, 0);
    }
  }
  template <class Arguments>
  MOE_FN void put_quantised(const Arguments& args, int r, int column, const uint32_t (&words)[kWords]) {
    MOE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      uint32_t pairs[16];
      MOE_UNROLL
      for (int i = 0; i < 16; ++i) pairs[i] = words[16 * part + i];
      const int at = task.n0 + column + 32 * part;
      if (kKind == kGateUp) {
        put_by_row(args.by_row, pairs, args, at, 0);
      } else if (r < 2) {
        put_by_row(args.by_row, pairs, args, at, r);
        put_by_column(args.by_column, pairs, args, at, r);
      } else {
        put_by_column(args.scaled_h_by_column, pairs, args, at, 0);
      }
    }
  }
  // One 128-byte row per lane, through the next panel.
  template <class TensorMap>
  MOE_FN void put_panel(const TensorMap* map, const uint32_t (&words)[32], int column, int half, int expert) {
    if (lane == 0) Isa::template store_wait_read<Config::kSlots - 1>();
    Isa::warp_sync();
    const uint32_t panel = base + Config::kSlotOffset + (warp * Config::kSlots + slot) * Config::kSlotBytes;
    MOE_UNROLL
    for (int chunk = 0; chunk < 8; ++chunk) {
      Isa::store_words(panel + panel_offset(lane, chunk), words[4 * chunk], words[4 * chunk + 1], words[4 * chunk + 2],
                       words[4 * chunk + 3]);
    }
    Isa::fence_async_shared();  // plain stores before a bulk store that reads them (torchao #4278)
    Isa::warp_sync();
    if (lane == 0) {
      Isa::store_box(map, panel, column, first_row, half, expert);
      Isa::store_commit();
    }
    slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
  }
  // 32 columns of a row, a block along the row. `matrix` counts tables of num_rows x n_extent.
  template <class Arguments>
  MOE_FN void put_by_row(const MxTarget& target, const uint32_t (&pairs)[16], const Arguments& args, int column, int matrix) const {
    const int64_t rows = args.num_rows;
    const int columns = args.n_extent;
    uint32_t bytes[8];
    const uint32_t code = mx::quantize_row<Isa>(pairs, bytes);
    if (column < columns) Isa::store_sector(target.elements + (matrix * rows + row(0)) * columns + column, bytes);
    if (column < div_up(columns, 128) * 128) {  // inside the table's padding too, where codes are 0
      const int64_t table = mx::interleaved_offset(rows, 0, columns) * matrix;
      target.codes[table + mx::interleaved_offset(row(0), column / 32, columns)] = static_cast<uint8_t>(code);
    }
  }
  // The same, a block of the warp's 32 rows per column: the table has n_extent rows, padded to 128, and runs along num_rows.
  template <class Arguments>
  MOE_FN void put_by_column(const MxTarget& target, const uint32_t (&pairs)[16], const Arguments& args, int column, int matrix) const {
    const int64_t rows = args.num_rows, padded = div_up(args.n_extent, 128) * 128;
    const int columns = args.n_extent;
    uint32_t bytes[8];
    const uint32_t code = mx::quantize_columns<Isa>(pairs, bytes);
    if (column < columns) Isa::store_sector(target.elements + (matrix * rows + row(0)) * columns + column, bytes);
    if (column < padded) {
      const int64_t table = mx::interleaved_offset(padded, 0, rows) * matrix;
      target.codes[table + mx::interleaved_offset(column + lane, first_row / 32, rows)] = static_cast<uint8_t>(code);
    }
  }

  // FP32 weight gradients. One that continues adds the whole sum over this call's rows to what is there: one rounding more than a sum
  // that starts from it.
  template <class Arguments>
  MOE_FN void write_wgrad(const Arguments& args) {
    const int matrix = kKind == kWgradGateUp ? 2 * task.expert + task.half : task.expert;
    begin();
    MOE_NO_UNROLL
    for (int p = 0; p < Config::kTileN / 32; ++p) {
      const int column = piece<32>(p, Config::kTileN);
      uint32_t v[32];
      if (task.rows > 0) {
        load(v, column);
      } else {  // tensor memory was not written
        MOE_UNROLL
        for (int i = 0; i < 32; ++i) v[i] = 0u;
      }
      loaded();
      if (args.accumulate && row(0) < args.m_extent) {
        const float* at = args.dw + (static_cast<int64_t>(matrix) * args.m_extent + row(0)) * args.n_extent + task.n0 + column;
        MOE_UNROLL
        for (int sector = 0; sector < 4; ++sector) {
          uint32_t before[8] = {};
          if (task.n0 + column + 8 * sector < args.n_extent) Isa::load_sector(at + 8 * sector, before);
          MOE_UNROLL
          for (int i = 0; i < 8; ++i) {
            v[8 * sector + i] = mx::bits_of(Isa::add(mx::float_of(before[i]), mx::float_of(v[8 * sector + i])));
          }
        }
      }
      put_panel(&args.out, v, task.n0 + column, task.half, task.expert);
    }
  }
};

// --- roles -----------------------------------------------------------------------------------------------------------------------
// Every task of this block's cluster, in order. kWholeWarp: all lanes of the warp take part.
template <class Isa, class Config, bool kWholeWarp, class Batch, class F>
MOE_FN void each_task(const Batch& batch, uint32_t base, F f) {
  auto run = [&](auto tasks) {
    MOE_NO_UNROLL
    for (Task task; tasks.take(task);) f(task);
  };
  if constexpr (Config::kStealing) {
    run(StolenTasks<Isa, Config, kWholeWarp>(batch, base));
  } else {
    constexpr int kBlocks = Config::kBlocks;
    run(TaskStream(batch.tasks, *batch.num_tasks, static_cast<int>(Isa::template cluster_id<kBlocks>()),
                   static_cast<int>(Isa::template cluster_count<kBlocks>())));
  }
}

template <Kind kKind, class Isa, class Config, class Batch>
MOE_FN void load_operands(const Batch& batch, uint32_t base) {
  const uint32_t rank = Isa::template block_rank<Config::kBlocks>();
  Ring<Isa, Config> ring(base);
  each_task<Isa, Config, false>(batch, base, [&](const Task& task) {
    wait_ready<Isa>(task, batch.args);
    const Task tile = block_tile<Config>(task, kKind, rank);
    if constexpr (Config::kMx) {
      using Scales = ScaleAtoms<kKind, Isa, Config, std::decay_t<decltype(batch.args)>>;
      load_k_blocks<kKind, Isa>(tile, batch.args, rank, 2, Scales{tile, batch.args}, ring);
    } else {
      load_k_blocks<kKind, Isa>(tile, batch.args, rank, 2, NoScales{}, ring);
    }
  });
}

template <Kind kKind, class Isa, class Config, class Batch>
MOE_FN void issue_products(const Batch& batch, uint32_t base, uint32_t tmem) {
  Ring<Isa, Config> ring(base);
  RingPosition<Config::kAccumulators> accumulator;
  RingPosition<Config::kEmptyBarriers> drained;
  each_task<Isa, Config, false>(batch, base, [&](const Task& task) {
    multiply_tile<kKind, Isa, Config>(task, batch.args, base, tmem, ring, accumulator, drained);
  });
}

// Epilogue warp.
template <Kind kKind, bool kPlain, class Isa, class Config, class Batch>
MOE_FN void write_results(const Batch& batch, uint32_t base, uint32_t tmem, uint32_t warp) {
  const auto& args = batch.args;
  const uint32_t rank = Isa::template block_rank<Config::kBlocks>();
  TensorMemoryTile<kKind, Isa, Config> tile(base, warp, tmem);
  each_task<Isa, Config, true>(batch, base, [&](const Task& task) {
    tile.take(block_tile<Config>(task, kKind, rank));
    if constexpr (is_wgrad(kKind)) {
      tile.write_wgrad(args);
    } else if (tile.task.rows <= 0) {  // the pair's second block, past the expert's rows: they are another expert's
      tile.begin();
      tile.let_issuer_go_on();
    } else {
      write_tile<kKind, kPlain, Isa>(tile, args);
    }
    Isa::fence_before_sync();  // loads after the issuer was let go on; the next arrival of this warp speaks for them too
    tile.accumulator.advance();
    if (task.signal >= 0) {
      if (tile.lane == 0) Isa::store_wait_done();
      Isa::warp_sync();  // orders the other lanes' stores before this release
      if (tile.lane == 0) Isa::add_release(args.signals + task.signal, 1);
    }
  });
  if (tile.lane == 0) Isa::store_wait_done();  // shared memory must outlive the stores that read it
}

template <Kind kKind, bool kPlain, class Isa, class Config, class Batch>
MOE_FN void sm100_run_block(const Batch& batch) {
  constexpr int kBlocks = Config::kBlocks;
  static_assert(sm100_supports<Config>(kKind), "this kind does not run with this tile; see sm100_supports");
  const uint32_t base = Isa::shared_base();
  const uint32_t warp = Isa::warp_index();
  if (warp == 0 && Isa::elect_one()) {
    Ring<Isa, Config> ring(base);
    for (int s = 0; s < Config::kStages; ++s) {
      Isa::barrier_init(ring.full(), 1);
      Isa::barrier_init(ring.empty(), 1);
      ring.advance();
    }
    for (uint32_t a = 0; a < Config::kAccumulators; ++a) {
      Isa::barrier_init(sums_full_barrier<Config>(base, a), 1);
      Isa::barrier_init(sums_empty_barrier<Config>(base, a), Config::kEpilogueWarps * kBlocks);
    }
    for (uint32_t c = 0; c < Config::kClcSlots; ++c) {
      Isa::barrier_init(given_barrier<Config>(base, c), 1);
      Isa::barrier_init(taken_barrier<Config>(base, c), Config::kTakers);
    }
    Isa::barrier_init_fence();
  }
  if (warp == 3) Isa::template tmem_alloc<kBlocks>(base + Config::kTmemAddressOffset, Config::kTmemColumns);
  // In a pair this also says that the peer has started and allocated, without which the address must not be used (cutlass #3316).
  Isa::warp_sync();
  Isa::fence_before_sync();
  Isa::template everyone<kBlocks>();
  Isa::fence_after_sync();
  const uint32_t tmem = Isa::load_word(base + Config::kTmemAddressOffset);

  if (warp == 0) {
    if (Isa::elect_one()) {
      Isa::prefetch_map(&batch.args.a);
      Isa::prefetch_map(&batch.args.b);
      load_operands<kKind, Isa, Config>(batch, base);
    }
  } else if (warp == 1) {
    if (Isa::template block_rank<kBlocks>() == 0 && Isa::elect_one()) issue_products<kKind, Isa, Config>(batch, base, tmem);
  } else if (warp == 2) {
    if (Config::kStealing && Isa::elect_one()) ask_for_work<Isa, Config>(batch, base);
  } else if (warp >= 4) {
    write_results<kKind, kPlain, Isa, Config>(batch, base, tmem, warp - 4);
  }

  Isa::warp_sync();  // the lanes that had no role wait for the one that had
  // All of tensor memory has been read; no block of a pair exits while the other still signals it (sglang #32907), and none
  // deallocates before the other has allocated (cutlass #3435).
  Isa::fence_before_sync();
  Isa::template everyone<kBlocks>();
  Isa::fence_after_sync();
  if (warp == 3) Isa::template tmem_dealloc<kBlocks>(tmem, Config::kTmemColumns);
}

}  // namespace moe
