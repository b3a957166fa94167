// The grouped products with tokens on the N side: D = W X^T, 256 weight columns by up to 192 tokens. For experts with few rows: a block
// multiplies the tokens there are, in steps of 32, and the weights are read once however many there are; row tiles of 128 would be
// filled badly, and the two blocks of a cluster would wait for one another. The sums are those of mma_sm90.h, bit for bit: the same
// 16-wide steps along the same contraction.
//
// Two blocks of a cluster share the tokens and take neighbouring columns. Consumer c owns two blocks of 64 columns: for kGateUp 64
// of gate and the same 64 of up, else columns 64 c and 128 + 64 c. Results leave through stages of the ring, 64 tokens each.
//
// FP8 (mx_tokens_n.h) has one block of 64 columns a consumer, and so the same loader, results and store warps with other sizes.
#pragma once

#include "mma_sm90.h"

namespace moe {

// kColumns weight columns of a block: of F for kGateUp, whose tile has as many of gate and of up, half of that.
template <int kColumns, int kStages_>
struct TokensNShape {
  static constexpr int kTileN = kColumns;
  static constexpr int kTokens = 192;   // tokens of a tile
  static constexpr int kTileM = kTokens;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kPanelsA = kTileN / 64;
  static constexpr int kPanelsB = kTokens / 64;
  static constexpr int kColumnBlocks = kPanelsA / kConsumers;  // of 64, a consumer's
  static constexpr int kStageBytes = (kPanelsA + kPanelsB) * kPanelBytes;
  static constexpr int kStages = kStages_;
  static constexpr int kAcc = kTokens / 2;      // FP32 accumulators per consumer thread and block of 64 columns
  static constexpr int kMaxUnits = kPanelsB;    // 64 tokens each

  static constexpr int kBarrierOffset = kStages * kStageBytes;
  static constexpr int kWrittenOffset = kBarrierOffset + 2 * kStages * 8;
  static constexpr int kCreditOffset = kWrittenOffset + kConsumers * kMaxUnits * 8;
  static constexpr int kLeadOffset = kCreditOffset + kConsumers * 8;
  static constexpr int kTableOffset = kLeadOffset + 16;  // of what the fourth warp leaves for others or itself
  static constexpr int kSlotPanels = (kPanelsA + kPanelsB) / kConsumers;
  static constexpr int kUnitScaleBytes = 0;  // scales of 64 tokens that come with a stage

  // With one block of columns a consumer has 32 of gate and 32 of up: both fill the same panels of 64 columns, which the first store warp
  // sends for both.
  static MOE_HOST_FN constexpr bool joint(Kind kind) { return kind == kGateUp && kColumnBlocks == 1; }

  static_assert(kColumnBlocks == 1 || kSlotPanels >= 3, "a stage carries three panels per consumer in the epilogue of gate and up");
};

struct TokensNConfig : TokensNShape<256, 4> {
  static constexpr int kBlockK = 64;
  static constexpr bool kOnlyKMajor = false;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kSharedBytes = kTableOffset + 4 * kTokens;  // the table: where each gathered token starts, in bytes

  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
  static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= 65536, "the register file has 64 Ki registers");
};

MOE_HOST_FN constexpr bool can_put_tokens_on_n(Kind kind) { return kind == kGateUp || kind == kDown || kind == kDgradGateUp; }

template <class Config>
MOE_FN int tile_tokens(const Task& tile) {
  return tile.rows < Config::kTokens ? tile.rows : Config::kTokens;
}
template <class Config>
MOE_FN int tile_units(const Task& tile) {
  return (tile_tokens<Config>(tile) + 63) / 64;
}

// Panel p of the weights, which arrives on `full`. Joint gate and up come eight rows of each in turn: a lane of a product then has both of the
// same column.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void load_weights_tokens_n(const Task& tile, const Arguments& args, KBlock block, int p, uint32_t full, uint32_t panel) {
  if constexpr (Config::joint(kKind)) {
    Isa::load_joint_panel(&args.b, full, panel, block.k, tile.n0 + 32 * p, tile.expert);
  } else {
    const Box box = box_b<kKind, Config>(tile, block, 64 * p, 0);
    Isa::load_panel(&args.b, full, panel, box.inner, box.outer, box.half, box.expert);
  }
}

// Producer, one task.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void load_task_tokens_n(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring) {
  const Task tile = block_tile<Config>(task, kKind, rank);
  const int units = tile_units<Config>(tile);
  const int half_blocks = half_k_blocks<kKind, Config>(task, args);
  const int k_blocks = task_k_blocks<kKind, Config>(task, args);
  const bool gathered = can_gather(kKind) && args.gather != nullptr;
  const uint32_t scale_bytes = static_cast<uint32_t>(units) * Config::kUnitScaleBytes;
  const uint32_t bytes = static_cast<uint32_t>(Config::kPanelsA + (gathered ? 0 : units)) * kPanelBytes + scale_bytes;
  wait_ready<Isa>(tile, args);
  MOE_NO_UNROLL
  for (int kb = 0; kb < k_blocks; ++kb) {
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    const uint32_t full = ring.full();
    Isa::barrier_expect_bytes(full, bytes);
    const KBlock block = k_block<kKind, Config>(tile, kb, half_blocks);
    MOE_UNROLL
    for (int p = 0; p < Config::kPanelsA; ++p) {
      load_weights_tokens_n<kKind, Isa, Config>(tile, args, block, p, full, ring.data() + p * kPanelBytes);
    }
    MOE_NO_UNROLL
    for (int q = gathered ? units : static_cast<int>(rank); q < units; q += 2) {
      const Box box = box_a<kKind, Config>(tile, block, 64 * q, 0);
      Isa::load_panel_both(&args.a, full, ring.data() + (Config::kPanelsA + q) * kPanelBytes, box.inner, box.outer, box.half, box.expert);
    }
    if constexpr (Config::kUnitScaleBytes > 0) {
      const uint16_t* const scales = args.a_scales + kb * static_cast<int64_t>(args.num_rows) + tile.row0;
      Isa::load_bytes(scales, full, Config::scales(ring.base, ring.stage), scale_bytes);
    }
    ring.advance();
  }
  MOE_NO_UNROLL
  for (int unit = 0; unit < units; ++unit) {  // lend stages to the consumers' results
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    Isa::barrier_arrive(ring.full());
    ring.advance();
  }
}

// Gathering warp, one task. There are more rows than registers for them, so where they start is kept in shared memory.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void gather_task_tokens_n(const Task& tile, const Arguments& args, uint32_t base, Ring<Isa, Config>& ring) {
  const int k_blocks = task_k_blocks<kKind, Config>(tile, args);
  const int units = tile_units<Config>(tile);
  if (args.gather == nullptr) {
    follow(k_blocks + units, ring);
    return;
  }
  wait_ready<Isa>(tile, args);
  const GatherLane<Isa> mine;
  Isa::warp_sync();  // the previous task's offsets have been read
  MOE_UNROLL
  for (int q = 0; q < Config::kTokens / 32; ++q) {
    const int row = 32 * q + static_cast<int>(mine.lane);
    const int slot = row < tile.rows ? args.slot_M[tile.row0 + row] : 0;  // columns of a product do not meet: any row will do
    const uint32_t vector = static_cast<uint32_t>(slot / args.top_k) * static_cast<uint32_t>(args.gather_vectors);
    Isa::store_word(base + Config::kTableOffset + 4 * static_cast<uint32_t>(row), 16 * vector);
  }
  Isa::warp_sync();
  const uint32_t table = base + Config::kTableOffset + 4 * mine.row;
  const uint8_t* from = args.gather + 16 * mine.piece;
  MOE_NO_UNROLL
  for (int kb = 0; kb < k_blocks; ++kb) {
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    const bool inside = 8 * kb + static_cast<int>(mine.piece) < args.gather_vectors;
    const uint8_t* column = inside ? from + 128 * static_cast<int64_t>(kb) : args.gather;
    MOE_NO_UNROLL
    for (int q = 0; q < units; ++q) {
      const uint32_t panel = ring.data() + (Config::kPanelsA + q) * kPanelBytes;
      uint32_t offset[16];
      MOE_UNROLL
      for (int i = 0; i < 16; ++i) offset[i] = Isa::load_word(table + 256 * q + 16 * i);
      MOE_UNROLL
      for (int i = 0; i < 16; ++i) Isa::gather_vector(mine.address(panel, i), column + offset[i], inside ? 16u : 0u);
    }
    Isa::gather_arrive(ring.full());
    ring.advance();
  }
  follow(units, ring);
}

// f(a type whose `value` is the width of the product) for so many tokens.
template <int kN>
struct Width {
  static constexpr int value = kN;
};
template <class F>
MOE_FN void with_width(int tokens, F f) {
  if (tokens <= 64) {
    f(Width<64>{});
  } else if (tokens <= 96) {
    f(Width<96>{});
  } else if (tokens <= 128) {
    f(Width<128>{});
  } else if (tokens <= 160) {
    f(Width<160>{});
  } else {
    f(Width<192>{});
  }
}

// The sums of a consumer warpgroup, and how they leave.
template <Kind kKind, bool kPlain, class Isa, class Config>
struct TokensNSums {
  uint32_t base;
  uint32_t consumer;
  uint32_t warp;  // 0..3 inside the warpgroup
  uint32_t lane;
  uint32_t tiles = 0;
  float acc[Config::kColumnBlocks][Config::kAcc];

  MOE_FN TokensNSums(uint32_t shared_base, uint32_t consumer_)
      : base(shared_base), consumer(consumer_), warp(Isa::warp_index() % 4), lane(Isa::lane_index()) {}

  static constexpr bool kJoint = Config::joint(kKind);
  static constexpr int kSources = kJoint ? 2 : Config::kColumnBlocks;  // panels that sums go to; kGateUp: gate and up

  // Address that this lane supplies to the transposing stmatrix for token blocks 2 jj and 2 jj + 1 of a panel (64 tokens of 64
  // columns): matrices are (block 2jj, columns 0-7 of the warp's 16), (2jj, 8-15), (2jj+1, 0-7), (2jj+1, 8-15). Joint: for the warp's
  // eight columns of token blocks 4 jj .. 4 jj + 3.
  MOE_FN uint32_t matrix_address(uint32_t panel, int jj) const {
    const uint32_t matrix = lane / 8;
    if (kJoint) return panel + panel_offset(8 * (4 * jj + matrix) + lane % 8, 4 * consumer + warp);
    return panel + panel_offset(8 * (2 * jj + matrix / 2) + lane % 8, 2 * warp + matrix % 2);
  }

  template <class Arguments>
  MOE_FN void write(const Task& tile, const Arguments& args, Ring<Isa, Config>& ring) {
    const int tokens = tile_tokens<Config>(tile);
    Isa::barrier_wait(credit_barrier<Config>(base, consumer), (tiles & 1) ^ 1);  // the previous tile has left shared memory
    ++tiles;
    MOE_UNROLL
    for (int unit = 0; unit < Config::kMaxUnits; ++unit) {
      if (64 * unit < tokens) {
        Isa::barrier_wait(ring.full(), ring.phase);
        MOE_UNROLL
        for (int jj = 0; jj < (kJoint ? 2 : 4); ++jj) {
          uint32_t pair[kSources][4], h[4];
          MOE_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int j = 8 * unit + (kJoint ? 4 * jj + i : 2 * jj + i / 2);
            const int left = tokens - 8 * j - 2 * static_cast<int>(lane % 4);  // of these two tokens; the others are padding
            const uint32_t live = left > 1 ? 0xffffffffu : left > 0 ? 0x0000ffffu : 0u;
            MOE_UNROLL
            for (int b = 0; b < kSources; ++b) {
              const float* const sums = acc[kJoint ? 0 : b] + 4 * j + 2 * (kJoint ? b : i % 2);
              pair[b][i] = Isa::pack_bf16(sums[0], sums[1]) & live;
            }
            if constexpr (kKind == kGateUp) {
              if (args.write_out) h[i] = activate_pair<kPlain, Isa>(pair[0][i], pair[1][i], args.act) & live;
            }
          }
          const uint32_t first = slot_panel<Config>(ring.data(), kJoint ? 0 : consumer, 0);
          if (kKind != kGateUp || args.save_gate_up) {
            MOE_UNROLL
            for (int b = 0; b < kSources; ++b) Isa::store_matrices_transposed(matrix_address(first + b * kPanelBytes, jj), pair[b]);
          }
          if (kKind == kGateUp && args.write_out) Isa::store_matrices_transposed(matrix_address(first + 2 * kPanelBytes, jj), h);
        }
        Isa::fence_async_shared();
        Isa::warp_sync();
        if (lane == 0) Isa::barrier_arrive(written_barrier<Config>(base, consumer, unit));
        ring.advance();
      }
    }
  }
};

template <Kind kKind, bool kPlain, class Isa, class Config>
struct TokensNConsumer : TokensNSums<kKind, kPlain, Isa, Config> {
  using Base = TokensNSums<kKind, kPlain, Isa, Config>;
  using Base::Base;
  using Base::acc, Base::consumer, Base::lane, Base::warp;

  // Value 4 j + 2 half + i of block b is column first_column(b) + 16 warp + lane / 4 + 8 half of token 8 j + 2 (lane % 4) + i.
  MOE_FN int first_column(int b) const { return static_cast<int>(64 * consumer) + (kKind == kGateUp ? 0 : 128 * b); }

  // Zero, or the bias of the column. The select is opaque to the compiler, which would otherwise define accumulators inside the loop.
  template <class Arguments>
  MOE_FN void start(const Task& tile, const Arguments& args) {
    constexpr int kHalves = kKind == kGateUp ? 2 : 1;
    const bool biased = has_bias(kKind) && args.bias != nullptr;
    MOE_UNROLL
    for (int b = 0; b < 2; ++b) {
      float from[2] = {0.0f, 0.0f};
      MOE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int column = tile.n0 + first_column(b) + static_cast<int>(16 * warp + lane / 4) + 8 * half;
        const int64_t row = kHalves * tile.expert + (kKind == kGateUp ? b : 0);
        if (biased && column < args.n_extent) from[half] = args.bias[row * args.n_extent + column];
      }
      MOE_UNROLL
      for (int i = 0; i < Config::kAcc; ++i) acc[b][i] = has_bias(kKind) ? Isa::select(biased, from[i / 2 % 2], 0.0f) : 0.0f;
    }
  }

  // All K blocks of a task on kN tokens.
  template <int kN>
  MOE_FN void multiply(int k_blocks, bool gathered, Ring<Isa, Config>& ring) {
    constexpr bool kMnWeights = kKind == kDgradGateUp;
    uint32_t previous_empty = 0;
    MOE_NO_UNROLL
    for (int kb = 0; kb < k_blocks; ++kb) {
      Isa::barrier_wait(ring.full(), ring.phase);
      if (gathered) Isa::fence_async_shared();  // tokens were written by lanes, and are read by the tensor cores
      const uint64_t weights_0 = panel_descriptor(ring.data() + consumer * kPanelBytes, kMnWeights);
      const uint64_t weights_1 = panel_descriptor(ring.data() + (consumer + 2) * kPanelBytes, kMnWeights);
      const uint64_t tokens = panel_descriptor(ring.data() + Config::kPanelsA * kPanelBytes, false);
      Isa::mma_fence();
      MOE_UNROLL
      for (int k16 = 0; k16 < Config::kBlockK / 16; ++k16) {
        const uint64_t w = k16 * panel_k16_step(kMnWeights), t = k16 * panel_k16_step(false);
        Isa::template mma<kN, kMnWeights, false>(acc[0], weights_0 + w, tokens + t);
        Isa::template mma<kN, kMnWeights, false>(acc[1], weights_1 + w, tokens + t);
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
  }

  template <class Arguments>
  MOE_FN void run(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring) {
    const Task tile = block_tile<Config>(task, kKind, rank);
    const int k_blocks = task_k_blocks<kKind, Config>(task, args);
    const int tokens = tile_tokens<Config>(tile);
    const bool gathered = can_gather(kKind) && args.gather != nullptr;
    start(tile, args);
    with_width(tokens, [&](auto width) { multiply<decltype(width)::value>(k_blocks, gathered, ring); });
    this->write(tile, args, ring);
  }
};

// Store warp of one consumer, one task; the first one for both consumers where their results are joint.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void store_task_tokens_n(const Task& task, const Arguments& args, uint32_t shared_base, uint32_t consumer, uint32_t& tiles,
                                Ring<Isa, Config>& ring) {
  constexpr bool kJoint = Config::joint(kKind);
  if (kJoint && consumer > 0) return;
  auto for_consumers = [&](auto f) {
    f(consumer);
    if (kJoint) f(1u);
  };
  const Task tile = block_tile<Config>(task, kKind, Isa::cluster_rank());
  ring.skip(task_k_blocks<kKind, Config>(task, args));
  const bool one = Isa::lane_index() == 0;
  const int column = tile.n0 + 64 * static_cast<int>(consumer);
  const int units = tile_units<Config>(tile);
  MOE_NO_UNROLL
  for (int unit = 0; unit < units; ++unit) {
    for_consumers([&](uint32_t c) { Isa::barrier_wait(written_barrier<Config>(shared_base, c, unit), tiles >> unit & 1); });
    const uint32_t first = slot_panel<Config>(ring.data(), consumer, 0);
    const int row = tile.row0 + 64 * unit;
    if (one) {
      if (kKind == kGateUp) {
        if (args.save_gate_up) {
          Isa::store_panel(&args.gate_up, first, column, row, 0, 0);
          Isa::store_panel(&args.gate_up, first + kPanelBytes, column, row, 1, 0);
        }
        if (args.write_out) Isa::store_panel(&args.out, first + 2 * kPanelBytes, column, row, 0, 0);
      } else {
        MOE_UNROLL
        for (int b = 0; b < Config::kColumnBlocks; ++b) Isa::store_panel(&args.out, first + b * kPanelBytes, column + 128 * b, row, 0, 0);
      }
      Isa::store_commit();
      Isa::template store_wait_read<0>();
    }
    Isa::warp_sync();
    if (one) for_consumers([&](uint32_t) { ring.release_warpgroup(ring.empty()); });
    ring.advance();
    tiles ^= 1u << unit;  // a unit's barrier turns only in tiles that have it
  }
  if (one) for_consumers([&](uint32_t c) { Isa::barrier_arrive(credit_barrier<Config>(shared_base, c)); });
  if (task.signal >= 0 && one) {
    Isa::store_wait_done();
    Isa::add_release(args.signals + task.signal, 1);
  }
}

// The roles of a block that runs one kind with tokens on the N side (run_roles in mma_sm90.h), but for the fourth warp.
template <Kind kKind, class Isa, class Config_, class Consumer>
struct TokensNRoles {
  using Config = Config_;
  static MOE_FN void init(uint32_t) {}

  template <class Batch>
  static MOE_FN void load(const Batch& batch, uint32_t base) {
    Ring<Isa, Config> ring(base);
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) {
      load_task_tokens_n<kKind, Isa, Config>(task, args, Isa::cluster_rank(), ring);
    });
  }
  template <class Batch>
  static MOE_FN void store(const Batch& batch, uint32_t base, uint32_t consumer) {
    Ring<Isa, Config> ring(base);
    uint32_t tiles = 0;
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) {
      store_task_tokens_n<kKind, Isa, Config>(task, args, base, consumer, tiles, ring);
    });
    if (Isa::lane_index() == 0) Isa::store_wait_done();  // shared memory must outlive the stores that read it
  }
  template <class Batch>
  static MOE_FN void compute(const Batch& batch, uint32_t base, uint32_t consumer) {
    Ring<Isa, Config> ring(base);
    Consumer state(base, consumer);
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) { state.run(task, args, Isa::cluster_rank(), ring); });
  }
};

template <Kind kKind, bool kPlain, class Isa>
struct TokensN : TokensNRoles<kKind, Isa, TokensNConfig, TokensNConsumer<kKind, kPlain, Isa, TokensNConfig>> {
  using Config = TokensNConfig;
  static constexpr bool kFourthWarp = can_gather(kKind);
  template <class Batch>
  static MOE_FN uint32_t full_arrivals(const Batch&) {
    return 1 + (kFourthWarp ? kGatherLanes : 0);
  }

  template <class Batch>
  static MOE_FN void gather(const Batch& batch, uint32_t base) {
    Ring<Isa, Config> ring(base);
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) { gather_task_tokens_n<kKind, Isa, Config>(task, args, base, ring); });
  }
};

}  // namespace moe
