// Task lists of the grouped GEMMs, built on the device from the plan's counts. See task_list.cu.
#pragma once

#include "moe.h"
#include "task.h"

namespace moe {

struct TaskList {
  Kind kind;
  int tile_n;       // output columns of a block's tile (of F for kGateUp: half the accumulator width)
  int m_extent;     // weight gradients: output rows (of one half)
  int n_extent;     // output columns
  bool tokens_on_n; // tiles of 192 tokens, which pair along the columns (gemm_tokens_n.h)
  bool strips;      // weight gradients: strips of 16 row tiles, which pair along the columns (gemm_resident.h)
  bool skip_empty;  // weight gradients: experts without rows get no task (accumulation)
  Task* tasks;
  int32_t* num_tasks;
};

constexpr int kMaxLists = 5;

// Upper bound of the list's length for any routing.
int64_t max_tasks(const LayerShape& shape, const TaskList& list);

// Fills up to kMaxLists lists in one launch.
Status build_tasks(const LayerShape& shape, const Plan& plan, const TaskList* lists, int num_lists, cudaStream_t stream);

}  // namespace moe
