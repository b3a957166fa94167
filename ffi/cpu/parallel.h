// Loops over tasks on somebody else's threads: XLA's pool in the handlers, std::thread in the C++ tests.
//
// Which thread runs a task never decides what it computes, so results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <functional>

namespace moejax::cpu {

class Pool {
 public:
  virtual ~Pool() = default;
  // Threads that may run scheduled work at the same time, the caller's not counted.
  virtual int64_t num_threads() const = 0;
  // Runs `work` once, now or later, on any thread; may run it inside the call.
  virtual void Schedule(std::function<void()> work) = 0;
};

// Calls body(0) ... body(tasks - 1), each once, in any order, and returns when all are done. The caller works too and waits only for
// tasks that a thread has already begun, so a pool whose threads are all busy (or are all callers like this one) cannot deadlock it.
// Every task runs with IEEE arithmetic (round to nearest, subnormals kept), whatever mode its thread was in. The first exception a
// task throws is rethrown here, after the tasks that had begun have finished; the others are then not started.
void ParallelFor(Pool& pool, int64_t tasks, const std::function<void(int64_t)>& body);

// Scratch of the current thread: at least `floats` FP32 values, 64-byte aligned, contents undefined. `slot` tells apart the buffers
// one task needs at a time. Kept until the thread ends, because a fresh allocation of a few MiB costs its page faults on every call.
inline constexpr int kScratchSlots = 8;
float* Scratch(int slot, int64_t floats);

// Sets IEEE arithmetic for the enclosing scope. XLA's threads may flush subnormals, the caller's may not: without this the bits
// would depend on who runs a task.
class IeeeScope {
 public:
  IeeeScope();
  ~IeeeScope();
  IeeeScope(const IeeeScope&) = delete;
  IeeeScope& operator=(const IeeeScope&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace moejax::cpu
