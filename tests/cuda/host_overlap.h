// The steps of a layer (kernels_cuda/overlap.h) on the host machine: they run at join(), one after the other, in any of the orders that
// what they wait for allows. A step that does not wait for what it needs meets memory that is full of NaN in one of them.
#pragma once

#include <vector>

#include "overlap.h"

namespace moe {

uint32_t step_order = 0;  // which order, by its bits; 0: that in which the steps are given
int weakened_step = -1;   // waits for all but one, whatever it was given with: a fault for the tests

class Overlap::Steps {
 public:
  struct Step {
    After after;
    Launch launch;
    bool done = false;
  };
  std::vector<Step> all;
  bool overlaps = true;

  // Steps before the one that a step may overtake, or all before it.
  bool ready(size_t i) const {
    const size_t needed = all[i].after == After::kAll ? i : i - (i > 0);
    for (size_t j = 0; j < needed; ++j) {
      if (!all[j].done) return false;
    }
    return true;
  }
  // The first that has not run, or, if this bit of the order says so, the last that may.
  size_t next(size_t bit) const {
    size_t first = 0, last = 0;
    while (all[first].done) ++first;
    for (size_t i = first; i < all.size(); ++i) {
      if (!all[i].done && ready(i)) last = i;
    }
    return step_order >> (bit % 32) & 1 ? last : first;
  }
};

Overlap::Overlap(cudaStream_t, bool overlaps) : steps_(std::make_unique<Steps>()) { steps_->overlaps = overlaps; }
Overlap::~Overlap() = default;

Status Overlap::step(After after, const Launch& launch) {
  if (!steps_->overlaps) after = After::kAll;
  if (static_cast<int>(steps_->all.size()) == weakened_step) after = After::kAllButOne;
  steps_->all.push_back({after, launch});
  return {};
}

Status Overlap::join() {
  for (size_t ran = 0; ran < steps_->all.size(); ++ran) {
    Steps::Step& step = steps_->all[steps_->next(ran)];
    step.done = true;
    if (Status status = step.launch(nullptr); !status.ok()) return status;
  }
  return {};
}

}  // namespace moe
