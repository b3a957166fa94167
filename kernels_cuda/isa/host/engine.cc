#include "engine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <limits>
#include <map>

#include "fibers.h"
#include "races.h"

namespace moe::host {
namespace {

constexpr uint32_t kBase = 1024;  // where shared memory starts in a block's 32-bit window

using Action = std::function<void()>;

struct Worker {
  std::vector<Action> uncommitted;
  std::vector<std::pair<uint32_t, Action>> gathers;  // since the last gather_arrive
  std::deque<std::vector<Action>> stores;            // committed groups not yet done
  int committed = 0;
};

struct Barrier {
  int64_t arrivals = 0, pending = 0, bytes = 0;
  uint32_t phase = 0;
  int clock = 0;  // of the race detector
  std::vector<int> waiting;
};

struct Flight {  // accumulators of a warpgroup with products under way
  int pending = 0;
  Accumulators registers, values;
  std::vector<float> memory;  // of `values`
};

struct Warpgroup {
  std::vector<Action> open;
  std::deque<std::vector<Action>> groups;
  int committed = 0;
  std::map<void*, Flight> flights;  // by the first thread's registers
};

struct Engine {
  Fibers fibers;
  Races races;
  std::vector<Worker> workers;
  bool lazy;  // copies and stores happen only when someone must wait for them
  std::vector<uint8_t> memory[kBlocks];
  std::map<std::pair<int, uint32_t>, Barrier> barriers;
  std::map<std::pair<int, int>, Warpgroup> products;
  std::vector<Action> copies;  // not yet landed
  std::vector<int> at_cluster;

  Engine(int threads, int shared_bytes, uint32_t seed)
      : fibers(kBlocks, threads, seed),
        races(kBlocks, threads, kBase, static_cast<uint32_t>(shared_bytes), [this](const std::string& what) { fibers.fail(what); }),
        workers(static_cast<size_t>(kBlocks * threads)),
        lazy(seed % 2 == 0) {
    for (auto& bytes : memory) bytes.assign(static_cast<size_t>(shared_bytes), 0xFF);
  }
};

Engine* engine = nullptr;

int self() { return engine->fibers.self(); }
Worker& me() { return engine->workers[static_cast<size_t>(self())]; }

bool land_copy() {
  if (engine->copies.empty()) return false;
  const size_t i = engine->fibers.random()() % engine->copies.size();
  const Action action = std::move(engine->copies[i]);
  engine->copies.erase(engine->copies.begin() + static_cast<long>(i));
  action();
  return true;
}

void do_oldest_group(std::deque<std::vector<Action>>& groups) {
  for (Action& action : groups.front()) action();
  groups.pop_front();
}

bool do_oldest_store() {
  for (Worker& worker : engine->workers) {
    if (worker.stores.empty()) continue;
    do_oldest_group(worker.stores);
    return true;
  }
  return false;
}

void whim() {
  if (engine->lazy) return;
  if (engine->fibers.random()() % 8 == 0) land_copy();
  if (engine->fibers.random()() % 16 == 0) do_oldest_store();
}

Barrier& barrier_at(int block, uint32_t address) {
  auto found = engine->barriers.find({block, address});
  if (found == engine->barriers.end()) fail("barrier at " + std::to_string(address) + " was never initialised");
  return found->second;
}

void settle(Barrier& bar, uint32_t address) {
  if (bar.pending < 0) fail("too many arrivals on the barrier at " + std::to_string(address));
  if (bar.pending == 0 && bar.bytes == 0) {
    bar.pending = bar.arrivals;
    ++bar.phase;
    engine->races.complete(bar.clock, bar.phase);
    engine->fibers.wake(bar.waiting);
  }
}

void count_arrivals(int block, uint32_t address, uint32_t count, int64_t expect_bytes) {
  Barrier& bar = barrier_at(block, address);
  bar.bytes += expect_bytes;
  bar.pending -= count;
  settle(bar, address);
}

}  // namespace

void fail(const std::string& what) { engine->fibers.fail(what); }

int block() { return engine->fibers.block(); }
int thread() { return engine->fibers.thread(); }

uint8_t* shared(int block, uint32_t address, uint32_t bytes) {
  if (address < kBase || address + bytes > kBase + engine->memory[block].size()) {
    fail("access to shared address " + std::to_string(address) + ", " + std::to_string(bytes) + " bytes, is out of bounds");
  }
  return engine->memory[block].data() + (address - kBase);
}

uint8_t* read(uint32_t address, uint32_t bytes) {
  uint8_t* const at = shared(block(), address, bytes);
  engine->races.read(self(), address, bytes);
  return at;
}
uint8_t* written(uint32_t address, uint32_t bytes) { return written_in(block(), address, bytes); }
uint8_t* written_in(int block, uint32_t address, uint32_t bytes) {
  uint8_t* const at = shared(block, address, bytes);
  engine->races.write(self(), block, address, bytes);
  return at;
}
uint8_t* read_by_warp(uint32_t address, uint32_t bytes) {
  uint8_t* const at = shared(block(), address, bytes);
  engine->races.warp_read(self(), address, bytes);
  return at;
}
uint8_t* written_by_warp(uint32_t address, uint32_t bytes) {
  uint8_t* const at = shared(block(), address, bytes);
  engine->races.warp_write(self(), address, bytes);
  return at;
}

void copy_writes(int block, uint32_t address, uint32_t bytes, uint32_t bar) {
  const Barrier& barrier = barrier_at(block, bar);
  engine->races.copy_in(self(), block, address, bytes, barrier.clock, barrier.phase + 1, false);
}
void store_reads(uint32_t address, uint32_t bytes) {
  shared(block(), address, bytes);
  engine->races.copy_out(self(), address, bytes, static_cast<uint32_t>(me().committed + 1));
}
void product_reads(uint32_t address, uint32_t bytes) {
  shared(block(), address, bytes);
  engine->races.operand(self(), address, bytes, static_cast<uint32_t>(engine->products[{block(), thread() / 128}].committed + 1));
}

void meet(int group, int member, int threads, const char* name, uint64_t argument, void* data,
          const std::function<void(void**)>& combine) {
  engine->fibers.meet(group, member, threads, name, argument, data, combine);
}

void barrier_init(uint32_t address, uint32_t arrivals) {
  shared(block(), address, 8);
  Barrier& bar = engine->barriers[{block(), address}];
  bar = {};
  bar.arrivals = bar.pending = arrivals;
  bar.clock = engine->races.new_barrier(block(), address);
}

void barrier_arrive(int block, uint32_t address, uint32_t count, int64_t expect_bytes) {
  engine->races.arrive(self(), barrier_at(block, address).clock);
  count_arrivals(block, address, count, expect_bytes);
}

void barrier_complete(int block, uint32_t address, int64_t bytes) {
  Barrier& bar = barrier_at(block, address);
  bar.bytes -= bytes;
  settle(bar, address);
}

void barrier_wait(uint32_t address, uint32_t parity) {
  Barrier& bar = barrier_at(block(), address);
  while ((bar.phase & 1) == parity) {
    bar.waiting.push_back(engine->fibers.self());
    engine->fibers.sleep({"the barrier", "", address});
  }
  engine->races.acquire(self(), bar.clock);
}

bool barrier_passed(uint32_t address, uint32_t parity) {
  Barrier& bar = barrier_at(block(), address);
  if ((bar.phase & 1) == parity) return false;
  engine->races.acquire(self(), bar.clock);
  return true;
}

void cluster_sync() {
  engine->at_cluster.push_back(engine->fibers.self());
  if (engine->at_cluster.size() == engine->workers.size()) {
    engine->at_cluster.pop_back();
    engine->races.sync_all();
    engine->fibers.wake(engine->at_cluster);
    return;
  }
  engine->fibers.sleep({"the cluster"});
}

void warp_synced() { engine->races.warp_sync(self()); }
void fence_async() { engine->races.fence(self()); }

void copy_in(Action action) { engine->copies.push_back(std::move(action)); }

void gather(uint32_t dst, Action action) { me().gathers.emplace_back(dst, std::move(action)); }

void gather_arrive(uint32_t address) {
  const int at = block();
  const Barrier& bar = barrier_at(at, address);
  for (const auto& [dst, action] : me().gathers) engine->races.copy_in(self(), at, dst, 16, bar.clock, bar.phase + 1, true);
  copy_in([at, address, actions = std::move(me().gathers)] {
    for (auto& [dst, action] : actions) action();
    count_arrivals(at, address, 1, 0);
  });
  me().gathers.clear();
}

void copy_out(Action action) { me().uncommitted.push_back(std::move(action)); }

void commit_stores() {
  me().stores.push_back(std::move(me().uncommitted));
  me().uncommitted.clear();
  ++me().committed;
}

void wait_stores(int pending) {
  while (static_cast<int>(me().stores.size()) > pending) do_oldest_group(me().stores);
  engine->races.stores_done(self(), static_cast<uint32_t>(std::max(0, me().committed - pending)));
}

void queue_product(int warpgroup, void** accumulators, int floats, std::function<void(const Accumulators&)> action) {
  constexpr size_t kThreads = 128;
  Warpgroup& wg = engine->products[{block(), warpgroup}];
  Flight& flight = wg.flights[accumulators[0]];
  if (flight.pending++ == 0) {
    flight.memory.resize(kThreads * static_cast<size_t>(floats));
    for (size_t t = 0; t < kThreads; ++t) {
      float* const mine = static_cast<float*>(accumulators[t]);
      flight.registers.push_back(mine);
      flight.values.push_back(&flight.memory[t * static_cast<size_t>(floats)]);
      std::copy_n(mine, floats, flight.values[t]);
      std::fill_n(mine, floats, std::numeric_limits<float>::quiet_NaN());
    }
  } else if (flight.registers[1] != accumulators[1]) {
    fail("products of one warpgroup are under way on accumulators that overlap");
  }
  wg.open.push_back([&wg, first = accumulators[0], floats, action = std::move(action)] {
    Flight& now = wg.flights.at(first);
    action(now.values);
    if (--now.pending > 0) return;
    for (size_t t = 0; t < kThreads; ++t) std::copy_n(now.values[t], floats, now.registers[t]);
    wg.flights.erase(first);
  });
}

void commit_products(int warpgroup) {
  Warpgroup& wg = engine->products[{block(), warpgroup}];
  wg.groups.push_back(std::move(wg.open));
  wg.open.clear();
  ++wg.committed;
}

void wait_products(int warpgroup, int pending) {
  Warpgroup& wg = engine->products[{block(), warpgroup}];
  while (static_cast<int>(wg.groups.size()) > pending) do_oldest_group(wg.groups);
  engine->races.products_done(self(), static_cast<uint32_t>(std::max(0, wg.committed - pending)));
}

void run_cluster(int threads, int shared_bytes, uint32_t seed, const std::function<void()>& body) {
  std::string stopped;
  {
    Engine state(threads, shared_bytes, seed);
    engine = &state;
    const auto whole_thread = [&body] {
      body();
      if (!me().uncommitted.empty()) fail("a bulk store was never committed");
      if (!engine->products[{block(), thread() / 128}].flights.empty()) fail("a product was never waited for");
    };
    stopped = state.fibers.run(whole_thread, whim, [] { return land_copy() || do_oldest_store(); });
  }
  engine = nullptr;
  if (stopped.empty()) return;
  std::fprintf(stderr, "emulator: %s\n", stopped.c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}

}  // namespace moe::host
