// Where a role's next task comes from, in the same order for all roles of a cluster: every n-th of the list, or what Cluster Launch Control
// hands over. Which cluster runs a task changes no result: a tile has one owner and a fixed order along K. A task may only wait for tasks
// with a smaller index.
#pragma once

#include "gemm_ring.h"
#include "task.h"

namespace moe {

// Every step-th task from `first` on. The next one is read while the current one is worked on: the read takes as long as a K block.
struct TaskStream {
  const Task* tasks;
  int index, step, count;
  Task next;

  MOE_FN TaskStream(const Task* tasks_, int count_, int first, int step_) : tasks(tasks_), index(first), step(step_), count(count_) {
    if (index < count) next = tasks[index];
  }
  MOE_FN bool take(Task& task) {
    if (index >= count) return false;
    task = next;
    index += step;
    if (index < count) next = tasks[index];
    return true;
  }
};

// f(task, arguments of the first kind) for every task of this block's cluster, in order.
template <class Isa, class Batch, class F>
MOE_FN void for_each_task(const Batch& batch, F f) {
  TaskStream stream(batch.tasks, *batch.num_tasks, Isa::cluster_index(), Isa::num_clusters());
  MOE_NO_UNROLL
  for (Task task; stream.take(task);) f(task, batch.kinds[0]);
}

// Barriers of work stealing, in every block. given: one arrival, the block's scheduler, with the 16 bytes of an answer; everybody waits who
// takes tasks. taken: everybody who took the answer arrives (Config::kTakers); the leader's scheduler waits.
template <class Config>
MOE_HOST_FN constexpr uint32_t given_barrier(uint32_t base, uint32_t answer) {
  return base + Config::kClcBarrierOffset + 8 * answer;
}
template <class Config>
MOE_HOST_FN constexpr uint32_t taken_barrier(uint32_t base, uint32_t answer) {
  return base + Config::kClcBarrierOffset + 8 * (Config::kClcSlots + answer);
}

// The cluster's own index first, then whatever it is granted, until it is refused; ids past the list have no work and are drained.
// kWholeWarp: all lanes of a warp take the task, else one thread does.
template <class Isa, class Config, bool kWholeWarp>
struct StolenTasks {
  const Task* tasks;
  int count;
  uint32_t base;
  uint32_t next;
  bool first = true;
  RingPosition<Config::kClcSlots> answer;

  template <class Batch>
  MOE_FN StolenTasks(const Batch& batch, uint32_t shared_base)
      : tasks(batch.tasks), count(*batch.num_tasks), base(shared_base), next(Isa::template cluster_id<Config::kBlocks>()) {}

  MOE_FN bool take(Task& task) {
    MOE_NO_UNROLL
    while (advance()) {
      if (next < static_cast<uint32_t>(count)) {
        task = tasks[next];
        return true;
      }
    }
    return false;
  }

  // Moves `next` on; false when there is nothing more to ask for.
  MOE_FN bool advance() {
    if (first) {
      first = false;
      return true;
    }
    Isa::template wait_cluster<Config::kBlocks>(given_barrier<Config>(base, answer.stage), answer.phase);
    uint32_t first_block = 0;
    const bool granted = Isa::stolen(base + Config::kClcOffset + 16 * answer.stage, first_block);
    Isa::fence_async_shared();  // the next answer is written there by the asynchronous proxy
    if (kWholeWarp) Isa::warp_sync();
    if (!kWholeWarp || Isa::lane_index() == 0) Isa::template arrive_leader<Config::kBlocks>(taken_barrier<Config>(base, answer.stage));
    answer.advance();
    next = first_block / Config::kBlocks;
    return granted;
  }
};

// One thread of every block: the leader asks, each counts the answer on its own barrier.
template <class Isa, class Config, class Batch>
MOE_FN void ask_for_work(const Batch& batch, uint32_t base) {
  const bool leads = Isa::template block_rank<Config::kBlocks>() == 0;
  StolenTasks<Isa, Config, false> tasks(batch, base);
  RingPosition<Config::kClcSlots> slot;
  tasks.advance();  // the cluster's own index
  bool granted = true;
  MOE_NO_UNROLL
  while (granted) {
    const uint32_t given = given_barrier<Config>(base, slot.stage);
    if (leads) Isa::template wait_cluster<Config::kBlocks>(taken_barrier<Config>(base, slot.stage), slot.phase ^ 1);
    Isa::barrier_expect_bytes(given, 16);
    if (leads) Isa::template steal<Config::kBlocks>(base + Config::kClcOffset + 16 * slot.stage, given);
    slot.advance();
    granted = tasks.advance();
  }
}

}  // namespace moe
