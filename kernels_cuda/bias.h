// Gradients that only layers with expert biases have. See bias.cu.
#pragma once

#include "moe.h"

namespace moe {

// db_gate_up_Ex2xF[e, half, f] = sum over the expert's rows of d_gate_up_2xMxF, and db_down_ExD[e, d] = sum over them of
// weight * dy; FP32 sums of BF16 values in a fixed order, overwritten or added to what is there. Experts without rows: zeros, or
// left as they are.
Status bias_gradients(const LayerShape& shape, const Plan& plan, const uint16_t* d_gate_up_2xMxF, const uint16_t* dy_TxD,
                      const float* weight_TxK, float* db_gate_up_Ex2xF, float* db_down_ExD, bool accumulate, cudaStream_t stream);

// partial_M[row] = dy of the row's token, times b_down of its expert, summed over D in a fixed order: the share of d(weight) that
// the bias of the output has.
Status bias_weight_partial(const LayerShape& shape, const Plan& plan, const uint16_t* dy_TxD, const float* b_down_ExD, float* partial_M,
                           cudaStream_t stream);

}  // namespace moe
