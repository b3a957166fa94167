// The MMA roles of Hopper: what differs from Blackwell (mma_sm100.h) besides the instruction layer. Two consumer warpgroups multiply 64 rows
// each, keep the sums in registers and turn them into results themselves, which store warps send to memory. Tasks, ring, loader and the maths
// of results are those of every architecture: scheduler.h, gemm_ring.h, gemm_load.h, gemm_results.h. Tile programs of other shapes over
// the same parts: gemm_tokens_n.h, gemm_resident.h, gemm_resident_rows.h, mx_roles.h.
//
// A block owns a 128 x kTileN output tile. Warp 0 fills the ring; warps 1 and 2 store what the consumers leave in shared memory, so that a
// warpgroup goes on to its next tile while the last one drains; warp 3 brings rows of A from tokens, where they are not dispatched,
// or dispatches rows for a later product (gemm_gather.h). Two blocks form a cluster and share either the A or the B operand of every stage.
#pragma once

#include <type_traits>

#include "gemm_arguments.h"
#include "gemm_gather.h"
#include "gemm_load.h"
#include "gemm_results.h"
#include "scheduler.h"

namespace moe {

// --- shape -----------------------------------------------------------------------------------------------------------------------
// Results leave through stages of the ring (three panels per consumer) and two staging panels per consumer.
template <int kTileN_>
struct GemmConfig {
  static constexpr int kTileM = 128;
  static constexpr int kTileN = kTileN_;
  static constexpr int kBlockK = 64;
  static constexpr int kElementBytes = 2;
  static constexpr bool kOnlyKMajor = false;
  static constexpr bool kMulticast = true;   // the blocks of a cluster share an operand
  static constexpr int kBlocks = 1;          // that compute a tile together
  static constexpr int kRowsB = kTileN;      // of a stage
  static constexpr int kBoxRowsB = 64;
  static constexpr int kBytesA = kTileM * kPanelRowBytes;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kPanelsA = kTileM / 64;
  static constexpr int kPanelsB = kTileN / 64;
  static constexpr int kStageBytes = (kPanelsA + kPanelsB) * kPanelBytes;
  static constexpr int kStages = kTileN == 256 ? 4 : 6;
  static constexpr int kAcc = kTileN / 2;       // FP32 accumulators per consumer thread
  static constexpr int kColumns64 = kTileN / 64;  // 64-column chunks of the epilogue
  static constexpr int kWeightChunk = 128;      // columns of F in one partial sum of d(weight): the same in every configuration
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;
  static constexpr int kOffsetTable = 0;  // of a gathering warp: in registers

  static constexpr int kMaxUnits = kColumns64;  // pieces in which a consumer hands its tile to its store warp

  // Shared memory: stages, then two staging panels per consumer, then the barriers: full[stage], empty[stage],
  // written[consumer][unit], credit[consumer], lead, followed.
  static constexpr int kStagingOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kStagingOffset + kConsumers * 2 * kPanelBytes;
  static constexpr int kWrittenOffset = kBarrierOffset + 2 * kStages * 8;
  static constexpr int kCreditOffset = kWrittenOffset + kConsumers * kMaxUnits * 8;
  static constexpr int kLeadOffset = kCreditOffset + kConsumers * 8;
  static constexpr int kSharedBytes = kLeadOffset + 16;

  // Stages of the ring that a tile's results pass through after its K blocks (kDgradDown: those that brought gate and up).
  static MOE_HOST_FN constexpr int drain_stages(Kind kind) {
    return kind == kDgradDown ? kColumns64 : kind == kGateUp ? kColumns64 / 2 : is_wgrad(kind) ? 0 : 1;
  }

  static_assert(kTileN % kWeightChunk == 0, "a partial sum of d(weight) must not cross tiles");
  static constexpr int kSlotPanels = (kPanelsA + kPanelsB) / kConsumers;  // panels of a stage that belong to one consumer

  static constexpr int kStagedPanels = 2;  // of a weight gradient's tile, per consumer

  static_assert(kSlotPanels >= 3, "a stage carries three panels per consumer in the epilogues");
  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
};

// Barriers. Stages: full[s], one arrival, this block's producer, with the bytes of its own copies and the peer's multicast; in launches that
// gather, one more by each lane of the gathering warp, on every stage; consumers wait. empty[s], 4 warps x 2 consumers x 2 blocks, because the
// peer's multicast also writes here; the producer waits. Both blocks run the same number of stages for a task, so the rings stay in step.
template <class Config>
MOE_HOST_FN constexpr uint32_t written_barrier(uint32_t base, uint32_t consumer, int unit) {
  return base + Config::kWrittenOffset + (consumer * Config::kMaxUnits + unit) * 8;
}
template <class Config>
MOE_HOST_FN constexpr uint32_t credit_barrier(uint32_t base, uint32_t consumer) {
  return base + Config::kCreditOffset + consumer * 8;
}
// lead: 4 warps of consumer 0 arrive once per tile of a weight gradient; consumer 1 waits before its products. followed: the 4 warps
// of consumer 1 arrive once they have seen that; consumer 0 waits before its next arrival, which could otherwise be a phase ahead.
template <class Config>
MOE_HOST_FN constexpr uint32_t lead_barrier(uint32_t base) {
  return base + Config::kLeadOffset;
}
template <class Config>
MOE_HOST_FN constexpr uint32_t followed_barrier(uint32_t base) {
  return base + Config::kLeadOffset + 8;
}
template <class Config>
MOE_HOST_FN constexpr uint32_t staging_panel(uint32_t base, uint32_t consumer, int panel) {
  return base + Config::kStagingOffset + (2 * consumer + panel) * kPanelBytes;
}
// Panel of a stage that belongs to one consumer in the epilogues.
template <class Config>
MOE_HOST_FN constexpr uint32_t slot_panel(uint32_t stage, uint32_t consumer, int panel) {
  return stage + (Config::kSlotPanels * consumer + panel) * kPanelBytes;
}

// Whether a tile's results also pass through staging.
MOE_HOST_FN constexpr bool uses_staging(Kind kind) { return kind != kGateUp && kind != kDgradDown; }

// --- producer --------------------------------------------------------------------------------------------------------------------
// Producer, one task. Fills one stage per K block, and for the kinds whose epilogue reads memory one stage per 64 columns. scales_of(tile):
// what comes with the K blocks (gemm_load.h).
template <Kind kKind, class Isa, class Config, class Arguments, class ScalesOf>
MOE_FN void load_task(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring, ScalesOf scales_of) {
  const bool gathered = can_gather<Config>(kKind) && args.gather != nullptr;
  const Task tile = block_tile<Config>(task, kKind, rank);

  // Two panels per consumer: gate and up, or 2 x 32 columns of an FP32 gradient.
  auto load_chunks = [&] {
    MOE_NO_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64; ++chunk) {
      Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
      const int consumers = kKind == kDgradDown && tile.rows <= 64 ? 1 : 2;  // the other one has padding alone, and reads nothing
      Isa::barrier_expect_bytes(ring.full(), 2 * consumers * kPanelBytes);
      MOE_UNROLL
      for (int p = 0; p < 4; ++p) {
        int consumer = p / 2;
        if (consumer >= consumers) break;
        uint32_t dst = slot_panel<Config>(ring.data(), consumer, p % 2);
        if (is_wgrad(kKind)) {
          Isa::load_panel(&args.out, ring.full(), dst, tile.n0 + 64 * chunk + 32 * (p % 2), tile.m0 + 64 * consumer, tile.half,
                          tile.expert);
        } else {
          Isa::load_panel(&args.gate_up, ring.full(), dst, tile.n0 + 64 * chunk, tile.row0 + 64 * consumer, p % 2, 0);
        }
      }
      ring.advance();
    }
  };

  wait_ready<Isa>(tile, args);
  if (is_wgrad(kKind) && args.accumulate) load_chunks();

  // Rows past the first 64 are never multiplied when the expert has none there.
  const int boxes_a = gathered ? 0 : !is_wgrad(kKind) && tile.rows <= 64 ? 1 : 2;
  load_k_blocks<kKind, Isa>(tile, args, rank, boxes_a, scales_of(tile), ring);
  if (kKind == kDgradDown) {
    load_chunks();
  } else {
    MOE_NO_UNROLL
    for (int drain = 0; drain < Config::drain_stages(kKind); ++drain) {  // lend stages to the consumers' results
      Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
      Isa::barrier_arrive(ring.full());
      ring.advance();
    }
  }
}

// --- consumers -------------------------------------------------------------------------------------------------------------------
// kColumns columns of a weight gradient from the registers: neighbouring lanes exchange halves of column blocks 2 jj and 2 jj + 1, so that
// each writes 16 bytes and four lanes 64 bytes of a row. `row`: of this thread's values 0 and 1 in the whole matrix. kStream: what is
// written leaves L2 before what is read.
template <class Isa, int kColumns, bool kStream, int kCount, class Arguments>
MOE_FN void store_gradient(const float (&acc)[kCount], const Task& tile, Kind kind, int row, int column, const Arguments& args) {
  const int matrix = kind == kWgradGateUp ? 2 * tile.expert + tile.half : tile.expert;
  const uint32_t lane = Isa::lane_index();
  const uint32_t odd = lane % 2;
  const int first_column = column + (odd ? 8 : 0) + 4 * static_cast<int>((lane % 4) / 2);
  const int64_t pitch = args.n_extent;
  float* at = args.dw + (static_cast<int64_t>(matrix) * args.m_extent + row) * pitch + first_column;
  MOE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int columns = row + 8 * half < args.m_extent ? args.n_extent - first_column : 0;
    MOE_UNROLL
    for (int jj = 0; jj < kColumns / 16; ++jj) {
      const int a = 8 * jj + 2 * half, b = a + 4;  // this lane's pairs of blocks 2 jj and 2 jj + 1
      const float got0 = Isa::shuffle_xor(Isa::select(odd, acc[a], acc[b]), 1);
      const float got1 = Isa::shuffle_xor(Isa::select(odd, acc[a + 1], acc[b + 1]), 1);
      const float v0 = Isa::select(odd, got0, acc[a]), v1 = Isa::select(odd, got1, acc[a + 1]);
      const float v2 = Isa::select(odd, acc[b], got0), v3 = Isa::select(odd, acc[b + 1], got1);
      if (16 * jj < columns) Isa::template store_float4<kStream>(at + 16 * jj, v0, v1, v2, v3);
    }
    at += 8 * pitch;
  }
}

// What a consumer warpgroup keeps from tile to tile, and how its lanes address panels. Its 64 x kTileN sums leave unit by unit: it writes
// panels (64 rows of 128 bytes) into shared memory and goes on to its next tile, while its store warp sends each unit to memory and gives
// the shared memory back. Most units are stages of the operand ring, taken in order like any K block; the two staging panels of the
// consumer are one more.
//
// Stores clip at the tensor's edges; row tiles start at the expert's base and groups are padded to the tile, so a store cannot
// reach the next expert. Rows past the expert's count are written as zeros.
//
// Weight gradients go straight from the registers to memory, but for their last 64 columns: a block writes 32 bytes a clock at
// best, so what waits in staging is written while the next tile's products run.
//
// Hand-over. written[consumer][unit]: 4 warps arrive, once per tile; the store warp waits. credit[consumer]: the store warp
// arrives once per tile, when all of it has left shared memory; the consumer waits before its next tile's first unit, so that no
// written barrier can be a phase ahead.
//
// Accumulator layout of m64nN (PTX ISA, wgmma D fragments): warp w holds rows 16 w .. 16 w + 15; value 4 j + i of lane l is row
// 16 w + l / 4 + 8 (i / 2), column 8 j + 2 (l % 4) + i % 2.
template <class Isa, class Config>
struct Epilogue {
  uint32_t base;
  uint32_t consumer;
  uint32_t warp;       // 0..3 inside the warpgroup
  uint32_t lane;
  uint32_t tiles = 0;  // tiles handed over

  MOE_FN Epilogue(uint32_t shared_base, uint32_t consumer_)
      : base(shared_base), consumer(consumer_), warp(Isa::warp_index() % 4), lane(Isa::lane_index()) {}

  MOE_FN int row_in_group() const { return static_cast<int>(16 * warp + lane / 4); }  // of values 0, 1; values 2, 3 are 8 below

  // Waits until the previous tile has left shared memory.
  MOE_FN void begin_tile() {
    Isa::barrier_wait(credit_barrier<Config>(base, consumer), (tiles & 1) ^ 1);
    ++tiles;
  }

  // Hands a unit to the store warp. Its panels were written by ordinary stores and are read by the copy engine.
  MOE_FN void finish_unit(int unit) const {
    Isa::fence_async_shared();
    Isa::warp_sync();
    if (lane == 0) Isa::barrier_arrive(written_barrier<Config>(base, consumer, unit));
  }

  // Weight gradients of few rows are mostly stores: one warpgroup multiplies while the other one stores. Consumer 1 waits for its
  // turn before a tile's products, consumer 0 passes it on after its own (or before, where the tile does not fit the ring).
  MOE_FN void wait_turn() const {
    if (consumer != 1) return;
    Isa::barrier_wait(lead_barrier<Config>(base), tiles & 1);
    Isa::warp_sync();
    if (lane == 0) Isa::barrier_arrive(followed_barrier<Config>(base));
  }
  MOE_FN void pass_turn() const {
    if (consumer != 0) return;
    Isa::barrier_wait(followed_barrier<Config>(base), (tiles & 1) ^ 1);
    Isa::warp_sync();
    if (lane == 0) Isa::barrier_arrive(lead_barrier<Config>(base));
  }

  // Address of the row that this lane supplies to ldmatrix/stmatrix x4 for column blocks 2 jj and 2 jj + 1 of a BF16 panel:
  // matrices are (rows 0-7, block 2jj), (rows 8-15, 2jj), (rows 0-7, 2jj+1), (rows 8-15, 2jj+1) of the warp's 16 rows.
  MOE_FN uint32_t matrix_address(uint32_t panel, int jj) const {
    uint32_t matrix = lane / 8;
    uint32_t row = 16 * warp + (matrix % 2) * 8 + lane % 8;
    return panel + panel_offset(row, 2 * jj + matrix / 2);
  }

  // The accumulators start from the bias of their columns.
  template <Kind kKind, class Arguments>
  MOE_FN void read_bias(float (&acc)[Config::kAcc], const Task& tile, const Arguments& args) const {
    constexpr int kHalves = kKind == kGateUp ? 2 : 1;
    constexpr int kBlocks = Config::kAcc / 4 / kHalves;  // of eight columns
    MOE_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      const float* bias = args.bias + static_cast<int64_t>(kHalves * tile.expert + half) * args.n_extent;
      MOE_UNROLL
      for (int j = 0; j < kBlocks; ++j) {
        const int column = tile.n0 + 8 * j + 2 * static_cast<int>(lane % 4);
        const bool inside = column < args.n_extent;  // extents are multiples of 8
        MOE_UNROLL
        for (int i = 0; i < 4; ++i) acc[4 * (kBlocks * half + j) + i] = inside ? bias[column + i % 2] : 0.0f;
      }
    }
  }

  // Address of columns 8 j + 2 (lane % 4) .. + 1 (j < 4) in an FP32 panel.
  MOE_FN uint32_t fp32_address(uint32_t panel, int j, int half) const {
    return panel + panel_offset(row_in_group() + 8 * half, 2 * j + (lane % 4) / 2) + 8 * (lane % 2);
  }

  // 64 columns of a gradient that is continued, brought by the ring as two panels.
  MOE_FN void read_fp32_chunk(float (&acc)[Config::kAcc], int chunk, uint32_t stage) const {
    MOE_UNROLL
    for (int j = 0; j < 8; ++j) {
      MOE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int at = 32 * chunk + 4 * j + 2 * half;
        Isa::load_float2(fp32_address(slot_panel<Config>(stage, consumer, j / 4), j % 4, half), acc[at], acc[at + 1]);
      }
    }
  }

  // 32 columns of FP32. Odd rows write blocks j and j ^ 2 in the other order: rows 2 i and 2 i + 1 would otherwise meet in the same
  // banks.
  MOE_FN void write_fp32(const float (&acc)[Config::kAcc], int part, uint32_t panel) const {
    const uint32_t odd = (lane / 4) % 2;
    MOE_UNROLL
    for (int j = 0; j < 4; ++j) {
      MOE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int at = 16 * part + 4 * j + 2 * half;
        const int other = 16 * part + 4 * (j ^ 2) + 2 * half;
        const uint32_t address = fp32_address(panel, odd ? j ^ 2 : j, half);
        Isa::store_float2(address, Isa::select(odd, acc[other], acc[at]), Isa::select(odd, acc[other + 1], acc[at + 1]));
      }
    }
  }

  // Weight gradients, FP32: the first columns from the registers, the others through staging.
  template <class Arguments>
  MOE_FN void write_wgrad(const float (&acc)[Config::kAcc], const Task& tile, Kind kind, const Arguments& args) {
    constexpr int kStagedParts = Config::kStagedPanels;
    constexpr int kDirectColumns = Config::kTileN - 32 * kStagedParts;
    const int first_row = tile.m0 + 64 * static_cast<int>(consumer) + row_in_group();
    store_gradient<Isa, kDirectColumns, false>(acc, tile, kind, first_row, tile.n0, args);
    begin_tile();
    MOE_UNROLL
    for (int part = 0; part < kStagedParts; ++part) {
      write_fp32(acc, kDirectColumns / 32 + part, staging_panel<Config>(base, consumer, part));
    }
    finish_unit(0);
  }
};

// A row kind's tile as gemm_results.h asks: sums in registers, results in panels that the store warp takes. A chunk is 64 columns, a piece
// the 16 columns of one stmatrix: pairs j of a piece are column block 2 p + j / 2, row half j % 2. kAhead: gate and up are read one piece
// ahead, so that no piece waits for shared memory; there are registers for it beside plain swiglu only.
template <Kind kKind, class Isa, class Config, bool kAhead = false>
struct RegisterTile {
  static constexpr int kRows = 2, kChunk = 64, kPieces = 4, kParts = 1, kWords = 4, kSavedPairs = 4;
  static constexpr int kColumns = Config::kTileN, kWeightChunk = Config::kWeightChunk;
  static constexpr int kUnroll = kColumns / kChunk;
  static constexpr bool kGated = kKind == kGateUp || kKind == kDgradDown;  // three results, a stage of the ring per chunk
  using Dot = std::conditional_t<Config::kElementBytes == 2, DotBySixteen<Isa>, DotByColumn<Isa>>;  // BF16 has tiles with tokens on either side

  const float (&acc)[Config::kAcc];
  const Task& tile;  // of this block
  int rows;          // real ones of this warpgroup; <= 0: all padding
  Epilogue<Isa, Config>& epilogue;
  Ring<Isa, Config>& ring;
  uint32_t ahead[2][4];  // gate and up of the next piece

  MOE_FN bool live(int i) const { return epilogue.row_in_group() + 8 * i < rows; }
  MOE_FN int row(int i) const { return tile.row0 + 64 * static_cast<int>(epilogue.consumer) + epilogue.row_in_group() + 8 * i; }
  // Computed for padding too: a select costs less than a branch where a thread has two rows.
  template <class Pair>
  MOE_FN uint32_t keep(int i, Pair pair) const {
    const uint32_t kept = pair();
    return live(i) ? kept : 0u;
  }
  MOE_FN int first_column() const { return tile.n0; }
  template <class Arguments>
  MOE_FN bool scatters(const Arguments& args) const {
    return args.scatter != nullptr;
  }
  template <class Arguments>
  MOE_FN bool writes_h(const Arguments& args) const {
    return args.write_out;
  }
  MOE_FN float sum_of_row(float sum) const {  // over its four lanes, in a fixed order
    sum = Isa::add(sum, Isa::shuffle_xor(sum, 1));
    return Isa::add(sum, Isa::shuffle_xor(sum, 2));
  }
  MOE_FN bool speaks_for_row() const { return epilogue.lane % 4 == 0; }

  MOE_FN void begin() { epilogue.begin_tile(); }
  template <int kPiece>
  MOE_FN int piece(int i, int) const {
    return kPiece * i;
  }
  MOE_FN void load(float (&v)[8], int column, int p, int) const {
    MOE_UNROLL
    for (int i = 0; i < 8; ++i) v[i] = acc[column / 2 + 4 * (2 * p + i / 4) + 2 * (i / 2 % 2) + i % 2];
  }
  MOE_FN void loaded() const {}
  // Two chunks of y or dx leave through one stage, which is wanted back first, the others through staging.
  MOE_FN uint32_t panel(int r, int column) const {
    if (kGated) return slot_panel<Config>(ring.data(), epilogue.consumer, r);
    return column < 128 ? slot_panel<Config>(ring.data(), epilogue.consumer, column / 64)
                        : staging_panel<Config>(epilogue.base, epilogue.consumer, column / 64 - 2);
  }
  MOE_FN void open(int column) const {
    if (kGated || column == 0) Isa::barrier_wait(ring.full(), ring.phase);
  }
  // Gate and up arrive through the ring; d(gate) and d(up) are written over them in place: every warp touches only its own 16 rows.
  template <class Arguments>
  MOE_FN void load_gate_up(const Arguments&, uint32_t (&gate)[4], uint32_t (&up)[4], int column, int p, int, int) {
    if (!kAhead) {
      read_piece(gate, up, column, p);
    } else {
      if (p == 0) read_piece(ahead[0], ahead[1], column, 0);
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        gate[i] = ahead[0][i];
        up[i] = ahead[1][i];
      }
      if (p + 1 < kPieces) read_piece(ahead[0], ahead[1], column, p + 1);
    }
    Isa::warp_sync();
  }
  MOE_FN void read_piece(uint32_t (&gate)[4], uint32_t (&up)[4], int column, int p) const {
    Isa::load_matrices(epilogue.matrix_address(panel(0, column), p), gate);
    Isa::load_matrices(epilogue.matrix_address(panel(1, column), p), up);
  }
  template <class Arguments>
  MOE_FN void put(const Arguments&, int r, int column, int p, const uint32_t (&words)[4]) const {
    Isa::store_matrices(epilogue.matrix_address(panel(r, column), p), words);
  }
  template <class Arguments>
  MOE_FN void close(const Arguments&, int column) {
    if (kGated || column % 128 != 0) epilogue.finish_unit(kGated ? column / 64 : column / 128);
    if (kGated || column + 64 == kColumns) ring.advance();
  }

  // Whether anything of this warpgroup is stored: of kGateUp also its padding, for the backward.
  template <class Arguments>
  MOE_FN bool wanted(const Arguments& args) const {
    return kKind == kGateUp || (rows > 0 && tile.n0 < args.n_extent);
  }
  // Hands over what nobody wants, as it is.
  template <class Arguments>
  MOE_FN void skip(const Arguments& args) {
    begin();
    MOE_NO_UNROLL
    for (int column = 0; column < kColumns; column += kChunk) {
      open(column);
      Isa::warp_sync();
      close(args, column);
    }
  }
};

// Consumer warpgroup `consumer` (0 or 1), one task: rows 64 * consumer .. + 63 of the tile.
template <Kind kKind, bool kPlain, class Isa, class Config, class Arguments>
MOE_FN void compute_task(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring,
                         Epilogue<Isa, Config>& epilogue) {
  constexpr bool kMnA = mn_major_a<Config>(kKind);
  constexpr bool kMnB = mn_major_b<Config>(kKind);
  const uint32_t consumer = epilogue.consumer;
  const Task tile = block_tile<Config>(task, kKind, rank);
  const int k_blocks = task_k_blocks<kKind, Config>(task, args);
  const int rows = tile.rows - 64 * static_cast<int>(consumer);  // real rows of this warpgroup; <= 0: all padding
  const bool live = (is_wgrad(kKind) || rows > 0) && tile.n0 < args.n_extent && k_blocks > 0;

  // Cleared here rather than by the first product's predicate, which would keep 128 dead registers live between tasks.
  float acc[Config::kAcc];
  if (has_bias(kKind) && args.bias != nullptr) {
    epilogue.template read_bias<kKind>(acc, tile, args);
  } else {
    MOE_UNROLL
    for (int i = 0; i < Config::kAcc; ++i) acc[i] = 0.0f;
  }
  if (is_wgrad(kKind) && args.accumulate) {
    MOE_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64; ++chunk) {
      Isa::barrier_wait(ring.full(), ring.phase);
      epilogue.read_fp32_chunk(acc, chunk, ring.data());
      Isa::warp_sync();
      Ring<Isa, Config>::release(ring.empty());
      ring.advance();
    }
  }

  const bool pass_after = live && k_blocks <= Config::kStages;  // the tile fits the ring, whose stages are given back by both
  if (is_wgrad(kKind)) {
    epilogue.wait_turn();
    if (!pass_after) epilogue.pass_turn();
  }

  if (live) {
    uint32_t previous_empty = 0;
    MOE_NO_UNROLL
    for (int kb = 0; kb < k_blocks; ++kb) {
      Isa::barrier_wait(ring.full(), ring.phase);
      if (can_gather(kKind) && args.gather != nullptr) Isa::fence_async_shared();  // A was written by lanes, and is read by the tensor cores
      const uint64_t desc_a = panel_descriptor(ring.data() + consumer * kPanelBytes, kMnA);
      const uint64_t desc_b = panel_descriptor(ring.data() + Config::kPanelsA * kPanelBytes, kMnB);
      Isa::mma_fence();
      MOE_UNROLL
      for (int k16 = 0; k16 < Config::kBlockK / 16; ++k16) {
        Isa::template mma<Config::kTileN, kMnA, kMnB>(acc, desc_a + k16 * panel_k16_step(kMnA), desc_b + k16 * panel_k16_step(kMnB));
      }
      Isa::mma_commit();
      if (kb > 0) {
        Isa::template mma_wait<1>();  // the previous block's products have read their stage
        Ring<Isa, Config>::release(previous_empty);
      }
      previous_empty = ring.empty();
      ring.advance();
    }
    Isa::template mma_wait<0>();
    Ring<Isa, Config>::release(previous_empty);
    if (is_wgrad(kKind) && pass_after) epilogue.pass_turn();
  } else {
    MOE_NO_UNROLL
    for (int kb = 0; kb < k_blocks; ++kb) {  // keep step with the ring: a stage may only be given back once it is full
      Isa::barrier_wait(ring.full(), ring.phase);
      Isa::warp_sync();  // no lane may give the stage back while another has yet to see it full: it could miss the phase
      Ring<Isa, Config>::release(ring.empty());
      ring.advance();
    }
  }

  if constexpr (is_wgrad(kKind)) {
    epilogue.write_wgrad(acc, tile, kKind, args);
  } else {
    RegisterTile<kKind, Isa, Config, kPlain> results = {acc, tile, rows, epilogue, ring, {}};
    if (!kPlain || results.wanted(args)) {  // beside the general activation there are no registers for a second branch
      write_tile<kKind, kPlain, Isa>(results, args);
    } else {
      results.skip(args);
    }
  }
}

// --- store warps -----------------------------------------------------------------------------------------------------------------
// Store warp of one consumer, one task: sends every unit to memory in order and gives its shared memory back.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void store_task(const Task& task, const Arguments& args, uint32_t shared_base, uint32_t consumer, uint32_t& tiles,
                       Ring<Isa, Config>& ring) {
  const Task tile = block_tile<Config>(task, kKind, Isa::cluster_rank());
  ring.skip((is_wgrad(kKind) && args.accumulate ? Config::kColumns64 : 0) + task_k_blocks<kKind, Config>(task, args));

  constexpr bool kGated = kKind == kGateUp || kKind == kDgradDown;
  constexpr int kUnits = Config::drain_stages(kKind) + (uses_staging(kKind) ? 1 : 0);
  const bool one = Isa::lane_index() == 0;  // this lane issues, so that it can wait for its bulk stores
  const int row = (is_wgrad(kKind) ? tile.m0 : tile.row0) + 64 * static_cast<int>(consumer);
  // Padded rows of a whole warpgroup are never read again, except in what is saved for the backward.
  const bool wanted = is_wgrad(kKind) || tile.rows > 64 * static_cast<int>(consumer);
  const bool scatter = uses_staging(kKind) && !is_wgrad(kKind) && args.scatter != nullptr;
  int column = tile.n0;
  int tokens[2] = {-1, -1};
  if (scatter && wanted) {
    MOE_UNROLL
    for (int i = 0; i < 2; ++i) tokens[i] = args.slot_M[row + 32 * i + Isa::lane_index()];
  }
  MOE_NO_UNROLL
  for (int unit = 0; unit < kUnits; ++unit) {
    Isa::barrier_wait(written_barrier<Config>(shared_base, consumer, unit), tiles & 1);
    const bool staged = uses_staging(kKind) && unit == kUnits - 1;
    const uint32_t first = staged ? staging_panel<Config>(shared_base, consumer, 0) : slot_panel<Config>(ring.data(), consumer, 0);
    if (scatter) {
      if (wanted) {
        MOE_NO_UNROLL
        for (int p = 0; p < 2; ++p) scatter_panel<Isa>(args, tokens, column + 64 * p, first + p * kPanelBytes);
      }
      column += 128;
    } else if (one) {
      auto send = [&](int r, uint32_t panel, int at) {
        const auto place = place_of<kKind>(args, r);
        Isa::store_panel(place.map, panel, at, row, place.half, 0);
      };
      if (kGated) {  // three matrices at the same place: gate, up and h, or their gradients and weight * h
        if (kKind == kGateUp ? args.save_gate_up != 0 : wanted) {
          send(0, first, column);
          send(1, first + kPanelBytes, column);
        }
        if (wanted && (kKind == kDgradDown || args.write_out)) send(2, first + 2 * kPanelBytes, column);
        column += 64;
      } else if (is_wgrad(kKind)) {
        MOE_UNROLL
        for (int p = 0; p < Config::kStagedPanels; ++p) {
          const int at = column + Config::kTileN + 32 * (p - Config::kStagedPanels);
          Isa::store_panel(&args.out, first + p * kPanelBytes, at, row, tile.half, tile.expert);
        }
      } else {
        if (wanted) {
          send(0, first, column);
          send(0, first + kPanelBytes, column + 64);
        }
        column += 128;
      }
      Isa::store_commit();
      Isa::template store_wait_read<0>();
    }
    Isa::warp_sync();
    if (!staged) {
      if (one) ring.release_warpgroup(ring.empty());
      ring.advance();
    }
  }
  if (one) Isa::barrier_arrive(credit_barrier<Config>(shared_base, consumer));
  ++tiles;
  signal_done<Isa>(task, args, one);
}

// --- roles -----------------------------------------------------------------------------------------------------------------------
// The roles of a block with tokens on the M side, for run_roles: every task of this block's cluster, in order.
template <class Kinds, bool kPlain, class Isa, class Config_>
struct TokensM {
  using Config = Config_;
  static constexpr bool kFourthWarp = Kinds::kCanGather || Kinds::kCanCarry;  // has work
  template <class Batch>
  static MOE_FN uint32_t full_arrivals(const Batch& batch) {  // on a full barrier of the ring
    return 1 + (Kinds::kCanGather && gathers(batch) ? kGatherLanes : 0);
  }
  static MOE_FN void init(uint32_t) {}  // barriers of its own

  // f(kind as a type, task, arguments of that kind)
  template <class Batch, class F>
  static MOE_FN void each_task(const Batch& batch, F f) {
    TaskStream stream(batch.tasks, *batch.num_tasks, Isa::cluster_index(), Isa::num_clusters());
    MOE_NO_UNROLL
    for (Task task; stream.take(task);) {
      Kinds::visit(task.kind, [&](auto kind, int at) { f(kind, task, batch.kinds[at]); });
    }
  }
  template <class Batch>
  static MOE_FN void load(const Batch& batch, uint32_t base) {
    Ring<Isa, Config> ring(base);
    each_task(batch, [&](auto kind, const Task& task, const auto& args) {
      load_task<decltype(kind)::value, Isa>(task, args, Isa::cluster_rank(), ring, [](const Task&) { return NoScales{}; });
    });
  }
  // The fourth warp gathers, or carries the dispatch of products after this one.
  template <class Batch>
  static MOE_FN void gather(const Batch& batch, uint32_t base) {
    static_assert(!Kinds::kCanGather || !Kinds::kCanCarry, "one warp does either");
    if constexpr (Kinds::kCanCarry) {
      for (const auto& args : batch.kinds) carry_rows<Isa>(args.carry);
    } else if (gathers(batch)) {
      Ring<Isa, Config> ring(base);
      each_task(batch, [&](auto kind, const Task& task, const auto& args) {
        gather_task<decltype(kind)::value, Isa>(task, args, Isa::cluster_rank(), ring);
      });
    }
  }
  template <class Batch>
  static MOE_FN void store(const Batch& batch, uint32_t base, uint32_t consumer) {
    Ring<Isa, Config> ring(base);
    uint32_t tiles = 0;
    each_task(batch, [&](auto kind, const Task& task, const auto& args) {
      store_task<decltype(kind)::value>(task, args, base, consumer, tiles, ring);
    });
    if (Isa::lane_index() == 0) Isa::store_wait_done();  // shared memory must outlive the stores that read it
  }
  template <class Batch>
  static MOE_FN void compute(const Batch& batch, uint32_t base, uint32_t consumer) {
    Ring<Isa, Config> ring(base);
    Epilogue<Isa, Config> epilogue(base, consumer);
    each_task(batch, [&](auto kind, const Task& task, const auto& args) {
      compute_task<decltype(kind)::value, kPlain>(task, args, Isa::cluster_rank(), ring, epilogue);
    });
  }
};

// A block: warp 0 loads, warps 1 and 2 store, warp 3 gathers, warps 4 to 11 multiply.
template <class Roles, class Isa, class Batch>
MOE_FN void run_roles(const Batch& batch) {
  using Config = typename Roles::Config;
  // What a block starts with: equal parts of the register file, in steps of eight a thread. A warpgroup that asked for more would wait for ever.
  constexpr int kStart = 65536 / Config::kThreads / 8 * 8;
  static_assert(128 * (Config::kProducerRegisters + Config::kConsumers * Config::kConsumerRegisters) <= Config::kThreads * kStart, "too many registers");
  const uint32_t base = Isa::shared_base();
  const uint32_t warp = Isa::warp_index();
  if (warp == 0 && Isa::elect_one()) {
    for (int s = 0; s < Config::kStages; ++s) {
      Isa::barrier_init(base + Config::kBarrierOffset + 8 * s, Roles::full_arrivals(batch));
      Isa::barrier_init(base + Config::kBarrierOffset + 8 * (Config::kStages + s), 2 * Config::kConsumers * 4);
    }
    for (uint32_t consumer = 0; consumer < Config::kConsumers; ++consumer) {
      for (int unit = 0; unit < Config::kMaxUnits; ++unit) Isa::barrier_init(written_barrier<Config>(base, consumer, unit), 4);
      Isa::barrier_init(credit_barrier<Config>(base, consumer), 1);
    }
    Isa::barrier_init(lead_barrier<Config>(base), 4);
    Isa::barrier_init(followed_barrier<Config>(base), 4);
    Roles::init(base);
    Isa::barrier_init_fence();
  }
  Isa::warp_sync();
  Isa::cluster_sync();  // the peer's copies arrive on these barriers

  if (warp < 4) {
    Isa::template registers_shrink<Config::kProducerRegisters>();
    if (warp == 0 && Isa::elect_one()) {
      for (const auto& args : batch.kinds) {
        Isa::prefetch_map(&args.a);
        Isa::prefetch_map(&args.b);
      }
      Roles::load(batch, base);
    } else if (warp == 1 || warp == 2) {
      Roles::store(batch, base, warp - 1);
    } else if (Roles::kFourthWarp && warp == 3) {
      Roles::gather(batch, base);
    }
  } else {
    Isa::template registers_grow<Config::kConsumerRegisters>();
    Roles::compute(batch, base, warp / 4 - 1);
  }
  Isa::warp_sync();     // the lanes that had no role wait for the one that had
  Isa::cluster_sync();  // a block must not exit while its peer still arrives on its barriers
}

}  // namespace moe
