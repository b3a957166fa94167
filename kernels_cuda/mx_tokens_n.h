// The FP8 products with tokens on the N side, for experts with few rows: loader, results and store warps of gemm_tokens_n.h, and the same bits as
// mx_roles.h. A block has 128 weight columns (kGateUp: 64 of gate and of up) by up to 192 tokens, a consumer 64 of them, because each K block is
// summed in temporaries of its own and then added to the sums: two sets, half of the tokens each, so that one is multiplied while the other is
// added. Results leave in BF16, but for h (mx_joint_results.h).
//
// A scale per token is one per column of the accumulators. They arrive with their stage as BF16 numbers in the order of the lanes that want them
// (lane_scales), so that a consumer reads two with four bytes and unpacks each in one operation. The fourth warp adds those of the weights.
#pragma once

#include "gemm_tokens_n.h"
#include "mx_joint_results.h"
#include "mx_roles.h"

namespace moe {

struct MxTokensNConfig : TokensNShape<128, 5, 16> {
  static constexpr int kBlockK = 128;
  static constexpr int kElementBytes = 1;
  static constexpr bool kOnlyKMajor = true;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;

  // Of each stage: BF16 scales of its tokens, then two FP32 ones of the weights.
  static constexpr int kUnitScaleBytes = 128;
  static constexpr int kWeightScales = kMaxUnits * kUnitScaleBytes;
  static constexpr int kScaleBytes = kWeightScales + 16;
  static constexpr int kScaleOffset = (kTableOffset + 15) / 16 * 16;
  static constexpr int kSharedBytes = kScaleOffset + kStages * kScaleBytes;
  static MOE_FN uint32_t scales(uint32_t base, uint32_t stage) { return base + kScaleOffset + stage * kScaleBytes; }

  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
  static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= kThreads * 168, "a block starts with 168 registers a thread");
};

// Fourth warp, one task: the weights' scales of each K block.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void scale_task(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring) {
  const Task tile = block_tile<Config>(task, kKind, rank);
  const int k_blocks = task_k_blocks<kKind, Config>(task, args);
  const uint32_t lane = Isa::lane_index();
  const WeightCodes<kKind, 1> weights(args, tile);
  const uint8_t* const codes = weights.codes[lane < weights.kCount ? lane : 0];
  uint32_t code = Isa::load_code(codes);
  MOE_NO_UNROLL
  for (int kb = 0; kb < k_blocks; ++kb) {
    const float scale = mx::finite_scale_value(code);
    if (kb + 1 < k_blocks) code = Isa::load_code(codes + weights.at(kb + 1));  // arrives while this warp waits for a stage
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    if (lane < weights.kCount) {
      Isa::store_word(Config::scales(ring.base, ring.stage) + Config::kWeightScales + 4 * lane, mx::bits_of(scale));
    }
    Isa::barrier_arrive(ring.full());
    ring.advance();
  }
  follow(result_stages<kKind, Config>(tile, args), ring);
}

template <Kind kKind, bool kPlain, class Isa, class Config>
using MxTokensNSums = std::conditional_t<kKind == kGateUp, JointSums<kPlain, Isa, Config>, TokensNSums<kKind, kPlain, Isa, Config>>;

template <Kind kKind, bool kPlain, class Isa, class Config>
struct MxTokensNConsumer : MxTokensNSums<kKind, kPlain, Isa, Config> {
  using Base = MxTokensNSums<kKind, kPlain, Isa, Config>;
  using Base::Base;
  using Base::acc, Base::base, Base::consumer, Base::lane;

  // Starts the products of one K block with the tokens of a half, from token kFrom on.
  template <int kFrom, int kCount>
  MOE_FN void start_half(float (&part)[kCount], uint32_t stage) const {
    const uint64_t weights = panel_descriptor(stage + consumer * kPanelBytes, false);
    const uint64_t tokens = panel_descriptor(stage + Config::kPanelsA * kPanelBytes + kFrom * kPanelRowBytes, false);
    constexpr uint64_t kStep = panel_k16_step(false);  // 32 bytes: 32 of K
    Isa::mma_fence();
    Isa::template mma_e4m3<true>(part, weights, tokens);
    MOE_UNROLL
    for (int k = 1; k < 4; ++k) Isa::template mma_e4m3<false>(part, weights + k * kStep, tokens + k * kStep);
    Isa::mma_commit();
  }

  // Waits until only the products started after this half's are under way, kPending groups of them, and adds it. The second half is the last to
  // read its stage.
  template <int kPending, int kFrom, int kCount>
  MOE_FN void finish_half(const float (&part)[kCount], uint32_t scales, uint32_t empty) {
    constexpr int kBlocks = kCount / 4;  // of eight tokens, two of which are this lane's
    uint32_t pair[kBlocks];
    MOE_UNROLL
    for (int j = 0; j < kBlocks; ++j) {  // before the wait, so that they come for nothing
      const int block = kFrom / 8 + j;
      const uint32_t at = scales + block / 8 * Config::kUnitScaleBytes + 32 * (lane % 4) + block % 8 * 4;
      if (block % 2 == 0 && j + 1 < kBlocks) {
        float two[2];
        Isa::load_float2(at, two[0], two[1]);
        pair[j] = mx::bits_of(two[0]);
        pair[j + 1] = mx::bits_of(two[1]);
      } else if (block % 2 == 0 || j == 0) {
        pair[j] = Isa::load_word(at);
      }
    }
    float weight[2];
    if constexpr (kKind == kGateUp) {
      Isa::load_float2(scales + Config::kWeightScales, weight[0], weight[1]);
    } else {
      weight[0] = weight[1] = mx::float_of(Isa::load_word(scales + Config::kWeightScales));
    }
    Isa::template mma_wait<kPending>();
    if (kFrom > 0) {
      Isa::warp_sync();  // all lanes have read their scales
      Ring<Isa, Config>::release(empty);
    }
    MOE_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float token = i % 2 ? Isa::bf16_hi(pair[j]) : Isa::bf16_lo(pair[j]);
        const float factor = Isa::mul(token, weight[i / 2]);  // exact, as mx::product_scale
        float& sum = acc[0][kFrom / 2 + 4 * j + i];
        sum = Isa::fma(part[4 * j + i], factor, sum);
      }
    }
  }

  // All K blocks of a task on kN tokens: one half is multiplied while the other is added.
  template <int kN>
  MOE_FN void multiply(int k_blocks, Ring<Isa, Config>& ring) {
    float first[kN / 4], second[kN / 4];
    Isa::barrier_wait(ring.full(), ring.phase);
    start_half<0>(first, ring.data());
    int left = 2 * k_blocks - 1;  // halves to be started; odd
    MOE_NO_UNROLL
    for (; left > 1; left -= 2) {
      const uint32_t scales = Config::scales(base, ring.stage), empty = ring.empty();
      start_half<kN / 2>(second, ring.data());
      finish_half<1, 0>(first, scales, empty);
      ring.advance();
      Isa::barrier_wait(ring.full(), ring.phase);
      start_half<0>(first, ring.data());
      finish_half<1, kN / 2>(second, scales, empty);
    }
    // Never taken. Without it the compiler makes one piece of the loop's head and the tail, which begin alike, and ptxas then no longer sees which
    // products are under way, and makes each wait for the one before.
    if (left < 1) return Isa::template mma_wait<0>();
    const uint32_t scales = Config::scales(base, ring.stage), empty = ring.empty();
    start_half<kN / 2>(second, ring.data());
    finish_half<1, 0>(first, scales, empty);
    finish_half<0, kN / 2>(second, scales, empty);
    ring.advance();
  }

  template <class Arguments>
  MOE_FN void run(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring) {
    const Task tile = block_tile<Config>(task, kKind, rank);
    const int k_blocks = task_k_blocks<kKind, Config>(task, args);
    MOE_UNROLL
    for (int i = 0; i < Config::kAcc; ++i) acc[0][i] = 0.0f;
    with_fine_width(tile_tokens<Config>(tile), [&](auto width) { multiply<decltype(width)::value>(k_blocks, ring); });
    this->write(tile, args, ring);
  }
};

template <Kind kKind>
using MxTokensNConfigOf = std::conditional_t<kKind == kGateUp, WithQuantizedH<MxTokensNConfig>, MxTokensNConfig>;

// The roles of a block that runs one kind with tokens on the N side (run_roles in mma_sm90.h).
template <Kind kKind, bool kPlain, class Isa>
struct MxTokensN : TokensNRoles<kKind, Isa, MxTokensNConfigOf<kKind>, MxTokensNConsumer<kKind, kPlain, Isa, MxTokensNConfigOf<kKind>>> {
  using Config = MxTokensNConfigOf<kKind>;
  using Base = TokensNRoles<kKind, Isa, Config, MxTokensNConsumer<kKind, kPlain, Isa, Config>>;
  static constexpr bool kFourthWarp = true;
  static MOE_FN void init(uint32_t base) {
    if constexpr (kKind == kGateUp) Config::template init_h_barriers<Isa>(base);
  }
  template <class Batch>
  static MOE_FN uint32_t full_arrivals(const Batch&) {
    return 1 + kGatherLanes;
  }

  template <class Batch>
  static MOE_FN void gather(const Batch& batch, uint32_t base) {
    Ring<Isa, Config> ring(base);
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) { scale_task<kKind, Isa>(task, args, Isa::cluster_rank(), ring); });
  }

  template <class Batch>
  static MOE_FN void store(const Batch& batch, uint32_t base, uint32_t consumer) {
    if constexpr (kKind == kGateUp) {
      Ring<Isa, Config> ring(base);
      JointStore<Isa, Config> results = {base, consumer};
      for_each_task<Isa>(batch, [&](const Task& task, const auto& args) { results.run(task, args, ring); });
      if (Isa::lane_index() == 0) Isa::store_wait_done();  // shared memory must outlive the stores that read it
    } else {
      Base::store(batch, base, consumer);
    }
  }
};

}  // namespace moe
