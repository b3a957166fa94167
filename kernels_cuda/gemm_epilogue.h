// What a consumer warpgroup does with its 64 x kTileN accumulators. They leave through two staging panels per warpgroup and bulk
// tensor stores, which clip at the tensor's edges; row tiles start at the expert's base and groups are padded to the tile, so a
// store cannot reach the next expert. Rows past the expert's count are written as zeros.
//
// Accumulator layout of m64nN (PTX ISA, wgmma D fragments): warp w holds rows 16 w .. 16 w + 15; value 4 j + i of lane l is row
// 16 w + l / 4 + 8 (i / 2), column 8 j + 2 (l % 4) + i % 2.
#pragma once

#include "gemm_config.h"

namespace moe {

template <class Isa, class Config, bool kPlain>
struct Epilogue {
  uint32_t staging;    // two panels
  uint32_t barrier;    // named barrier of this warpgroup
  uint32_t consumer;
  uint32_t warp;       // 0..3 inside the warpgroup
  uint32_t lane;
  uint32_t leader;     // one thread issues the warpgroup's bulk stores, so that it can wait for them
  uint32_t turn = 0;   // which staging panel is next

  MOE_FN Epilogue(uint32_t shared_base, uint32_t consumer_)
      : staging(shared_base + Config::kStagingOffset + consumer_ * 2 * kPanelBytes),
        barrier(1 + consumer_),
        consumer(consumer_),
        warp(Isa::warp_index() % 4),
        lane(Isa::lane_index()),
        leader(Isa::thread_index() % 128 == 0) {}

  MOE_FN int row_in_group() const { return static_cast<int>(16 * warp + lane / 4); }  // of values 0, 1; values 2, 3 are 8 below

  // Address of the row that this lane supplies to ldmatrix/stmatrix x4 for column blocks 2 jj and 2 jj + 1 of a BF16 panel:
  // matrices are (rows 0-7, block 2jj), (rows 8-15, 2jj), (rows 0-7, 2jj+1), (rows 8-15, 2jj+1) of the warp's 16 rows.
  MOE_FN uint32_t matrix_address(uint32_t panel, int jj) const {
    uint32_t matrix = lane / 8;
    uint32_t row = 16 * warp + (matrix % 2) * 8 + lane % 8;
    return panel + panel_offset(row, 2 * jj + matrix / 2);
  }

  // Waits until the next staging panel is free for the whole warpgroup.
  MOE_FN uint32_t acquire_staging() {
    uint32_t panel = staging + turn * kPanelBytes;
    turn ^= 1;
    if (leader) Isa::template store_wait_read<1>();
    Isa::named_barrier(barrier, 128);
    return panel;
  }

  // Makes ordinary writes to staging visible to the copy engine; after it the leader may store.
  MOE_FN void publish_staging() {
    Isa::fence_async_shared();
    Isa::named_barrier(barrier, 128);
  }

  // 64 x 64 BF16 panel of packed pairs: pair(jj, i) is column block 2 jj + i / 2, row half i % 2.
  template <class Pair>
  MOE_FN void stage_bf16(uint32_t panel, Pair pair) const {
    MOE_UNROLL
    for (int jj = 0; jj < 4; ++jj) {
      uint32_t r[4];
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) r[i] = pair(jj, i);
      Isa::store_matrices(matrix_address(panel, jj), r);
    }
  }

  // y or dx: rounded once to BF16.
  template <class Arguments>
  MOE_FN void store_bf16(const float (&acc)[Config::kAcc], const Task& tile, int rows, const Arguments& args) {
    const bool live[2] = {row_in_group() < rows, row_in_group() + 8 < rows};
    MOE_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64; ++chunk) {
      uint32_t panel = acquire_staging();
      stage_bf16(panel, [&](int jj, int i) {
        int at = 32 * chunk + 4 * (2 * jj + i / 2) + 2 * (i % 2);
        return live[i % 2] ? Isa::pack_bf16(acc[at], acc[at + 1]) : 0u;
      });
      publish_staging();
      if (leader) {
        Isa::store_panel(&args.out, panel, tile.n0 + 64 * chunk, tile.row0 + 64 * consumer, 0, 0);
        Isa::store_commit();
      }
    }
  }

  // Gate and up are rounded to BF16 before the activation; the first half of the tile's columns is gate, the second up.
  template <class Arguments>
  MOE_FN void store_gate_up(float (&acc)[Config::kAcc], const Task& tile, int rows, const Arguments& args) {
    const bool live[2] = {row_in_group() < rows, row_in_group() + 8 < rows};
    constexpr int kUp = Config::kAcc / 2;
    MOE_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64 / 2; ++chunk) {
      uint32_t gate[16], up[16];  // packed pairs of this chunk: 4 jj + i
      MOE_UNROLL
      for (int p = 0; p < 16; ++p) {
        int at = 32 * chunk + 4 * (2 * (p / 4) + (p % 4) / 2) + 2 * (p % 2);
        gate[p] = live[p % 2] ? Isa::pack_bf16(acc[at], acc[at + 1]) : 0u;
        up[p] = live[p % 2] ? Isa::pack_bf16(acc[kUp + at], acc[kUp + at + 1]) : 0u;
      }
      const int column = tile.n0 + 64 * chunk;
      const int row = tile.row0 + 64 * static_cast<int>(consumer);
      if (args.save_gate_up) {
        MOE_UNROLL
        for (int half = 0; half < 2; ++half) {
          uint32_t panel = acquire_staging();
          stage_bf16(panel, [&](int jj, int i) { return half ? up[4 * jj + i] : gate[4 * jj + i]; });
          publish_staging();
          if (leader) {
            Isa::store_panel(&args.gate_up, panel, column, row, half, 0);
            Isa::store_commit();
          }
        }
      }
      if (args.write_out) {
        uint32_t panel = acquire_staging();
        stage_bf16(panel, [&](int jj, int i) {
          uint32_t g = gate[4 * jj + i], u = up[4 * jj + i];
          return Isa::pack_bf16(activation_forward<kPlain, Isa>(Isa::bf16_lo(g), Isa::bf16_lo(u), args.act),
                                activation_forward<kPlain, Isa>(Isa::bf16_hi(g), Isa::bf16_hi(u), args.act));
        });
        publish_staging();
        if (leader) {
          Isa::store_panel(&args.out, panel, column, row, 0, 0);
          Isa::store_commit();
        }
      }
    }
  }

  // dh0 is in acc. Each 64-column chunk of gate and up arrives through the ring; d(gate) and d(up) are written over it in place
  // (every warp touches only its own 16 rows) and stored from there, weight * h leaves through staging.
  template <class Arguments, class RingType>
  MOE_FN void store_dgrad_down(const float (&acc)[Config::kAcc], const Task& tile, int rows, const Arguments& args, RingType& ring) {
    const bool live[2] = {row_in_group() < rows, row_in_group() + 8 < rows};
    const int row = tile.row0 + 64 * static_cast<int>(consumer);
    float weight[2] = {0.0f, 0.0f};
    MOE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int slot = live[i] ? args.slot_M[row + row_in_group() + 8 * i] : -1;
      if (slot >= 0) weight[i] = args.weight_TxK[slot];
    }
    float dot[2] = {0.0f, 0.0f};
    uint32_t previous_empty = 0;
    MOE_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64; ++chunk) {
      const int column = tile.n0 + 64 * chunk;
      Isa::barrier_wait(ring.full(), ring.phase);
      const uint32_t gate_panel = ring.data() + consumer * 2 * kPanelBytes;
      const uint32_t up_panel = gate_panel + kPanelBytes;
      const uint32_t staged = acquire_staging();
      MOE_UNROLL
      for (int jj = 0; jj < 4; ++jj) {
        uint32_t gate[4], up[4], scaled[4];
        Isa::load_matrices(matrix_address(gate_panel, jj), gate);
        Isa::load_matrices(matrix_address(up_panel, jj), up);
        MOE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int at = 32 * chunk + 4 * (2 * jj + i / 2) + 2 * (i % 2);
          const int half = i % 2;
          const ActivationGrad lo = activation_backward<kPlain, Isa>(Isa::bf16_lo(gate[i]), Isa::bf16_lo(up[i]), args.act);
          const ActivationGrad hi = activation_backward<kPlain, Isa>(Isa::bf16_hi(gate[i]), Isa::bf16_hi(up[i]), args.act);
          const uint32_t h = Isa::pack_bf16(lo.h, hi.h);  // the forward's operand
          dot[half] = Isa::fma(Isa::bf16_lo(h), acc[at], dot[half]);
          dot[half] = Isa::fma(Isa::bf16_hi(h), acc[at + 1], dot[half]);
          const float dh_lo = Isa::mul(weight[half], acc[at]), dh_hi = Isa::mul(weight[half], acc[at + 1]);
          const uint32_t dg = Isa::pack_bf16(Isa::mul(dh_lo, lo.d_gate), Isa::mul(dh_hi, hi.d_gate));
          const uint32_t du = Isa::pack_bf16(Isa::mul(dh_lo, lo.d_up), Isa::mul(dh_hi, hi.d_up));
          const uint32_t wh = Isa::pack_bf16(Isa::mul(weight[half], Isa::bf16_lo(h)), Isa::mul(weight[half], Isa::bf16_hi(h)));
          gate[i] = live[half] ? dg : 0u;
          up[i] = live[half] ? du : 0u;
          scaled[i] = live[half] ? wh : 0u;
        }
        Isa::warp_sync();
        Isa::store_matrices(matrix_address(gate_panel, jj), gate);
        Isa::store_matrices(matrix_address(up_panel, jj), up);
        Isa::store_matrices(matrix_address(staged, jj), scaled);
      }
      publish_staging();
      if (leader) {
        Isa::store_panel(&args.out, gate_panel, column, row, 0, 0);
        Isa::store_panel(&args.out, up_panel, column, row, 1, 0);
        Isa::store_panel(&args.out2, staged, column, row, 0, 0);
        Isa::store_commit();
        if (chunk > 0) {
          Isa::template store_wait_read<1>();  // the previous chunk's panels have left the stage
          release_all_warps(previous_empty);
        }
      }
      previous_empty = ring.empty();
      ring.advance();
      if (chunk % 2 == 1) {  // 128 columns: one partial sum of d(weight), lanes added in a fixed order
        MOE_UNROLL
        for (int i = 0; i < 2; ++i) {
          dot[i] = Isa::add(dot[i], Isa::shuffle_xor(dot[i], 1));
          dot[i] = Isa::add(dot[i], Isa::shuffle_xor(dot[i], 2));
          const int first_column = tile.n0 + 64 * (chunk - 1);
          if (lane % 4 == 0 && live[i] && first_column < args.n_extent) {
            args.weight_partial[(first_column / Config::kWeightChunk) * args.num_rows + row + row_in_group() + 8 * i] = dot[i];
          }
          dot[i] = 0.0f;
        }
      }
    }
    if (leader) {
      Isa::template store_wait_read<0>();
      release_all_warps(previous_empty);
    }
  }

  // The leader gives a stage back for the four warps of its warpgroup, which it has met at a named barrier since.
  static MOE_FN void release_all_warps(uint32_t empty_bar) {
    Isa::barrier_arrive_cluster(empty_bar, 0, 4);
    Isa::barrier_arrive_cluster(empty_bar, 1, 4);
  }

  // Address of columns 8 j + 2 (lane % 4) .. + 1 (j < 4) in an FP32 panel.
  MOE_FN uint32_t fp32_address(uint32_t panel, int j, int half) const {
    return panel + panel_offset(row_in_group() + 8 * half, 2 * j + (lane % 4) / 2) + 8 * (lane % 2);
  }

  MOE_FN void load_fp32_chunk(float (&acc)[Config::kAcc], int chunk, uint32_t panels) const {
    MOE_UNROLL
    for (int j = 0; j < 8; ++j) {
      MOE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int at = 32 * chunk + 4 * j + 2 * half;
        Isa::load_float2(fp32_address(panels + (j / 4) * kPanelBytes, j % 4, half), acc[at], acc[at + 1]);
      }
    }
  }

  // Weight gradients, FP32.
  template <class Arguments>
  MOE_FN void store_fp32(const float (&acc)[Config::kAcc], const Task& tile, const Arguments& args) {
    MOE_UNROLL
    for (int part = 0; part < Config::kTileN / 32; ++part) {
      uint32_t panel = acquire_staging();
      MOE_UNROLL
      for (int j = 0; j < 4; ++j) {
        MOE_UNROLL
        for (int half = 0; half < 2; ++half) {
          int at = 16 * part + 4 * j + 2 * half;
          Isa::store_float2(fp32_address(panel, j, half), acc[at], acc[at + 1]);
        }
      }
      publish_staging();
      if (leader) {
        Isa::store_panel(&args.out, panel, tile.n0 + 32 * part, tile.m0 + 64 * consumer, tile.half, tile.expert);
        Isa::store_commit();
      }
    }
  }

  template <class Arguments>
  MOE_FN void signal_done(const Task& task, const Arguments& args) {
    if (task.signal < 0) return;
    if (leader) {
      Isa::store_wait_done();
      Isa::add_release(args.signals + task.signal, 1);
    }
  }

  // Shared memory must outlive the stores that read it.
  MOE_FN void finish() {
    if (leader) Isa::store_wait_done();
  }
};

}  // namespace moe
