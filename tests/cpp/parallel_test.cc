// The task loop on pools of several kinds: all of it under the thread sanitizer too.
#include <atomic>
#include <stdexcept>

#include "check.h"

namespace moejax::cpu {
namespace {

void EveryTaskRunsOnce() {
  for (int threads : {1, 2, 8}) {
    TestPool pool(threads);
    for (int64_t tasks : {0, 1, 7, 1000}) {
      std::vector<int> runs(tasks, 0);  // plain ints: a task that ran twice would be a race
      ParallelFor(pool, tasks, [&](int64_t task) { ++runs[task]; });
      for (int64_t task = 0; task < tasks; ++task) CHECK(runs[task] == 1, "task %d ran %d times", int(task), runs[task]);
    }
  }
}

// A pool whose threads never come back while the caller waits: its work stays queued.
class StuckPool : public Pool {
 public:
  int64_t num_threads() const override { return 4; }
  void Schedule(std::function<void()> work) override { queue.push_back(std::move(work)); }
  std::vector<std::function<void()>> queue;
};

void BusyPoolCannotDeadlock() {
  StuckPool pool;
  int64_t sum = 0;
  ParallelFor(pool, 100, [&](int64_t task) { sum += task; });
  CHECK(sum == 4950, "sum is %d", int(sum));
  for (auto& work : pool.queue) work();  // late workers find nothing to do, and the body is long gone
  CHECK(sum == 4950, "a late worker ran a task again");
}

// A pool that runs work inside Schedule.
class InlinePool : public Pool {
 public:
  int64_t num_threads() const override { return 3; }
  void Schedule(std::function<void()> work) override { work(); }
};

void PoolMayRunInline() {
  InlinePool pool;
  int64_t sum = 0;
  ParallelFor(pool, 10, [&](int64_t task) { sum += task; });
  CHECK(sum == 45, "sum is %d", int(sum));
}

void FirstExceptionComesBack() {
  TestPool pool(4);
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::atomic<int> started{0};
    std::string caught;
    try {
      ParallelFor(pool, 1000, [&](int64_t task) {
        ++started;
        if (task == 5) throw std::runtime_error("task 5");
      });
    } catch (const std::runtime_error& error) {
      caught = error.what();
    }
    CHECK(caught == "task 5", "caught '%s'", caught.c_str());
    CHECK(started >= 6 && started <= 1000, "%d started", started.load());
  }
}

void LoopsOfSeveralCallersShareAPool() {
  TestPool pool(3);
  std::vector<std::thread> callers;
  std::vector<int64_t> sums(4, 0);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        std::vector<int64_t> part(64, 0);
        ParallelFor(pool, 64, [&](int64_t task) { part[task] = task; });
        for (int64_t value : part) sums[caller] += value;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (int64_t sum : sums) CHECK(sum == 20 * 2016, "sum is %d", int(sum));
}

void TasksKeepSubnormals() {
#if defined(__x86_64__)
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);  // this thread flushes, as XLA's may
  TestPool pool(2);
  std::vector<float> halves(64);
  volatile float subnormal = FloatOf(2);
  ParallelFor(pool, 64, [&](int64_t task) { halves[task] = subnormal * 0.5f; });
  const unsigned after = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before);
  CHECK((after & 0x8040) == 0x8040, "the caller's mode was not restored");
  for (float half : halves) CHECK(BitsOf(half) == 1, "a task flushed a subnormal");
#endif
}

void ScratchIsPerThreadAndGrows() {
  float* small = Scratch(0, 16);
  CHECK(reinterpret_cast<uintptr_t>(small) % 64 == 0, "not aligned");
  CHECK(Scratch(0, 8) == small, "a smaller request moved the buffer");
  float* large = Scratch(0, 1 << 16);
  large[(1 << 16) - 1] = 1.0f;
  float* other = nullptr;
  std::thread([&] { other = Scratch(0, 16); }).join();
  CHECK(other != large, "two threads share scratch");
}

}  // namespace
}  // namespace moejax::cpu

int main() {
  using namespace moejax::cpu;
  EveryTaskRunsOnce();
  BusyPoolCannotDeadlock();
  PoolMayRunInline();
  FirstExceptionComesBack();
  LoopsOfSeveralCallersShareAPool();
  TasksKeepSubnormals();
  ScratchIsPerThreadAndGrows();
  std::puts("parallel: ok");
}
