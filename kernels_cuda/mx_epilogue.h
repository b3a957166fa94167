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
    uint32_t largest[4];
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) largest[block] = mx::largest_pair(pairs[block][0], pairs[block][1], pairs[block][2], pairs[block][3]);
    maxima[0] = mx::larger_halves(largest[0], largest[1]);
    maxima[1] = mx::larger_halves(largest[2], largest[3]);
  }
  MOE_FN void quantize(uint32_t lane, const mx::TwoScales* scales) {
    const uint32_t raised = mx::raised_common(scales[0], scales[1]);
    common = raised - 8;
    const uint32_t order = lane % 2 ? 0x1032u : 0x3210u;  // register m belongs at place m ^ lane % 4
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) {
      uint32_t q[2];
      mx::quantize_eight<true>(pairs[block][0], pairs[block][1], pairs[block][2], pairs[block][3], scales[block / 2].scale[block % 2],
                               mx::half_of(scales[block / 2].raised, block % 2), raised, q);
      const uint32_t a = mx::permute_bytes(q[0], q[0], order), b = mx::permute_bytes(q[1], q[1], order);
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
  // A row of the warp's 16 per half warp, 16 bytes of each of its lanes.
  template <class Arguments>
  MOE_FN void quantize_rows(const Arguments& args, int column) const {
    const auto& epilogue = this->epilogue;
    const uint32_t lane = epilogue.lane, first = 16 * epilogue.warp + lane / 16;
    const uint32_t stage = lane % 16 < 8 ? first_stage : this->ring.data();
    const int at = this->tile.n0 + column;
    uint8_t* codes = args.row_codes + at / 128 * args.num_rows + this->tile.row0 + 64 * epilogue.consumer + first;
    const bool write = lane % 16 == 0 && this->rows > 0 && at < args.n_extent;
    Isa::barrier_wait(Barriers::staging(epilogue.base, epilogue.consumer), column == 0);
    MOE_NO_UNROLL
    for (int r = 0; r < 2; ++r) {
      const uint32_t from = slot_panel<Config>(stage, epilogue.consumer, r), to = staging_panel<Config>(epilogue.base, epilogue.consumer, r);
      typename Isa::Vector v[8];  // all at once: what follows has long chains
      MOE_UNROLL
      for (int i = 0; i < 8; ++i) v[i] = Isa::load_vector(from + panel_offset(first + 2 * i, lane % 8));
      uint32_t maxima[4];
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        maxima[i] = mx::larger_halves(mx::largest_pair(v[2 * i].x, v[2 * i].y, v[2 * i].z, v[2 * i].w),
                                      mx::largest_pair(v[2 * i + 1].x, v[2 * i + 1].y, v[2 * i + 1].z, v[2 * i + 1].w));
      }
      max_over_lanes<Isa, 1, 2>(maxima);
      mx::TwoScales scales[4];
      mx::two_scales(maxima, scales);
      uint32_t common[4] = {scales[0].raised, scales[1].raised, scales[2].raised, scales[3].raised};
      max_over_lanes<Isa, 4, 8>(common);
      MOE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const uint32_t group = mx::half_of(common[i / 2], i % 2);
        uint32_t bytes[2];
        mx::quantize_eight<true>(v[i].x, v[i].y, v[i].z, v[i].w, scales[i / 2].scale[i % 2], mx::half_of(scales[i / 2].raised, i % 2), group, bytes);
        Isa::store_float2(to + panel_offset(first + 2 * i, lane % 16 / 2) + 8 * (lane % 2), mx::float_of(bytes[0]), mx::float_of(bytes[1]));
        if (write) codes[2 * i] = static_cast<uint8_t>(group - 8);
      }
      codes += div_up(args.n_extent, 128) * args.num_rows;
    }
  }

  // One matrix after the other: once all warps have read it, its place in the second stage takes the result. The next one is read before that, while
  // nothing waits for it.
  template <class Arguments>
  MOE_FN void quantize_columns(const Arguments& args, int column) {
    const auto& epilogue = this->epilogue;
    const uint32_t lane = epilogue.lane, stage = epilogue.consumer ? this->ring.data() : first_stage;
    const int64_t pitch = div_up(args.n_extent, 128) * 128;
    const int first_line = static_cast<int>(64 * epilogue.consumer + 16 * epilogue.warp + lane / 4);
    const int64_t at = this->tile.row0 / 128 * pitch + this->tile.n0 + column;
    const bool write = lane % 4 == 0 && this->tile.n0 + column < args.n_extent;
    uint8_t* codes = args.column_codes + at + first_line;                                   // a byte per column: an operand A
    uint16_t* scales_of_h = args.scaled_h_scales + at + mx::fragment_position(first_line);  // in BF16, in fragment order: an operand B
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
      MOE_UNROLL
      for (int s = 0; s < 2; ++s) strips[s].quantize(lane, scales + 2 * s);
      if (r < 2) read(r + 1);
      MOE_UNROLL
      for (int s = 0; s < 2; ++s) {
        const uint32_t common = strips[s].common;
        if (write & (r < 2)) codes[8 * s] = static_cast<uint8_t>(common);
        if (write & (r == 2)) scales_of_h[2 * s] = static_cast<uint16_t>(mx::bits_of(mx::finite_scale_value(common)) >> 16);
      }
      codes += args.num_rows / 128 * pitch;
      Isa::barrier_wait(Barriers::taken(epilogue.base), (column / 128 + r) & 1);
      MOE_UNROLL
      for (uint32_t s = 0; s < 2; ++s) strips[s].write(slot_panel<Config>(this->ring.data(), epilogue.consumer, r), lane, 2 * epilogue.warp + s);
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
}

}  // namespace moe
