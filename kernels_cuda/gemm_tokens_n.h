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

#include "tokens_n_load.h"
#include "tokens_n_results.h"

namespace moe {

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
