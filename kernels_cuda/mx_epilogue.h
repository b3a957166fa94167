// Epilogues whose results leave in MXFP8: rounding to BF16 and quantisation where the values are produced. Blocks along rows are 1 x 128 of
// one warpgroup; blocks along columns are 128 rows of one column, and so of both consumers, who exchange BF16 values through shared memory.
// Read mma_sm90.h first.
#pragma once

#include "mma_sm90.h"
#include "quantize_math.h"

namespace moe {

// The largest of each half over lanes that differ in bits `kFirst` and `kSecond`.
template <class Isa, uint32_t kFirst, uint32_t kSecond, int kCount>
MOE_FN void max_over_lanes(uint32_t (&pairs)[kCount]) {
  MOE_UNROLL
  for (int i = 0; i < kCount; ++i) pairs[i] = mx::larger_of_lanes<Isa>(pairs[i], kFirst);
  MOE_UNROLL
  for (int i = 0; i < kCount; ++i) pairs[i] = mx::larger_of_lanes<Isa>(pairs[i], kSecond);
}

// h of a lane: pairs of BF16, [64-column chunk][4 jj + i] with column block 2 jj + i / 2 and row half i % 2 as in RegisterTile.
using ActivationPairs = uint32_t[2][16];

// Quantises 64 rows x 128 columns into `panel` and gives the codes of the lane's two rows, the same in all four lanes of a row.
template <class Isa, class EpilogueType>
MOE_FN void quantize_panel(const ActivationPairs& h, uint32_t panel, const EpilogueType& epilogue, uint32_t (&common)[2]) {
  MOE_UNROLL
  for (int half = 0; half < 2; ++half) {
    auto pair = [&](int block, int k) { return h[block / 2][8 * (block % 2) + 4 * (k / 2) + 2 * (k % 2) + half]; };
    auto largest = [&](int block) { return mx::largest_pair(pair(block, 0), pair(block, 1), pair(block, 2), pair(block, 3)); };
    uint32_t maxima[2] = {mx::larger_halves(largest(0), largest(1)), mx::larger_halves(largest(2), largest(3))};
    max_over_lanes<Isa, 1, 2>(maxima);
    mx::TwoScales scales[2];
    mx::two_scales(maxima, scales);
    const uint32_t raised = mx::raised_common(scales[0], scales[1]);
    common[half] = raised - 8;
    const uint32_t row = epilogue.row_in_group() + 8 * half;
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) {
      uint32_t bytes[2];
      mx::quantize_eight<true>(pair(block, 0), pair(block, 1), pair(block, 2), pair(block, 3), scales[block / 2].scale[block % 2],
                               mx::half_of(scales[block / 2].raised, block % 2), raised, bytes);
      MOE_UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint32_t byte = 32 * block + 8 * k + 2 * (epilogue.lane % 4);
        Isa::store_short(panel + panel_offset(row, byte / 16) + byte % 16, bytes[k / 2] >> 16 * (k % 2));
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
  signal_done<Isa>(task, args, one);
}

// --- d(gate), d(up), weight * h -------------------------------------------------------------------------------------------------------
// Barriers of kDgradDown, in MxConfig's room for more. shared: the 8 warps of both consumers arrive once the BF16 values of a group of 128
// columns are written, and taken: once they have read each other's, for each of the three matrices; every warp waits for both.
// staging[consumer]: its store warp arrives when a group has left shared memory; the consumer waits before it writes the next group's rows
// into its staging panels. weights[consumer]: its store warp arrives once it has brought the combine weights of the tile's rows.
template <class Config>
struct GroupBarriers {
  static MOE_FN uint32_t shared(uint32_t base) { return base + Config::kGroupOffset; }
  static MOE_FN uint32_t taken(uint32_t base) { return base + Config::kGroupOffset + 8; }
  static MOE_FN uint32_t staging(uint32_t base, uint32_t consumer) { return base + Config::kGroupOffset + 16 + 8 * consumer; }
  static MOE_FN uint32_t weights(uint32_t base, uint32_t consumer) { return base + Config::kGroupOffset + 32 + 8 * consumer; }
  template <class Isa>
  static MOE_FN void init(uint32_t base) {
    Isa::barrier_init(shared(base), 8);
    Isa::barrier_init(taken(base), 8);
    for (uint32_t consumer = 0; consumer < Config::kConsumers; ++consumer) {
      Isa::barrier_init(staging(base, consumer), 1);
      Isa::barrier_init(weights(base, consumer), 1);
    }
  }
};

// Combine weight of a row of the consumer's, 0 for padding.
template <class Config>
MOE_FN uint32_t row_weight(uint32_t base, uint32_t consumer, uint32_t row) {
  return base + Config::kWeightsOffset + 4 * (64 * consumer + row);
}

// 128 rows x 8 columns of BF16 from the panels of both consumers to E4M3 along the columns. Lane l holds column l / 4 and, of every 32 rows,
// eight from 8 (l % 4) on: ldmatrix gives register m rows 2 (l % 4) .. + 1 of matrix m, which this reads from where rows 8 (l % 4) + 2 (m ^ l % 4)
// .. + 1 lie, so that the eight rows of a matrix never meet in a bank.
template <class Isa>
struct ColumnStrip {
  uint32_t pairs[4][4];
  uint32_t bytes[4][2];  // of each 32 rows, in order
  uint32_t common;

  static MOE_FN uint32_t source(uint32_t panel, uint32_t lane, uint32_t chunk) {
    const uint32_t pair = lane % 8 / 2;
    return panel + panel_offset(8 * pair + 2 * (pair ^ lane / 8) + lane % 2, chunk);
  }
  MOE_FN void load(const uint32_t (&panels)[2], uint32_t lane, uint32_t chunk) {
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) {
      Isa::load_matrices_transposed(source(panels[block / 2], lane, chunk) + 32 * kPanelRowBytes * (block % 2), pairs[block]);
    }
  }
  MOE_FN void find_maxima(uint32_t* maxima) const {  // of this lane's eight rows of each block
    MOE_UNROLL
    for (int i = 0; i < 2; ++i) maxima[i] = mx::larger_signed_halves(mx::largest_signed(pairs[2 * i]), mx::largest_signed(pairs[2 * i + 1]));
  }
  // Register m belongs at place m ^ lane % 4. Which bytes of the four registers' elements make the first word; the second one has those of the others.
  static MOE_FN uint32_t order(uint32_t lane) { return (lane % 2 ? 0x1032u : 0x3210u) ^ (lane & 2 ? 0x4444u : 0u); }
  MOE_FN void quantize(uint32_t order, uint32_t zeros, const mx::TwoScales* scales) {
    common = mx::raised_commons(scales[0], scales[1]);
    MOE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t factors = mx::rebase_factors(scales[i].raised, common);
      uint32_t q[2][2];
      quantize_block<0>(pairs[2 * i], scales[i], zeros, factors, q[0]);
      quantize_block<1>(pairs[2 * i + 1], scales[i], zeros, factors, q[1]);
      MOE_UNROLL
      for (int k = 0; k < 2; ++k) {
        bytes[2 * i + k][0] = mx::permute_bytes(q[k][0], q[k][1], order);
        bytes[2 * i + k][1] = mx::permute_bytes(q[k][0], q[k][1], order ^ 0x4444u);
      }
    }
  }
  // Where a block of a column goes, in a panel. Those of the column 8 further lie 1024 bytes further.
  static MOE_FN uint32_t place(uint32_t column, uint32_t lane, uint32_t block) { return (panel_offset(column, lane % 4 / 2) ^ 32 * block) + 8 * (lane % 2); }
  MOE_FN void write(const uint32_t (&places)[4], uint32_t offset) const {
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) Isa::store_float2(places[block] + offset, mx::float_of(bytes[block][0]), mx::float_of(bytes[block][1]));
  }

 private:
  template <int kHalf>
  static MOE_FN void quantize_block(const uint32_t (&v)[4], const mx::TwoScales& scales, uint32_t zeros, uint32_t factors, uint32_t (&q)[2]) {
    mx::quantize_rebased<kHalf>(v[0], v[1], v[2], v[3], scales.scale[kHalf], zeros, factors, q);
  }
};

// The tile of kDgradDown: d(gate) and d(up) leave along rows, and all three along columns too, transposed, where the weight gradients are
// FP8; otherwise in BF16. Chunks of 64 columns are written in BF16 as in the base, two of them (a stage each) are a group: the rows of a
// warp are quantised into the staging panels, then consumer c quantises the columns of chunk c into its panels of the second stage.
// The loop over chunks stays a loop, and so the sums of the next chunk are moved to where those of the last were: unrolled the epilogue is longer than
// the instruction caches hold.
template <class Isa, class Config, bool kAhead>
struct MxDgradDownTile : RegisterTile<kDgradDown, Isa, Config, kAhead> {
  using Base = RegisterTile<kDgradDown, Isa, Config, kAhead>;
  using Barriers = GroupBarriers<Config>;
  static constexpr int kUnroll = 1;
  static constexpr int kChunkSums = 32;

  float (&sums)[Config::kAcc];
  uint32_t first_stage = 0, first_empty = 0;

  MOE_FN void load(float (&v)[8], int, int p, int part) const { Base::load(v, 0, p, part); }
  template <class Arguments>
  MOE_FN void close(const Arguments& args, int column) {
    MOE_UNROLL
    for (int i = 0; i + kChunkSums < Config::kAcc; ++i) sums[i] = sums[i + kChunkSums];
    auto& ring = this->ring;
    if (column % 128 == 0) {
      first_stage = ring.data();
      first_empty = ring.empty();
      ring.advance();
      return;
    }
    const auto& epilogue = this->epilogue;
    const bool columns = args.column_codes != nullptr;
    if (columns) Isa::fence_async_shared();  // the copy engine fills the first stage next
    Isa::warp_sync();
    if (columns && epilogue.lane == 0) Isa::barrier_arrive(Barriers::shared(epilogue.base));
    quantize_rows(args, column - 64);
    if (columns) quantize_columns(args, column - 64);
    epilogue.finish_unit(column / 128);
    ring.advance();
  }

 private:
  // A row of the warp's 16 per half warp, 16 bytes of each of its lanes. Rows 2 i and 2 (i + 4) of a lane lie 1024 bytes apart, whatever the swizzle.
  template <class Arguments>
  MOE_FN void quantize_rows(const Arguments& args, int column) const {
    const auto& epilogue = this->epilogue;
    const uint32_t lane = epilogue.lane, first = 16 * epilogue.warp + lane / 16;
    const uint32_t stage = lane % 16 < 8 ? first_stage : this->ring.data();
    uint32_t from[4], to[4];
    MOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      from[i] = slot_panel<Config>(stage, epilogue.consumer, 0) + panel_offset(first + 2 * i, lane % 8);
      to[i] = staging_panel<Config>(epilogue.base, epilogue.consumer, 0) + panel_offset(first + 2 * i, lane % 16 / 2) + 8 * (lane % 2);
    }
    // The first eight lanes of a half warp write the codes of its eight rows.
    const int at = this->tile.n0 + column;
    uint8_t* codes = args.row_codes + at / 128 * args.num_rows + this->tile.row0 + 64 * epilogue.consumer + first + 2 * (lane % 8);
    uint8_t* const codes_up = Isa::not_before(codes + div_up(args.n_extent, 128) * args.num_rows);
    const bool write = lane % 16 < 8 && this->rows > 0 && at < args.n_extent;
    Isa::barrier_wait(Barriers::staging(epilogue.base, epilogue.consumer), column == 0);
    MOE_NO_UNROLL
    for (int r = 0; r < 2; ++r) {
      typename Isa::Vector v[8];  // all at once: what follows has long chains
      MOE_UNROLL
      for (int i = 0; i < 8; ++i) v[i] = Isa::load_vector(from[i % 4] + (i / 4 * 8 * kPanelRowBytes + r * kPanelBytes));
      uint32_t maxima[4];
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) maxima[i] = mx::larger_signed_halves(largest(v[2 * i]), largest(v[2 * i + 1]));
      max_over_lanes<Isa, 1, 2>(maxima);
      mx::TwoScales scales[4];
      mx::two_scales(maxima, scales);
      const uint32_t zeros = mx::signed_zeros(scales[0].scale[0]);
      uint32_t common[4] = {scales[0].raised, scales[1].raised, scales[2].raised, scales[3].raised};
      max_over_lanes<Isa, 4, 8>(common);
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32_t factors = mx::rebase_factors(scales[i].raised, common[i]);
        const uint32_t offset = i / 2 * 8 * kPanelRowBytes + r * kPanelBytes;
        quantize_row<0>(v[2 * i], scales[i], zeros, factors, to[2 * i % 4] + offset);
        quantize_row<1>(v[2 * i + 1], scales[i], zeros, factors, to[(2 * i + 1) % 4] + offset);
      }
      const uint32_t four = lane & 4 ? (lane & 2 ? common[3] : common[2]) : (lane & 2 ? common[1] : common[0]);
      if (write) *codes = static_cast<uint8_t>((four >> 16 * (lane % 2)) - 8);
      codes = codes_up;
    }
  }
  static MOE_FN uint32_t largest(const typename Isa::Vector& v) {
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
    return mx::largest_signed(pairs);
  }
  template <int kHalf>
  static MOE_FN void quantize_row(const typename Isa::Vector& v, const mx::TwoScales& scales, uint32_t zeros, uint32_t factors, uint32_t to) {
    uint32_t bytes[2];
    mx::quantize_rebased<kHalf>(v.x, v.y, v.z, v.w, scales.scale[kHalf], zeros, factors, bytes);
    Isa::store_float2(to, mx::float_of(bytes[0]), mx::float_of(bytes[1]));
  }

  // One matrix after the other: once all warps have read it, its place in the second stage takes the result. The next one is read before that, while
  // nothing waits for it.
  template <class Arguments>
  MOE_FN void quantize_columns(const Arguments& args, int column) {
    const auto& epilogue = this->epilogue;
    const uint32_t lane = epilogue.lane, stage = epilogue.consumer ? this->ring.data() : first_stage;
    const int64_t pitch = div_up(args.n_extent, 128) * 128;
    // Of the four lanes of a column, the first writes its code and the second that of the column 8 further.
    const uint32_t line = 16 * epilogue.warp + lane / 4;
    const int coded = static_cast<int>(64 * epilogue.consumer + line + 8 * (lane % 2));
    const int64_t at = this->tile.row0 / 128 * pitch + this->tile.n0 + column;
    const bool write = lane % 4 < 2 && this->tile.n0 + column < args.n_extent;
    uint8_t* codes = args.column_codes + at + coded;                                   // a byte per column: an operand A
    uint8_t* const codes_up = Isa::not_before(codes + args.num_rows / 128 * pitch);
    uint16_t* const scales_of_h = Isa::not_before(args.scaled_h_scales + at + mx::fragment_position(coded));  // in BF16, in fragment order: an operand B
    uint32_t places[4];
    MOE_UNROLL
    for (uint32_t block = 0; block < 4; ++block) {
      places[block] = slot_panel<Config>(this->ring.data(), epilogue.consumer, 0) + ColumnStrip<Isa>::place(line, lane, block);
    }
    const uint32_t order = ColumnStrip<Isa>::order(lane);
    ColumnStrip<Isa> strips[2];
    auto read = [&](int r) {
      const uint32_t panels[2] = {slot_panel<Config>(stage, 0, r), slot_panel<Config>(stage, 1, r)};
      MOE_UNROLL
      for (uint32_t s = 0; s < 2; ++s) strips[s].load(panels, lane, 2 * epilogue.warp + s);
    };
    auto report = [&] {  // early: the others wait for it further down
      Isa::warp_sync();
      if (lane == 0) Isa::barrier_arrive(Barriers::taken(epilogue.base));
    };
    Isa::barrier_wait(Barriers::shared(epilogue.base), column / 128);
    read(0);
    report();
    MOE_NO_UNROLL
    for (int r = 0; r < 3; ++r) {
      uint32_t all[4];
      MOE_UNROLL
      for (int s = 0; s < 2; ++s) strips[s].find_maxima(all + 2 * s);
      max_over_lanes<Isa, 1, 2>(all);
      mx::TwoScales scales[4];
      mx::two_scales(all, scales);
      const uint32_t zeros = mx::signed_zeros(scales[0].scale[0]);
      MOE_UNROLL
      for (int s = 0; s < 2; ++s) strips[s].quantize(order, zeros, scales + 2 * s);
      if (r < 2) read(r + 1);
      const uint32_t common = (lane % 2 ? strips[1].common : strips[0].common) - 0x00080008u;
      if (write & (r < 2)) *codes = static_cast<uint8_t>(common);
      if (write & (r == 2)) *scales_of_h = static_cast<uint16_t>(mx::bf16_scales(common));
      codes = codes_up;
      Isa::barrier_wait(Barriers::taken(epilogue.base), (column / 128 + r) & 1);
      MOE_UNROLL
      for (uint32_t s = 0; s < 2; ++s) strips[s].write(places, 8 * kPanelRowBytes * s + r * kPanelBytes);
      if (r < 2) report();
    }
    Ring<Isa, Config>::release(first_empty);
  }
};

// Overload of that in gemm_results.h: the store warp has fetched them while the products ran.
template <class Isa, class Config, bool kAhead, class Arguments>
MOE_FN void load_weights(const MxDgradDownTile<Isa, Config, kAhead>& results, const Arguments&, float (&weight)[2]) {
  const auto& epilogue = results.epilogue;
  Isa::barrier_wait(GroupBarriers<Config>::weights(epilogue.base, epilogue.consumer), epilogue.tiles & 1);
  MOE_UNROLL
  for (int i = 0; i < 2; ++i) {
    weight[i] = mx::float_of(Isa::load_word(row_weight<Config>(epilogue.base, epilogue.consumer, epilogue.row_in_group() + 8 * i)));
  }
}

// Store warp of one consumer, one kDgradDown task in MXFP8; as store_task.
template <class Isa, class Config, class Arguments>
MOE_FN void store_dgrad_down_mx(const Task& task, const Arguments& args, uint32_t shared_base, uint32_t consumer, uint32_t& tiles,
                                Ring<Isa, Config>& ring) {
  const Task tile = block_tile<Config>(task, kDgradDown, Isa::cluster_rank());
  ring.skip(task_k_blocks<kDgradDown, Config>(task, args));
  const bool one = Isa::lane_index() == 0;
  const int row = tile.row0 + 64 * static_cast<int>(consumer);
  MOE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int in_group = 32 * i + static_cast<int>(Isa::lane_index());
    const int slot = in_group < tile.rows - 64 * static_cast<int>(consumer) ? args.slot_M[row + in_group] : -1;
    Isa::store_word(row_weight<Config>(shared_base, consumer, in_group), slot >= 0 ? mx::bits_of(args.weight_TxK[slot]) : 0u);
  }
  Isa::warp_sync();
  if (one) Isa::barrier_arrive(GroupBarriers<Config>::weights(shared_base, consumer));
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
  if (one) signal_done<Isa>(task, args, one);  // asked twice, the sums of the K loop stay in registers of two banks (test_mx_ptxas.py)
}

}  // namespace moe
