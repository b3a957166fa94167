// Weight gradients in strips, with one operand at rest (gemm_resident.h, gemm_resident_rows.h), on the host: which shapes they suit, and
// how their output is cut. For both recipes on Hopper.
#pragma once

#include <utility>

#include "gemm_kernels.h"
#include "gemm_resident.h"
#include "gemm_resident_rows.h"
#include "moe.h"
#include "mx_resident.h"
#include "tiling.h"

namespace moe {

// Rows of an expert, on average.
inline int64_t rows_per_expert(const LayerShape& s) { return s.tokens * s.top_k / routed_experts(s); }

// Whether neighbouring launches of a backward should overlap. With many rows blocks that begin one by one stay out of step, and share less of what
// they read (NOTES.md, v18).
inline bool overlaps(const LayerShape& s) { return rows_per_expert(s) <= 1024; }

// A cluster covers `step` columns, or rows; a matrix that leaves more than a quarter of them empty is better cut finer.
inline bool fills_strips(int extent, int step) { return 4 * extent >= 3 * div_up(extent, step) * step; }

// Where most experts' rows fit. Of BF16 operands.
inline Way resident_way(int64_t rows, int m_extent, int n_extent) {
  if (rows <= 176 && fills_strips(n_extent, 2 * ResidentConfig::kTileN)) return kWayResident512;
  return rows <= 544 && fills_strips(m_extent, 2 * ResidentRowsConfig::kTileM) ? kWayResidentRows : kWayDispatched;
}
// Of FP8 operands.
inline Way resident_fp8_way(int64_t rows, int n_extent) {
  return rows <= 544 && fills_strips(n_extent, 2 * MxResidentConfig::kTileN) ? kWayResidentFp8 : kWayDispatched;
}
inline bool is_resident(Way way) { return way == kWayResident512 || way == kWayResidentRows; }

// Rows of a box of the operands.
inline int box_rows(Layout layout) {
  return layout == Layout::kResident512 ? ResidentConfig::kBoxRows : layout == Layout::kResidentRows ? ResidentRowsConfig::kBoxRows : kPanelRows;
}

// Rows that a product multiplies are a multiple of this from an expert's first one, so up to there its padding must be zero.
inline int multiplied_rows(Layout layout) { return layout == Layout::kResident512 ? 16 : 64; }

// Strips instead of tiles, down the rows of columns that rest.
template <class Config>
Tiling in_strips(Tiling t) {
  t.tile_m = Config::kStripTiles * Config::kTileM;
  t.step_n = Config::kTileN;
  t.m_extent = div_up(t.m_extent, Config::kTileM) * Config::kTileM;
  t.pairs = Pairs::kStrips;
  return t;
}
// Strips along the columns, of rows that rest: a list's M is the dimension along a strip.
inline Tiling in_row_strips(Tiling t) {
  t.tile_m = ResidentRowsConfig::kStripTiles * ResidentRowsConfig::kTileN;
  t.step_n = ResidentRowsConfig::kTileM;
  std::swap(t.m_extent, t.n_extent);
  t.pairs = Pairs::kColumns;
  return t;
}

}  // namespace moe
