// FP8 with tokens on the N side (mx_tokens_n.h), kGateUp: how gate, up and h leave. The two consumers of a block have 32 columns each of the same 64, and
// the two blocks of a cluster halves of the same 128 of F, a group of h. Gate and up leave as BF16 through stages of the ring, if they are saved.
//
// h is quantised by the store warps while the consumers multiply their next tile, each for half of the tokens. A lane has 16 columns of a token, so two
// lanes have a block of 32; four find what the largest code of the block's 64 columns is, and send it to the same warp of the other block, which has the
// other half of the group. What is quantised to the scale of its own 32 waits in place, in shared memory, until the other's codes are there.
#pragma once

#include "mx_roles.h"
#include "tokens_n_results.h"

namespace moe {

// Shared memory behind that of `Base`: h of a tile, BF16 panels of 64 tokens; what the other block found of each token, tiles in turn; barriers.
template <class Base>
struct WithQuantizedH : Base {
  static constexpr int kCodeWords = Base::kTokens / 4;  // of a store warp: a word for two tokens
  static constexpr int kCodesOffset = (Base::kSharedBytes + 15) / 16 * 16;
  static constexpr int kHBarriers = kCodesOffset + 2 * 2 * 4 * kCodeWords;
  static constexpr int kHOffset = (kHBarriers + 32 + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes = kHOffset + Base::kPanelsB * kPanelBytes;
  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");

  static MOE_FN uint32_t h_panel(uint32_t base, int unit) { return base + kHOffset + static_cast<uint32_t>(unit) * kPanelBytes; }
  static MOE_FN uint32_t codes(uint32_t base, uint32_t warp, uint32_t tiles) {
    return base + kCodesOffset + (2 * (tiles % 2) + warp) * (4 * kCodeWords);
  }
  // filled: the 8 warps of both consumers arrive once a tile's results are written; the store warps wait. left: both of them arrive once these have left
  // shared memory; the consumers wait before they write the next one's. exchanged[warp]: the store warp and its like in the other block arrive once
  // their codes of a tile are written; both wait. So neither can be a tile ahead with its arrival, nor two with its codes.
  static MOE_FN uint32_t filled(uint32_t base) { return base + kHBarriers; }
  static MOE_FN uint32_t left(uint32_t base) { return base + kHBarriers + 8; }
  static MOE_FN uint32_t exchanged(uint32_t base, uint32_t warp) { return base + kHBarriers + 16 + 8 * warp; }
  template <class Isa>
  static MOE_FN void init_h_barriers(uint32_t base) {
    Isa::barrier_init(filled(base), 4 * Base::kConsumers);
    Isa::barrier_init(left(base), 2);
    for (uint32_t warp = 0; warp < 2; ++warp) Isa::barrier_init(exchanged(base, warp), 2);
  }
};

// The sums of a consumer: of token block j four, gate of two tokens, then up.
template <bool kPlain, class Isa, class Config>
struct JointSums : TokensNSums<kGateUp, kPlain, Isa, Config> {
  using Base = TokensNSums<kGateUp, kPlain, Isa, Config>;
  using Base::Base;
  using Base::acc, Base::base, Base::consumer, Base::lane, Base::tiles, Base::warp;

  // Address that this lane supplies to the transposing stmatrix for the warp's eight columns of token blocks 4 jj .. 4 jj + 3.
  MOE_FN uint32_t matrix_address(uint32_t panel, int jj) const {
    return panel + panel_offset(8 * (4 * jj + lane / 8) + lane % 8, 4 * consumer + warp);
  }

  template <class Arguments>
  MOE_FN void write(const Task& tile, const Arguments& args, Ring<Isa, Config>& ring) {
    constexpr int kAtOnce = Config::pieces_at_once(kGateUp);
    const int tokens = tile_tokens<Config>(tile);
    Isa::barrier_wait(Config::left(base), (tiles & 1) ^ 1);
    ++tiles;
    MOE_UNROLL
    for (int unit = 0; unit < Config::kPanelsB; ++unit) {
      if (64 * unit < tokens) {
        if (args.save_gate_up && unit % kAtOnce == 0) Isa::barrier_wait(ring.full(), ring.phase);
        const uint32_t saved = ring.data() + unit % kAtOnce * 2 * kPanelBytes;
        MOE_UNROLL
        for (int jj = 0; jj < 2; ++jj) {
          uint32_t gate[4], up[4], h[4];
          MOE_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int j = 8 * unit + 4 * jj + i;
            const uint32_t kept = this->live(tokens, j);
            const float* const sums = acc[0] + 4 * j;
            gate[i] = Isa::pack_bf16(sums[0], sums[1]) & kept;
            up[i] = Isa::pack_bf16(sums[2], sums[3]) & kept;
            if (args.write_out) h[i] = activate_pair<kPlain, Isa>(gate[i], up[i], args.act) & kept;
          }
          if (args.save_gate_up) {
            Isa::store_matrices_transposed(matrix_address(saved, jj), gate);
            Isa::store_matrices_transposed(matrix_address(saved + kPanelBytes, jj), up);
          }
          if (args.write_out) Isa::store_matrices_transposed(matrix_address(Config::h_panel(base, unit), jj), h);
        }
        if (args.save_gate_up && (unit % kAtOnce == kAtOnce - 1 || 64 * (unit + 1) >= tokens)) {
          this->hand_over(unit / kAtOnce);
          ring.advance();
        }
      }
    }
    Isa::warp_sync();
    if (lane == 0) Isa::barrier_arrive(Config::filled(base));
  }
};

// A store warp, 0 or 1. The first one also sends gate and up of both consumers.
template <class Isa, class Config>
struct JointStore {
  uint32_t base, warp;
  uint32_t lane = Isa::lane_index();
  uint32_t tiles = 0;
  uint32_t sent = 0;  // bit i: parity of the tiles that had a stage i

  template <class Arguments>
  MOE_FN void run(const Task& task, const Arguments& args, Ring<Isa, Config>& ring) {
    const Task tile = block_tile<Config>(task, kGateUp, Isa::cluster_rank());
    if (warp == 0) {
      ring.skip(task_k_blocks<kGateUp, Config>(task, args));
      send_gate_up(tile, args, ring);
    }
    Isa::barrier_wait(Config::filled(base), tiles & 1);  // without h too: a store warp that did not wait would be tiles ahead
    if (args.write_out) quantize(tile, args);
    Isa::warp_sync();
    if (lane == 0) Isa::barrier_arrive(Config::left(base));
    ++tiles;
    signal_done<Isa>(task, args, lane == 0);
  }

 private:
  template <class Arguments>
  MOE_FN void send_gate_up(const Task& tile, const Arguments& args, Ring<Isa, Config>& ring) {
    constexpr int kAtOnce = Config::pieces_at_once(kGateUp);
    const int stages = result_stages<kGateUp, Config>(tile, args), units = tile_units<Config>(tile);
    MOE_NO_UNROLL
    for (int stage = 0; stage < stages; ++stage) {
      for (uint32_t consumer = 0; consumer < 2; ++consumer) {
        Isa::barrier_wait(written_barrier<Config>(base, consumer, stage), sent >> stage & 1);
      }
      if (lane == 0) {
        MOE_UNROLL
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          const int unit = kAtOnce * stage + i / 2;
          if (unit < units) Isa::store_panel(&args.gate_up, ring.data() + i * kPanelBytes, tile.n0, tile.row0 + 64 * unit, i % 2, 0);
        }
        Isa::store_commit();
        Isa::template store_wait_read<0>();
      }
      Isa::warp_sync();
      if (lane == 0) {
        for (int consumer = 0; consumer < 2; ++consumer) ring.release_warpgroup(ring.empty());
      }
      ring.advance();
      sent ^= 1u << stage;
    }
  }

  // 32 tokens of a unit at a time, of which this warp has 16 and a lane two: `row` of them and the one eight further on, halves of a word.
  template <class Arguments>
  MOE_FN void quantize(const Task& tile, const Arguments& args) const {
    const int steps = 2 * tile_units<Config>(tile);
    const uint32_t row = lane / 4, piece = lane % 4;
    const uint32_t first = Config::h_panel(base, 0) + panel_offset(16 * warp + row, 2 * piece);
    const uint32_t second = Config::h_panel(base, 0) + panel_offset(16 * warp + row, 2 * piece + 1);
    constexpr uint32_t kStep = 32 * kPanelRowBytes, kNextRow = 8 * kPanelRowBytes;
    const uint32_t theirs = Config::codes(base, warp, tiles) + 4 * row;
    MOE_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      typename Isa::Vector v[2][2];
      uint32_t largest[2];
      MOE_UNROLL
      for (int r = 0; r < 2; ++r) {
        v[r][0] = Isa::load_vector(first + step * kStep + r * kNextRow);
        v[r][1] = Isa::load_vector(second + step * kStep + r * kNextRow);
        largest[r] = mx::max_pairs(mx::largest_pair(v[r][0].x, v[r][0].y, v[r][0].z, v[r][0].w),
                                   mx::largest_pair(v[r][1].x, v[r][1].y, v[r][1].z, v[r][1].w));
      }
      const uint32_t maxima[1] = {mx::larger_of_lanes<Isa>(mx::larger_halves(largest[0], largest[1]), 1)};
      mx::TwoScales scales[1];
      mx::two_scales(maxima, scales);
      MOE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const uint32_t to = first + step * kStep + r * kNextRow, scale = scales[0].scale[r];
        Isa::store_float2(to, mx::float_of(mx::quantize_quad(v[r][0].x, v[r][0].y, scale)), mx::float_of(mx::quantize_quad(v[r][0].z, v[r][0].w, scale)));
        Isa::store_float2(to + 8, mx::float_of(mx::quantize_quad(v[r][1].x, v[r][1].y, scale)),
                          mx::float_of(mx::quantize_quad(v[r][1].z, v[r][1].w, scale)));
      }
      const uint32_t ours = mx::larger_of_lanes<Isa>(scales[0].raised, 2);  // of 64 columns
      Isa::store_float2(second + step * kStep, mx::float_of(scales[0].raised), mx::float_of(ours));
      if (piece == 0) Isa::store_word_cluster(theirs + 32 * step, Isa::cluster_rank() ^ 1, ours);
    }
    Isa::warp_sync();
    if (lane < 2) Isa::barrier_release_cluster(Config::exchanged(base, warp), lane);
    Isa::barrier_acquire_cluster(Config::exchanged(base, warp), tiles & 1);

    const int column = tile.n0 + 16 * static_cast<int>(piece);
    const int64_t token = tile.row0 + 16 * static_cast<int>(warp) + static_cast<int>(row);
    uint8_t* h = args.h_MxF + token * args.n_extent + column;
    uint8_t* codes = args.row_codes + tile.n0 / 128 * args.num_rows + token;
    const bool inside = column < args.n_extent, writes_codes = piece == 0 && Isa::cluster_rank() == 0;
    MOE_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      float both[2];
      Isa::load_float2(second + step * kStep, both[0], both[1]);
      const uint32_t raised = mx::bits_of(both[0]);
      const uint32_t common = mx::max_pairs(mx::bits_of(both[1]), Isa::load_word(theirs + 32 * step));
      MOE_UNROLL
      for (int r = 0; r < 2; ++r) {
        auto q = Isa::load_vector(first + step * kStep + r * kNextRow);
        const uint32_t factor = mx::rebase_factor(mx::half_of(raised, r), mx::half_of(common, r));
        q.x = mx::rebase_quad(q.x, factor);
        q.y = mx::rebase_quad(q.y, factor);
        q.z = mx::rebase_quad(q.z, factor);
        q.w = mx::rebase_quad(q.w, factor);
        if (inside) Isa::store_vector(h + 8 * r * static_cast<int64_t>(args.n_extent), q);
        if (writes_codes) codes[8 * r] = static_cast<uint8_t>(mx::half_of(common, r) - 8);
      }
      h += 32 * static_cast<int64_t>(args.n_extent);
      codes += 32;
    }
  }
};

}  // namespace moe
