#include "engine.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace moe::host {
namespace {

constexpr uint32_t kBase = 1024;  // where shared memory starts in a block's 32-bit window

struct Worker {
  std::thread thread;
  std::condition_variable turn;
  bool running = false;
  std::string waiting_for;
  std::deque<std::function<void()>> uncommitted;
  std::vector<std::function<void()>> gathers;  // since the last gather_arrive
  std::deque<std::vector<std::function<void()>>> stores;  // committed groups not yet done
};

struct Meeting {
  int arrived = 0;
  const char* name = nullptr;
  uint64_t argument = 0;
  std::vector<void*> data;
  std::vector<int> waiting;
};

struct Barrier {
  int64_t arrivals = 0, pending = 0, bytes = 0;
  uint32_t phase = 0;
  std::vector<int> waiting;
};

struct Warpgroup {
  std::vector<std::function<void()>> open;
  std::deque<std::vector<std::function<void()>>> groups;
};

struct Engine {
  std::mutex mutex;
  std::vector<Worker> workers;
  std::vector<int> ready;
  int finished = 0;
  int threads = 0;
  std::mt19937 random;
  bool lazy = false;  // copies and stores happen only when someone must wait for them
  std::vector<uint8_t> memory[kBlocks];
  std::map<std::pair<int, int>, Meeting> meetings;  // (block, group)
  std::map<std::pair<int, uint32_t>, Barrier> barriers;
  std::map<std::pair<int, int>, Warpgroup> products;
  std::vector<std::function<void()>> copies;  // not yet landed
  std::vector<int> at_cluster;
  std::condition_variable done;
};

Engine* engine = nullptr;
thread_local int self = -1;

void land_copy() {
  const size_t i = engine->random() % engine->copies.size();
  auto action = std::move(engine->copies[i]);
  engine->copies.erase(engine->copies.begin() + static_cast<long>(i));
  action();
}

bool do_oldest_store() {
  for (Worker& worker : engine->workers) {
    if (!worker.stores.empty()) {
      for (auto& action : worker.stores.front()) action();
      worker.stores.pop_front();
      return true;
    }
  }
  return false;
}

void wake(std::vector<int>& waiting) {
  engine->ready.insert(engine->ready.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

// Picks who runs next; the caller holds the lock and is not running any more.
void pass_on() {
  while (engine->ready.empty()) {
    if (!engine->copies.empty()) {
      land_copy();
    } else if (!do_oldest_store()) {
      if (engine->finished == static_cast<int>(engine->workers.size())) {
        engine->done.notify_all();
        return;
      }
      std::map<std::string, int> reasons;
      for (Worker& worker : engine->workers) {
        if (!worker.waiting_for.empty()) ++reasons[worker.waiting_for];
      }
      std::string message = "deadlock:";
      for (auto& [reason, count] : reasons) message += " " + std::to_string(count) + " threads wait for " + reason + ";";
      fail(message);
    }
  }
  if (!engine->lazy) {
    if (!engine->copies.empty() && engine->random() % 8 == 0) land_copy();
    if (engine->random() % 16 == 0) do_oldest_store();
  }
  const size_t i = engine->random() % engine->ready.size();
  const int next = engine->ready[i];
  engine->ready[i] = engine->ready.back();
  engine->ready.pop_back();
  engine->workers[next].running = true;
  engine->workers[next].turn.notify_one();
}

// The calling thread has put itself on a list that will make it ready again.
void sleep(std::unique_lock<std::mutex>& lock, const std::string& reason) {
  Worker& me = engine->workers[self];
  me.running = false;
  me.waiting_for = reason;
  pass_on();
  me.turn.wait(lock, [&] { return me.running; });
  me.waiting_for.clear();
}

Barrier& barrier_at(int block, uint32_t address) {
  auto found = engine->barriers.find({block, address});
  if (found == engine->barriers.end()) fail("barrier at " + std::to_string(address) + " was never initialised");
  return found->second;
}

void settle(Barrier& bar) {
  if (bar.pending == 0 && bar.bytes == 0) {
    bar.pending = bar.arrivals;
    ++bar.phase;
    wake(bar.waiting);
  }
}

}  // namespace

void fail(const std::string& what) {
  std::fprintf(stderr, "emulator: %s (block %d, thread %d)\n", what.c_str(), self < 0 ? -1 : block(), self < 0 ? -1 : thread());
  std::fflush(nullptr);
  std::_Exit(1);
}

int block() { return self / engine->threads; }
int thread() { return self % engine->threads; }

uint8_t* shared(int block, uint32_t address, uint32_t bytes) {
  if (address < kBase || address + bytes > kBase + engine->memory[block].size()) {
    fail("access to shared address " + std::to_string(address) + ", " + std::to_string(bytes) + " bytes, is out of bounds");
  }
  return engine->memory[block].data() + (address - kBase);
}

void meet(int group, int member, int threads, const char* name, uint64_t argument, void* data,
          const std::function<void(void**)>& combine) {
  std::unique_lock<std::mutex> lock(engine->mutex);
  Meeting& meeting = engine->meetings[{block(), group}];
  if (meeting.arrived == 0) {
    meeting.name = name;
    meeting.argument = argument;
    meeting.data.assign(threads, nullptr);
  } else if (std::string(meeting.name) != name || meeting.argument != argument) {
    fail(std::string("lanes disagree: ") + meeting.name + " and " + name + " or their arguments");
  }
  meeting.data[member] = data;
  if (++meeting.arrived == threads) {
    if (combine) combine(meeting.data.data());
    meeting.arrived = 0;
    wake(meeting.waiting);
    return;
  }
  meeting.waiting.push_back(self);
  sleep(lock, std::string("the other lanes of ") + name);
}

void barrier_init(uint32_t address, uint32_t arrivals) {
  std::unique_lock<std::mutex> lock(engine->mutex);
  shared(block(), address, 8);
  Barrier& bar = engine->barriers[{block(), address}];
  bar = {};
  bar.arrivals = bar.pending = arrivals;
}

void barrier_arrive(int block, uint32_t address, uint32_t count, int64_t expect_bytes) {
  std::unique_lock<std::mutex> lock(engine->mutex);
  Barrier& bar = barrier_at(block, address);
  bar.bytes += expect_bytes;
  bar.pending -= count;
  if (bar.pending < 0) fail("too many arrivals on the barrier at " + std::to_string(address));
  settle(bar);
}

void barrier_complete(int block, uint32_t address, int64_t bytes) {  // from a landing copy: the lock is held
  Barrier& bar = barrier_at(block, address);
  bar.bytes -= bytes;
  settle(bar);
}

void barrier_wait(uint32_t address, uint32_t parity) {
  std::unique_lock<std::mutex> lock(engine->mutex);
  Barrier& bar = barrier_at(block(), address);
  while ((bar.phase & 1) == parity) {
    bar.waiting.push_back(self);
    sleep(lock, "the barrier at " + std::to_string(address) + " of block " + std::to_string(block()));
  }
}

void cluster_sync() {
  std::unique_lock<std::mutex> lock(engine->mutex);
  engine->at_cluster.push_back(self);
  if (engine->at_cluster.size() == engine->workers.size()) {
    engine->at_cluster.pop_back();
    wake(engine->at_cluster);
    return;
  }
  sleep(lock, "the cluster");
}

void copy_in(std::function<void()> action) {
  std::unique_lock<std::mutex> lock(engine->mutex);
  engine->copies.push_back(std::move(action));
}

void gather(std::function<void()> action) { engine->workers[self].gathers.push_back(std::move(action)); }

void gather_arrive(uint32_t address) {
  const int at = block();
  copy_in([at, address, actions = std::move(engine->workers[self].gathers)] {  // landing: the lock is held
    for (auto& action : actions) action();
    Barrier& bar = barrier_at(at, address);
    if (--bar.pending < 0) fail("too many arrivals on the barrier at " + std::to_string(address));
    settle(bar);
  });
  engine->workers[self].gathers.clear();
}

void copy_out(std::function<void()> action) { engine->workers[self].uncommitted.push_back(std::move(action)); }

void commit_stores() {
  std::unique_lock<std::mutex> lock(engine->mutex);
  Worker& me = engine->workers[self];
  me.stores.emplace_back(me.uncommitted.begin(), me.uncommitted.end());
  me.uncommitted.clear();
}

void wait_stores(int pending) {
  std::unique_lock<std::mutex> lock(engine->mutex);
  Worker& me = engine->workers[self];
  while (static_cast<int>(me.stores.size()) > pending) {
    for (auto& action : me.stores.front()) action();
    me.stores.pop_front();
  }
}

void queue_product(int warpgroup, std::function<void()> action) {  // from a meeting: the lock is held
  engine->products[{block(), warpgroup}].open.push_back(std::move(action));
}

void commit_products(int warpgroup) {
  Warpgroup& wg = engine->products[{block(), warpgroup}];
  wg.groups.push_back(std::move(wg.open));
  wg.open.clear();
}

void wait_products(int warpgroup, int pending) {
  Warpgroup& wg = engine->products[{block(), warpgroup}];
  while (static_cast<int>(wg.groups.size()) > pending) {
    for (auto& action : wg.groups.front()) action();
    wg.groups.pop_front();
  }
}

void run_cluster(int threads, int shared_bytes, uint32_t seed, const std::function<void()>& body) {
  Engine state;
  engine = &state;
  state.threads = threads;
  state.random.seed(seed);
  state.lazy = seed % 2 == 0;
  for (auto& memory : state.memory) memory.assign(shared_bytes, 0xFF);
  state.workers = std::vector<Worker>(static_cast<size_t>(kBlocks * threads));
  std::unique_lock<std::mutex> lock(state.mutex);
  for (int i = 0; i < kBlocks * threads; ++i) {
    state.ready.push_back(i);
    state.workers[i].thread = std::thread([i, &state, &body] {
      self = i;
      {
        std::unique_lock<std::mutex> start(state.mutex);
        state.workers[i].turn.wait(start, [&] { return state.workers[i].running; });
      }
      body();
      std::unique_lock<std::mutex> end(state.mutex);
      if (!state.workers[i].uncommitted.empty()) fail("a bulk store was never committed");
      state.workers[i].running = false;
      ++state.finished;
      pass_on();
    });
  }
  pass_on();
  state.done.wait(lock, [&] { return state.finished == kBlocks * threads; });
  while (!state.copies.empty()) fail("a copy was still under way when the kernel ended");
  for (Worker& worker : state.workers) {
    if (!worker.stores.empty()) fail("a bulk store was still under way when the kernel ended");
  }
  lock.unlock();
  for (Worker& worker : state.workers) worker.thread.join();
  engine = nullptr;
}

}  // namespace moe::host
