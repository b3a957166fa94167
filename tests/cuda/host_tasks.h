// The task lists of host tests, as the device's builder would write them.
#pragma once

#include <vector>

#include "tiling.h"

namespace moe {

template <class Integers>
std::vector<Task> list_tasks(const Tiling& tiling, const Integers& count_E, const Integers& start_E, int clusters = 1) {
  std::vector<int> first = {0}, light = {0};
  for (int rows : count_E) {
    const TaskGrid grid = task_grid(tiling, rows);
    first.push_back(first.back() + grid.total);
    light.push_back(light.back() + grid.light);
  }
  const ListOrder order = {first.data(), light.data(), static_cast<int>(first.size()) - 1, clusters};
  std::vector<Task> tasks(order.count());
  for (int task = 0; task < order.count(); ++task) {
    const int e = order.expert_of(task);
    tasks.at(order.place(task, e)) = make_task(tiling, task_grid(tiling, count_E[e]), task - first[e], e, start_E[e], count_E[e]);
  }
  return tasks;
}

}  // namespace moe
