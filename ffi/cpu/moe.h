// The expert layer on the CPU: dispatch, products, activation and combine, forward and backward.
//
// Work is cut into tiles of 128 to 192 rows of one expert, in row order (`Tile`); a tile is gathered, multiplied and written by one thread.
// Weight gradients have one owner per block of output rows, which adds the expert's tiles in row order. So results depend neither on
// the number of threads nor on the window of rows that is in flight. Rounding points: `docs/design.md` §2.
//
// Forms: with `top_k` > 0 the arrays x, y, dy, dx hold tokens and the schedule's indices say which; with `top_k` = 0 they hold rows.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"
#include "cpu/types.h"

namespace moejax::cpu {

struct LayerShape {
  int64_t tokens = 0;  // T; unused with top_k = 0
  int64_t top_k = 0;   // K, or 0: rows
  int64_t d_model = 0;
  int64_t width = 0;   // F
};

struct Layer {
  Recipe recipe = Recipe::kFp32;
  Activation act;
  LayerShape shape;
  Groups groups;
  const int32_t* slot_M = nullptr;    // t K + s of each row inside a group; null with top_k = 0
  const int32_t* row_TxK = nullptr;   // row of each slot, or -1; null with top_k = 0
  Matrices gate_up;                   // E x 2F x D, blocks along D
  Matrices down;                      // E x D x F, blocks along F
  const float* b_gate_up = nullptr;   // E x 2F, or null
  const float* b_down = nullptr;      // E x D, or null
};

struct ForwardBuffers {
  RowsIn x;                       // T x D or M x D
  const float* weight = nullptr;  // T x K
  RowsOut y;                      // T x D, in the dtype of x; unused with top_k = 0
  RowsOut y_rows;                 // compute dtype: with top_k = 0 the result, M x D (zero in padding), else a workspace, T K x D
  RowsOut saved;                  // gate and up in the compute dtype, packed: T K x 2F, with top_k = 0 M x 2F; or null
};
void MoeForward(Pool& pool, const Layer& layer, const ForwardBuffers& buffers);

struct BackwardBuffers {
  RowsIn x;
  RowsIn dy;                      // in the dtype of x
  const float* weight = nullptr;  // T x K, or M
  RowsIn saved;                   // gate and up of the forward, or null: computed again
  Matrices gate_up_down;          // gate_up with blocks along 2F (the same array as Layer::gate_up unless kMxfp8)
  Matrices down_down;             // down with blocks along D
  Format wgrad = Format::kFp32;   // what the weight-gradient products round their operands to
  RowsOut dx;                     // T x D in the dtype of x; unused with top_k = 0
  RowsOut dx_rows;                // like y_rows
  float* d_weight = nullptr;      // T x K or M; zero for slots without a row and in padding
  float* dw_gate_up = nullptr;    // E x 2F x D
  float* dw_down = nullptr;       // E x D x F
  float* db_gate_up = nullptr;    // E x 2F, or null
  float* db_down = nullptr;       // E x D, or null
  bool accumulate = false;        // gradients start from what the buffers hold, instead of from zero
  float* window = nullptr;        // window_tiles * FloatsPerTile(D, F) values
  int64_t window_tiles = 0;       // most tiles in flight between the dgrad and the wgrad products, positive
};
void MoeBackward(Pool& pool, const Layer& layer, const BackwardBuffers& buffers);

// What a tile holds in BackwardBuffers::window. Per row: x, dy (D each), d_gate_up (2F), weight * h (F); once: bias gradients (2F + D).
constexpr int64_t FloatsPerTile(int64_t d_model, int64_t width) {
  return kMaxTile * (2 * d_model + 3 * width) + 2 * width + d_model;
}

// y_t = sum over slots in slot order, in FP32, of weight * row; rounded once. Slots without a row add nothing. weight may be null (1).
// padding: `PaddingBefore` where rows are packed, or null.
void Combine(Pool& pool, const RowsIn& rows, const int64_t* padding, const float* weight_TxK, const int32_t* row_TxK, int64_t tokens,
             int64_t top_k, int64_t width, const RowsOut& out);

// Grouped products on rows, for `grouped_matmul` and its tests. FP32 or BF16 rows, FP32 accumulation; padding of y is zero.
// y[r] = x[r] W_e^T (transposed: W is E x N x K) or x[r] W_e (W is E x K x N) for the rows r of expert e.
void GroupedProduct(Pool& pool, const Groups& groups, const RowsIn& x, const Matrices& w, bool transposed, const RowsOut& y);
// dw_e += (or =) sum over the rows of e of dy[r]^T x[r], in row order; E x N x K.
void GroupedWgrad(Pool& pool, const Groups& groups, const RowsIn& dy, const RowsIn& x, int64_t n, int64_t k, bool accumulate, float* dw);

}  // namespace moejax::cpu
