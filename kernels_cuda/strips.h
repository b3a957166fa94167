// Weight gradients in strips, with one operand at rest (gemm_resident.h), on the host: which shapes they suit, and how
// their output is cut. For both recipes on Hopper.
#pragma once

#include "gemm_kernels.h"
#include "gemm_resident.h"
#include "moe.h"
#include "tiling.h"

namespace moe {

// Rows of an expert, on average.
inline int64_t rows_per_expert(const LayerShape& s) { return s.tokens * s.top_k / routed_experts(s); }

// A cluster covers twice the columns of a block; a matrix that leaves more than a quarter of them empty is better cut finer.
template <class Config>
bool fills_strips(int columns) {
  constexpr int kStep = 2 * Config::kTileN;
  return 4 * columns >= 3 * div_up(columns, kStep) * kStep;
}

// Where most experts' rows fit. Of BF16 operands.
inline Way resident_way(int64_t rows, int columns) {
  if (rows <= 176 && fills_strips<ResidentWide>(columns)) return kWayResident512;
  return rows <= 544 && fills_strips<ResidentTall>(columns) ? kWayResident128 : kWayDispatched;
}

// Rows of a box of the operands.
inline int box_rows(Layout layout) { return layout == Layout::kResident512 ? ResidentWide::kBoxRows : kPanelRows; }

// Rows that a product multiplies are a multiple of this from an expert's first one, so up to there its padding must be zero.
inline int multiplied_rows(Layout layout) { return layout == Layout::kResident512 || layout == Layout::kResident128 ? 16 : 64; }

// Strips instead of tiles.
template <class Config>
Tiling in_strips(Tiling t) {
  t.tile_m = Config::kStripTiles * Config::kTileM;
  t.step_n = Config::kTileN;
  t.m_extent = div_up(t.m_extent, Config::kTileM) * Config::kTileM;
  t.pairs = Pairs::kStrips;
  return t;
}

}  // namespace moe
