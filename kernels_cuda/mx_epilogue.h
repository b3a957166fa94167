// Epilogues whose results leave in MXFP8: rounding to BF16 and quantisation where the values are produced. Blocks along rows are 1 x 128 of
// one warpgroup; blocks along columns are 128 rows of one column, and so of both consumers, who exchange BF16 values through shared memory.
// Read mma_sm90.h first.
#pragma once

#include "mma_sm90.h"
#include "quantize_math.h"

namespace moe {

// --- four blocks of 32, re-based to one code ---------------------------------------------------------------------------------------
struct GroupCodes {
  uint32_t code[4], common;
};

// `largest`: of each block, the largest magnitudes of this lane as pairs of BF16; the four lanes of a line hold a block together. Two blocks
// share a shuffle.
template <class Isa>
MOE_FN GroupCodes group_codes(const uint32_t (&largest)[4]) {
  GroupCodes codes;
  codes.common = 0;
  MOE_UNROLL
  for (int i = 0; i < 4; i += 2) {
    const uint32_t lo = Isa::permute_bytes(largest[i], largest[i + 1], 0x5410), hi = Isa::permute_bytes(largest[i], largest[i + 1], 0x7632);
    uint32_t both = Isa::max_pairs(lo, hi);
    both = Isa::max_pairs(both, mx::bits_of(Isa::shuffle_xor(mx::float_of(both), 1)));
    both = Isa::max_pairs(both, mx::bits_of(Isa::shuffle_xor(mx::float_of(both), 2)));
    codes.code[i] = mx::scale_code_bf16(both & 0xFFFFu);
    codes.code[i + 1] = mx::scale_code_bf16(both >> 16);
  }
  MOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t finite = codes.code[i] == mx::kPoison ? 0 : codes.code[i];
    codes.common = codes.common > finite ? codes.common : finite;
  }
  return codes;
}

// Pairs of BF16 of 64 rows x 128 columns: [64-column chunk][4 jj + i] with column block 2 jj + i / 2 and row half i % 2 as in RegisterTile.
using ActivationPairs = uint32_t[2][16];

// Quantises 64 rows x 128 columns into `panel` and gives the codes of the lane's two rows, the same in all four lanes of a row.
template <class Isa, class EpilogueType>
MOE_FN void quantize_panel(const ActivationPairs& h, uint32_t panel, const EpilogueType& epilogue, uint32_t (&common)[2]) {
  MOE_UNROLL
  for (int half = 0; half < 2; ++half) {
    auto pair = [&](int block, int k) { return h[block / 2][8 * (block % 2) + 4 * (k / 2) + 2 * (k % 2) + half]; };
    uint32_t largest[4] = {};
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) {
      MOE_UNROLL
      for (int k = 0; k < 4; ++k) largest[block] = Isa::max_pairs(largest[block], pair(block, k) & 0x7FFF7FFFu);
    }
    const GroupCodes codes = group_codes<Isa>(largest);
    common[half] = codes.common;
    const uint32_t row = epilogue.row_in_group() + 8 * half;
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) {
      const float scale = mx::reciprocal_scale(codes.code[block]);
      const uint32_t factor = mx::rebase_factor(codes.code[block], codes.common);
      MOE_UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint32_t q = mx::quantize_pair<Isa>(pair(block, k), scale, scale);
        const uint32_t byte = 32 * block + 8 * k + 2 * (epilogue.lane % 4);
        Isa::store_short(panel + panel_offset(row, byte / 16) + byte % 16, mx::rebase_e4m3(q, factor));
      }
    }
  }
}

// The tile of kGateUp with h in MXFP8. One stage per 64 columns of F: gate and up; the second one carries the panel of h as well.
template <class Isa, class Config>
struct MxGateUpTile : RegisterTile<kGateUp, Isa, Config> {
  using Base = RegisterTile<kGateUp, Isa, Config>;
  ActivationPairs h;

  template <class Arguments>
  MOE_FN void put(const Arguments& args, int r, int column, int p, const uint32_t (&words)[4]) {
    if (r < 2) return Base::put(args, r, column, p, words);
    MOE_UNROLL
    for (int i = 0; i < 4; ++i) h[column / 64][4 * p + i] = words[i];
  }
  template <class Arguments>
  MOE_FN void close(const Arguments& args, int column) {
    const auto& tile = this->tile;
    const auto& epilogue = this->epilogue;
    if (column == 64 && args.write_out) {
      uint32_t common[2];
      quantize_panel<Isa>(h, slot_panel<Config>(this->ring.data(), epilogue.consumer, 2), epilogue, common);
      if (epilogue.lane % 4 == 0 && this->rows > 0 && tile.n0 < args.n_extent) {
        uint8_t* codes = args.row_codes + (tile.n0 / 128) * args.num_rows + this->row(0);
        codes[0] = static_cast<uint8_t>(common[0]);
        codes[8] = static_cast<uint8_t>(common[1]);
      }
    }
    Base::close(args, column);
  }
};

// Store warp of one consumer, one kGateUp task whose h is in MXFP8; as store_task.
template <class Isa, class Config, class Arguments>
MOE_FN void store_gate_up_mx(const Task& task, const Arguments& args, uint32_t shared_base, uint32_t consumer, uint32_t& tiles,
                             Ring<Isa, Config>& ring) {
  const Task tile = block_tile<Config>(task, kGateUp, Isa::cluster_rank());
  ring.skip(task_k_blocks<kGateUp, Config>(task, args));
  const bool one = Isa::lane_index() == 0;
  const int row = tile.row0 + 64 * static_cast<int>(consumer);
  const bool wanted = tile.rows > 64 * static_cast<int>(consumer);
  MOE_NO_UNROLL
  for (int unit = 0; unit < 2; ++unit) {
    Isa::barrier_wait(written_barrier<Config>(shared_base, consumer, unit), tiles & 1);
    const uint32_t first = slot_panel<Config>(ring.data(), consumer, 0);
    if (one) {
      if (args.save_gate_up) {
        Isa::store_panel(&args.gate_up, first, tile.n0 + 64 * unit, row, 0, 0);
        Isa::store_panel(&args.gate_up, first + kPanelBytes, tile.n0 + 64 * unit, row, 1, 0);
      }
      if (unit == 1 && wanted && args.write_out) Isa::store_panel(&args.out, first + 2 * kPanelBytes, tile.n0, row, 0, 0);
      Isa::store_commit();
      Isa::template store_wait_read<0>();
    }
    Isa::warp_sync();
    if (one) ring.release_warpgroup(ring.empty());
    ring.advance();
  }
  if (one) Isa::barrier_arrive(credit_barrier<Config>(shared_base, consumer));
  ++tiles;
}

// --- d(gate), d(up), weight * h -------------------------------------------------------------------------------------------------------
// Barriers of kDgradDown, in MxConfig's room for more. shared: the 8 warps of both consumers arrive once the BF16 values of a group of 128
// columns are written, and taken: once they have read each other's; every warp waits for both. staging[consumer]: its store warp arrives when
// a group has left shared memory; the consumer waits before it writes the next group's rows into its staging panels.
template <class Config>
struct GroupBarriers {
  static MOE_FN uint32_t shared(uint32_t base) { return base + Config::kGroupOffset; }
  static MOE_FN uint32_t taken(uint32_t base) { return base + Config::kGroupOffset + 8; }
  static MOE_FN uint32_t staging(uint32_t base, uint32_t consumer) { return base + Config::kGroupOffset + 16 + 8 * consumer; }
  template <class Isa>
  static MOE_FN void init(uint32_t base) {
    Isa::barrier_init(shared(base), 8);
    Isa::barrier_init(taken(base), 8);
    for (uint32_t consumer = 0; consumer < Config::kConsumers; ++consumer) Isa::barrier_init(staging(base, consumer), 1);
  }
};

// 128 rows x 8 columns of BF16 from the panels of both consumers to E4M3 along the columns. Lane l holds column l / 4 and, of every 32 rows,
// eight from 8 (l % 4) on: ldmatrix gives register m rows 2 (l % 4) .. + 1 of matrix m, which this reads from where rows 8 (l % 4) + 2 (m ^ l % 4)
// .. + 1 lie, so that the eight rows of a matrix never meet in a bank.
template <class Isa>
struct ColumnStrip {
  uint32_t bytes[4][2];  // of each 32 rows, in order
  uint32_t common;

  static MOE_FN uint32_t source(uint32_t panel, uint32_t lane, uint32_t chunk) {
    const uint32_t pair = lane % 8 / 2;
    return panel + panel_offset(8 * pair + 2 * (pair ^ lane / 8) + lane % 2, chunk);
  }
  MOE_FN void quantize(const uint32_t (&panels)[2], uint32_t lane, uint32_t chunk) {
    uint32_t pairs[4][4], largest[4];
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) {
      Isa::load_matrices_transposed(source(panels[block / 2], lane, chunk) + 32 * kPanelRowBytes * (block % 2), pairs[block]);
      largest[block] = pairs[block][0] & 0x7FFF7FFFu;
      MOE_UNROLL
      for (int m = 1; m < 4; ++m) largest[block] = Isa::max_pairs(largest[block], pairs[block][m] & 0x7FFF7FFFu);
    }
    const GroupCodes codes = group_codes<Isa>(largest);
    common = codes.common;
    const uint32_t order = lane % 2 ? 0x1054u : 0x5410u;  // register m belongs at place m ^ lane % 4
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) {
      const float scale = mx::reciprocal_scale(codes.code[block]);
      const uint32_t factor = mx::rebase_factor(codes.code[block], common);
      uint32_t q[4];
      MOE_UNROLL
      for (int m = 0; m < 4; ++m) q[m] = mx::rebase_e4m3(mx::quantize_pair<Isa>(pairs[block][m], scale, scale), factor);
      const uint32_t a = Isa::permute_bytes(q[0], q[1], order), b = Isa::permute_bytes(q[2], q[3], order);
      bytes[block][0] = lane & 2 ? b : a;
      bytes[block][1] = lane & 2 ? a : b;
    }
  }
  MOE_FN void write(uint32_t panel, uint32_t lane, uint32_t chunk) const {  // line: a column
    const uint32_t line = 8 * chunk + lane / 4, quarter = lane % 4;
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) {
      Isa::store_float2(panel + panel_offset(line, 2 * block + quarter / 2) + 8 * (quarter % 2), mx::float_of(bytes[block][0]),
                        mx::float_of(bytes[block][1]));
    }
  }
};

// The tile of kDgradDown: d(gate) and d(up) leave along rows, and all three along columns too, transposed, where the weight gradients are FP8; otherwise
// in BF16. Chunks of 64 columns are written in BF16 as in the base, two of them (a stage each) are a group: the rows of a warp are quantised
// into the staging panels, then consumer c quantises the columns of chunk c into its panels of the second stage.
template <class Isa, class Config>
struct MxDgradDownTile : RegisterTile<kDgradDown, Isa, Config> {
  using Base = RegisterTile<kDgradDown, Isa, Config>;
  using Barriers = GroupBarriers<Config>;
  uint32_t first_stage = 0, first_empty = 0;

  template <class Arguments>
  MOE_FN void close(const Arguments& args, int column) {
    auto& ring = this->ring;
    if (column % 128 == 0) {
      first_stage = ring.data();
      first_empty = ring.empty();
      ring.advance();
      return;
    }
    const auto& epilogue = this->epilogue;
    const bool columns = args.column_codes != nullptr;
    Isa::warp_sync();
    if (columns && epilogue.lane == 0) Isa::barrier_arrive(Barriers::shared(epilogue.base));
    quantize_rows(args, column - 64);
    if (columns) quantize_columns(args, column - 64);
    epilogue.finish_unit(column / 128);
    ring.advance();
  }

 private:
  template <class Arguments>
  MOE_FN void quantize_rows(const Arguments& args, int column) const {
    const auto& epilogue = this->epilogue;
    Isa::barrier_wait(Barriers::staging(epilogue.base, epilogue.consumer), column == 0);
    MOE_UNROLL
    for (int r = 0; r < 2; ++r) {
      ActivationPairs pairs;
      MOE_UNROLL
      for (int chunk = 0; chunk < 2; ++chunk) {
        MOE_UNROLL
        for (int p = 0; p < 4; ++p) {
          uint32_t words[4];
          Isa::load_matrices(epilogue.matrix_address(slot_panel<Config>(chunk ? this->ring.data() : first_stage, epilogue.consumer, r), p), words);
          MOE_UNROLL
          for (int i = 0; i < 4; ++i) pairs[chunk][4 * p + i] = words[i];
        }
      }
      uint32_t common[2];
      quantize_panel<Isa>(pairs, staging_panel<Config>(epilogue.base, epilogue.consumer, r), epilogue, common);
      const int at = this->tile.n0 + column;
      if (epilogue.lane % 4 == 0 && this->rows > 0 && at < args.n_extent) {
        uint8_t* codes = args.row_codes + (r * div_up(args.n_extent, 128) + at / 128) * args.num_rows + this->row(0);
        codes[0] = static_cast<uint8_t>(common[0]);
        codes[8] = static_cast<uint8_t>(common[1]);
      }
    }
  }

  template <class Arguments>
  MOE_FN void quantize_columns(const Arguments& args, int column) {
    const auto& epilogue = this->epilogue;
    const uint32_t stage = epilogue.consumer ? this->ring.data() : first_stage;
    ColumnStrip<Isa> strips[3][2];
    Isa::barrier_wait(Barriers::shared(epilogue.base), column / 128);
    MOE_UNROLL
    for (int r = 0; r < 3; ++r) {
      const uint32_t panels[2] = {slot_panel<Config>(stage, 0, r), slot_panel<Config>(stage, 1, r)};
      MOE_UNROLL
      for (uint32_t s = 0; s < 2; ++s) strips[r][s].quantize(panels, epilogue.lane, 2 * epilogue.warp + s);
    }
    Isa::fence_async_shared();  // the copy engine fills the first stage next
    Isa::warp_sync();
    if (epilogue.lane == 0) Isa::barrier_arrive(Barriers::taken(epilogue.base));
    write_codes(args, strips, this->tile.n0 + column);
    Isa::barrier_wait(Barriers::taken(epilogue.base), column / 128);
    Ring<Isa, Config>::release(first_empty);
    MOE_UNROLL
    for (int r = 0; r < 3; ++r) {
      MOE_UNROLL
      for (uint32_t s = 0; s < 2; ++s) strips[r][s].write(slot_panel<Config>(this->ring.data(), epilogue.consumer, r), epilogue.lane, 2 * epilogue.warp + s);
    }
  }

  // A byte per column of d(gate) and d(up), which are an operand A; scales in BF16, in fragment order, of weight * h, an operand B.
  template <class Arguments>
  MOE_FN void write_codes(const Arguments& args, const ColumnStrip<Isa> (&strips)[3][2], int column) const {
    const auto& epilogue = this->epilogue;
    if (column >= args.n_extent) return;
    const int64_t pitch = div_up(args.n_extent, 128) * 128;
    const int64_t at = this->tile.row0 / 128 * pitch + column;
    MOE_UNROLL
    for (uint32_t s = 0; s < 2; ++s) {
      const int line = static_cast<int>(64 * epilogue.consumer + 16 * epilogue.warp + 8 * s + epilogue.lane / 4);
      if (epilogue.lane % 4 == 0) {
        args.column_codes[at + line] = static_cast<uint8_t>(strips[0][s].common);
      } else if (epilogue.lane % 4 == 1) {
        args.column_codes[args.num_rows / 128 * pitch + at + line] = static_cast<uint8_t>(strips[1][s].common);
      } else if (epilogue.lane % 4 == 2) {
        args.scaled_h_scales[at + mx::fragment_position(line)] = static_cast<uint16_t>(mx::bits_of(mx::finite_scale_value(strips[2][s].common)) >> 16);
      }
    }
  }
};

// Store warp of one consumer, one kDgradDown task in MXFP8; as store_task.
template <class Isa, class Config, class Arguments>
MOE_FN void store_dgrad_down_mx(const Task& task, const Arguments& args, uint32_t shared_base, uint32_t consumer, uint32_t& tiles,
                                Ring<Isa, Config>& ring) {
  const Task tile = block_tile<Config>(task, kDgradDown, Isa::cluster_rank());
  ring.skip(task_k_blocks<kDgradDown, Config>(task, args));
  const bool one = Isa::lane_index() == 0;
  const int row = tile.row0 + 64 * static_cast<int>(consumer);
  const bool wanted = tile.rows > 64 * static_cast<int>(consumer);
  const bool columns = args.column_codes != nullptr;
  MOE_NO_UNROLL
  for (int unit = 0; unit < 2; ++unit) {
    const int column = tile.n0 + 128 * unit;
    Isa::barrier_wait(written_barrier<Config>(shared_base, consumer, unit), tiles & 1);
    const uint32_t first_empty = ring.empty(), first = slot_panel<Config>(ring.data(), consumer, 0);
    ring.advance();
    const uint32_t second = slot_panel<Config>(ring.data(), consumer, 0);
    if (one) {
      auto send = [&](uint32_t panels, int c0, int c1) {
        for (int half = 0; half < 2; ++half) Isa::store_panel(&args.d_gate_up, panels + half * kPanelBytes, c0, c1, half, 0);
        Isa::store_panel(&args.scaled_h, panels + 2 * kPanelBytes, c0, c1, 0, 0);
      };
      if (wanted) {
        for (int half = 0; half < 2; ++half) Isa::store_panel(&args.out, staging_panel<Config>(shared_base, consumer, half), column, row, half, 0);
      }
      if (columns) {
        send(second, tile.row0, column + 64 * static_cast<int>(consumer));
      } else if (wanted) {
        send(first, column, row);
        send(second, column + 64, row);
      }
      Isa::store_commit();
      Isa::template store_wait_read<0>();
    }
    Isa::warp_sync();
    if (one) {
      if (!columns) ring.release_warpgroup(first_empty);
      ring.release_warpgroup(ring.empty());
      Isa::barrier_arrive(GroupBarriers<Config>::staging(shared_base, consumer));
    }
    ring.advance();
  }
  if (one) Isa::barrier_arrive(credit_barrier<Config>(shared_base, consumer));
  ++tiles;
}

}  // namespace moe
