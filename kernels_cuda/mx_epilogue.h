// The gate/up epilogue whose h leaves in MXFP8: activation, rounding to BF16 and quantisation where h is produced. A tile has 128 columns of F,
// and so one block of 1 x 128 per row, in one panel of 64 rows x 128 bytes per consumer. Read mma_sm90.h first.
#pragma once

#include "mma_sm90.h"
#include "quantize_math.h"

namespace moe {

// h of a lane: pairs of BF16, [64-column chunk][4 jj + i] with column block 2 jj + i / 2 and row half i % 2 as in RegisterTile.
using ActivationPairs = uint32_t[2][16];

// Quantises 64 rows x 128 columns into `panel` and gives the codes of the lane's two rows, the same in all four lanes of a row.
template <class Isa, class EpilogueType>
MOE_FN void quantize_panel(const ActivationPairs& h, uint32_t panel, const EpilogueType& epilogue, uint32_t (&common)[2]) {
  MOE_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t code[4];  // of 32 columns each
    common[half] = 0;
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) {
      uint32_t largest = 0;
      MOE_UNROLL
      for (int k = 0; k < 4; ++k) largest = Isa::max_pairs(largest, h[block / 2][8 * (block % 2) + 4 * (k / 2) + 2 * (k % 2) + half] & 0x7FFF7FFFu);
      uint32_t amax = mx::larger(mx::magnitude_lo(largest), mx::magnitude_hi(largest));
      MOE_UNROLL
      for (uint32_t mask = 1; mask <= 2; mask *= 2) {  // the four lanes of a row
        amax = mx::larger(amax, mx::bits_of(Isa::shuffle_xor(mx::float_of(amax), mask)));
      }
      code[block] = mx::scale_code(amax);
      const uint32_t finite = code[block] == mx::kPoison ? 0 : code[block];
      common[half] = common[half] > finite ? common[half] : finite;
    }
    const uint32_t row = epilogue.row_in_group() + 8 * half;
    MOE_UNROLL
    for (int block = 0; block < 4; ++block) {
      const float scale = mx::reciprocal_scale(code[block]);
      const uint32_t factor = mx::rebase_factor(code[block], common[half]);
      MOE_UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint32_t pair = h[block / 2][8 * (block % 2) + 4 * (k / 2) + 2 * (k % 2) + half];
        const uint32_t q = mx::quantize_pair<Isa>(pair, scale, scale);
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
        uint8_t* codes = args.h_codes + (tile.n0 / 128) * args.num_rows + this->row(0);
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

}  // namespace moe
