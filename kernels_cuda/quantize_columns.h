// Eight columns of 128 rows in a warp, from BF16 in shared memory to E4M3 along the columns: what the transposing quantisers of BF16 sources share.
// Lane 4 c + q of a warp has column c and its rows 16 q .. 16 q + 15 and 64 + 16 q .. 64 + 16 q + 15, so that a block of 32 is two lanes, and two lanes
// store a sector of 32 bytes.
#pragma once

#include "isa/portable.h"
#include "quantize_math.h"

namespace moe {

// A lane points the four ldmatrix at four neighbouring rows, this one first. Matrix m of load i, eight lanes, brings lane 4 c + q the rows i and 4 + i of
// the m-th eight that it is to have.
MOE_HOST_FN constexpr uint32_t addressed_row(uint32_t lane) { return 64 * (lane / 16) + 16 * (lane % 8 / 2) + 8 * (lane / 8 % 2) + 4 * (lane % 2); }

template <class Isa>
struct ColumnEight {
  uint32_t pairs[16];  // four of each eight rows
  uint32_t words[8];   // elements, in order

  MOE_FN void load(int i, uint32_t address) {
    uint32_t v[4];
    Isa::load_matrices_transposed(address, v);
    MOE_UNROLL
    for (int m = 0; m < 4; ++m) pairs[4 * m + i] = v[m];
  }
  MOE_FN typename Isa::Vector elements(int half) const {
    return {words[4 * half], words[4 * half + 1], words[4 * half + 2], words[4 * half + 3]};
  }

  // A code per block. Returns the column's four in lanes of q = 0.
  MOE_FN uint32_t quantize() {
    mx::TwoScales scales[1];
    mx::two_scales({block_maxima()}, scales);
    MOE_UNROLL
    for (int i = 0; i < 8; ++i) words[i] = elements_under(i, scales[0].scale[i / 4]);
    const uint32_t own = scales[0].code(0) | scales[0].code(1) << 16;
    return own | mx::bits_of(Isa::shuffle_xor(mx::float_of(own), 2)) << 8;
  }

  // Re-based to one code, which all lanes of the column get. Rounded once where that is enough, which it is for nearly all columns whose values lie
  // within a few binades.
  MOE_FN uint32_t quantize_aligned() {
    const uint32_t maxima = block_maxima(), line = over_line(maxima), raised = mx::raised_codes(line), scale = mx::reciprocal_bf16(raised);
    uint32_t fine = 0xFFFFFFFFu;
    MOE_UNROLL
    for (int i = 0; i < 8; ++i) {
      words[i] = elements_under(i, scale);
      fine &= mx::even_or_normal(words[i]);
    }
    const bool twice = ((fine & 0x80808080u) != 0x80808080u) & (mx::raised_codes(maxima) != raised);
    if (!Isa::any(twice | (mx::poisoned_halves(line) != 0))) return mx::half_of(raised, 0) - 8;
    return quantize_twice(maxima);
  }

 private:
  MOE_FN uint32_t elements_under(int word, uint32_t scale) const {
    const uint32_t* four = pairs + 4 * (word / 2);
    return word % 2 == 0 ? mx::quantize_halves<0>(four, scale) : mx::quantize_halves<1>(four, scale);
  }
  // Of the lane's two blocks in the halves.
  MOE_FN uint32_t block_maxima() const {
    uint32_t largest[2];
    MOE_UNROLL
    for (int k = 0; k < 2; ++k) {
      largest[k] = mx::larger_magnitudes(mx::largest_signed(pairs + 8 * k), mx::largest_signed(pairs + 8 * k + 4)) & 0x7FFF7FFFu;
    }
    return mx::larger_of_lanes<Isa>(mx::larger_halves(largest[0], largest[1]), 1);
  }
  // The largest of all four, in both halves.
  static MOE_FN uint32_t over_line(uint32_t halves) { return mx::larger_of_lanes<Isa>(mx::max_pairs(halves, mx::permute_bytes(halves, halves, 0x1032)), 2); }
  // As the format defines it.
  MOE_FN uint32_t quantize_twice(uint32_t maxima) {
    mx::TwoScales scales[1];
    mx::two_scales({maxima}, scales);
    const uint32_t own = scales[0].raised, common = mx::half_of(over_line(own), 0);
    MOE_UNROLL
    for (int k = 0; k < 2; ++k) {
      const uint32_t factor = mx::rebase_factor(mx::half_of(own, k), common);
      MOE_UNROLL
      for (int i = 4 * k; i < 4 * k + 4; ++i) words[i] = mx::rebase_quad(elements_under(i, scales[0].scale[k]), factor);
    }
    return common - 8;
  }
};

}  // namespace moe
