// Scheduler, shared memory, barriers, copies and work stealing of the machine; tensor memory and products are in sm100_tensor.cc.
#include "sm100_machine.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "sm100_state.h"

namespace moe::machine {

State* state = nullptr;

namespace {

// The two steps of a worker's oldest group of bulk stores.
void read_group(Worker& worker) {
  for (Store& store : worker.unread.front()) store.read();
  worker.unwritten.push_back(std::move(worker.unread.front()));
  worker.unread.pop_front();
}
void write_group(Worker& worker) {
  for (Store& store : worker.unwritten.front()) store.write();
  worker.unwritten.pop_front();
}

bool any_progress() {  // one asynchronous step; the seed picks the unit
  State& s = *state;
  const uint32_t first = s.random() % 4;
  for (uint32_t i = 0; i < 4; ++i) {
    switch ((first + i) % 4) {
      case 0:
        if (!s.copies.empty()) {
          const size_t at = s.random() % s.copies.size();
          auto action = std::move(s.copies[at]);
          s.copies.erase(s.copies.begin() + static_cast<long>(at));
          action();
          return true;
        }
        break;
      case 1:
        for (auto& queue : s.tensor) {
          if (!queue.empty()) {
            auto action = std::move(queue.front());
            queue.pop_front();
            action();
            return true;
          }
        }
        break;
      case 2:
        for (Worker& worker : s.workers) {
          if (!worker.unread.empty() && (worker.unwritten.empty() || s.random() % 2 == 0)) {
            read_group(worker);
            return true;
          }
          if (!worker.unwritten.empty()) {
            write_group(worker);
            return true;
          }
        }
        break;
      default:
        if (!s.steals.empty()) {
          auto action = std::move(s.steals.front());
          s.steals.erase(s.steals.begin());
          action();
          return true;
        }
    }
  }
  return false;
}

// Before each turn: what units do though nobody must wait for them.
void whim() {
  State& s = *state;
  if (s.mode == 2) {
    while (any_progress()) {
    }
  } else if (s.random() % 4 == 0 && (s.mode == 1 || s.polling)) {
    if (any_progress()) s.polls = 0;
  }
  s.polling = false;
}

void check_end() {
  State& s = *state;
  for (auto& [at, bar] : s.barriers) {
    if (bar.bytes != 0) {
      fail("the barrier at " + std::to_string(at.second) + " of block " + std::to_string(at.first) + " ends with " +
           std::to_string(bar.bytes) + " bytes " + (bar.bytes > 0 ? "missing" : "too many"));
    }
  }
  for (int b = 0; b < s.launch.blocks; ++b) {
    for (int c = 0; c < 512; ++c) {
      if (s.tmem[b].owner[c] != 0) fail("tensor memory of block " + std::to_string(b) + " was never deallocated");
    }
    for (Chunk& chunk : s.memory[b].chunks) {
      if (chunk.readers != 0) fail("shared memory is still being read when the kernel ends");
    }
  }
}

// One cluster, on its own state.
std::string run_cluster(const Launch& launch, uint32_t index, std::deque<uint32_t>& waiting, uint32_t seed,
                        const std::function<void()>& body) {
  State s(launch, index, waiting, seed);
  state = &s;
  const auto whole_thread = [&] {
    body();
    if (!s.me().uncommitted.empty()) fail("a bulk store was never committed");
    if (s.me().known_read < s.me().committed) fail("a thread ends without having waited until its bulk stores have read shared memory");
    if (!s.me().loads.empty()) fail("a tensor-memory load was never waited for");
    --s.live[block()];
  };
  std::string stopped = s.fibers.run(whole_thread, whim, any_progress);
  try {
    if (stopped.empty()) check_end();
  } catch (const host::Stopped&) {
    stopped = s.fibers.error();
  }
  waiting.insert(waiting.end(), s.elsewhere.begin(), s.elsewhere.end());
  state = nullptr;
  return stopped;
}

Barrier& barrier_at(int b, uint32_t address) {
  auto found = state->barriers.find({b, address});
  if (found == state->barriers.end()) fail("the barrier at " + std::to_string(address) + " was never initialised");
  return found->second;
}

void settle(Barrier& bar) {
  if (bar.pending == 0 && bar.bytes == 0) {
    bar.pending = bar.arrivals;
    ++bar.phase;
    state->fibers.wake(bar.waiting);
  }
}

// What this thread must have done before it tells others, and with `whole_warp` the lanes it speaks for.
void check_before_sync(const char* what, bool whole_warp) {
  State& s = *state;
  const int first = whole_warp ? s.fibers.self() / 32 * 32 : s.fibers.self(), count = whole_warp ? 32 : 1;
  for (int i = first; i < first + count; ++i) {
    if (s.workers[i].needs_before) {
      fail(std::string(what) + " after tensor-memory accesses without tcgen05.fence::before_thread_sync");
    }
  }
}

void finish_alloc() {
  State& s = *state;
  const int first = s.fibers.self() / 32 * 32;
  for (int i = first; i < first + 32; ++i) {
    if (s.workers[i].alloc_chunk >= 0) s.memory[block()].chunks[s.workers[i].alloc_chunk].state = kReady;
    s.workers[i].alloc_chunk = -1;
  }
}

// Every 16 bytes of a box: offset in (swizzled) shared memory, and where they lie, or null outside the tensor.
template <class F>
void for_chunks(const Map& map, const int (&at)[4], F f) {
  const int per_chunk = 16 / map.element_bytes, chunks = map.box_inner / per_chunk;
  for (int row = 0; row < map.box_outer; ++row) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int64_t index[4] = {at[0] + chunk * per_chunk, at[1] + row, at[2], at[3]};
      bool inside = true;
      for (int d = 0; d < 4; ++d) inside = inside && index[d] >= 0 && index[d] < map.dims[d];
      const int64_t element = ((index[3] * map.dims[2] + index[2]) * map.dims[1] + index[1]) * map.dims[0] + index[0];
      const uint32_t linear = static_cast<uint32_t>(row * chunks + chunk) * 16;
      f(map.swizzle ? linear ^ ((linear >> 7 & 7) << 4) : linear, inside ? map.data + element * map.element_bytes : nullptr);
    }
  }
}

uint32_t box_bytes(const Map& map) { return static_cast<uint32_t>(map.box_inner * map.box_outer * map.element_bytes); }

void check_box(const Map& map, uint32_t address) {
  if (map.swizzle && map.box_inner * map.element_bytes != 128) fail("a swizzled box must be 128 bytes wide");
  if (address % (map.swizzle ? 1024 : 128) != 0) fail("a box must start at a multiple of 1024 bytes (128 without swizzle)");
  if (map.dims[0] * map.element_bytes % 16 != 0) fail("rows of a tensor map must be a multiple of 16 bytes");
}

}  // namespace

State::State(const Launch& launched, uint32_t index, std::deque<uint32_t>& unstarted, uint32_t seed)
    : launch(launched),
      cluster(index),
      mode(static_cast<int>(launched.seed % 3)),
      fibers(launched.blocks, launched.threads, seed),
      workers(static_cast<size_t>(launched.blocks * launched.threads)),
      waiting(&unstarted) {
  for (int b = 0; b < launch.blocks; ++b) {
    memory[b].bytes.assign(launch.shared_bytes, 0xFF);
    memory[b].chunks.assign((launch.shared_bytes + 15) / 16, Chunk{});
    live[b] = launch.threads;
    tmem[b].cells.assign(128 * 512, Cell{});
  }
}

void fail(const std::string& what) { state->fibers.fail(what); }

int block() { return state->fibers.block(); }
int thread() { return state->fibers.thread(); }
int blocks() { return state->launch.blocks; }
uint32_t cluster_index() { return state->cluster; }
uint32_t num_clusters() { return static_cast<uint32_t>(state->launch.clusters); }

void yield() {
  if (state->random() % 4 == 0) state->fibers.turn();
}

void poll() {
  State& s = *state;
  if (++s.polls > 200000) fail("a flag that is waited for never comes");
  s.polling = true;
  s.fibers.turn({"a flag"});
}

void meet(int group, int member, int members, const char* name, uint64_t argument, void* data,
          const std::function<void(void**)>& combine) {
  state->fibers.meet(group, member, members, name, argument, data, combine);
}

Chunk& chunk_at(int b, uint32_t address, uint32_t bytes) {
  Memory& memory = state->memory[b];
  if (address < kSharedBase || address + bytes > kSharedBase + memory.bytes.size()) {
    fail("shared address " + std::to_string(address) + ", " + std::to_string(bytes) + " bytes, is out of bounds");
  }
  return memory.chunks[(address - kSharedBase) / 16];
}
uint8_t* bytes_at(int b, uint32_t address) { return state->memory[b].bytes.data() + (address - kSharedBase); }

void begin_async_read(int b, uint32_t address) {
  Chunk& chunk = chunk_at(b, address, 16);
  if (chunk.state == kReady && chunk.writer < 0) {
    ++chunk.readers;
    return;
  }
  const std::string what = "an asynchronous unit reads shared memory at " + std::to_string(address);
  if (chunk.state == kUnwritten) fail(what + ", which was never written");
  if (chunk.state == kInFlight) fail(what + " while a copy is filling it");
  fail(what + ", written by ordinary stores without a proxy fence");
}
void end_async_read(int b, uint32_t address) { --chunk_at(b, address, 16).readers; }

void begin_async_write(int b, uint32_t address) {
  Chunk& chunk = chunk_at(b, address, 16);
  if (chunk.readers > 0) fail("shared memory at " + std::to_string(address) + " is overwritten while a unit still reads it");
  if (chunk.state == kInFlight) fail("two copies fill shared memory at " + std::to_string(address) + " at once");
  if (chunk.unfenced_reads > 0) {
    fail("shared memory at " + std::to_string(address) + " is filled by a unit after ordinary loads without a proxy fence");
  }
  if (chunk.writer >= 0) {
    fail("shared memory at " + std::to_string(address) + " is filled by a unit after ordinary stores without a proxy fence");
  }
  chunk.state = kInFlight;
  std::memset(bytes_at(b, address), 0xFF, 16);
}

void write_shared(uint32_t address, const void* from, uint32_t bytes) {
  for (uint32_t at = address / 16 * 16; at < address + bytes; at += 16) {
    Chunk& chunk = chunk_at(block(), at, 16);
    if (chunk.readers > 0) fail("shared memory at " + std::to_string(at) + " is overwritten while a unit still reads it");
    if (chunk.state == kInFlight) fail("shared memory at " + std::to_string(at) + " is written while a copy is filling it");
    chunk.state = kReady;
    chunk.writer = state->fibers.self();
    state->me().written.push_back(static_cast<int>((at - kSharedBase) / 16));
  }
  std::memcpy(bytes_at(block(), address), from, bytes);
}

void read_shared(uint32_t address, void* to, uint32_t bytes) {
  for (uint32_t at = address / 16 * 16; at < address + bytes; at += 16) {
    Chunk& chunk = chunk_at(block(), at, 16);
    if (chunk.state != kReady) {
      fail("shared memory at " + std::to_string(at) + " is read " +
           (chunk.state == kUnwritten ? "and was never written" : "while it is being filled"));
    }
    const int index = static_cast<int>((at - kSharedBase) / 16);
    std::vector<int>& read = state->me().read;
    if (std::find(read.begin(), read.end(), index) == read.end()) {
      read.push_back(index);
      ++chunk.unfenced_reads;
    }
  }
  std::memcpy(to, bytes_at(block(), address), bytes);
}

void fence_async() {
  Worker& me = state->me();
  for (int i : me.written) {
    Chunk& chunk = state->memory[block()].chunks[i];
    if (chunk.writer == state->fibers.self()) chunk.writer = -1;
  }
  me.written.clear();
  for (int i : me.read) --state->memory[block()].chunks[i].unfenced_reads;
  me.read.clear();
}
void fence_async_all() {
  fence_async();
  state->me().acquired = false;
}

void acquired() { state->me().acquired = true; }
void stored_global() { state->me().stored_global = true; }
void check_release() {
  State& s = *state;
  const int self = s.fibers.self(), first = self / 32 * 32;
  for (int i = first; i < first + 32; ++i) {
    const Worker& lane = s.workers[i];
    if (lane.known_done < lane.committed) fail("a release before the bulk stores that it speaks for have been waited for");
    if (i != self && lane.stored_global) fail("a release before the warp has met after its lanes' stores");
  }
}

void part() { state->me().parted = true; }
void come_together() { state->me().parted = state->me().stored_global = false; }
void check_together(const char* what) {
  if (state->me().parted) fail(std::string(what) + " by lanes that have not come together since one was elected");
}

void barrier_init(uint32_t address, uint32_t arrivals) {
  chunk_at(block(), address, 8);
  Barrier& bar = state->barriers[{block(), address}];
  bar = {};
  bar.arrivals = bar.pending = arrivals;
  bar.initialiser = state->fibers.self();
}
void barrier_init_fence() {
  for (auto& [at, bar] : state->barriers) bar.fenced = bar.fenced || bar.initialiser == state->fibers.self();
}

// For a use by a unit, or by a thread of the other block.
Barrier& fenced_barrier_at(int b, uint32_t address) {
  Barrier& bar = barrier_at(b, address);
  if (!bar.fenced) fail("the barrier at " + std::to_string(address) + " is used before its initialisation was fenced");
  return bar;
}

void arrive(int b, uint32_t address, int64_t expect_bytes) {
  if (state->live[b] == 0) fail("a signal to block " + std::to_string(b) + ", which has exited");
  Barrier& bar = barrier_at(b, address);
  bar.bytes += expect_bytes;
  if (--bar.pending < 0) fail("too many arrivals on the barrier at " + std::to_string(address));
  settle(bar);
}

void arrive_by_unit(int b, uint32_t address) {
  fenced_barrier_at(b, address);
  arrive(b, address, 0);
}

void barrier_arrive(int b, uint32_t address, int64_t expect_bytes, Scope scope) {
  check_before_sync("an arrival", true);
  finish_alloc();
  if (b != block()) {
    if (scope == Scope::kBlock) fail("an arrival at the other block with block scope (cutlass #3647)");
    fenced_barrier_at(b, address).remote = true;
  }
  arrive(b, address, expect_bytes);
  yield();
}

void barrier_complete(int b, uint32_t address, int64_t bytes) {
  Barrier& bar = fenced_barrier_at(b, address);
  bar.bytes -= bytes;
  settle(bar);
}

void barrier_wait(uint32_t address, uint32_t parity, Scope scope) {
  Barrier& bar = barrier_at(block(), address);
  while ((bar.phase & 1) == parity) {
    bar.waiting.push_back(state->fibers.self());
    state->fibers.sleep({"the barrier", "", address});
  }
  if (bar.remote && scope == Scope::kBlock) fail("a wait with block scope for arrivals of the other block");
  state->me().needs_after = true;
}

void cluster_sync() {
  State& s = *state;
  check_before_sync("a cluster barrier", false);
  if (s.launch.blocks > 1) check_together("a cluster barrier");  // .aligned; that of one block is not
  finish_alloc();
  s.at_cluster.push_back(s.fibers.self());
  if (s.at_cluster.size() == s.workers.size()) {
    s.at_cluster.pop_back();
    for (int b = 0; b < s.launch.blocks; ++b) s.tmem[b].synchronised = s.tmem[b].allocated;
    s.fibers.wake(s.at_cluster);
  } else {
    s.fibers.sleep({"the cluster"});
  }
  s.me().needs_after = true;
}

void load_box(const Map& map, int bar_block, uint32_t bar, uint32_t dst, const int (&at)[4]) {
  check_box(map, dst);
  if (state->me().acquired) fail("a copy reads memory after an acquire without a proxy fence");
  const int b = block();
  const int c[4] = {at[0], at[1], at[2], at[3]};
  for_chunks(map, c, [&](uint32_t offset, uint8_t*) { begin_async_write(b, dst + offset); });
  const Map* source = &map;
  state->copies.push_back([=] {
    const int where[4] = {c[0], c[1], c[2], c[3]};
    for_chunks(*source, where, [&](uint32_t offset, uint8_t* global) {
      chunk_at(b, dst + offset, 16).state = kReady;
      if (global != nullptr) {
        std::memcpy(bytes_at(b, dst + offset), global, 16);
      } else {
        std::memset(bytes_at(b, dst + offset), 0, 16);
      }
    });
    barrier_complete(bar_block, bar, box_bytes(*source));
  });
  yield();
}

void store_box(const Map& map, uint32_t src, const int (&at)[4]) {
  check_box(map, src);
  const int b = block();
  const int c[4] = {at[0], at[1], at[2], at[3]};
  for_chunks(map, c, [&](uint32_t offset, uint8_t*) { begin_async_read(b, src + offset); });
  const Map* target = &map;
  const auto moved = std::make_shared<std::vector<uint8_t>>();  // on its way
  const auto read = [=] {
    const int where[4] = {c[0], c[1], c[2], c[3]};
    for_chunks(*target, where, [&](uint32_t offset, uint8_t*) {
      const uint8_t* from = bytes_at(b, src + offset);
      moved->insert(moved->end(), from, from + 16);
      end_async_read(b, src + offset);
    });
  };
  const auto write = [=] {
    const int where[4] = {c[0], c[1], c[2], c[3]};
    const uint8_t* from = moved->data();
    for_chunks(*target, where, [&](uint32_t, uint8_t* global) {
      if (global != nullptr) std::memcpy(global, from, 16);
      from += 16;
    });
  };
  state->me().uncommitted.push_back({read, write});
}

void store_commit() {
  Worker& me = state->me();
  me.unread.push_back(std::move(me.uncommitted));
  me.uncommitted.clear();
  ++me.committed;
}

void store_wait_read(int pending) {
  Worker& me = state->me();
  while (static_cast<int>(me.unread.size()) > pending) read_group(me);
  me.known_read = std::max(me.known_read, me.committed - pending);
}

void store_wait_done() {
  Worker& me = state->me();
  store_wait_read(0);
  while (!me.unwritten.empty()) write_group(me);
  me.known_done = me.committed;
}

void steal(uint32_t response, uint32_t bar) {
  State& s = *state;
  if (s.refused) fail("work was asked for after a request had been refused");
  if (response % 16 != 0) fail("a work-stealing response must be aligned to 16 bytes");
  for (int b = 0; b < s.launch.blocks; ++b) begin_async_write(b, response);
  s.steals.push_back([response, bar] {
    State& now = *state;
    uint32_t words[4] = {0, 0, 0, 0};
    // Another SM may start a cluster first; and a request may be refused although some wait: they run later then.
    while (now.waiting->size() > 1 && now.random() % 8 == 0) {
      now.elsewhere.push_back(now.waiting->front());
      now.waiting->pop_front();
    }
    if (!now.waiting->empty() && now.random() % 16 != 0) {
      words[0] = 1;
      words[1] = now.waiting->front() * static_cast<uint32_t>(now.launch.blocks);
      now.waiting->pop_front();
    } else {
      now.refused = true;
    }
    for (int b = 0; b < now.launch.blocks; ++b) {
      chunk_at(b, response, 16).state = kReady;
      std::memcpy(bytes_at(b, response), words, 16);
      barrier_complete(b, bar, 16);
    }
  });
  yield();
}

bool stolen(uint32_t response, uint32_t* first_block) {
  uint32_t words[4];
  read_shared(response, words, 16);
  *first_block = words[1];
  return words[0] == 1;
}

std::string run(const Launch& launch, const std::function<void()>& body) {
  std::mt19937 random(launch.seed);
  std::deque<uint32_t> waiting;
  for (int i = 0; i < launch.clusters; ++i) waiting.push_back(static_cast<uint32_t>(i));
  while (!waiting.empty()) {
    const uint32_t index = waiting.front();
    waiting.pop_front();
    std::deque<uint32_t> none;
    const std::string error = run_cluster(launch, index, launch.stealing ? waiting : none, static_cast<uint32_t>(random()), body);
    if (!error.empty()) return error;
  }
  return "";
}

}  // namespace moe::machine
