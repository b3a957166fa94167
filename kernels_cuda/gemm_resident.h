// Weight gradients with one operand at rest in shared memory, for experts with up to 192 rows; gemm_resident_rows.h is the form for more. A block
// keeps 256 columns of operand B, for all rows of an expert, and walks down a strip of tiles of 64 rows, for which only columns of operand A
// arrive, shared with the other block of the cluster. Such a product is mostly stores, and what its loads take of L2 and memory is
// missing for them; so all blocks of the card ask for A at the same moments, and several tiles of it fit into shared memory. Each warpgroup takes
// half of the columns and goes its own way through the rings, so that mostly one multiplies while the other one stores. An expert with more rows
// than fit streams both operands through the same rings. The sums are those of mma_sm90.h, bit for bit.
#pragma once

#include "mma_sm90.h"

namespace moe {

struct ResidentConfig {
  static constexpr int kTileM = 64;
  static constexpr int kTileN = 256;
  static constexpr int kStripTiles = 32;
  static constexpr int kBlockK = 64;
  static constexpr int kBoxRows = 16;  // of a box of either operand: reads of few rows end near the last one
  static constexpr bool kOnlyKMajor = false;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kPanelsB = kTileN / 64;
  static constexpr int kOwnN = kTileN / 2;  // columns of a warpgroup
  static constexpr int kBlocks = 3;         // of K, that fit
  static constexpr int kMaxUnits = 1;
  static constexpr int kProducerRegisters = 56;  // by 16-row boxes the loader needs more than 40
  static constexpr int kConsumerRegisters = 224;

  // Shared memory: operand A, the lookahead; operand B; then the barriers: full and empty of A, of B, and those of mma_sm90.h.
  static constexpr int kStageBytes = kPanelBytes;
  static constexpr int kStages = 16;
  static constexpr int kColumnsOffset = kStages * kStageBytes;
  static constexpr int kColumnBytes = kPanelsB * kPanelBytes;
  static constexpr int kBarrierOffset = kColumnsOffset + kBlocks * kColumnBytes;
  static constexpr int kWrittenOffset = kBarrierOffset + 2 * (kStages + kBlocks) * 8;
  static constexpr int kCreditOffset = kWrittenOffset + kConsumers * kMaxUnits * 8;
  static constexpr int kLeadOffset = kCreditOffset + kConsumers * 8;
  static constexpr int kSharedBytes = kLeadOffset + 16;

  // Operand B, in a ring of its own: a stage per K block, given back by this block's eight warps alone.
  struct Columns {
    static constexpr int kStages = kBlocks;
    static constexpr int kStageBytes = kColumnBytes;
    static constexpr int kBarrierOffset = kBlocks * kColumnBytes + 2 * ResidentConfig::kStages * 8;  // from kColumnsOffset on
  };

  // Reads scattered among writes slow memory down, whatever their share; those of all blocks at once do so less. A is asked for at ticks of the
  // card's clock, 4.1 us apart, two tiles at a time, which memory takes at least as long to write; the rest of the ring covers the wait.
  static constexpr int kTickShift = 12;
  static constexpr int kTickTiles = 2;

  static_assert(kStages >= 2 * kTickTiles * kBlocks, "a tick's tiles arrive while the last ones are multiplied");
  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
  static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= kThreads * 168, "a block starts with 168 registers a thread");
};

// One strip as every role sees it. The row tiles of both matrices of kWgradGateUp follow one another (Pairs::kStrips).
template <class Config>
struct Strip {
  static constexpr int kBoxes = Config::kBlockK / Config::kBoxRows;  // of a whole K block, per panel
  static constexpr int kBoxBytes = Config::kBoxRows * kPanelRowBytes;

  Task task;  // of this block; m0 is the first tile's
  int k_blocks, tiles, matrix_tiles;
  bool resident;
  template <class Arguments>
  MOE_FN Strip(const Task& of, Kind kind, uint32_t rank, const Arguments& args)
      : task(block_tile<Config>(of, kind, rank)),
        k_blocks(div_up(of.rows, Config::kBlockK)),
        matrix_tiles(div_up(args.m_extent, Config::kTileM)),
        resident(k_blocks <= Config::Columns::kStages) {
    const int left = (kind == kWgradGateUp ? 2 : 1) * matrix_tiles - of.m0 / Config::kTileM;
    tiles = left < Config::kStripTiles ? left : Config::kStripTiles;
  }
  MOE_FN int boxes(int kb) const {  // of a K block, per panel: what lies past the expert's rows is not multiplied
    const int left = div_up(task.rows - Config::kBlockK * kb, Config::kBoxRows);
    return left > kBoxes ? kBoxes : left;
  }
  // Tiles that are asked for together at tile t, or none: then its loads do not wait. The first ones of a strip come with its columns.
  MOE_FN int together(int t) const {
    if (t == 0 || t % Config::kTickTiles != 0 || !resident || k_blocks == 0) return 0;
    return tiles - t < Config::kTickTiles ? tiles - t : Config::kTickTiles;
  }
  MOE_FN Task tile(int t) const {
    Task one = task;
    const int at = task.m0 / Config::kTileM + t;
    one.half = static_cast<uint8_t>(at >= matrix_tiles ? 1 : 0);
    one.m0 = Config::kTileM * (at - one.half * matrix_tiles);
    return one;
  }
};

// Producer, one strip.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void load_strip(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring,
                       Ring<Isa, typename Config::Columns>& columns) {
  const Strip<Config> strip(task, kKind, rank, args);
  constexpr int kBoxBytes = Strip<Config>::kBoxBytes;
  wait_ready<Isa>(task, args);
  MOE_NO_UNROLL
  for (int t = 0; t < strip.tiles; ++t) {
    const Task tile = strip.tile(t);
    if (const int together = strip.together(t); together > 0) {
      Ring<Isa, Config> last = ring;
      last.skip(together * strip.k_blocks - 1);
      Isa::barrier_wait(last.empty(), last.phase ^ 1);  // stages are given back in order
      Isa::template wait_tick<Config::kTickShift>();
    }
    MOE_NO_UNROLL
    for (int kb = 0; kb < strip.k_blocks; ++kb) {
      const KBlock block = {0, tile.row0 + Config::kBlockK * kb};
      const int boxes = strip.boxes(kb);
      if (t == 0 || !strip.resident) {
        Isa::barrier_wait(columns.empty(), columns.phase ^ 1);
        Isa::barrier_expect_bytes(columns.full(), Config::kPanelsB * boxes * kBoxBytes);
        MOE_NO_UNROLL
        for (int i = 0; i < boxes; ++i) {
          MOE_UNROLL
          for (int p = 0; p < Config::kPanelsB; ++p) {
            const Box box = box_b<kKind, Config>(tile, block, 64 * p, Config::kBoxRows * i);
            Isa::load_panel(&args.b, columns.full(), columns.data() + p * kPanelBytes + i * kBoxBytes, box.inner, box.outer, 0, 0);
          }
        }
        columns.advance();
      }
      Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
      Isa::barrier_expect_bytes(ring.full(), boxes * kBoxBytes);
      MOE_NO_UNROLL
      for (int i = static_cast<int>(rank); i < boxes; i += 2) {  // the other block brings those in between
        const Box box = box_a<kKind, Config>(tile, block, 0, Config::kBoxRows * i);
        Isa::template load_panel_both<true>(&args.a, ring.full(), ring.data() + i * kBoxBytes, box.inner, box.outer, tile.half, 0);
      }
      ring.advance();
    }
  }
}

template <int kSteps>
struct Steps {
  static constexpr int value = kSteps;
};

// A consumer warpgroup.
template <Kind kKind, class Isa, class Config>
struct ResidentConsumer {
  using Rows = Ring<Isa, Config>;
  using Columns = Ring<Isa, typename Config::Columns>;
  uint32_t base;
  uint32_t consumer;
  uint32_t lane, row;  // row: of this thread in 64, of values 0 and 1; values 2 and 3 are 8 below
  float acc[Config::kOwnN / 2];

  MOE_FN ResidentConsumer(uint32_t shared_base, uint32_t consumer_)
      : base(shared_base), consumer(consumer_), lane(Isa::lane_index()), row(16 * (Isa::warp_index() % 4) + Isa::lane_index() / 4) {}

  // A stage of A goes back to both blocks, of B to this one.
  MOE_FN void release_columns(uint32_t empty) const {
    if (lane == 0) Isa::barrier_arrive(empty);
  }

  // The products of one tile, which has K blocks; the last block in steps of 16 rows, as many as there are. first: operand B has yet to be
  // seen full; last: its stages go back.
  MOE_FN void multiply(const Strip<Config>& strip, bool first, bool last, Rows& ring, Columns at) {
    uint32_t previous = 0, previous_columns = 0;
    auto give_back = [&] {
      Rows::release(previous);
      if (last) release_columns(previous_columns);
    };
    auto block = [&](auto steps, bool follows) {
      if (first) Isa::barrier_wait(at.full(), at.phase);
      Isa::barrier_wait(ring.full(), ring.phase);
      const uint64_t desc_a = panel_descriptor(ring.data(), true);
      const uint64_t desc_b = panel_descriptor(at.data() + consumer * (Config::kOwnN / 64) * kPanelBytes, true);
      Isa::mma_fence();
      MOE_UNROLL
      for (int k16 = 0; k16 < decltype(steps)::value; ++k16) {
        Isa::template mma<Config::kOwnN, true, true>(acc, desc_a + k16 * panel_k16_step(true), desc_b + k16 * panel_k16_step(true));
      }
      Isa::mma_commit();
      if (follows) {
        Isa::template mma_wait<1>();  // the previous block's products have read their stages
        give_back();
      }
      previous = ring.empty();
      previous_columns = at.empty();
      ring.advance();
      at.advance();
    };
    const int whole = strip.task.rows / 64, rest = (strip.task.rows % 64 + 15) / 16;
    MOE_NO_UNROLL
    for (int kb = 0; kb < whole; ++kb) block(Steps<4>{}, kb > 0);
    if (rest == 4) block(Steps<4>{}, whole > 0);
    if (rest == 3) block(Steps<3>{}, whole > 0);
    if (rest == 2) block(Steps<2>{}, whole > 0);
    if (rest == 1) block(Steps<1>{}, whole > 0);
    Isa::template mma_wait<0>();
    give_back();
  }

  // The stages of a tile whose columns lie past the end. No lane may give a stage back while another has yet to see it full.
  MOE_FN void follow(const Strip<Config>& strip, bool first, bool last, Rows& ring, Columns at) {
    MOE_NO_UNROLL
    for (int kb = 0; kb < strip.k_blocks; ++kb) {
      if (first) Isa::barrier_wait(at.full(), at.phase);
      Isa::barrier_wait(ring.full(), ring.phase);
      Isa::warp_sync();
      Rows::release(ring.empty());
      if (last) release_columns(at.empty());
      ring.advance();
      at.advance();
    }
  }

  template <class Arguments>
  MOE_FN void run(const Task& task, const Arguments& args, uint32_t rank, Rows& ring, Columns& columns) {
    const Strip<Config> strip(task, kKind, rank, args);
    const bool live = strip.task.n0 < args.n_extent;
    const bool resident = strip.resident;
    MOE_NO_UNROLL
    for (int t = 0; t < strip.tiles; ++t) {
      MOE_UNROLL
      for (float& sum : acc) sum = 0.0f;
      const bool first = t == 0 || !resident, last = t == strip.tiles - 1 || !resident;
      if (live && strip.k_blocks > 0) {
        multiply(strip, first, last, ring, columns);
      } else {
        follow(strip, first, last, ring, columns);
      }
      if (!resident) columns.skip(strip.k_blocks);
      if (!live) continue;
      const Task tile = strip.tile(t);
      const int column = tile.n0 + Config::kOwnN * static_cast<int>(consumer);
      store_gradient<Isa, Config::kOwnN, true>(acc, tile, kKind, tile.m0 + static_cast<int>(row), column, args);
    }
    if (resident) columns.skip(strip.k_blocks);
    if (task.signal >= 0) {
      Isa::warp_sync();
      if (lane == 0) Isa::barrier_arrive(written_barrier<Config>(base, consumer, 0));
    }
  }
};

// Store warp of one consumer, one strip: the consumers store themselves, so all it does is to say that they have.
template <class Isa, class Config, class Arguments>
MOE_FN void signal_strip(const Task& task, const Arguments& args, uint32_t shared_base, uint32_t consumer, uint32_t& strips) {
  if (task.signal < 0) return;
  Isa::barrier_wait(written_barrier<Config>(shared_base, consumer, 0), strips & 1);
  ++strips;
  if (Isa::lane_index() == 0) Isa::add_release(args.signals + task.signal, 1);
}

// What the roles of a block with columns at rest have in common, whatever their operands are (mx_resident.h).
template <class Isa, class Config_>
struct ColumnsAtRest {
  using Config = Config_;
  using Columns = Ring<Isa, typename Config::Columns>;
  static constexpr bool kFourthWarp = false;
  template <class Batch>
  static MOE_FN uint32_t full_arrivals(const Batch&) {
    return 1;
  }

  static MOE_FN Columns columns(uint32_t base) { return Columns(base + Config::kColumnsOffset); }
  static MOE_FN void init(uint32_t base) {
    Columns ring = columns(base);
    for (int s = 0; s < Config::Columns::kStages; ++s) {
      Isa::barrier_init(ring.full(), 1);
      Isa::barrier_init(ring.empty(), Config::kConsumers * 4);
      ring.advance();
    }
  }
  template <class Batch>
  static MOE_FN void gather(const Batch&, uint32_t) {}
};

// The roles of a block that runs strips, for run_roles.
template <Kind kKind, class Isa, class Config_>
struct Resident : ColumnsAtRest<Isa, Config_> {
  using Config = Config_;
  using typename ColumnsAtRest<Isa, Config>::Columns;
  using ColumnsAtRest<Isa, Config>::columns;

  template <class Batch>
  static MOE_FN void load(const Batch& batch, uint32_t base) {
    Ring<Isa, Config> ring(base);
    Columns b = columns(base);
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) { load_strip<kKind, Isa, Config>(task, args, Isa::cluster_rank(), ring, b); });
  }
  template <class Batch>
  static MOE_FN void store(const Batch& batch, uint32_t base, uint32_t consumer) {
    uint32_t strips = 0;
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) { signal_strip<Isa, Config>(task, args, base, consumer, strips); });
  }
  template <class Batch>
  static MOE_FN void compute(const Batch& batch, uint32_t base, uint32_t consumer) {
    Ring<Isa, Config> ring(base);
    Columns b = columns(base);
    ResidentConsumer<kKind, Isa, Config> state(base, consumer);
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) { state.run(task, args, Isa::cluster_rank(), ring, b); });
  }
};

}  // namespace moe
