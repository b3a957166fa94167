// MXFP8 quantisers for Hopper: blocks along rows, along columns, or both from one read; plain C++ over device pointers and a stream,
// no allocation. The bits are those of moejax/ops/mxfp8.py. Maths: quantize_math.h; kernels: quantize_rows.cu, quantize_tiles.cu,
// quantize_transposed.cu, quantize_gathered.cu.
//
// Letters: B matrices, R rows, C columns. The source is (B, R, C), BF16 or FP32. "Rows" outputs have blocks along C, "columns" outputs
// along R: the same source, but different numbers, never made from each other.
#pragma once

#include "moe.h"
#include "quantize_math.h"

namespace moe {

enum class Form {
  kNone,
  kMx,            // canonical: a code per 32
  kAligned,       // re-based: a code per 128 along the block axis
  kAlignedTile,   // re-based: a code per 128 x 128
  kDequantized,   // the values of kMx in BF16, in the source's layout; no codes
};

enum class CodeLayout {
  kPlain,        // kMx rows: (B, R, ceil(C/32)), columns: (B, ceil(R/32), C), or (B, C, ceil(R/32)) with transposed elements
  kInterleaved,  // kMx: as tcgen05 reads them, per matrix; padding up to whole atoms of 128 x 4 holds code 0
  kFragment,     // kAligned columns: the scales themselves, in BF16, in the order of mx::fragment_position within each 128
};
// kAligned: (B, blocks of 128, rows or columns rounded up to 128), a code per 128 along the block axis, which is the slow one.
// kAlignedTile: rows (B, R/128, C/128), columns (B, C/128, R/128), both rounded up.

struct MxOutput {
  Form form = Form::kNone;
  CodeLayout layout = CodeLayout::kPlain;
  bool transposed = false;     // columns only: elements as (B, C, R), so that the block axis is contiguous. R must be a multiple of 16.
  void* elements = nullptr;    // E4M3 bytes, BF16 with kDequantized
  uint8_t* codes = nullptr;
};

struct QuantizeSource {
  const void* data = nullptr;
  bool fp32 = false;
  int64_t batch = 1, rows = 0, columns = 0;  // columns: a multiple of 32
  // Grouped rows (R = M of the plan): a row without a slot counts as zero and is not read; a whole tile of 128 rows without one is left
  // alone. With gather > 0, row m is row slot_M[m] / gather of `data`, so tokens are read where they are; slot_M is then aligned to 16 bytes.
  const int32_t* slot_M = nullptr;
  int64_t gather = 0;
  int64_t tokens = 0;  // with gather: the rows of `data`, or 0 if that is not said; a kernel that keeps all of them in shared memory asks
};

// Bytes of the codes of an output of this form.
int64_t code_bytes(const QuantizeSource& source, const MxOutput& out, bool by_rows);

// Either output may be kNone.
Status quantize(const QuantizeSource& source, const MxOutput& by_rows, const MxOutput& by_columns, cudaStream_t stream);

// quantize() of two sources, columns alone; in one launch where both are tokens of one plan that a block can keep in shared memory.
Status quantize_two(const QuantizeSource (&sources)[2], const MxOutput (&by_columns)[2], cudaStream_t stream);

// Bytes from a token's codes to the next one's.
inline int64_t token_code_pitch(int64_t d_model) { return ((d_model + 127) / 128 + 15) / 16 * 16; }

// Tokens in kAligned MX along D, each quantised once. Elements are of rows, padding up to the next multiple of `zero_to` zero; or of tokens,
// for products that gather them. Codes are always of rows, 0 for all without a token.
struct QuantizedTokens {
  bool by_token;
  uint8_t* elements;     // (M, D); by_token: (T, D)
  uint8_t* codes;        // (ceil(D/128), M)
  uint8_t* token_codes;  // (T, token_code_pitch), on the way: a byte at a time they would cost more than the tokens
  int zero_to;
  uint16_t* rows_MxD = nullptr;  // if not null: also BF16 rows, as dispatch_rows writes them
  int zero_rows_to = 64;         // as dispatch_rows
};
// x_TxD BF16, read once.
Status dispatch_quantized(const LayerShape& shape, const uint16_t* x_TxD, const Plan& plan, const QuantizedTokens& out, cudaStream_t stream);

// The scales of kAligned rows as products with tokens on the N side read them: of codes (lines, M), which are those of the plan's rows, in BF16,
// each 64 rows in the order of mx::lane_position. Whole 64 rows without a slot are left alone.
Status lane_scales(const LayerShape& shape, const Plan& plan, const uint8_t* codes, int64_t lines, uint16_t* scales, cudaStream_t stream);

// BF16 values of kAligned rows: elements (halves, M, width), codes (halves, width/128, M). Rows without a slot are left alone.
Status dequantize_aligned_rows(const LayerShape& shape, const Plan& plan, const uint8_t* elements, const uint8_t* codes, int64_t width,
                               int64_t halves, uint16_t* out, cudaStream_t stream);

// MXStats of moejax/ops/mxfp8.py, added to `counts` (6 x uint64: elements, nonzero, underflowed, saturated, blocks, poisoned) for the
// kMx row form of a source without gather, of any number of rows; those with a negative slot_M do not count. Integer sums: the order
// does not matter.
Status count_losses(const QuantizeSource& source, uint64_t* counts, cudaStream_t stream);

}  // namespace moe
