// Moving rows in and out of the FP32 the products work in: gathering tokens, decoding weights, writing results.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/types.h"
#include "cpu/vector_ops.h"

namespace moejax::cpu {

// At most kMaxTile rows of one expert, from a multiple of 128 on: the unit of work, and the row block of every product.
struct Tile {
  int64_t expert;
  int64_t first_row;
  int64_t rows;
  int64_t packed_row;  // of the first row, where no padding lies between the experts
};

// Tiles in row order. Experts without rows have none.
std::vector<Tile> Tiles(const Groups& groups);

// Rows of padding that lie before each block of 128 rows: row r of a group is packed row r - padding[r / 128].
std::vector<int64_t> PaddingBefore(const Groups& groups);

// Row `row` of an array as FP32, rounded to BF16 on the way if `bf16`.
void ReadRow(const RowsIn& in, int64_t row, int64_t width, bool bf16, float* out);

// FP32 values as row `row` of an array.
void WriteRow(const float* values, int64_t row, int64_t width, const RowsOut& out);
void ZeroRow(int64_t row, int64_t width, const RowsOut& out);

// Y[rows x W.rows] = X W_e^T, and Y[rows x W.columns] = X W_e; x and y are contiguous, W_e is matrix `e`, decoded a block at a time.
void ProductWithTranspose(const float* x, int64_t rows, const Matrices& w, int64_t e, float* y);
void Product(const float* x, int64_t rows, const Matrices& w, int64_t e, float* y);

// Rounds `rows` contiguous rows to the MX format, blocks along the row or down the rows (the first block starts at row 0).
void MxRoundRows(float* values, int64_t rows, int64_t width);
void MxRoundColumns(float* values, int64_t rows, int64_t width);

}  // namespace moejax::cpu
