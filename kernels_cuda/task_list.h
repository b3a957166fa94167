// Task lists of the grouped products, built on the device from the plan's counts. What is in them: tiling.h; the builder: task_list.cu.
#pragma once

#include "moe.h"
#include "tiling.h"

namespace moe {

struct TaskList : Tiling {
  Task* tasks;         // room for max_tasks
  int32_t* num_tasks;  // of a list of two parts all three counts of Part
  ListCut cut;         // a list of one part, where there are more than kMostOrdered experts
};
// Of a list: all tasks, those in front of its cut, those behind it.
enum Part { kWhole, kFront, kBack };

constexpr int kMaxLists = 5;
constexpr int64_t kMostOrdered = 6000;  // experts: lists of more are only in the order of the experts

inline int64_t max_tasks(const LayerShape& shape, const Tiling& tiling) {
  return max_tasks(tiling, shape.rows, static_cast<int>(shape.experts));
}

// Fills up to kMaxLists lists in one launch, from each expert's count of rows and its first row.
Status build_tasks(int64_t experts, const int32_t* count_E, const int32_t* start_E, const TaskList* lists, int num_lists,
                   cudaStream_t stream);

inline Status build_tasks(const LayerShape& shape, const Plan& plan, const TaskList* lists, int num_lists, cudaStream_t stream) {
  return build_tasks(shape.experts, plan.count_E, plan.start_E, lists, num_lists, stream);
}

}  // namespace moe
