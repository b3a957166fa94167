// Row movement around the expert GEMMs: dispatch, combine, and the last step of d(weight). See rows.cu.
#pragma once

#include "moe.h"
#include "task_list.h"

namespace moe {

// Shared-memory table of one word per slot of a token, rounded up to 16 bytes: the compiler reads it in vectors.
inline size_t slot_table_bytes(int64_t top_k) { return static_cast<size_t>((top_k + 3) / 4 * 16); }

// rows_MxD[row_TxK[t, s]] = x_TxD[t] for every slot with a row, and zeros in the padded rows of each group up to a multiple of `zero_to`. Nothing
// else is touched.
Status dispatch_rows(const LayerShape& shape, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, cudaStream_t stream,
                     int zero_to = 64);

// The same in two parts, which may run at the same time: the rows of the tasks in front of the list's cut, and all padding; then, on so many
// multiprocessors, an even number, which it takes for itself, the other rows. Hopper. The list is built before.
Status dispatch_front(const LayerShape& shape, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, const TaskList& list,
                      cudaStream_t stream, int zero_to = 64);
Status dispatch_back(const LayerShape& shape, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, const TaskList& list, int sms,
                     cudaStream_t stream);

// y_TxD[t] = sum over s, in slot order, FP32, of weight_TxK[t, s] * rows_MxD[row_TxK[t, s]], rounded once. weight null: 1.
Status combine_rows(const LayerShape& shape, const uint16_t* rows_MxD, const float* weight_TxK, const Plan& plan, uint16_t* y_TxD,
                    cudaStream_t stream);

// y_TxD[t] = 0 for every token none of whose slots has a row (where the down product scatters to tokens itself, K = 1).
Status zero_unrouted(const LayerShape& shape, const Plan& plan, uint16_t* y_TxD, cudaStream_t stream);

// d_weight_TxK = the partial sums of each slot's row added in order, one per 128 columns of F and `more` after them; 0 for a slot
// without a row.
Status sum_weight_partials(const LayerShape& shape, const float* partial_CxM, const Plan& plan, float* d_weight_TxK,
                           cudaStream_t stream, int more = 0);

}  // namespace moe
