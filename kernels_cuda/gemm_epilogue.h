// What happens to a consumer warpgroup's 64 x kTileN accumulators. The consumer writes panels (64 rows of 128 bytes) into shared
// memory, unit by unit, and goes on to its next tile; its store warp sends each unit to memory and gives the shared memory back. Most units are stages of the operand ring, taken in order like any K block; the two staging panels
// of the consumer are one more.
//
// Stores clip at the tensor's edges; row tiles start at the expert's base and groups are padded to the tile, so a store cannot
// reach the next expert. Rows past the expert's count are written as zeros.
//
// Weight gradients go straight from the registers to memory, but for their last 64 columns: a block writes 32 bytes a clock at
// best, so what waits in staging is written while the next tile's products run.
//
// Hand-over. written[consumer][unit]: 4 warps arrive, once per tile; the store warp waits. credit[consumer]: the store warp
// arrives once per tile, when all of it has left shared memory; the consumer waits before its next tile's first unit, so that no
// written barrier can be a phase ahead.
//
// Accumulator layout of m64nN (PTX ISA, wgmma D fragments): warp w holds rows 16 w .. 16 w + 15; value 4 j + i of lane l is row
// 16 w + l / 4 + 8 (i / 2), column 8 j + 2 (l % 4) + i % 2.
#pragma once

#include "gemm_ring.h"

namespace moe {

// Whether a tile's results also pass through staging.
MOE_HOST_FN constexpr bool uses_staging(Kind kind) { return kind != kGateUp && kind != kDgradDown; }

// kColumns columns of a weight gradient from the registers: neighbouring lanes exchange halves of column blocks 2 jj and 2 jj + 1, so that
// each writes 16 bytes and four lanes 64 bytes of a row. `row`: of this thread's values 0 and 1 in the whole matrix. kStream: what is
// written leaves L2 before what is read.
template <class Isa, int kColumns, bool kStream, int kCount, class Arguments>
MOE_FN void store_gradient(const float (&acc)[kCount], const Task& tile, Kind kind, int row, int column, const Arguments& args) {
  const int matrix = kind == kWgradGateUp ? 2 * tile.expert + tile.half : tile.expert;
  const uint32_t lane = Isa::lane_index();
  const uint32_t odd = lane % 2;
  const int first_column = column + (odd ? 8 : 0) + 4 * static_cast<int>((lane % 4) / 2);
  const int64_t pitch = args.n_extent;
  float* at = args.dw + (static_cast<int64_t>(matrix) * args.m_extent + row) * pitch + first_column;
  MOE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int columns = row + 8 * half < args.m_extent ? args.n_extent - first_column : 0;
    MOE_UNROLL
    for (int jj = 0; jj < kColumns / 16; ++jj) {
      const int a = 8 * jj + 2 * half, b = a + 4;  // this lane's pairs of blocks 2 jj and 2 jj + 1
      const float got0 = Isa::shuffle_xor(Isa::select(odd, acc[a], acc[b]), 1);
      const float got1 = Isa::shuffle_xor(Isa::select(odd, acc[a + 1], acc[b + 1]), 1);
      const float v0 = Isa::select(odd, got0, acc[a]), v1 = Isa::select(odd, got1, acc[a + 1]);
      const float v2 = Isa::select(odd, acc[b], got0), v3 = Isa::select(odd, acc[b + 1], got1);
      if (16 * jj < columns) Isa::template store_float4<kStream>(at + 16 * jj, v0, v1, v2, v3);
    }
    at += 8 * pitch;
  }
}

template <class Isa, class Config, bool kPlain>
struct Epilogue {
  uint32_t base;
  uint32_t consumer;
  uint32_t warp;       // 0..3 inside the warpgroup
  uint32_t lane;
  uint32_t tiles = 0;  // tiles handed over

  MOE_FN Epilogue(uint32_t shared_base, uint32_t consumer_)
      : base(shared_base), consumer(consumer_), warp(Isa::warp_index() % 4), lane(Isa::lane_index()) {}

  MOE_FN int row_in_group() const { return static_cast<int>(16 * warp + lane / 4); }  // of values 0, 1; values 2, 3 are 8 below

  // Waits until the previous tile has left shared memory.
  MOE_FN void begin_tile() {
    Isa::barrier_wait(credit_barrier<Config>(base, consumer), (tiles & 1) ^ 1);
    ++tiles;
  }

  // Hands a unit to the store warp. Its panels were written by ordinary stores and are read by the copy engine.
  MOE_FN void finish_unit(int unit) const {
    Isa::fence_async_shared();
    Isa::warp_sync();
    if (lane == 0) Isa::barrier_arrive(written_barrier<Config>(base, consumer, unit));
  }

  // Weight gradients of few rows are mostly stores: one warpgroup multiplies while the other one stores. Consumer 1 waits for its
  // turn before a tile's products, consumer 0 passes it on after its own (or before, where the tile does not fit the ring).
  MOE_FN void wait_turn() const {
    if (consumer != 1) return;
    Isa::barrier_wait(lead_barrier<Config>(base), tiles & 1);
    Isa::warp_sync();
    if (lane == 0) Isa::barrier_arrive(followed_barrier<Config>(base));
  }
  MOE_FN void pass_turn() const {
    if (consumer != 0) return;
    Isa::barrier_wait(followed_barrier<Config>(base), (tiles & 1) ^ 1);
    Isa::warp_sync();
    if (lane == 0) Isa::barrier_arrive(lead_barrier<Config>(base));
  }

  // Address of the row that this lane supplies to ldmatrix/stmatrix x4 for column blocks 2 jj and 2 jj + 1 of a BF16 panel:
  // matrices are (rows 0-7, block 2jj), (rows 8-15, 2jj), (rows 0-7, 2jj+1), (rows 8-15, 2jj+1) of the warp's 16 rows.
  MOE_FN uint32_t matrix_address(uint32_t panel, int jj) const {
    uint32_t matrix = lane / 8;
    uint32_t row = 16 * warp + (matrix % 2) * 8 + lane % 8;
    return panel + panel_offset(row, 2 * jj + matrix / 2);
  }

  // 64 x 64 BF16 panel of packed pairs: pair(jj, i) is column block 2 jj + i / 2, row half i % 2.
  template <class Pair>
  MOE_FN void write_bf16(uint32_t panel, Pair pair) const {
    MOE_UNROLL
    for (int jj = 0; jj < 4; ++jj) {
      uint32_t r[4];
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) r[i] = pair(jj, i);
      Isa::store_matrices(matrix_address(panel, jj), r);
    }
  }

  // Combine weights of this thread's two rows; 0 for padding.
  template <class Arguments>
  MOE_FN void load_weights(float (&weight)[2], const Task& tile, int rows, const Arguments& args) const {
    MOE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = row_in_group() + 8 * i;
      const int slot = row < rows ? args.slot_M[tile.row0 + 64 * static_cast<int>(consumer) + row] : -1;
      weight[i] = slot >= 0 ? args.weight_TxK[slot] : 0.0f;
    }
  }

  // y or dx: rounded once to BF16. Units: columns 0..127 in one stage, which is wanted back first, the rest in staging. With one expert per token the combine
  // is a product and a second rounding, done here: the rows then go straight to their tokens.
  template <class Arguments, class RingType>
  MOE_FN void write_rows(const float (&acc)[Config::kAcc], const Task& tile, int rows, const Arguments& args, RingType& ring) {
    const bool live[2] = {row_in_group() < rows, row_in_group() + 8 < rows};
    const bool weighted = args.scatter != nullptr && args.weight_TxK != nullptr;
    float weight[2] = {1.0f, 1.0f};
    if (weighted) load_weights(weight, tile, rows, args);
    begin_tile();
    MOE_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64; ++chunk) {
      if (chunk == 0) Isa::barrier_wait(ring.full(), ring.phase);
      uint32_t panel = chunk < 2 ? slot_panel<Config>(ring.data(), consumer, chunk) : staging_panel<Config>(base, consumer, chunk - 2);
      write_bf16(panel, [&](int jj, int i) {
        int at = 32 * chunk + 4 * (2 * jj + i / 2) + 2 * (i % 2);
        uint32_t v = Isa::pack_bf16(acc[at], acc[at + 1]);
        if (weighted) v = Isa::pack_bf16(Isa::mul(weight[i % 2], Isa::bf16_lo(v)), Isa::mul(weight[i % 2], Isa::bf16_hi(v)));
        return live[i % 2] ? v : 0u;
      });
      if (chunk % 2 == 1) finish_unit(chunk / 2);
    }
    ring.advance();
  }

  // Gate and up are rounded to BF16 before the activation; the first half of the tile's columns is gate, the second up.
  // One stage per 64 columns of F: gate, up, h.
  template <class Arguments, class RingType>
  MOE_FN void write_gate_up(float (&acc)[Config::kAcc], int rows, const Arguments& args, RingType& ring) {
    const bool live[2] = {row_in_group() < rows, row_in_group() + 8 < rows};
    constexpr int kUp = Config::kAcc / 2;
    begin_tile();
    MOE_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64 / 2; ++chunk) {
      Isa::barrier_wait(ring.full(), ring.phase);
      uint32_t panels[3];
      MOE_UNROLL
      for (int p = 0; p < 3; ++p) panels[p] = slot_panel<Config>(ring.data(), consumer, p);
      MOE_UNROLL
      for (int jj = 0; jj < 4; ++jj) {
        uint32_t gate[4], up[4], h[4];
        MOE_UNROLL
        for (int i = 0; i < 4; ++i) {
          int at = 32 * chunk + 4 * (2 * jj + i / 2) + 2 * (i % 2);
          gate[i] = live[i % 2] ? Isa::pack_bf16(acc[at], acc[at + 1]) : 0u;
          up[i] = live[i % 2] ? Isa::pack_bf16(acc[kUp + at], acc[kUp + at + 1]) : 0u;
        }
        if (args.save_gate_up) {
          Isa::store_matrices(matrix_address(panels[0], jj), gate);
          Isa::store_matrices(matrix_address(panels[1], jj), up);
        }
        if (args.write_out) {
          MOE_UNROLL
          for (int i = 0; i < 4; ++i) {
            h[i] = Isa::pack_bf16(activation_forward<kPlain, Isa>(Isa::bf16_lo(gate[i]), Isa::bf16_lo(up[i]), args.act),
                                  activation_forward<kPlain, Isa>(Isa::bf16_hi(gate[i]), Isa::bf16_hi(up[i]), args.act));
          }
          Isa::store_matrices(matrix_address(panels[2], jj), h);
        }
      }
      finish_unit(chunk);
      ring.advance();
    }
  }

  // dh0 is in acc. Each 64-column chunk of gate and up arrives through the ring; d(gate) and d(up) are written over it in place
  // (every warp touches only its own 16 rows), weight * h into the third panel of the stage.
  template <class Arguments, class RingType>
  MOE_FN void write_dgrad_down(const float (&acc)[Config::kAcc], const Task& tile, int rows, const Arguments& args, RingType& ring) {
    const bool live[2] = {row_in_group() < rows, row_in_group() + 8 < rows};
    const int row = tile.row0 + 64 * static_cast<int>(consumer);
    float weight[2];
    load_weights(weight, tile, rows, args);
    float dot[2] = {0.0f, 0.0f};
    begin_tile();
    MOE_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64; ++chunk) {
      Isa::barrier_wait(ring.full(), ring.phase);
      const uint32_t gate_panel = slot_panel<Config>(ring.data(), consumer, 0);
      const uint32_t up_panel = slot_panel<Config>(ring.data(), consumer, 1);
      const uint32_t scaled_panel = slot_panel<Config>(ring.data(), consumer, 2);
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
        Isa::store_matrices(matrix_address(scaled_panel, jj), scaled);
      }
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
      finish_unit(chunk);
      ring.advance();
    }
  }

  // The accumulators start from the bias of their columns.
  template <Kind kKind, class Arguments>
  MOE_FN void read_bias(float (&acc)[Config::kAcc], const Task& tile, const Arguments& args) const {
    constexpr int kHalves = kKind == kGateUp ? 2 : 1;
    constexpr int kBlocks = Config::kAcc / 4 / kHalves;  // of eight columns
    MOE_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      const float* bias = args.bias + static_cast<int64_t>(kHalves * tile.expert + half) * args.n_extent;
      MOE_UNROLL
      for (int j = 0; j < kBlocks; ++j) {
        const int column = tile.n0 + 8 * j + 2 * static_cast<int>(lane % 4);
        const bool inside = column < args.n_extent;  // extents are multiples of 8
        MOE_UNROLL
        for (int i = 0; i < 4; ++i) acc[4 * (kBlocks * half + j) + i] = inside ? bias[column + i % 2] : 0.0f;
      }
    }
  }

  // Address of columns 8 j + 2 (lane % 4) .. + 1 (j < 4) in an FP32 panel.
  MOE_FN uint32_t fp32_address(uint32_t panel, int j, int half) const {
    return panel + panel_offset(row_in_group() + 8 * half, 2 * j + (lane % 4) / 2) + 8 * (lane % 2);
  }

  // 64 columns of a gradient that is continued, brought by the ring as two panels.
  MOE_FN void read_fp32_chunk(float (&acc)[Config::kAcc], int chunk, uint32_t stage) const {
    MOE_UNROLL
    for (int j = 0; j < 8; ++j) {
      MOE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int at = 32 * chunk + 4 * j + 2 * half;
        Isa::load_float2(fp32_address(slot_panel<Config>(stage, consumer, j / 4), j % 4, half), acc[at], acc[at + 1]);
      }
    }
  }

  // 32 columns of FP32. Odd rows write blocks j and j ^ 2 in the other order: rows 2 i and 2 i + 1 would otherwise meet in the same
  // banks.
  MOE_FN void write_fp32(const float (&acc)[Config::kAcc], int part, uint32_t panel) const {
    const uint32_t odd = (lane / 4) % 2;
    MOE_UNROLL
    for (int j = 0; j < 4; ++j) {
      MOE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int at = 16 * part + 4 * j + 2 * half;
        const int other = 16 * part + 4 * (j ^ 2) + 2 * half;
        const uint32_t address = fp32_address(panel, odd ? j ^ 2 : j, half);
        Isa::store_float2(address, Isa::select(odd, acc[other], acc[at]), Isa::select(odd, acc[other + 1], acc[at + 1]));
      }
    }
  }

  // Weight gradients, FP32: the first columns from the registers, the others through staging.
  template <class Arguments>
  MOE_FN void write_wgrad(const float (&acc)[Config::kAcc], const Task& tile, Kind kind, const Arguments& args) {
    constexpr int kStagedParts = Config::kStagedPanels;
    constexpr int kDirectColumns = Config::kTileN - 32 * kStagedParts;
    const int first_row = tile.m0 + 64 * static_cast<int>(consumer) + row_in_group();
    store_gradient<Isa, kDirectColumns, false>(acc, tile, kind, first_row, tile.n0, args);
    begin_tile();
    MOE_UNROLL
    for (int part = 0; part < kStagedParts; ++part) {
      write_fp32(acc, kDirectColumns / 32 + part, staging_panel<Config>(base, consumer, part));
    }
    finish_unit(0);
  }
};

// One warp writes a BF16 panel to the tokens of its rows: 16 bytes a lane, full 128-byte lines. Lane l holds the tokens of rows l and
// l + 32, -1 for padding.
template <class Isa, class Arguments>
MOE_FN void scatter_panel(const Arguments& args, const int (&tokens)[2], int column, uint32_t panel) {
  const uint32_t lane = Isa::lane_index();
  const int at = column + static_cast<int>(lane % 8) * 8;
  MOE_UNROLL
  for (int half = 0; half < 2; ++half) {
    MOE_NO_UNROLL
    for (int part = 0; part < 32; part += 16) {
      typename Isa::Vector values[4];
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) values[i] = Isa::load_vector(panel + panel_offset(32 * half + part + 4 * i + lane / 8, lane % 8));
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int token = Isa::shuffle(tokens[half], part + 4 * i + lane / 8);
        if (token >= 0 && at < args.n_extent) {
          Isa::store_vector(args.scatter + 2 * (static_cast<int64_t>(token) * args.n_extent + at), values[i]);
        }
      }
    }
  }
}

// Store warp of one consumer, one task: sends every unit to memory in order and gives its shared memory back.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void store_task(const Task& task, const Arguments& args, uint32_t shared_base, uint32_t consumer, uint32_t& tiles,
                       Ring<Isa, Config>& ring) {
  const Task tile = block_tile<Config>(task, kKind, Isa::cluster_rank());
  ring.skip((is_wgrad(kKind) && args.accumulate ? Config::kColumns64 : 0) + task_k_blocks<kKind>(task, args));

  constexpr bool kGated = kKind == kGateUp || kKind == kDgradDown;
  constexpr int kUnits = drain_stages<Config>(kKind) + (uses_staging(kKind) ? 1 : 0);
  const bool one = Isa::lane_index() == 0;  // this lane issues, so that it can wait for its bulk stores
  const int row = (is_wgrad(kKind) ? tile.m0 : tile.row0) + 64 * static_cast<int>(consumer);
  // Padded rows of a whole warpgroup are never read again, except in what is saved for the backward.
  const bool wanted = is_wgrad(kKind) || tile.rows > 64 * static_cast<int>(consumer);
  const bool scatter = uses_staging(kKind) && !is_wgrad(kKind) && args.scatter != nullptr;
  int column = tile.n0;
  int tokens[2] = {-1, -1};
  if (scatter && wanted) {
    MOE_UNROLL
    for (int i = 0; i < 2; ++i) tokens[i] = args.slot_M[row + 32 * i + Isa::lane_index()];
  }
  MOE_NO_UNROLL
  for (int unit = 0; unit < kUnits; ++unit) {
    Isa::barrier_wait(written_barrier<Config>(shared_base, consumer, unit), tiles & 1);
    const bool staged = uses_staging(kKind) && unit == kUnits - 1;
    const uint32_t first = staged ? staging_panel<Config>(shared_base, consumer, 0) : slot_panel<Config>(ring.data(), consumer, 0);
    if (scatter) {
      if (wanted) {
        MOE_NO_UNROLL
        for (int p = 0; p < 2; ++p) scatter_panel<Isa>(args, tokens, column + 64 * p, first + p * kPanelBytes);
      }
      column += 128;
    } else if (one) {
      if (kGated) {  // three matrices at the same place: gate, up and h, or their gradients and weight * h
        const bool pair = kKind == kGateUp ? args.save_gate_up != 0 : wanted;
        const auto* pair_map = kKind == kGateUp ? &args.gate_up : &args.out;
        if (pair) {
          Isa::store_panel(pair_map, first, column, row, 0, 0);
          Isa::store_panel(pair_map, first + kPanelBytes, column, row, 1, 0);
        }
        const bool third = wanted && (kKind == kDgradDown || args.write_out);
        if (third) Isa::store_panel(kKind == kGateUp ? &args.out : &args.scaled_h, first + 2 * kPanelBytes, column, row, 0, 0);
        column += 64;
      } else if (is_wgrad(kKind)) {
        MOE_UNROLL
        for (int p = 0; p < Config::kStagedPanels; ++p) {
          const int at = column + Config::kTileN + 32 * (p - Config::kStagedPanels);
          Isa::store_panel(&args.out, first + p * kPanelBytes, at, row, tile.half, tile.expert);
        }
      } else {
        if (wanted) {
          Isa::store_panel(&args.out, first, column, row, 0, 0);
          Isa::store_panel(&args.out, first + kPanelBytes, column + 64, row, 0, 0);
        }
        column += 128;
      }
      Isa::store_commit();
      Isa::template store_wait_read<0>();
    }
    Isa::warp_sync();
    if (!staged) {
      if (one) ring.release_warpgroup(ring.empty());
      ring.advance();
    }
  }
  if (one) Isa::barrier_arrive(credit_barrier<Config>(shared_base, consumer));
  ++tiles;
  if (task.signal >= 0 && one) {  // the warp_sync above ordered the other lanes' stores before this release
    Isa::store_wait_done();
    Isa::add_release(args.signals + task.signal, 1);
  }
}

}  // namespace moe
