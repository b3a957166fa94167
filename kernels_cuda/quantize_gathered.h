// Columns of gathered tokens from tokens that a block keeps in shared memory (quantize_gathered.cu), for the quantisers that choose it.
#pragma once

#include "quantize.h"

namespace moe {

bool can_keep_tokens(const QuantizeSource& source, const MxOutput& by_rows, const MxOutput& by_columns);

// One or two sources of one plan, for each of which can_keep_tokens() is true.
Status quantize_kept_tokens(const QuantizeSource* sources, const MxOutput* by_columns, int count, cudaStream_t stream);

}  // namespace moe
