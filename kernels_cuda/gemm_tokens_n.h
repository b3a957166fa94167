// The grouped products with tokens on the N side: D = W X^T, 256 weight columns by up to 192 tokens. For experts with few rows: a block
// multiplies the tokens there are, in steps of 32 or 16, and the weights are read once however many there are; row tiles of 128 would be
// filled badly, and the two blocks of a cluster would wait for one another. The sums are those of mma_sm90.h, bit for bit: the same
// 16-wide steps along the same contraction.
//
// Two blocks of a cluster share the tokens and take neighbouring columns. Consumer c owns two blocks of 64 columns: for kGateUp 64
// of gate and the same 64 of up, for kDgradDown columns 128 c to 128 c + 127, so that a partial sum of d(weight) is one consumer's, else columns
// 64 c and 128 + 64 c. Results leave through stages of the ring by pieces of 64 tokens and 64 columns: three pieces a consumer in a stage, or one of
// the kinds that have three results, of kDgradDown in the stages that brought gate and up. As few stages as will do, since those that are left
// already bring the next tile.
//
// Tokens come and go by boxes of kBoxRows: of an expert's last 64 rows no more is moved than there is, for which memory is the bound.
//
// FP8 (mx_tokens_n.h) has one block of 64 columns a consumer, and so the same loader, results and store warps with other sizes.
#pragma once

#include "mma_sm90.h"

namespace moe {

// kColumns weight columns of a block: of F for kGateUp, whose tile has as many of gate and of up, half of that.
template <int kColumns, int kStages_, int kBoxRows_ = 64, int kPiecesAtOnce = 1>
struct TokensNShape {
  static constexpr int kBoxRows = kBoxRows_;
  static constexpr int kBoxBytes = kBoxRows * kPanelRowBytes;
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
  static constexpr int kMaxUnits = kPanelsB * kColumnBlocks;  // stages that a consumer hands over

  // A consumer's pieces of 64 tokens, and how many leave in a stage.
  static MOE_HOST_FN constexpr int pieces(Kind kind) { return kind == kGateUp ? 1 : kColumnBlocks; }
  static MOE_HOST_FN constexpr int pieces_at_once(Kind kind) { return kind == kGateUp || kind == kDgradDown ? 1 : kPiecesAtOnce; }

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

struct TokensNConfig : TokensNShape<256, 4, 16, 3> {
  static constexpr int kBlockK = 64;
  static constexpr bool kOnlyKMajor = false;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kWeightChunk = 64 * kColumnBlocks;  // as GemmConfig's
  // The table: where each gathered token starts, in bytes; of kDgradDown the tokens' combine weights, of this tile and of the last one.
  static constexpr int kSharedBytes = kTableOffset + 2 * 4 * kTokens;

  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
};

MOE_HOST_FN constexpr bool can_put_tokens_on_n(Kind kind) { return !is_wgrad(kind); }

template <class Config>
MOE_FN int tile_tokens(const Task& tile) {
  return tile.rows < Config::kTokens ? tile.rows : Config::kTokens;
}
template <class Config>
MOE_FN int tile_units(const Task& tile) {
  return (tile_tokens<Config>(tile) + 63) / 64;
}
// Stages in which a tile's results leave.
template <Kind kKind, class Config>
MOE_FN int result_stages(const Task& tile) {
  return div_up(Config::pieces(kKind) * tile_units<Config>(tile), Config::pieces_at_once(kKind));
}
// Boxes of tokens in unit `unit` that hold the first `tokens` of the tile.
template <class Config>
MOE_FN int unit_boxes(int tokens, int unit) {
  const int left = div_up(tokens - 64 * unit, Config::kBoxRows);
  return left < 64 / Config::kBoxRows ? left : 64 / Config::kBoxRows;  // or less than one
}
// The panel of weights that is block b of 64 columns of a consumer.
template <Kind kKind, class Config>
MOE_FN int weight_panel(uint32_t consumer, int b) {
  return kKind == kDgradDown ? Config::kColumnBlocks * static_cast<int>(consumer) + b : static_cast<int>(consumer) + 2 * b;
}

// kDgradDown. Combine weights of a tile's tokens, FP32; tiles take turns.
template <class Config>
MOE_FN uint32_t weight_table(uint32_t base, uint32_t tiles) {
  return base + Config::kTableOffset + tiles % 2 * (4 * Config::kTokens);
}
// What d(weight) is made of: FP32 [4 warps][64 tokens][4 pairs of columns], in the panel of a stage that results leave free.
template <class Config>
MOE_FN uint32_t dot_table(uint32_t stage, uint32_t consumer) {
  return slot_panel<Config>(stage, 2, 0) + consumer * (kPanelBytes / 2);
}

// Panel p of the weights, which arrives on `full`. Joint gate and up come eight rows of each in turn: a lane of a product then has both of the
// same column.
//
// Weights are read once, and may leave L2 before the tokens, which every cluster of an expert reads. With K-major ones that lost, measured while
// memory gave 256 bytes of a row at a time, of which a stage takes 128 (NOTES.md, v15).
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void load_weights_tokens_n(const Task& tile, const Arguments& args, KBlock block, int p, uint32_t full, uint32_t panel) {
  if constexpr (Config::joint(kKind)) {
    Isa::load_joint_panel(&args.b, full, panel, block.k, tile.n0 + 32 * p, tile.expert);
  } else {
    const Box box = box_b<kKind, Config>(tile, block, 64 * p, 0);
    Isa::template load_panel<mn_major_b<Config>(kKind)>(&args.b, full, panel, box.inner, box.outer, box.half, box.expert);
  }
}

// Gate and up of each consumer's piece, where their gradients will be written.
template <class Isa, class Config, class Arguments>
MOE_FN void load_gate_up_tokens_n(const Task& tile, const Arguments& args, int piece, const Ring<Isa, Config>& ring) {
  const int unit = piece / Config::kColumnBlocks, b = piece % Config::kColumnBlocks;
  const uint32_t full = ring.full();
  const int boxes = unit_boxes<Config>(tile_tokens<Config>(tile), unit);
  Isa::barrier_expect_bytes(full, static_cast<uint32_t>(4 * boxes) * Config::kBoxBytes);
  MOE_NO_UNROLL
  for (int p = 0; p < 4; ++p) {
    const uint32_t panel = slot_panel<Config>(ring.data(), p / 2, p % 2);
    const int column = tile.n0 + 64 * weight_panel<kDgradDown, Config>(p / 2, b);
    MOE_NO_UNROLL
    for (int i = 0; i < boxes; ++i) {
      const int row = tile.row0 + 64 * unit + Config::kBoxRows * i;
      Isa::load_panel(&args.gate_up, full, panel + i * Config::kBoxBytes, column, row, p % 2, 0);
    }
  }
}

// Producer, one task.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void load_task_tokens_n(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring) {
  const Task tile = block_tile<Config>(task, kKind, rank);
  const int tokens = tile_tokens<Config>(tile);
  const int half_blocks = half_k_blocks<kKind, Config>(task, args);
  const int k_blocks = task_k_blocks<kKind, Config>(task, args);
  const bool gathered = can_gather(kKind) && args.gather != nullptr;
  const int boxes = gathered ? 0 : div_up(tokens, Config::kBoxRows);
  const uint32_t scale_bytes = static_cast<uint32_t>(tile_units<Config>(tile)) * Config::kUnitScaleBytes;
  const uint32_t bytes = Config::kPanelsA * kPanelBytes + static_cast<uint32_t>(boxes) * Config::kBoxBytes + scale_bytes;
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
    for (int q = static_cast<int>(rank); q < boxes; q += 2) {
      const Box box = box_a<kKind, Config>(tile, block, Config::kBoxRows * q, 0);
      const uint32_t to = ring.data() + Config::kPanelsA * kPanelBytes + q * Config::kBoxBytes;
      Isa::load_panel_both(&args.a, full, to, box.inner, box.outer, box.half, box.expert);
    }
    if constexpr (Config::kUnitScaleBytes > 0) {
      const uint16_t* const scales = args.a_scales + kb * static_cast<int64_t>(args.num_rows) + tile.row0;
      Isa::load_bytes(scales, full, Config::scales(ring.base, ring.stage), scale_bytes);
    }
    ring.advance();
  }
  MOE_NO_UNROLL
  for (int i = 0; i < result_stages<kKind, Config>(tile); ++i) {  // lend stages to the consumers' results
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    if constexpr (kKind == kDgradDown) {
      load_gate_up_tokens_n<Isa, Config>(tile, args, i, ring);
    } else {
      Isa::barrier_arrive(ring.full());
    }
    ring.advance();
  }
}

// Gathering warp, one task. There are more rows than registers for them, so where they start is kept in shared memory.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void gather_task_tokens_n(const Task& tile, const Arguments& args, uint32_t base, Ring<Isa, Config>& ring) {
  const int k_blocks = task_k_blocks<kKind, Config>(tile, args);
  const int units = tile_units<Config>(tile);
  if (args.gather == nullptr) {
    follow(k_blocks + result_stages<kKind, Config>(tile), ring);
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
  follow(result_stages<kKind, Config>(tile), ring);
}

// Fourth warp of kDgradDown, one task: the combine weights of its tokens, 0 for padding. It follows the ring; that the first stage for results is free
// says that every consumer has begun this tile, or at least the one before, and so is done with the table of the tile before that.
template <class Isa, class Config, class Arguments>
MOE_FN void weigh_task_tokens_n(const Task& tile, const Arguments& args, uint32_t table, Ring<Isa, Config>& ring) {
  constexpr int kEach = Config::kTokens / 32;
  const int lane = static_cast<int>(Isa::lane_index());
  float weight[kEach];
  MOE_UNROLL
  for (int q = 0; q < kEach; ++q) {
    const int slot = 32 * q + lane < tile.rows ? args.slot_M[tile.row0 + 32 * q + lane] : -1;
    weight[q] = slot >= 0 ? args.weight_TxK[slot] : 0.0f;
  }
  follow(task_k_blocks<kDgradDown, Config>(tile, args), ring);
  Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
  MOE_UNROLL
  for (int q = 0; q < kEach; ++q) Isa::store_float(table + 4 * (32 * q + lane), weight[q]);
  follow(result_stages<kDgradDown, Config>(tile), ring);
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

// By steps of 16 where most experts are: half a step less is multiplied.
template <class F>
MOE_FN void with_fine_width(int tokens, F f) {
  if (tokens > 128 && tokens <= 144) {
    f(Width<144>{});
  } else if (tokens > 160 && tokens <= 176) {
    f(Width<176>{});
  } else {
    with_width(tokens, f);
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
  static constexpr int kSources = kKind == kGateUp ? 2 : 1;  // panels that a piece's sums go to: gate and up

  // Address that this lane supplies to the transposing stmatrix for token blocks 2 jj and 2 jj + 1 of a panel (64 tokens of 64
  // columns): matrices are (block 2jj, columns 0-7 of the warp's 16), (2jj, 8-15), (2jj+1, 0-7), (2jj+1, 8-15). Joint: for the warp's
  // eight columns of token blocks 4 jj .. 4 jj + 3.
  MOE_FN uint32_t matrix_address(uint32_t panel, int jj) const {
    const uint32_t matrix = lane / 8;
    if (kJoint) return panel + panel_offset(8 * (4 * jj + matrix) + lane % 8, 4 * consumer + warp);
    return panel + panel_offset(8 * (2 * jj + matrix / 2) + lane % 8, 2 * warp + matrix % 2);
  }

  // Which halves of a pair of tokens are no padding, of the two of block j of 8 that this lane has.
  MOE_FN uint32_t live(int tokens, int j) const {
    const int left = tokens - 8 * j - 2 * static_cast<int>(lane % 4);
    return left > 1 ? 0xffffffffu : left > 0 ? 0x0000ffffu : 0u;
  }
  MOE_FN void hand_over(int unit) const {
    Isa::fence_async_shared();
    Isa::warp_sync();
    if (lane == 0) Isa::barrier_arrive(written_barrier<Config>(base, consumer, unit));
  }

  // kDgradDown: d(gate) and d(up) in place of gate and up, and weight * h. A warp has 16 columns of each block, and touches no other's; what d(weight)
  // is made of it leaves in the order of DotBySixteen for the store warp.
  template <class Arguments>
  MOE_FN void write_gradients(const Task& tile, const Arguments& args, Ring<Isa, Config>& ring) {
    const int tokens = tile_tokens<Config>(tile);
    Isa::barrier_wait(credit_barrier<Config>(base, consumer), (tiles & 1) ^ 1);  // the previous tile has left shared memory
    const uint32_t weights = weight_table<Config>(base, tiles) + 8 * (lane % 4);
    ++tiles;
    constexpr uint32_t kBlockBytes = 8 * kPanelRowBytes;
    const uint32_t matrix = lane / 8;
    const bool odd = lane / 4 % 2 != 0;  // of neighbouring columns, which are in lanes 4 apart, each adds up one token of two
    MOE_UNROLL
    for (int unit = 0; unit < Config::kPanelsB; ++unit) {
      if (64 * unit < tokens) {
        MOE_UNROLL
        for (int b = 0; b < Config::kColumnBlocks; ++b) {
          Isa::barrier_wait(ring.full(), ring.phase);
          const uint32_t first = slot_panel<Config>(ring.data(), consumer, 0);
          const uint32_t dots = dot_table<Config>(ring.data(), consumer) + 1024 * warp + 4 * (lane / 8);
          const uint32_t pieces = matrix_address(first, 0), gradients = pieces + matrix / 2 * (kPanelBytes - kBlockBytes);
          uint32_t scaled_h[4];
          MOE_UNROLL
          for (int block = 0; block < 8; ++block) {  // 8 tokens, for which a lane has two columns of gate, then of up
            const int j = 8 * unit + block;
            const uint32_t kept = live(tokens, j);
            uint32_t pair[4];
            float weight[2], dot[2] = {};
            Isa::load_matrices_transposed(gradients + block * kBlockBytes, pair);
            Isa::load_float2(weights + 32 * j, weight[0], weight[1]);
            Isa::warp_sync();
            MOE_UNROLL
            for (int half = 0; half < 2; ++half) {
              const float* const sums = acc[b] + 4 * j + 2 * half;
              const GradPair grad = grad_pair<kPlain, Isa>(
                  sums[0], sums[1], pair[half], pair[2 + half], weight[0], weight[1], args.act,
                  [&](float h_lo, float lo, float h_hi, float hi) {
                    dot[0] = half == 0 ? Isa::mul(h_lo, lo) : Isa::fma(h_lo, lo, dot[0]);
                    dot[1] = half == 0 ? Isa::mul(h_hi, hi) : Isa::fma(h_hi, hi, dot[1]);
                  },
                  [&](auto value) { return value() & kept; });
              pair[half] = grad.d_gate;
              pair[2 + half] = grad.d_up;
              scaled_h[2 * (block % 2) + half] = grad.scaled_h;
            }
            Isa::store_matrices_transposed(gradients + block * kBlockBytes, pair);
            if (block % 2 != 0) Isa::store_matrices_transposed(pieces + 2 * kPanelBytes + (block - 1) * kBlockBytes, scaled_h);
            const float other = Isa::shuffle_xor(odd ? dot[0] : dot[1], 4);
            const int token = 8 * block + 2 * static_cast<int>(lane % 4) + (odd ? 1 : 0);
            Isa::store_float(dots + 16 * token, Isa::add(odd ? dot[1] : dot[0], other));
          }
          hand_over(Config::pieces(kKind) * unit + b);
          ring.advance();
        }
      }
    }
  }

  template <class Arguments>
  MOE_FN void write(const Task& tile, const Arguments& args, Ring<Isa, Config>& ring) {
    constexpr int kPieces = Config::pieces(kKind), kAtOnce = Config::pieces_at_once(kKind);
    const int tokens = tile_tokens<Config>(tile);
    Isa::barrier_wait(credit_barrier<Config>(base, consumer), (tiles & 1) ^ 1);  // the previous tile has left shared memory
    ++tiles;
    MOE_UNROLL
    for (int piece = 0; piece < kPieces * Config::kPanelsB; ++piece) {
      const int unit = piece / kPieces;
      if (64 * unit < tokens) {
        if (piece % kAtOnce == 0) Isa::barrier_wait(ring.full(), ring.phase);
        const uint32_t first = slot_panel<Config>(ring.data(), kJoint ? 0 : consumer, piece % kAtOnce);
        MOE_UNROLL
        for (int jj = 0; jj < (kJoint ? 2 : 4); ++jj) {
          uint32_t pair[kSources][4], h[4];
          MOE_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int j = 8 * unit + (kJoint ? 4 * jj + i : 2 * jj + i / 2);
            const uint32_t kept = live(tokens, j);
            MOE_UNROLL
            for (int b = 0; b < kSources; ++b) {
              const int block = kJoint ? 0 : kKind == kGateUp ? b : piece % kPieces;
              const float* const sums = acc[block] + 4 * j + 2 * (kJoint ? b : i % 2);
              pair[b][i] = Isa::pack_bf16(sums[0], sums[1]) & kept;
            }
            if constexpr (kKind == kGateUp) {
              if (args.write_out) h[i] = activate_pair<kPlain, Isa>(pair[0][i], pair[1][i], args.act) & kept;
            }
          }
          if (kKind != kGateUp || args.save_gate_up) {
            MOE_UNROLL
            for (int b = 0; b < kSources; ++b) Isa::store_matrices_transposed(matrix_address(first + b * kPanelBytes, jj), pair[b]);
          }
          if (kKind == kGateUp && args.write_out) Isa::store_matrices_transposed(matrix_address(first + 2 * kPanelBytes, jj), h);
        }
        const bool last = piece % kPieces == kPieces - 1 && 64 * (unit + 1) >= tokens;
        if (piece % kAtOnce == kAtOnce - 1 || last) {
          hand_over(piece / kAtOnce);
          ring.advance();
        }
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
  MOE_FN int first_column(int b) const { return 64 * (kKind == kGateUp ? static_cast<int>(consumer) : weight_panel<kKind, Config>(consumer, b)); }

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
    constexpr bool kMnWeights = mn_major_b<Config>(kKind);
    uint32_t previous_empty = 0;
    MOE_NO_UNROLL
    for (int kb = 0; kb < k_blocks; ++kb) {
      Isa::barrier_wait(ring.full(), ring.phase);
      if (gathered) Isa::fence_async_shared();  // tokens were written by lanes, and are read by the tensor cores
      const uint64_t weights_0 = panel_descriptor(ring.data() + weight_panel<kKind, Config>(consumer, 0) * kPanelBytes, kMnWeights);
      const uint64_t weights_1 = panel_descriptor(ring.data() + weight_panel<kKind, Config>(consumer, 1) * kPanelBytes, kMnWeights);
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
    with_fine_width(tokens, [&](auto width) { multiply<decltype(width)::value>(k_blocks, gathered, ring); });
    if constexpr (kKind == kDgradDown) {
      this->write_gradients(tile, args, ring);
    } else {
      this->write(tile, args, ring);
    }
  }
};

// Tokens of a tile that are written, padding as zeros.
template <class Config, class Arguments>
MOE_FN int written_tokens(int tokens, const Arguments& args) {
  if constexpr (Config::kBoxRows == kPanelRows) {
    return tokens;
  } else {
    return div_up(tokens, args.zero_to) * args.zero_to;
  }
}

// kDgradDown, a store warp: what the four warps of a consumer left of 64 columns, from left to right. `dot` of two tokens, four pairs of columns each.
template <class Isa>
MOE_FN void add_dots(float (&dot)[2][4], uint32_t table, bool first) {
  MOE_UNROLL
  for (int t = 0; t < 2; ++t) {
    MOE_UNROLL
    for (int w = 0; w < 4; ++w) {
      MOE_UNROLL
      for (int q = 0; q < 4; q += 2) {
        float v[2];
        Isa::load_float2(table + 1024 * w + 16 * (32 * t + Isa::lane_index()) + 4 * q, v[0], v[1]);
        MOE_UNROLL
        for (int i = 0; i < 2; ++i) dot[t][q + i] = Isa::add(w == 0 && first ? 0.0f : dot[t][q + i], v[i]);
      }
    }
  }
}
template <class Isa, class Config, class Arguments>
MOE_FN void write_dots(const float (&dot)[2][4], const Task& tile, const Arguments& args, int unit, uint32_t consumer) {
  const int column = tile.n0 + Config::kWeightChunk * static_cast<int>(consumer);
  if (column >= args.n_extent) return;
  float* const to = args.weight_partial + column / Config::kWeightChunk * args.num_rows + tile.row0;
  MOE_UNROLL
  for (int t = 0; t < 2; ++t) {
    const int token = 64 * unit + 32 * t + static_cast<int>(Isa::lane_index());
    if (token < tile.rows) to[token] = Isa::add(Isa::add(dot[t][0], dot[t][1]), Isa::add(dot[t][2], dot[t][3]));
  }
}

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
  const int tokens = tile_tokens<Config>(tile), stages = result_stages<kKind, Config>(tile);
  constexpr int kPieces = Config::pieces(kKind), kAtOnce = Config::pieces_at_once(kKind);
  float dot[2][4];  // kDgradDown: of tokens lane and lane + 32 of a unit
  // Result r of a piece.
  auto send = [&](int piece, int r, uint32_t panel) {
    const int unit = piece / kPieces;
    const int boxes = unit_boxes<Config>(written_tokens<Config>(tokens, args), unit);
    const int column = tile.n0 + 64 * (kKind == kGateUp ? static_cast<int>(consumer) : weight_panel<kKind, Config>(consumer, piece % kPieces));
    const auto place = place_of<kKind>(args, r);
    MOE_NO_UNROLL
    for (int i = 0; i < boxes; ++i) {
      Isa::store_panel(place.map, panel + i * Config::kBoxBytes, column, tile.row0 + 64 * unit + Config::kBoxRows * i, place.half, 0);
    }
  };
  MOE_NO_UNROLL
  for (int stage = 0; stage < stages; ++stage) {
    for_consumers([&](uint32_t c) { Isa::barrier_wait(written_barrier<Config>(shared_base, c, stage), tiles >> stage & 1); });
    const uint32_t first = slot_panel<Config>(ring.data(), consumer, 0);
    if (one) {
      if constexpr (kKind == kGateUp || kKind == kDgradDown) {
        MOE_UNROLL
        for (int r = 0; r < 3; ++r) {
          if (kKind == kDgradDown || (r < 2 ? args.save_gate_up : args.write_out)) send(stage, r, first + r * kPanelBytes);
        }
      } else {
        MOE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) send(kAtOnce * stage + i, 0, first + i * kPanelBytes);
      }
      Isa::store_commit();
    }
    if constexpr (kKind == kDgradDown) {
      const int b = stage % kPieces;
      add_dots<Isa>(dot, dot_table<Config>(ring.data(), consumer), b == 0);
      if (b == kPieces - 1) write_dots<Isa, Config>(dot, tile, args, stage / kPieces, consumer);
    }
    if (one) Isa::template store_wait_read<0>();
    Isa::warp_sync();
    if (one) for_consumers([&](uint32_t) { ring.release_warpgroup(ring.empty()); });
    ring.advance();
    tiles ^= 1u << stage;  // a stage's barrier turns only in tiles that have it
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
  static constexpr bool kFourthWarp = can_gather(kKind) || kKind == kDgradDown;
  template <class Batch>
  static MOE_FN uint32_t full_arrivals(const Batch&) {
    return 1 + (kFourthWarp ? kGatherLanes : 0);
  }

  template <class Batch>
  static MOE_FN void gather(const Batch& batch, uint32_t base) {
    Ring<Isa, Config> ring(base);
    uint32_t tiles = 0;
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) {
      if constexpr (kKind == kDgradDown) {
        weigh_task_tokens_n<Isa>(task, args, weight_table<Config>(base, tiles++), ring);
      } else {
        gather_task_tokens_n<kKind, Isa, Config>(task, args, base, ring);
      }
    });
  }
};

}  // namespace moe
