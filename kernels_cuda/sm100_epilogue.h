// What the four epilogue warps of a Blackwell block do with the accumulators in tensor memory. Warp w reads lanes 32 w .. 32 w + 31,
// which are those rows of the block's 128; a thread has one row, 32 columns at a time. So a block of 32 along a row lies in one thread, and a
// block of 32 rows in one warp: both orientations of MXFP8 are quantised from registers.
//
// BF16 and FP32 results leave through shared panels of 32 rows x 128 bytes (128-byte swizzle) and bulk stores, a ring of panels per warp,
// nothing shared between warps. Quantised elements go straight to memory, 32 bytes a lane: one whole sector.
//
// Rows past the expert's count are written as zeros, scale code 0, inside the padded group; a block of a pair whose 128 rows begin past
// the group writes nothing. Padding may be multiplied: its results are dropped here.
#pragma once

#include "quantize_math.h"
#include "sm100_pipeline.h"

namespace moe {

// Largest magnitude of packed BF16 pairs, as FP32 bits: integers order NaN > Inf > finite, subnormals kept.
MOE_FN uint32_t bf16_amax(const uint32_t (&pairs)[16]) {
  uint32_t largest = 0;
  MOE_UNROLL
  for (int i = 0; i < 16; ++i) {
    const uint32_t lo = (pairs[i] & 0x7FFFu) << 16, hi = pairs[i] & 0x7FFF0000u;
    largest = lo > largest ? lo : largest;
    largest = hi > largest ? hi : largest;
  }
  return largest;
}

// 32 neighbouring values of a row as E4M3 bytes under one scale; returns the code.
template <class Isa>
MOE_FN uint32_t quantize_row(const uint32_t (&pairs)[16], uint32_t (&bytes)[8]) {
  const uint32_t code = mx::scale_code(bf16_amax(pairs));
  const float scale = mx::reciprocal_scale(code);
  MOE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint32_t a = pairs[2 * i], b = pairs[2 * i + 1];
    bytes[i] = mx::pack_e4m3(Isa::mul(Isa::bf16_lo(a), scale), Isa::mul(Isa::bf16_hi(a), scale)) |
               mx::pack_e4m3(Isa::mul(Isa::bf16_lo(b), scale), Isa::mul(Isa::bf16_hi(b), scale)) << 16;
  }
  return code;
}

// The same values with blocks along the warp's 32 rows: each lane's bytes of its own row; returns, in lane l, the code of column l.
template <class Isa>
MOE_FN uint32_t quantize_columns(const uint32_t (&pairs)[16], uint32_t (&bytes)[8]) {
  uint32_t amax[32];
  MOE_UNROLL
  for (int i = 0; i < 16; ++i) {
    amax[2 * i] = (pairs[i] & 0x7FFFu) << 16;
    amax[2 * i + 1] = pairs[i] & 0x7FFF0000u;
  }
  Isa::warp_max(amax);
  const uint32_t lane = Isa::lane_index();
  uint32_t own = 0;
  MOE_UNROLL
  for (int i = 0; i < 8; ++i) {
    float v[4];
    MOE_UNROLL
    for (int j = 0; j < 4; j += 2) {
      const int column = 4 * i + j;
      const uint32_t codes = mx::scale_codes(amax[column], amax[column + 1]), lo = codes & 0xFF, hi = codes >> 8;
      if (lane == static_cast<uint32_t>(column)) own = lo;
      if (lane == static_cast<uint32_t>(column + 1)) own = hi;
      v[j] = Isa::mul(Isa::bf16_lo(pairs[column / 2]), mx::reciprocal_scale(lo));
      v[j + 1] = Isa::mul(Isa::bf16_hi(pairs[column / 2]), mx::reciprocal_scale(hi));
    }
    bytes[i] = mx::pack_e4m3(v[0], v[1]) | mx::pack_e4m3(v[2], v[3]) << 16;
  }
  return own;
}

template <Kind kKind, bool kPlain, class Isa, class Config>
struct Sm100Epilogue {
  uint32_t base;
  uint32_t warp;  // 0..3
  uint32_t lane;
  uint32_t tmem;
  uint32_t slot = 0;
  RingPosition<Config::kAccumulators> accumulator;

  // --- accumulators ----------------------------------------------------------------------------------------------------------
  MOE_FN void begin_tile() const {
    Isa::barrier_wait(Sm100Barriers<Config>(base).acc_full(accumulator.index), accumulator.phase);
    Isa::fence_after_sync();
  }
  MOE_FN void load(uint32_t (&v)[32], int column) const {
    Isa::tmem_load(sm100::tmem_address(tmem, 32 * warp, accumulator.index * Config::kAccumulatorStep + column), v);
    Isa::tmem_wait_load(v);
  }
  // A tile's columns are read in pieces of kPiece. Accumulators that share columns start at them: the first from its end.
  template <int kPiece>
  MOE_FN int piece(int i, int columns) const {
    return kPiece * (Config::kShared && accumulator.index == 0 ? columns / kPiece - 1 - i : i);
  }
  // Whether the issuer may go on after piece i: when the last one has been read, or the shared columns.
  template <int kPiece>
  MOE_FN bool frees(int i, int columns) const {
    return i == (Config::kShared ? 0 : columns / kPiece - 1);
  }
  MOE_FN void let_issuer_go_on() const {
    Isa::fence_before_sync();
    Isa::warp_sync();
    const uint32_t barrier = Sm100Barriers<Config>(base).acc_empty(Config::kShared ? 0 : accumulator.index);
    if (lane == 0) Isa::template arrive_leader<Config::kBlocks>(barrier);
  }

  // --- result panels -----------------------------------------------------------------------------------------------------------
  // One 128-byte row per lane.
  template <class TensorMap>
  MOE_FN void put(const TensorMap* map, const uint32_t (&words)[32], int column, int row, int half, int expert) {
    if (lane == 0) Isa::template store_wait_read<Config::kSlots - 1>();
    Isa::warp_sync();
    const uint32_t panel = base + Config::kSlotOffset + (warp * Config::kSlots + slot) * Config::kSlotBytes;
    MOE_UNROLL
    for (int chunk = 0; chunk < 8; ++chunk) {
      Isa::store_words(panel + panel_offset(lane, chunk), words[4 * chunk], words[4 * chunk + 1], words[4 * chunk + 2],
                       words[4 * chunk + 3]);
    }
    Isa::fence_async_shared();
    Isa::warp_sync();
    if (lane == 0) {
      Isa::store_box(map, panel, column, row, half, expert);
      Isa::store_commit();
    }
    slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
  }

  // --- MXFP8 -------------------------------------------------------------------------------------------------------------------
  // 32 columns of a row, a block along the row. `matrix` counts tables of rows x columns.
  MOE_FN void put_by_row(const MxTarget& target, const uint32_t (&pairs)[16], int64_t rows, int columns, int64_t row, int column,
                         int matrix) const {
    uint32_t bytes[8];
    const uint32_t code = quantize_row<Isa>(pairs, bytes);
    if (column < columns) Isa::store_sector(target.elements + (matrix * rows + row) * columns + column, bytes);
    if (column < (columns + 127) / 128 * 128) {  // inside the table's padding too, where codes are 0
      const int64_t table = mx::interleaved_offset(rows, 0, columns) * matrix;
      target.codes[table + mx::interleaved_offset(row, column / 32, columns)] = static_cast<uint8_t>(code);
    }
  }
  // The same, a block of the warp's 32 rows per column: the table has `columns` rows, padded to 128, and runs along `rows`.
  MOE_FN void put_by_column(const MxTarget& target, const uint32_t (&pairs)[16], int64_t rows, int columns, int64_t row, int column,
                            int matrix) const {
    const int64_t padded = (columns + 127) / 128 * 128;
    uint32_t bytes[8];
    const uint32_t code = quantize_columns<Isa>(pairs, bytes);
    if (column < columns) Isa::store_sector(target.elements + (matrix * rows + row) * columns + column, bytes);
    if (column < padded) {
      const int64_t table = mx::interleaved_offset(padded, 0, rows) * matrix;
      target.codes[table + mx::interleaved_offset(column + lane, (row - lane) / 32, rows)] = static_cast<uint8_t>(code);
    }
  }

  // --- kinds -------------------------------------------------------------------------------------------------------------------
  // `rows`: real rows of the block's 128; `row`: this lane's row of the whole matrix, `first_row` the warp's.

  // y or dx, rounded once to BF16.
  template <class Arguments>
  MOE_FN void write_rows(const Task& task, const Arguments& args, bool live, int first_row) {
    MOE_NO_UNROLL
    for (int p = 0; p < Config::kTileN / 64; ++p) {
      const int column = piece<64>(p, Config::kTileN);
      uint32_t words[32];
      MOE_UNROLL
      for (int s = 0; s < 2; ++s) {
        uint32_t v[32];
        load(v, column + 32 * s);
        MOE_UNROLL
        for (int i = 0; i < 16; ++i) {
          words[16 * s + i] = live ? Isa::pack_bf16(mx::float_of(v[2 * i]), mx::float_of(v[2 * i + 1])) : 0u;
        }
      }
      if (frees<64>(p, Config::kTileN)) let_issuer_go_on();
      put(&args.out, words, task.n0 + column, first_row, 0, 0);
    }
  }

  // Gate and up are rounded to BF16 before the activation; the first half of the tile's columns is gate.
  template <class Arguments>
  MOE_FN void write_gate_up(const Task& task, const Arguments& args, bool live, int first_row) {
    constexpr int kHalf = Config::kTileN / 2;
    MOE_NO_UNROLL
    for (int p = 0; p < kHalf / 64; ++p) {  // shared columns: the last of up, or the first of gate
      const int column = piece<64>(p, kHalf);
      uint32_t gate[32], up[32], h[32];
      MOE_UNROLL
      for (int s = 0; s < 2; ++s) {
        uint32_t g[32], u[32];
        load(g, column + 32 * s);
        load(u, kHalf + column + 32 * s);
        MOE_UNROLL
        for (int i = 0; i < 16; ++i) {
          const int at = 16 * s + i;
          gate[at] = live ? Isa::pack_bf16(mx::float_of(g[2 * i]), mx::float_of(g[2 * i + 1])) : 0u;
          up[at] = live ? Isa::pack_bf16(mx::float_of(u[2 * i]), mx::float_of(u[2 * i + 1])) : 0u;
          h[at] = Isa::pack_bf16(activation_forward<kPlain, Isa>(Isa::bf16_lo(gate[at]), Isa::bf16_lo(up[at]), args.act),
                                 activation_forward<kPlain, Isa>(Isa::bf16_hi(gate[at]), Isa::bf16_hi(up[at]), args.act));
          if (!live) h[at] = 0u;
        }
      }
      if (frees<64>(p, kHalf)) let_issuer_go_on();
      if (args.save_gate_up) {
        put(&args.gate_up, gate, task.n0 + column, first_row, 0, 0);
        put(&args.gate_up, up, task.n0 + column, first_row, 1, 0);
      }
      if constexpr (Config::kMx) {
        MOE_UNROLL
        for (int s = 0; s < 2; ++s) {
          uint32_t pairs[16];
          MOE_UNROLL
          for (int i = 0; i < 16; ++i) pairs[i] = h[16 * s + i];
          put_by_row(args.by_row, pairs, args.num_rows, args.n_extent, first_row + lane, task.n0 + column + 32 * s, 0);
        }
      } else {
        put(&args.out, h, task.n0 + column, first_row, 0, 0);
      }
    }
  }

  struct GradRow {  // what 32 columns of a row turn into, packed BF16
    uint32_t d_gate[16], d_up[16], scaled_h[16];
  };
  // dh0 is accumulated; gate and up come from memory. `dot` grows by h * dh0, in column order.
  template <class Arguments>
  MOE_FN void grad_columns(const Arguments& args, const uint32_t (&dh0)[32], int64_t row, int column, bool live, float weight, float& dot,
                           GradRow& grad) const {
    const uint16_t* saved = args.gate_up_2xMxF + row * args.n_extent + column;
    MOE_UNROLL
    for (int sector = 0; sector < 2; ++sector) {
      uint32_t gate[8] = {}, up[8] = {};
      if (live && column + 16 * sector < args.n_extent) {
        Isa::load_sector(saved + 16 * sector, gate);
        Isa::load_sector(saved + args.num_rows * args.n_extent + 16 * sector, up);
      }
      MOE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const float dh0_lo = mx::float_of(dh0[16 * sector + 2 * i]), dh0_hi = mx::float_of(dh0[16 * sector + 2 * i + 1]);
        const ActivationGrad lo = activation_backward<kPlain, Isa>(Isa::bf16_lo(gate[i]), Isa::bf16_lo(up[i]), args.act);
        const ActivationGrad hi = activation_backward<kPlain, Isa>(Isa::bf16_hi(gate[i]), Isa::bf16_hi(up[i]), args.act);
        const uint32_t h = Isa::pack_bf16(lo.h, hi.h);  // the forward's operand
        dot = Isa::fma(Isa::bf16_lo(h), dh0_lo, dot);
        dot = Isa::fma(Isa::bf16_hi(h), dh0_hi, dot);
        const float dh_lo = Isa::mul(weight, dh0_lo), dh_hi = Isa::mul(weight, dh0_hi);
        const int to = 8 * sector + i;
        grad.d_gate[to] = live ? Isa::pack_bf16(Isa::mul(dh_lo, lo.d_gate), Isa::mul(dh_hi, hi.d_gate)) : 0u;
        grad.d_up[to] = live ? Isa::pack_bf16(Isa::mul(dh_lo, lo.d_up), Isa::mul(dh_hi, hi.d_up)) : 0u;
        grad.scaled_h[to] = live ? Isa::pack_bf16(Isa::mul(weight, Isa::bf16_lo(h)), Isa::mul(weight, Isa::bf16_hi(h))) : 0u;
      }
    }
  }

  // d(gate), d(up), weight * h, and per 128 columns a partial sum of d(weight).
  template <class Arguments>
  MOE_FN void write_dgrad_down(const Task& task, const Arguments& args, bool live, int first_row) {
    const int64_t row = first_row + static_cast<int>(lane);
    float weight = 0.0f;
    if (live) {
      const int slot_of_row = args.slot_M[row];
      weight = slot_of_row >= 0 ? args.weight_TxK[slot_of_row] : 0.0f;
    }
    // A partial sum of d(weight) runs over 128 columns in ascending order, whichever piece comes first.
    MOE_NO_UNROLL
    for (int p = 0; p < Config::kTileN / Config::kWeightChunk; ++p) {
      const int first = piece<Config::kWeightChunk>(p, Config::kTileN);
      float dot = 0.0f;
      // Packed BF16 of 64 columns where they leave through panels; MXFP8 is written 32 columns at a time, which keeps registers free.
      constexpr int kStep = Config::kMx ? 32 : 64;
      MOE_NO_UNROLL
      for (int column = first; column < first + Config::kWeightChunk; column += kStep) {
        const int at = task.n0 + column;
        [[maybe_unused]] uint32_t d_gate[32], d_up[32], scaled_h[32];
        MOE_UNROLL
        for (int s = 0; s < kStep / 32; ++s) {
          uint32_t dh0[32];
          load(dh0, column + 32 * s);
          if (frees<Config::kWeightChunk>(p, Config::kTileN) && column + 32 * s + 32 == first + Config::kWeightChunk) let_issuer_go_on();
          GradRow grad;
          grad_columns(args, dh0, row, at + 32 * s, live, weight, dot, grad);
          if constexpr (Config::kMx) {
            put_by_row(args.by_row, grad.d_gate, args.num_rows, args.n_extent, row, at, 0);
            put_by_row(args.by_row, grad.d_up, args.num_rows, args.n_extent, row, at, 1);
            put_by_column(args.by_column, grad.d_gate, args.num_rows, args.n_extent, row, at, 0);
            put_by_column(args.by_column, grad.d_up, args.num_rows, args.n_extent, row, at, 1);
            put_by_column(args.scaled_h_by_column, grad.scaled_h, args.num_rows, args.n_extent, row, at, 0);
          } else {
            MOE_UNROLL
            for (int i = 0; i < 16; ++i) {
              d_gate[16 * s + i] = grad.d_gate[i];
              d_up[16 * s + i] = grad.d_up[i];
              scaled_h[16 * s + i] = grad.scaled_h[i];
            }
          }
        }
        if constexpr (!Config::kMx) {
          put(&args.out, d_gate, at, first_row, 0, 0);
          put(&args.out, d_up, at, first_row, 1, 0);
          put(&args.scaled_h, scaled_h, at, first_row, 0, 0);
        }
      }
      if (live && task.n0 + first < args.n_extent) {
        args.weight_partial[(task.n0 + first) / Config::kWeightChunk * args.num_rows + row] = dot;
      }
    }
  }

  // FP32 weight gradients. One that continues adds the whole sum over this call's rows to what is there: one rounding more than a sum
  // that starts from it.
  template <class Arguments>
  MOE_FN void write_wgrad(const Task& task, const Arguments& args, bool any_rows, int first_row) {
    const int matrix = kKind == kWgradGateUp ? 2 * task.expert + task.half : task.expert;
    const int row = first_row + static_cast<int>(lane);
    MOE_NO_UNROLL
    for (int p = 0; p < Config::kTileN / 32; ++p) {
      const int column = piece<32>(p, Config::kTileN);
      uint32_t v[32];
      if (any_rows) {
        load(v, column);
      } else {  // tensor memory was not written
        MOE_UNROLL
        for (int i = 0; i < 32; ++i) v[i] = 0u;
      }
      if (frees<32>(p, Config::kTileN)) let_issuer_go_on();
      if (args.accumulate && row < args.m_extent) {
        const float* at = args.dw + (static_cast<int64_t>(matrix) * args.m_extent + row) * args.n_extent + task.n0 + column;
        MOE_UNROLL
        for (int sector = 0; sector < 4; ++sector) {
          uint32_t before[8] = {};
          if (task.n0 + column + 8 * sector < args.n_extent) Isa::load_sector(at + 8 * sector, before);
          MOE_UNROLL
          for (int i = 0; i < 8; ++i) {
            v[8 * sector + i] = mx::bits_of(Isa::add(mx::float_of(before[i]), mx::float_of(v[8 * sector + i])));
          }
        }
      }
      put(&args.out, v, task.n0 + column, first_row, task.half, task.expert);
    }
  }
};

// Epilogue warp, every task of this block's cluster.
template <Kind kKind, bool kPlain, class Isa, class Config, class Batch>
MOE_FN void write_results(const Batch& batch, uint32_t base, uint32_t tmem, uint32_t warp) {
  Sm100Epilogue<kKind, kPlain, Isa, Config> epilogue = {base, warp, Isa::lane_index(), tmem};
  const auto& args = batch.args;
  Sm100Tasks<Isa, Config, true> tasks(batch, base);
  const int rank = static_cast<int>(Isa::template block_rank<Config::kBlocks>());
  MOE_NO_UNROLL
  for (Task task; tasks.take(task);) {
    const int in_block = 32 * static_cast<int>(warp);
    const int rows = task.rows - 128 * rank;
    const int first_row = (is_wgrad(kKind) ? task.m0 : task.row0) + 128 * rank + in_block;
    const bool live = in_block + static_cast<int>(epilogue.lane) < rows;
    epilogue.begin_tile();
    if (!is_wgrad(kKind) && rows <= 0) {  // the pair's second block, past the expert's rows: they are another expert's
      epilogue.let_issuer_go_on();
    } else if constexpr (kKind == kGateUp) {
      epilogue.write_gate_up(task, args, live, first_row);
    } else if constexpr (kKind == kDgradDown) {
      epilogue.write_dgrad_down(task, args, live, first_row);
    } else if constexpr (is_wgrad(kKind)) {
      epilogue.write_wgrad(task, args, task.rows > 0, first_row);
    } else {
      epilogue.write_rows(task, args, live, first_row);
    }
    Isa::fence_before_sync();  // loads after the issuer was let go on; the next arrival of this warp speaks for them too
    epilogue.accumulator.advance();
    if (task.signal >= 0) {
      if (epilogue.lane == 0) Isa::store_wait_done();
      Isa::warp_sync();  // orders the other lanes' stores before this release
      if (epilogue.lane == 0) Isa::add_release(args.signals + task.signal, 1);
    }
  }
  if (epilogue.lane == 0) Isa::store_wait_done();  // shared memory must outlive the stores that read it
}

}  // namespace moe
