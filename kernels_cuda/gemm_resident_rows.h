// Weight gradients with one operand at rest in registers: each consumer warpgroup keeps 64 rows of operand A, for up to 512 rows of an
// expert, and all of shared memory is a ring of what moves past them: tiles of 128 columns of operand B, shared by the blocks of the cluster.
// So a stage is asked for several thousand clocks before its product, and the tensor cores read a third less from shared memory. The
// warpgroups go their own ways through the ring, so that mostly one of them multiplies while the other one stores. An expert's rows past those
// are multiplied from shared memory, both operands. The sums are those of mma_sm90.h, bit for bit.
//
// A task is a strip: 128 rows a block by up to 16 tiles. First come the stages of A, which the warpgroups copy to registers.
#pragma once

#include "gemm_resident.h"

namespace moe {

struct ResidentRowsConfig {
  static constexpr int kTileM = 128;
  static constexpr int kTileN = 128;
  static constexpr int kStripTiles = 16;
  static constexpr int kBlockK = 64;
  static constexpr int kBoxRows = 16;  // of either operand: what is past the registers is read to near the last row
  static constexpr bool kOnlyKMajor = false;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kResidentBlocks = 8;  // of K, in registers: 16 a thread for each; more don't fit beside the sums
  static constexpr int kMaxUnits = 1;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  // Shared memory: a stage is two panels, of either operand; then the barriers of mma_sm90.h.
  static constexpr int kPanels = 2;
  static constexpr int kStageBytes = kPanels * kPanelBytes;
  static constexpr int kStages = 14;
  static constexpr int kBarrierOffset = kStages * kStageBytes;
  static constexpr int kWrittenOffset = kBarrierOffset + 2 * kStages * 8;
  static constexpr int kCreditOffset = kWrittenOffset + kConsumers * kMaxUnits * 8;
  static constexpr int kLeadOffset = kCreditOffset + kConsumers * 8;
  static constexpr int kSharedBytes = kLeadOffset + 16;

  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
  static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= kThreads * 168, "a block starts with 168 registers a thread");
};

// One strip as every role sees it. Tasks are laid out along the other operand's dimension: m0 is the first column of the first tile, n0 the first
// row of A (in_row_strips, strips.h).
template <Kind kKind, class Config>
struct RowStrip {
  Task task;  // of this block
  int k_blocks, resident_blocks, tiles;
  bool live;  // its rows lie inside

  // Tiles [first, end) of the strip.
  template <class Arguments>
  MOE_FN RowStrip(const Task& of, int first, int end, uint32_t rank, const Arguments& args)
      : task(block_tile<Config>(of, kKind, rank)),
        k_blocks(div_up(of.rows, Config::kBlockK)),
        resident_blocks(k_blocks < Config::kResidentBlocks ? k_blocks : Config::kResidentBlocks),
        live(task.n0 < args.m_extent) {
    const int there = div_up(args.n_extent, Config::kTileN) - of.m0 / Config::kTileN;
    tiles = (there < end ? there : end) - first;
    task.m0 += first * Config::kTileN;
  }
  // Boxes of a K block, per panel. What is in registers is multiplied whole; of the rest, what lies past the expert's rows is not.
  MOE_FN int boxes(int kb) const {
    constexpr int kAll = Config::kBlockK / Config::kBoxRows;
    const int left = div_up(task.rows - Config::kBlockK * kb, Config::kBoxRows);
    return kb < Config::kResidentBlocks || left > kAll ? kAll : left;
  }
  MOE_FN Task tile(int t) const {
    Task one = task;
    one.m0 = task.n0;
    one.n0 = task.m0 + Config::kTileN * t;
    return one;
  }
};

// f(task, first tile, end, arguments) for this block's cluster: every n-th strip of the list, and of those left after whole rounds an equal share of
// the tiles, unless somebody waits for them.
template <class Isa, class Config, class Batch, class F>
MOE_FN void for_each_strip(const Batch& batch, F f) {
  const auto& args = batch.kinds[0];
  const int count = *batch.num_tasks, clusters = Isa::num_clusters(), index = Isa::cluster_index();
  const int left = count % clusters;
  const bool share = left > 0 && batch.tasks[count - left].signal < 0;
  TaskStream stream(batch.tasks, share ? count - left : count, index, clusters);
  MOE_NO_UNROLL
  for (Task task; stream.take(task);) f(task, 0, Config::kStripTiles, args);
  if (!share) return;
  const int there = div_up(args.n_extent, Config::kTileN), tiles = there < Config::kStripTiles ? there : Config::kStripTiles;
  const int end = (index + 1) * left * tiles / clusters;
  MOE_NO_UNROLL
  for (int at = index * left * tiles / clusters; at < end;) {
    const int first = at % tiles, last = first + end - at < tiles ? first + end - at : tiles;
    f(batch.tasks[count - left + at / tiles], first, last, args);
    at += last - first;
  }
}

// Producer, one strip.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void load_row_strip(const RowStrip<kKind, Config>& strip, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring) {
  constexpr int kBoxBytes = Config::kBoxRows * kPanelRowBytes;
  auto begin_stage = [&](int boxes) {
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    Isa::barrier_expect_bytes(ring.full(), Config::kPanels * boxes * kBoxBytes);
  };
  auto load_rows = [&](const Task& tile, int kb) {  // of A, this block's own
    const int boxes = strip.boxes(kb);
    begin_stage(boxes);
    MOE_NO_UNROLL
    for (int i = 0; i < boxes; ++i) {
      MOE_UNROLL
      for (int p = 0; p < Config::kPanels; ++p) {
        const Box box = box_a<kKind, Config>(tile, {0, tile.row0 + Config::kBlockK * kb}, 64 * p, Config::kBoxRows * i);
        Isa::load_panel(&args.a, ring.full(), ring.data() + p * kPanelBytes + i * kBoxBytes, box.inner, box.outer, box.half, 0);
      }
    }
    ring.advance();
  };
  wait_ready<Isa>(strip.task, args);
  MOE_NO_UNROLL
  for (int kb = 0; kb < strip.resident_blocks; ++kb) load_rows(strip.tile(0), kb);
  MOE_NO_UNROLL
  for (int t = 0; t < strip.tiles; ++t) {
    const Task tile = strip.tile(t);
    MOE_NO_UNROLL
    for (int kb = 0; kb < strip.k_blocks; ++kb) {
      if (kb >= Config::kResidentBlocks) load_rows(tile, kb);
      const int boxes = strip.boxes(kb);
      begin_stage(boxes);
      MOE_NO_UNROLL
      for (int i = 0; i < boxes; ++i) {
        const Box box = box_b<kKind, Config>(tile, {0, tile.row0 + Config::kBlockK * kb}, 64 * static_cast<int>(rank), Config::kBoxRows * i);
        Isa::load_panel_both(&args.b, ring.full(), ring.data() + rank * kPanelBytes + i * kBoxBytes, box.inner, box.outer, 0, 0);
      }
      ring.advance();
    }
  }
}

// A consumer warpgroup.
template <Kind kKind, class Isa, class Config>
struct ResidentRowsConsumer {
  using RingOf = Ring<Isa, Config>;
  using Strip = RowStrip<kKind, Config>;
  uint32_t base;
  uint32_t consumer;
  uint32_t warp, lane;
  uint32_t rows[4 * Config::kResidentBlocks][4];  // of A, by 16 of K
  float acc[Config::kTileN / 2];

  MOE_FN ResidentRowsConsumer(uint32_t shared_base, uint32_t consumer_)
      : base(shared_base), consumer(consumer_), warp(Isa::warp_index() % 4), lane(Isa::lane_index()) {}

  // Copies the strip's stages of A to registers, turned: in shared memory 64 values of M follow one another.
  MOE_FN void take_rows(const Strip& strip, RingOf& ring) {
    const uint32_t k = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;  // of the row that this lane points at
    MOE_UNROLL
    for (int kb = 0; kb < Config::kResidentBlocks; ++kb) {
      if (kb < strip.resident_blocks) {
        Isa::barrier_wait(ring.full(), ring.phase);
        MOE_UNROLL
        for (int k16 = 0; k16 < 4; ++k16) {
          Isa::load_matrices_transposed(ring.data() + consumer * kPanelBytes + panel_offset(16 * k16 + k, chunk), rows[4 * kb + k16]);
        }
        Isa::warp_sync();
        RingOf::release(ring.empty());
        ring.advance();
      }
    }
  }

  // The products of one tile, which has K blocks. Those in registers are multiplied whole, zeros included; what is past them in steps of 16 rows, as many
  // as there are. A stage goes back when two more blocks have been issued: what two of four products take covers the turn-round of a third.
  MOE_FN void multiply(const Strip& strip, RingOf& ring) {
    uint32_t older = 0, newer = 0;  // stages that products under way read
    MOE_UNROLL
    for (int kb = 0; kb < Config::kResidentBlocks; ++kb) {
      if (kb < strip.resident_blocks) {
        Isa::barrier_wait(ring.full(), ring.phase);
        const uint64_t desc_b = panel_descriptor(ring.data(), true);
        Isa::mma_fence();
        MOE_UNROLL
        for (int k16 = 0; k16 < 4; ++k16) Isa::template mma_registers<true>(acc, rows[4 * kb + k16], desc_b + k16 * panel_k16_step(true));
        Isa::mma_commit();
        if (kb >= 2) {
          Isa::template mma_wait<2>();
          RingOf::release(older);
        }
        older = newer;
        newer = ring.empty();
        ring.advance();
      }
    }
    MOE_NO_UNROLL
    for (int kb = Config::kResidentBlocks; kb < strip.k_blocks; ++kb) {  // a stage of A, then one of B
      const int left = (strip.task.rows - Config::kBlockK * kb + 15) / 16, steps = left < 4 ? left : 4;
      Isa::barrier_wait(ring.full(), ring.phase);
      const uint32_t empty_a = ring.empty();
      uint64_t desc_a = panel_descriptor(ring.data() + consumer * kPanelBytes, true);
      ring.advance();
      Isa::barrier_wait(ring.full(), ring.phase);
      uint64_t desc_b = panel_descriptor(ring.data(), true);
      MOE_NO_UNROLL
      for (int k16 = 0; k16 < steps; ++k16) {  // each a group: ptxas serialises one whose length is known at run time
        Isa::mma_fence();
        Isa::template mma<Config::kTileN, true, true>(acc, desc_a, desc_b);
        Isa::mma_commit();
        desc_a += panel_k16_step(true);
        desc_b += panel_k16_step(true);
      }
      Isa::template mma_wait<1>();
      if (older != 0) RingOf::release(older);
      RingOf::release(newer);
      older = empty_a;
      newer = ring.empty();
      ring.advance();
    }
    Isa::template mma_wait<0>();
    if (older != 0) RingOf::release(older);
    RingOf::release(newer);
  }

  // Stages whose sums lie past the end. No lane may give one back while another has yet to see it full.
  MOE_FN void follow(int stages, RingOf& ring) {
    MOE_NO_UNROLL
    for (int i = 0; i < stages; ++i) {
      Isa::barrier_wait(ring.full(), ring.phase);
      Isa::warp_sync();
      RingOf::release(ring.empty());
      ring.advance();
    }
  }

  template <class Arguments>
  MOE_FN void run(const Strip& strip, const Arguments& args, RingOf& ring) {
    const bool multiplies = strip.live && strip.k_blocks > 0;
    if (multiplies) {
      take_rows(strip, ring);
    } else {
      follow(strip.resident_blocks, ring);
    }
    MOE_NO_UNROLL
    for (int t = 0; t < strip.tiles; ++t) {
      MOE_UNROLL
      for (float& sum : acc) sum = 0.0f;
      if (multiplies) {
        multiply(strip, ring);
      } else {
        follow(2 * strip.k_blocks - strip.resident_blocks, ring);
      }
      if (!strip.live) continue;
      const Task tile = strip.tile(t);
      const int row = tile.m0 + static_cast<int>(64 * consumer + 16 * warp + lane / 4);
      store_gradient<Isa, Config::kTileN, false>(acc, tile, kKind, row, tile.n0, args);
    }
    if (strip.task.signal >= 0) {
      Isa::warp_sync();
      if (lane == 0) Isa::barrier_arrive(written_barrier<Config>(base, consumer, 0));
    }
  }
};

// The roles of a block, for run_roles.
template <Kind kKind, class Isa, class Config_ = ResidentRowsConfig>
struct ResidentRows {
  using Config = Config_;
  static constexpr bool kFourthWarp = false;
  template <class Batch>
  static MOE_FN uint32_t full_arrivals(const Batch&) {
    return 1;
  }

  static MOE_FN void init(uint32_t) {}
  template <class Batch>
  static MOE_FN void load(const Batch& batch, uint32_t base) {
    Ring<Isa, Config> ring(base);
    for_each_strip<Isa, Config>(batch, [&](const Task& task, int first, int end, const auto& args) {
      load_row_strip<kKind, Isa, Config>(RowStrip<kKind, Config>(task, first, end, Isa::cluster_rank(), args), args, Isa::cluster_rank(), ring);
    });
  }
  template <class Batch>
  static MOE_FN void gather(const Batch&, uint32_t) {}
  template <class Batch>
  static MOE_FN void store(const Batch& batch, uint32_t base, uint32_t consumer) {
    uint32_t strips = 0;
    for_each_strip<Isa, Config>(batch, [&](const Task& task, int, int, const auto& args) { signal_strip<Isa, Config>(task, args, base, consumer, strips); });
  }
  template <class Batch>
  static MOE_FN void compute(const Batch& batch, uint32_t base, uint32_t consumer) {
    Ring<Isa, Config> ring(base);
    ResidentRowsConsumer<kKind, Isa, Config> state(base, consumer);
    for_each_strip<Isa, Config>(batch, [&](const Task& task, int first, int end, const auto& args) {
      state.run(RowStrip<kKind, Config>(task, first, end, Isa::cluster_rank(), args), args, ring);
    });
  }
};

}  // namespace moe
