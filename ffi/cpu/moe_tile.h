// Steps of a tile that forward and backward share.
#pragma once

#include "cpu/moe.h"
#include "cpu/rows.h"

namespace moejax::cpu {

// The tile's rows of x or dy in the compute dtype, as FP32: tile.rows x D.
void GatherRows(const Layer& layer, const RowsIn& in, const Tile& tile, float* out);

// Gate and up of a tile, tile.rows x 2F, rounded as the recipe says. Under kMxfp8, x is replaced by its row-wise rounding.
void GateUp(const Layer& layer, const Tile& tile, float* x, float* gate_up);

// Where a tile's rows of y or dx go: in the result of the row form they lie as in the schedule; on the way to `Combine` and in `saved`
// they lie packed, since fresh memory costs a page fault per page touched and padding can be several times the rows.
inline int64_t ResultRow(const Layer& layer, const Tile& tile) { return layer.shape.top_k == 0 ? tile.first_row : tile.packed_row; }

// Combines a token form's packed rows into its tokens.
void CombinePacked(Pool& pool, const Layer& layer, const RowsOut& rows, const float* weight, const RowsOut& out);

// Zeroes the rows of an M x width array that belong to no group. A null array is left alone.
void ZeroPadding(Pool& pool, const Groups& groups, int64_t width, const RowsOut& out);

}  // namespace moejax::cpu
