// The threads of an emulated GPU: a fiber each (Boost.Context), of which one runs at a time, chosen by a seed; and collectives, where
// they meet. Both emulators stand on it: engine.h (Hopper) and sm100_machine.h (Blackwell) add memory, barriers and the units that
// work beside the threads. Boost is needed by tests alone (tests/cuda/host_build.py finds it).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace moe::host {

// Thrown by Fibers::fail, in a fiber or in a unit; ends the run.
struct Stopped {};

// What a fiber waits for, put into words only when nobody can go on.
struct Reason {
  const char* what = "";
  const char* name = "";
  int64_t address = -1;
};

class Fibers {
 public:
  // `threads` fibers for each of `blocks` blocks. Equal seeds give equal runs.
  Fibers(int blocks, int threads, uint32_t seed);
  ~Fibers();
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;

  // Runs `body` as every fiber until all have ended. Before each turn `whim` may let asynchronous units do something; `progress` must, when
  // no fiber can go on, and returns false if there was nothing to do. Returns "" or what stopped the run.
  std::string run(const std::function<void()>& body, const std::function<void()>& whim, const std::function<bool()>& progress);

  // Stops the run; `what` gets the block and thread that noticed.
  [[noreturn]] void fail(const std::string& what);
  const std::string& error() const { return error_; }

  int self() const { return self_; }  // -1 in a unit
  int block() const { return self_ / threads_; }
  int thread() const { return self_ % threads_; }
  int count() const { return count_; }
  int finished() const { return finished_; }
  std::mt19937& random() { return random_; }

  // From a fiber: others run until somebody wakes it, or, with `turn`, until it is chosen again.
  void sleep(const Reason& reason);
  void turn(const Reason& reason = {"its turn"});
  void wake(std::vector<int>& waiting);  // and clears the list

  // All `members` of group `group` of this block meet; name and argument must agree. The last to arrive runs `combine` on everyone's
  // `data`, by member; nobody goes on before.
  void meet(int group, int member, int members, const char* name, uint64_t argument, void* data,
            const std::function<void(void**)>& combine);

 private:
  struct Fiber;
  struct Meeting {
    int arrived = 0;
    const char* name = nullptr;
    uint64_t argument = 0;
    std::vector<void*> data;
    std::vector<int> waiting;
  };
  void resume(int fiber);
  void unwind();
  std::string deadlock() const;

  int threads_, count_;
  int self_ = -1, finished_ = 0;
  bool unwinding_ = false;
  std::mt19937 random_;
  std::string error_;
  std::vector<int> ready_;
  std::map<std::pair<int, int>, Meeting> meetings_;  // (block, group)
  std::vector<Fiber> fibers_;
  std::unique_ptr<Fiber> scheduler_;
};

}  // namespace moe::host
