#include "cpu/parallel.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace moejax::cpu {
namespace {

// Outlives the call: a worker that wakes up late finds no task left and only touches this.
struct Loop {
  explicit Loop(int64_t tasks, const std::function<void(int64_t)>& body) : tasks(tasks), body(&body) {}

  const int64_t tasks;
  const std::function<void(int64_t)>* const body;  // valid while a claimed task is unfinished, for the caller waits for those
  std::atomic<int64_t> next{0};

  std::mutex mutex;
  std::condition_variable finished;
  int64_t done = 0;            // guarded by mutex
  std::exception_ptr error;    // guarded by mutex

  void Work() {
    IeeeScope ieee;
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      std::exception_ptr thrown;
      int64_t completed = 1;
      try {
        (*body)(task);
      } catch (...) {
        thrown = std::current_exception();
        // Claim all tasks nobody has begun, so that they count as done without running.
        const int64_t first_unclaimed = next.exchange(tasks, std::memory_order_relaxed);
        if (first_unclaimed < tasks) completed += tasks - first_unclaimed;
      }
      std::lock_guard<std::mutex> lock(mutex);
      if (thrown && !error) error = thrown;
      done += completed;
      if (done == tasks) finished.notify_all();
    }
  }
};

struct ScratchBuffer {
  float* data = nullptr;
  int64_t floats = 0;
  ~ScratchBuffer() { std::free(data); }
};

}  // namespace

void ParallelFor(Pool& pool, int64_t tasks, const std::function<void(int64_t)>& body) {
  if (tasks <= 0) return;
  auto loop = std::make_shared<Loop>(tasks, body);
  const int64_t helpers = std::min(pool.num_threads(), tasks - 1);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->Work(); });
  loop->Work();
  std::unique_lock<std::mutex> lock(loop->mutex);
  loop->finished.wait(lock, [&] { return loop->done == loop->tasks; });
  if (loop->error) std::rethrow_exception(loop->error);
}

float* Scratch(int slot, int64_t floats) {
  thread_local ScratchBuffer buffers[kScratchSlots];
  ScratchBuffer& buffer = buffers[slot];
  if (buffer.floats < floats) {
    std::free(buffer.data);
    buffer.data = nullptr;
    buffer.floats = 0;
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
    buffer.data = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (buffer.data == nullptr) throw std::bad_alloc();
    buffer.floats = floats;
  }
  return buffer.data;
}

#if defined(__x86_64__) || defined(_M_X64)
IeeeScope::IeeeScope() : saved_(_mm_getcsr()) {
  constexpr uint32_t kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040, kRoundingMode = 0x6000;
  _mm_setcsr(static_cast<uint32_t>(saved_) & ~(kFlushToZero | kDenormalsAreZero | kRoundingMode));
}
IeeeScope::~IeeeScope() { _mm_setcsr(static_cast<uint32_t>(saved_)); }
#elif defined(__aarch64__)
IeeeScope::IeeeScope() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  constexpr uint64_t kFlushToZero = uint64_t{1} << 24, kRoundingMode = uint64_t{3} << 22;
  asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(kFlushToZero | kRoundingMode)));
}
IeeeScope::~IeeeScope() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
IeeeScope::IeeeScope() : saved_(0) {}
IeeeScope::~IeeeScope() {}
#endif

}  // namespace moejax::cpu
