// What the tile quantisers share: parameters, tiles of 128 x 128 as a grid, codes on their way to memory. See quantize.h.
#pragma once

#include "isa/portable.h"
#include "quantize.h"

namespace moe {

constexpr int kTile = 128;

// Division of numbers below 2^31 by one that the host knows: a product and a shift.
struct Divisor {
  uint32_t factor = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + d - 1) / d);
  }
  MOE_FN uint32_t divide(uint32_t n) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(n) * factor) >> 31 >> shift);
  }
};

struct TileParams {
  const void* data;
  int64_t rows, columns;
  uint32_t row_tiles, column_tiles;
  Divisor by_row_tiles, by_column_tiles;
  const int32_t* slot_M;
  Divisor slots_per_token;  // with gather
  bool gather;
  void* row_elements;
  uint8_t* row_codes;
  void* column_elements;
  uint8_t* column_codes;
  CodeLayout row_layout, column_layout;
};

// The tile of this block: all column tiles of a row tile before the next.
struct TileIndex {
  uint32_t matrix, row_tile, column_tile;
  int64_t row0, column0;

  MOE_FN TileIndex(const TileParams& p, uint32_t block) {
    const uint32_t line = p.by_column_tiles.divide(block);
    column_tile = block - line * p.column_tiles;
    matrix = p.by_row_tiles.divide(line);
    row_tile = line - matrix * p.row_tiles;
    row0 = static_cast<int64_t>(row_tile) * kTile;
    column0 = static_cast<int64_t>(column_tile) * kTile;
  }
};

// Largest code of a line's four, poison aside.
MOE_FN uint32_t common_code(uint32_t four) {
  uint32_t m = 0;
  MOE_UNROLL
  for (int k = 0; k < 4; ++k) {
    const uint32_t code = four >> (8 * k) & 0xFF;
    m = mx::larger(m, code == mx::kPoison ? 0u : code);
  }
  return m;
}

// Codes of one orientation of a tile, `four` per line (line: the index across blocks), to memory. `lines` and `blocks` are those of the
// whole matrix, line0 and block0 where the tile begins; a thread per line.
template <Form kForm>
MOE_FN void write_codes(int line, const uint32_t* four, const uint8_t* common, uint8_t* out, CodeLayout layout, bool blocks_slow, int64_t matrix,
                        int64_t line0, int64_t lines, int64_t block0, int64_t elements) {
  if (kForm == Form::kMx) {
    if (line >= kTile) return;
    const uint32_t word = four[line];
    const int64_t blocks = (elements + 31) / 32;
    if (layout == CodeLayout::kInterleaved) {  // a tile is one atom; lanes change places so that its 512 bytes are written in order
      const int64_t atoms = (elements + 127) / 128;
      const int64_t atom = (matrix * ((lines + 127) / 128) + line0 / 128) * atoms + block0 / 4;
      reinterpret_cast<uint32_t*>(out)[atom * 128 + line] = four[line / 4 + line % 4 * 32];
    } else if (line0 + line < lines) {
      const int count = static_cast<int>(blocks - block0 < 4 ? blocks - block0 : 4);
      if (blocks_slow) {
        for (int k = 0; k < count; ++k) out[(matrix * blocks + block0 + k) * lines + line0 + line] = word >> (8 * k);
      } else {
        uint8_t* at = out + (matrix * lines + line0 + line) * blocks + block0;
        if (blocks % 4 == 0) {
          *reinterpret_cast<uint32_t*>(at) = word;
        } else {
          for (int k = 0; k < count; ++k) at[k] = word >> (8 * k);
        }
      }
    }
  } else if (kForm == Form::kAligned) {
    if (line >= kTile) return;
    const int64_t at = (matrix * ((elements + 127) / 128) + block0 / 4) * ((lines + 127) / 128 * 128) + line0;
    if (layout == CodeLayout::kFragment) {
      reinterpret_cast<uint16_t*>(out)[at + mx::fragment_position(line)] = mx::bits_of(mx::finite_scale_value(common[line])) >> 16;
    } else {
      out[at + line] = common[line];
    }
  }
}

}  // namespace moe
