// Tokens on the N side (gemm_tokens_n.h): the shape of a block, and where a tile's parts lie in it.
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
  static MOE_HOST_FN constexpr int pieces_at_once(Kind kind) {
    return joint(kind) ? 2 : kind == kGateUp || kind == kDgradDown ? 1 : kPiecesAtOnce;
  }

  static constexpr int kBarrierOffset = kStages * kStageBytes;
  static constexpr int kWrittenOffset = kBarrierOffset + 2 * kStages * 8;
  static constexpr int kCreditOffset = kWrittenOffset + kConsumers * kMaxUnits * 8;
  static constexpr int kLeadOffset = kCreditOffset + kConsumers * 8;
  static constexpr int kTableOffset = kLeadOffset + 16;  // of what the fourth warp leaves for others or itself
  static constexpr int kSlotPanels = (kPanelsA + kPanelsB) / kConsumers;
  static constexpr int kUnitScaleBytes = 0;  // scales of 64 tokens that come with a stage

  // With one block of columns a consumer has 32 of gate and 32 of up: both fill the same panels of 64 columns (mx_joint_results.h).
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
// Stages in which a tile's results leave. Of joint gate and up, h has a place of its own.
template <Kind kKind, class Config, class Arguments>
MOE_FN int result_stages(const Task& tile, const Arguments& args) {
  if (Config::joint(kKind) && !args.save_gate_up) return 0;
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

}  // namespace moe
