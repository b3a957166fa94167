// Tokens on the N side (gemm_tokens_n.h): what fills the ring, and the fourth warp, which gathers tokens or brings their combine weights.
#pragma once

#include "tokens_n_shape.h"

namespace moe {

// Panel p of the weights, which arrives on `full`. Joint gate and up come eight rows of each in turn: a lane of a product then has both of the
// same column.
//
// Weights are read once, and may leave L2 before the tokens, which every cluster of an expert reads. With K-major ones, of which a stage takes 128 bytes
// of a row, that gains nothing (NOTES.md, v15, v20).
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
  for (int i = 0; i < result_stages<kKind, Config>(tile, args); ++i) {  // lend stages to the consumers' results
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    if constexpr (kKind == kDgradDown) {
      load_gate_up_tokens_n<Isa, Config>(tile, args, i, ring);
    } else {
      Isa::barrier_arrive(ring.full());
    }
    ring.advance();
  }
}

// Gathering warp, one task. There are more rows than registers for them, so where they start is kept in shared memory. No more boxes of rows come than
// hold tokens: what reaches the multiprocessors from L2 is as much a bound as memory (NOTES.md, v20).
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void gather_task_tokens_n(const Task& tile, const Arguments& args, uint32_t base, Ring<Isa, Config>& ring) {
  const int k_blocks = task_k_blocks<kKind, Config>(tile, args);
  if (args.gather == nullptr) {
    follow(k_blocks + result_stages<kKind, Config>(tile, args), ring);
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
  constexpr int kInstructions = Config::kBoxRows / 4;  // for a box
  const int boxes = div_up(tile_tokens<Config>(tile), Config::kBoxRows);
  MOE_NO_UNROLL
  for (int kb = 0; kb < k_blocks; ++kb) {
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    const bool inside = 8 * kb + static_cast<int>(mine.piece) < args.gather_vectors;
    const uint8_t* column = inside ? from + 128 * static_cast<int64_t>(kb) : args.gather;
    MOE_NO_UNROLL
    for (int box = 0; box < boxes; ++box) {
      const uint32_t to = ring.data() + Config::kPanelsA * kPanelBytes + box * Config::kBoxBytes;
      uint32_t offset[kInstructions];
      MOE_UNROLL
      for (int i = 0; i < kInstructions; ++i) offset[i] = Isa::load_word(table + 16 * (kInstructions * box + i));
      MOE_UNROLL
      for (int i = 0; i < kInstructions; ++i) Isa::gather_vector(mine.address(to, i), column + offset[i], inside ? 16u : 0u);
    }
    Isa::gather_arrive(ring.full());
    ring.advance();
  }
  follow(result_stages<kKind, Config>(tile, args), ring);
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
  follow(result_stages<kDgradDown, Config>(tile, args), ring);
}

}  // namespace moe
