// The loader of every tile program: which boxes of the operands a stage of the ring is made of, where they begin, and how many bytes they
// count. A stage is 128 bytes of the contraction: rows of A, rows of B, and on Blackwell the scales that the tensor core applies.
//
// An operand is K-major (a 128-byte row of a stage is one index of M or N) or MN-major (it is one index of the contraction). One tensor
// map serves both: a box is kPanelRows rows of 128 bytes either way.
#pragma once

#include "gemm_ring.h"

namespace moe {

// Which operand is MN-major: its contiguous dimension is not the contraction. FP8 products of Hopper take K-major ones alone.
template <class Config>
MOE_HOST_FN constexpr bool mn_major_a(Kind kind) {
  return !Config::kOnlyKMajor && is_wgrad(kind);
}
template <class Config>
MOE_HOST_FN constexpr bool mn_major_b(Kind kind) {
  return !Config::kOnlyKMajor && kind != kGateUp && kind != kDown;
}

// Where a box begins: coordinates of the operand's map.
struct Box {
  int inner, outer, half, expert;
};
// A block of the contraction: kDgradGateUp sums over two halves, d(gate) Wg and d(up) Wu; weight gradients over an expert's rows.
struct KBlock {
  int half, k;
};
template <Kind kKind, class Config>
MOE_FN KBlock k_block(const Task& tile, int kb, int half_blocks) {
  const int half = kKind == kDgradGateUp && kb >= half_blocks ? 1 : 0;
  return {half, (kb - half * half_blocks) * Config::kBlockK + (is_wgrad(kKind) ? tile.row0 : 0)};
}
// The box of A at row m of the tile and k of the block.
template <Kind kKind, class Config>
MOE_FN Box box_a(const Task& tile, KBlock block, int m, int k) {
  const int row = (is_wgrad(kKind) ? tile.m0 : tile.row0) + m;
  const int half = is_wgrad(kKind) ? tile.half : block.half;
  return mn_major_a<Config>(kKind) ? Box{row, block.k + k, half, 0} : Box{block.k + k, row, half, 0};
}
// The box of B at column n of the tile. The first half of a tile's columns is gate, the second up, where both are computed.
template <Kind kKind, class Config>
MOE_FN Box box_b(const Task& tile, KBlock block, int n, int k) {
  constexpr int kHalf = Config::kTileN / 2;
  const int column = tile.n0 + (kKind == kGateUp ? n % kHalf : n);
  const int half = kKind == kGateUp ? n / kHalf : block.half;
  const int expert = is_wgrad(kKind) ? 0 : tile.expert;
  return mn_major_b<Config>(kKind) ? Box{column, block.k + k, half, expert} : Box{block.k + k, column, half, expert};
}

// Scales that come with a stage, beside the operands: none; or atoms as Blackwell's tensor core reads them, one of A for this block's rows, and
// those of all of the tile's columns, which both blocks of a pair need. bytes(): of this block; load: those of one block of K, to be counted
// on the stage's full barrier.
struct NoScales {
  MOE_FN uint32_t bytes() const { return 0; }
  template <class RingType>
  MOE_FN void load(KBlock, const RingType&) {}
};
// Atoms of B that a tile reads: 128 columns each; gate and up have one of their own.
template <Kind kKind, class Config>
MOE_FN int scale_atoms_b(const Task& tile) {
  return kKind == kGateUp ? 2 : (tile.n0 % 128 + Config::kTileN + 127) / 128;
}
template <Kind kKind, class Isa, class Config, class Arguments>
struct ScaleAtoms {
  const Task& tile;
  const Arguments& args;

  MOE_FN uint32_t bytes() const { return (1 + scale_atoms_b<kKind, Config>(tile)) * Config::kScaleAtomBytes; }
  MOE_FN void load(KBlock block, const Ring<Isa, Config>& ring) {
    const uint32_t dst = ring.base + Config::kScaleOffset + ring.stage * Config::kScaleStageBytes;
    const int atom_k = block.k / 128, atom_m = (is_wgrad(kKind) ? tile.m0 : tile.row0) / 128;
    Isa::template load_box<Config::kBlocks>(&args.scale_a, ring.full(), dst, 0, atom_k, atom_m, is_wgrad(kKind) ? tile.half : block.half);
    MOE_NO_UNROLL
    for (int i = 0; i < scale_atoms_b<kKind, Config>(tile); ++i) {
      const int atom_n = tile.n0 / 128 + (kKind == kGateUp ? 0 : i);
      const int matrix = kKind == kGateUp        ? 2 * tile.expert + i
                         : kKind == kDgradGateUp ? 2 * tile.expert + block.half
                         : is_wgrad(kKind)       ? 0
                                                 : tile.expert;
      const uint32_t to = dst + (1 + i) * Config::kScaleAtomBytes;
      Isa::template load_box<Config::kBlocks>(&args.scale_b, ring.full(), to, 0, atom_k, atom_n, matrix);
    }
  }
};

// One stage per block of the contraction of `tile`, this block's part of the cluster's task. `boxes_a`: as many of the boxes of A are
// needed, 64 rows each; the others are brought by somebody else, or never multiplied. In a cluster that shares by multicast each block brings
// half of the shared operand for both; in a pair each brings its own rows, and the leader counts the bytes of both.
template <Kind kKind, class Isa, class Config, class Arguments, class Scales>
MOE_FN void load_k_blocks(const Task& tile, const Arguments& args, uint32_t rank, int boxes_a, Scales scales, Ring<Isa, Config>& ring) {
  constexpr bool kMnA = mn_major_a<Config>(kKind), kMnB = mn_major_b<Config>(kKind);
  constexpr int kPerRow = kPanelRowBytes / Config::kElementBytes;  // elements in a 128-byte row
  constexpr int kDeep = Config::kBlockK / kPanelRows;              // MN-major: boxes along K in a stage
  constexpr int kBoxesA = Config::kTileM / kPanelRows;
  constexpr int kBoxRowsB = kMnB ? kPanelRows : Config::kBoxRowsB;
  constexpr int kBoxesB = Config::kRowsB / kBoxRowsB;              // of this block
  const int half_blocks = half_k_blocks<kKind, Config>(tile, args);
  const int k_blocks = task_k_blocks<kKind, Config>(tile, args);
  const int first_b = Config::kBlocks == 1 ? 0 : Config::kRowsB * static_cast<int>(rank);
  const bool share_a = Config::kMulticast && tile.pair == kPairN;
  const uint32_t bytes = static_cast<uint32_t>(boxes_a) * kPanelBytes + Config::kRowsB * kPanelRowBytes + scales.bytes();
  MOE_NO_UNROLL
  for (int kb = 0; kb < k_blocks; ++kb) {
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    const uint32_t full = ring.full(), stage = ring.data();
    const KBlock block = k_block<kKind, Config>(tile, kb, half_blocks);
    if (Config::kBlocks == 1 || rank == 0) Isa::barrier_expect_bytes(full, Config::kBlocks * bytes);
    auto load = [&](const auto* map, uint32_t dst, const Box& box, bool both) {
      if constexpr (!Config::kMulticast) {
        Isa::template load_box<Config::kBlocks>(map, full, dst, box.inner, box.outer, box.half, box.expert);
      } else if (both) {
        Isa::load_panel_both(map, full, dst, box.inner, box.outer, box.half, box.expert);
      } else {
        Isa::load_panel(map, full, dst, box.inner, box.outer, box.half, box.expert);
      }
    };
    auto load_a = [&](int p, bool both) {
      const Box box = box_a<kKind, Config>(tile, block, kMnA ? p / kDeep * kPerRow : kPanelRows * p, kMnA ? p % kDeep * kPanelRows : 0);
      load(&args.a, stage + p * kPanelBytes, box, both);
    };
    auto load_b = [&](int p, bool both) {
      const Box box = box_b<kKind, Config>(tile, block, first_b + (kMnB ? p / kDeep * kPerRow : kBoxRowsB * p), kMnB ? p % kDeep * kPanelRows : 0);
      load(&args.b, stage + Config::kBytesA + p * kBoxRowsB * kPanelRowBytes, box, both);
    };
    if (share_a) {
      if (static_cast<int>(rank) < boxes_a) load_a(static_cast<int>(rank), true);
    } else {
      MOE_UNROLL
      for (int p = 0; p < kBoxesA; ++p) {
        if (p < boxes_a) load_a(p, false);
      }
    }
    if (share_a || !Config::kMulticast) {
      MOE_UNROLL
      for (int p = 0; p < kBoxesB; ++p) load_b(p, false);
    } else {
      MOE_UNROLL
      for (int p = 0; p < kBoxesB / 2; ++p) load_b(static_cast<int>(rank) * (kBoxesB / 2) + p, true);
    }
    scales.load(block, ring);
    ring.advance();
  }
}

}  // namespace moe
