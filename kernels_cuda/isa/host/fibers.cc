#include "fibers.h"

#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace moe::host {

namespace context = boost::context;

namespace {

constexpr size_t kStackBytes = 128 * 1024;

// Stacks with a guard page, kept from run to run: their pages are then already there.
struct Stacks {
  static std::vector<context::stack_context>& free() {
    static std::vector<context::stack_context> all;
    return all;
  }
  context::stack_context allocate() {
    if (free().empty()) return context::protected_fixedsize_stack(kStackBytes).allocate();
    const context::stack_context stack = free().back();
    free().pop_back();
    return stack;
  }
  void deallocate(context::stack_context& stack) { free().push_back(stack); }
};

// The address sanitizer must be told of every switch: where the stack is that is switched to, and when it has been.
void before_switch([[maybe_unused]] void** fake, [[maybe_unused]] const void* bottom, [[maybe_unused]] size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake, bottom, size);
#endif
}
void after_switch([[maybe_unused]] void* fake, [[maybe_unused]] const void** bottom, [[maybe_unused]] size_t* size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, bottom, size);
#endif
}

}  // namespace

// A fiber, or the scheduler's own place while a fiber runs.
struct Fibers::Fiber {
  context::fiber suspended;
  const void* bottom = nullptr;
  size_t size = 0;
  void* fake = nullptr;  // of the address sanitizer
  bool ended = false;
  Reason waiting;
};

Fibers::Fibers(int blocks, int threads, uint32_t seed)
    : threads_(threads), count_(blocks * threads), random_(seed), fibers_(static_cast<size_t>(blocks * threads)), scheduler_(new Fiber) {}

Fibers::~Fibers() = default;

std::string Fibers::run(const std::function<void()>& body, const std::function<void()>& whim, const std::function<bool()>& progress) {
  Stacks stacks;
  for (int i = 0; i < count_; ++i) {
    const context::stack_context stack = stacks.allocate();
    Fiber& fiber = fibers_[i];
    fiber.bottom = static_cast<char*>(stack.sp) - stack.size;
    fiber.size = stack.size;
    ready_.push_back(i);
    fiber.waiting = {"its first turn"};
    fiber.suspended = context::fiber(std::allocator_arg, context::preallocated(stack.sp, stack.size, stack), stacks,
                                     [this, i, &body](context::fiber&& from) {
                                       after_switch(nullptr, &scheduler_->bottom, &scheduler_->size);
                                       scheduler_->suspended = std::move(from);
                                       try {
                                         if (!unwinding_) body();
                                       } catch (const Stopped&) {
                                       }
                                       fibers_[i].ended = true;
                                       ++finished_;
                                       before_switch(nullptr, scheduler_->bottom, scheduler_->size);
                                       return std::move(scheduler_->suspended);
                                     });
  }
  try {
    while (error_.empty()) {
      whim();
      if (!ready_.empty()) {
        const size_t i = random_() % ready_.size();
        const int next = ready_[i];
        ready_[i] = ready_.back();
        ready_.pop_back();
        resume(next);
      } else if (!progress()) {
        if (finished_ == count_) break;
        fail(deadlock());
      }
    }
  } catch (const Stopped&) {  // from a unit; the message is in error_
  }
  unwind();
  return error_;
}

// Fibers that a stopped run leaves behind end by an exception, so that what lies on their stacks is destroyed.
void Fibers::unwind() {
  unwinding_ = true;
  for (int i = 0; i < count_; ++i) {
    if (fibers_[i].suspended) resume(i);
  }
}

void Fibers::resume(int fiber) {
  self_ = fiber;
  before_switch(&scheduler_->fake, fibers_[fiber].bottom, fibers_[fiber].size);
  fibers_[fiber].suspended = std::move(fibers_[fiber].suspended).resume();
  after_switch(scheduler_->fake, nullptr, nullptr);
  self_ = -1;
}

void Fibers::sleep(const Reason& reason) {
  Fiber& me = fibers_[self_];
  me.waiting = reason;
  before_switch(&me.fake, scheduler_->bottom, scheduler_->size);
  scheduler_->suspended = std::move(scheduler_->suspended).resume();
  after_switch(me.fake, &scheduler_->bottom, &scheduler_->size);
  if (unwinding_) throw Stopped{};
}

void Fibers::turn(const Reason& reason) {
  ready_.push_back(self_);
  sleep(reason);
}

void Fibers::wake(std::vector<int>& waiting) {
  ready_.insert(ready_.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

void Fibers::fail(const std::string& what) {
  if (error_.empty()) {
    error_ = what;
    if (self_ >= 0) error_ += " (block " + std::to_string(block()) + ", thread " + std::to_string(thread()) + ")";
  }
  throw Stopped{};
}

std::string Fibers::deadlock() const {
  std::map<std::string, int> waiting;
  for (int i = 0; i < count_; ++i) {
    const Fiber& fiber = fibers_[i];
    if (fiber.ended) continue;
    std::string text = "threads of block " + std::to_string(i / threads_) + " wait for " + fiber.waiting.what + fiber.waiting.name;
    if (fiber.waiting.address >= 0) text += " at " + std::to_string(fiber.waiting.address);
    ++waiting[text];
  }
  std::string message = "deadlock:";
  for (const auto& [text, count] : waiting) message += " " + std::to_string(count) + " " + text + ";";
  return message;
}

void Fibers::meet(int group, int member, int members, const char* name, uint64_t argument, void* data,
                  const std::function<void(void**)>& combine) {
  Meeting& meeting = meetings_[{block(), group}];
  if (meeting.arrived == 0) {
    meeting.name = name;
    meeting.argument = argument;
    meeting.data.assign(static_cast<size_t>(members), nullptr);
  } else if (std::strcmp(meeting.name, name) != 0 || meeting.argument != argument) {
    fail(std::string("lanes disagree: ") + meeting.name + " and " + name + ", or their arguments");
  }
  meeting.data[static_cast<size_t>(member)] = data;
  if (++meeting.arrived == members) {
    if (combine) combine(meeting.data.data());
    meeting.arrived = 0;
    wake(meeting.waiting);
    return;
  }
  meeting.waiting.push_back(self_);
  sleep({"the other lanes of ", name});
}

}  // namespace moe::host
