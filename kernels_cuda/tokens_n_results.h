// Tokens on the N side (gemm_tokens_n.h): how a consumer's sums become results in stages of the ring, and the store warps that send them.
#pragma once

#include "tokens_n_shape.h"

namespace moe {

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

  static constexpr int kSources = kKind == kGateUp ? 2 : 1;  // panels that a piece's sums go to: gate and up

  // Address that this lane supplies to the transposing stmatrix for token blocks 2 jj and 2 jj + 1 of a panel (64 tokens of 64
  // columns): matrices are (block 2jj, columns 0-7 of the warp's 16), (2jj, 8-15), (2jj+1, 0-7), (2jj+1, 8-15).
  MOE_FN uint32_t matrix_address(uint32_t panel, int jj) const {
    const uint32_t matrix = lane / 8;
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
        const uint32_t first = slot_panel<Config>(ring.data(), consumer, piece % kAtOnce);
        MOE_UNROLL
        for (int jj = 0; jj < 4; ++jj) {
          uint32_t pair[kSources][4], h[4];
          MOE_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int j = 8 * unit + 2 * jj + i / 2;
            const uint32_t kept = live(tokens, j);
            MOE_UNROLL
            for (int b = 0; b < kSources; ++b) {
              const int block = kKind == kGateUp ? b : piece % kPieces;
              const float* const sums = acc[block] + 4 * j + 2 * (i % 2);
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

// Store warp of one consumer, one task.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void store_task_tokens_n(const Task& task, const Arguments& args, uint32_t shared_base, uint32_t consumer, uint32_t& tiles,
                                Ring<Isa, Config>& ring) {
  const Task tile = block_tile<Config>(task, kKind, Isa::cluster_rank());
  ring.skip(task_k_blocks<kKind, Config>(task, args));
  const bool one = Isa::lane_index() == 0;
  const int tokens = tile_tokens<Config>(tile), stages = result_stages<kKind, Config>(tile, args);
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
    Isa::barrier_wait(written_barrier<Config>(shared_base, consumer, stage), tiles >> stage & 1);
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
    if (one) ring.release_warpgroup(ring.empty());
    ring.advance();
    tiles ^= 1u << stage;  // a stage's barrier turns only in tiles that have it
  }
  if (one) Isa::barrier_arrive(credit_barrier<Config>(shared_base, consumer));
  signal_done<Isa>(task, args, one);
}

}  // namespace moe
