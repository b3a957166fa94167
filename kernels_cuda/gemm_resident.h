// Weight gradients of experts with few rows. Such a product is mostly stores, and what its loads take of the L2 is missing for them: so a
// block keeps its 256 columns of operand B for all the expert's rows in shared memory, and walks down a strip of up to 16 tiles,
// for which only the 128 columns of operand A arrive, shared with the other block of the cluster. Up to 192 rows stay resident;
// an expert with more streams both operands through the same rings. The sums are those of gemm_roles.h, bit for bit.
#pragma once

#include "gemm_epilogue.h"

namespace moe {

// Operand B, in a ring of its own: what belongs to a K block is given back by this block's eight warps alone.
struct ResidentColumns {
  static constexpr int kStages = 3;
  static constexpr int kStageBytes = 4 * kPanelBytes;
  static constexpr int kOffset = 6 * 2 * kPanelBytes;  // behind the ring of operand A
  static constexpr int kBarrierOffset = kStages * kStageBytes + 4 * kPanelBytes + 2 * 6 * 8;  // from kOffset on
};

struct ResidentConfig {
  static constexpr int kTileM = 128;
  static constexpr int kTileN = 256;
  static constexpr int kBlockK = 64;
  static constexpr int kRowsA = kTileM;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kPanelsA = kTileM / 64;
  static constexpr int kPanelsB = kTileN / 64;
  static constexpr int kStageBytes = kPanelsA * kPanelBytes;  // the ring holds operand A
  static constexpr int kStages = 6;
  static constexpr int kAcc = kTileN / 2;
  static constexpr int kColumns64 = kTileN / 64;
  static constexpr int kMaxUnits = 1;
  static constexpr int kStagedPanels = 2;
  static constexpr int kStripTiles = 16;
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;

  // Shared memory: operand A, operand B, staging, then the barriers: full and empty of A, of B, and those of gemm_config.h.
  static constexpr int kStagingOffset = ResidentColumns::kOffset + ResidentColumns::kStages * ResidentColumns::kStageBytes;
  static constexpr int kBarrierOffset = kStagingOffset + kConsumers * kStagedPanels * kPanelBytes;
  static constexpr int kWrittenOffset = kBarrierOffset + 2 * (kStages + ResidentColumns::kStages) * 8;
  static constexpr int kCreditOffset = kWrittenOffset + kConsumers * kMaxUnits * 8;
  static constexpr int kLeadOffset = kCreditOffset + kConsumers * 8;
  static constexpr int kSharedBytes = kLeadOffset + 16;

  static_assert(ResidentColumns::kOffset == kStages * kStageBytes, "operand B lies behind operand A");
  static_assert(ResidentColumns::kOffset + ResidentColumns::kBarrierOffset == kBarrierOffset + 2 * kStages * 8, "barriers of B follow those of A");
  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
  static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= 65536, "the register file has 64 Ki registers");
};

// Tiles of a strip: from task.m0 down.
template <class Config, class Arguments>
MOE_FN int strip_tiles(const Task& task, const Arguments& args) {
  const int left = (args.m_extent - task.m0 + Config::kTileM - 1) / Config::kTileM;
  return left < Config::kStripTiles ? left : Config::kStripTiles;
}

// Producer, one strip.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void load_strip(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring, Ring<Isa, ResidentColumns>& columns) {
  const Task tile = block_tile<Config>(task, kKind, rank);
  const int k_blocks = task_k_blocks<kKind, Config>(task, args);
  const int tiles = strip_tiles<Config>(task, args);
  const bool resident = k_blocks <= ResidentColumns::kStages;
  wait_ready<Isa>(tile, args);
  MOE_NO_UNROLL
  for (int t = 0; t < tiles; ++t) {
    MOE_NO_UNROLL
    for (int kb = 0; kb < k_blocks; ++kb) {
      const int row = tile.row0 + 64 * kb;
      if (t == 0 || !resident) {
        Isa::barrier_wait(columns.empty(), columns.phase ^ 1);
        Isa::barrier_expect_bytes(columns.full(), ResidentColumns::kStageBytes);
        MOE_UNROLL
        for (int p = 0; p < Config::kPanelsB; ++p) {
          Isa::load_panel(&args.b, columns.full(), columns.data() + p * kPanelBytes, tile.n0 + 64 * p, row, 0, 0);
        }
        columns.advance();
      }
      Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
      Isa::barrier_expect_bytes(ring.full(), Config::kStageBytes);
      const int column = tile.m0 + Config::kTileM * t + 64 * static_cast<int>(rank);
      Isa::load_panel_both(&args.a, ring.full(), ring.data() + rank * kPanelBytes, column, row, tile.half, 0);
      ring.advance();
    }
  }
}

// Consumer warpgroup, one strip.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void compute_strip(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring, Ring<Isa, ResidentColumns>& columns,
                          Epilogue<Isa, Config, true>& epilogue) {
  Task tile = block_tile<Config>(task, kKind, rank);
  const int k_blocks = task_k_blocks<kKind, Config>(task, args);
  const int tiles = strip_tiles<Config>(task, args);
  const bool resident = k_blocks <= ResidentColumns::kStages;
  const bool live = tile.n0 < args.n_extent && k_blocks > 0;
  auto release_columns = [&](uint32_t empty_bar) {
    if (epilogue.lane == 0) Isa::barrier_arrive(empty_bar);
  };
  MOE_NO_UNROLL
  for (int t = 0; t < tiles; ++t) {
    float acc[Config::kAcc];
    MOE_UNROLL
    for (int i = 0; i < Config::kAcc; ++i) acc[i] = 0.0f;
    Ring<Isa, ResidentColumns> at = columns;  // of this tile's K blocks
    epilogue.wait_turn();
    if (!resident || !live) epilogue.pass_turn();  // a long tile does not fit the ring, whose stages are given back by both
    auto wait_stages = [&] {
      Isa::barrier_wait(ring.full(), ring.phase);
      if (t == 0 || !resident) Isa::barrier_wait(at.full(), at.phase);
    };
    auto give_back = [&](uint32_t empty, uint32_t empty_columns) {
      Ring<Isa, Config>::release(empty);
      if (!resident) release_columns(empty_columns);
    };
    if (live) {
      uint32_t previous = 0, previous_columns = 0;
      MOE_NO_UNROLL
      for (int kb = 0; kb < k_blocks; ++kb) {
        wait_stages();
        const uint64_t desc_a = panel_descriptor(ring.data() + epilogue.consumer * kPanelBytes, true);
        const uint64_t desc_b = panel_descriptor(at.data(), true);
        Isa::mma_fence();
        MOE_UNROLL
        for (int k16 = 0; k16 < Config::kBlockK / 16; ++k16) {
          Isa::template mma<Config::kTileN, true, true>(acc, desc_a + k16 * panel_k16_step(true), desc_b + k16 * panel_k16_step(true));
        }
        Isa::mma_commit();
        if (kb > 0) {
          Isa::template mma_wait<1>();  // the previous block's products have read their stages
          give_back(previous, previous_columns);
        }
        previous = ring.empty();
        previous_columns = at.empty();
        ring.advance();
        at.advance();
      }
      Isa::template mma_wait<0>();
      give_back(previous, previous_columns);
      if (resident) epilogue.pass_turn();
    } else {
      MOE_NO_UNROLL
      for (int kb = 0; kb < k_blocks; ++kb) {
        wait_stages();
        Isa::warp_sync();  // no lane may give a stage back while another has yet to see it full
        give_back(ring.empty(), at.empty());
        ring.advance();
        at.advance();
      }
    }
    if (!resident) columns = at;
    if (tile.n0 < args.n_extent) {
      epilogue.write_wgrad(acc, tile, kKind, args);
    } else {
      epilogue.skip_wgrad();
    }
    tile.m0 += Config::kTileM;
  }
  if (resident) {
    MOE_NO_UNROLL
    for (int kb = 0; kb < k_blocks; ++kb) {
      release_columns(columns.empty());
      columns.advance();
    }
  }
}

// Store warp of one consumer, one strip: the last 64 columns of every tile.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void store_strip(const Task& task, const Arguments& args, uint32_t shared_base, uint32_t consumer, uint32_t& tiles_done) {
  const Task tile = block_tile<Config>(task, kKind, Isa::cluster_rank());
  const int tiles = strip_tiles<Config>(task, args);
  const bool one = Isa::lane_index() == 0;
  MOE_NO_UNROLL
  for (int t = 0; t < tiles; ++t) {
    Isa::barrier_wait(written_barrier<Config>(shared_base, consumer, 0), tiles_done & 1);
    const int row = tile.m0 + Config::kTileM * t + 64 * static_cast<int>(consumer);
    if (one && tile.n0 < args.n_extent) {
      MOE_UNROLL
      for (int p = 0; p < Config::kStagedPanels; ++p) {
        const int column = tile.n0 + Config::kTileN + 32 * (p - Config::kStagedPanels);
        Isa::store_panel(&args.out, staging_panel<Config>(shared_base, consumer, p), column, row, tile.half, tile.expert);
      }
      Isa::store_commit();
      Isa::template store_wait_read<0>();
    }
    Isa::warp_sync();
    if (one) Isa::barrier_arrive(credit_barrier<Config>(shared_base, consumer));
    ++tiles_done;
  }
  if (task.signal >= 0 && one) {
    Isa::store_wait_done();
    Isa::add_release(args.signals + task.signal, 1);
  }
}

// The roles of a block that runs strips, for run_roles.
template <Kind kKind, class Isa>
struct Resident {
  using Config = ResidentConfig;
  using Columns = Ring<Isa, ResidentColumns>;
  static constexpr bool kCanGather = false;

  static MOE_FN Columns columns(uint32_t base) { return Columns(base + ResidentColumns::kOffset); }
  static MOE_FN void init(uint32_t base) {
    Columns ring = columns(base);
    for (int s = 0; s < ResidentColumns::kStages; ++s) {
      Isa::barrier_init(ring.full(), 1);
      Isa::barrier_init(ring.empty(), Config::kConsumers * 4);
      ring.advance();
    }
  }
  template <class Batch, class F>
  static MOE_FN void each_task(const Batch& batch, F f) {
    TaskStream stream(batch.tasks, *batch.num_tasks, Isa::cluster_index(), Isa::num_clusters());
    MOE_NO_UNROLL
    for (Task task; stream.take(task);) f(task, batch.kinds[0]);
  }
  template <class Batch>
  static MOE_FN void load(const Batch& batch, uint32_t base) {
    Ring<Isa, Config> ring(base);
    Columns b = columns(base);
    each_task(batch, [&](const Task& task, const auto& args) { load_strip<kKind, Isa, Config>(task, args, Isa::cluster_rank(), ring, b); });
  }
  template <class Batch>
  static MOE_FN void gather(const Batch&, uint32_t) {}
  template <class Batch>
  static MOE_FN void store(const Batch& batch, uint32_t base, uint32_t consumer) {
    uint32_t tiles = 0;
    each_task(batch, [&](const Task& task, const auto& args) { store_strip<kKind, Isa, Config>(task, args, base, consumer, tiles); });
    if (Isa::lane_index() == 0) Isa::store_wait_done();  // shared memory must outlive the stores that read it
  }
  template <class Batch>
  static MOE_FN void compute(const Batch& batch, uint32_t base, uint32_t consumer) {
    Ring<Isa, Config> ring(base);
    Columns b = columns(base);
    Epilogue<Isa, Config, true> epilogue(base, consumer);
    each_task(batch, [&](const Task& task, const auto& args) {
      compute_strip<kKind, Isa, Config>(task, args, Isa::cluster_rank(), ring, b, epilogue);
    });
  }
};

}  // namespace moe
