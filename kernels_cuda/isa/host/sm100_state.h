// What the two files of the machine share: its state. Not for anybody else.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fibers.h"
#include "sm100_machine.h"

namespace moe::machine {

constexpr uint32_t kSharedBase = 1024;  // where shared memory starts in a block's 32-bit window

enum : uint8_t { kUnwritten, kInFlight, kReady };

struct Chunk {  // 16 bytes of shared memory
  uint8_t state = kUnwritten;
  int writer = -1;  // thread whose ordinary stores have not been fenced
  int readers = 0;  // asynchronous reads under way
  int unfenced_reads = 0;  // threads whose ordinary loads have not been fenced
};
struct Memory {
  std::vector<uint8_t> bytes;
  std::vector<Chunk> chunks;
};

struct Cell {  // 32 bits of tensor memory
  uint32_t value = 0x7FC0DEADu;
  bool written = false;
  int writers = 0;  // products under way
  int readers = 0;  // loads under way
};
struct Tmem {
  std::vector<Cell> cells;      // lane * 512 + column
  int owner[512] = {};          // allocation that holds a column, 0: none
  int allocations = 0;
  bool allocated = false;       // this block has allocated at least once
  bool synchronised = false;    // ... and a cluster barrier has passed since
  bool relinquished = false;
};

struct Load {
  uint32_t address;
  uint32_t* to;
  int columns;
};

// A bulk store: it reads shared memory first, and is complete when memory has been written.
struct Store {
  std::function<void()> read, write;
};

struct Worker {
  std::vector<int> written;  // chunks written by ordinary stores since the last fence
  std::vector<int> read;     // ... read by ordinary loads
  std::vector<Store> uncommitted;
  std::deque<std::vector<Store>> unread, unwritten;  // committed groups
  // Groups committed, and of how many this thread has waited for the read, for the whole: what it may rely on, whatever the units did.
  int committed = 0, known_read = 0, known_done = 0;
  bool acquired = false;       // a flag was read and no proxy fence of global memory since
  bool stored_global = false;  // ordinary stores to memory since the last warp_sync
  bool parted = false;         // the warp elected a lane and has not come together since
  std::vector<Load> loads;
  bool needs_after = false;   // a wait has returned and no after_thread_sync fence since
  bool needs_before = false;  // tensor memory was read and no before_thread_sync fence since
  int alloc_chunk = -1;       // where an allocation's result is visible after the next barrier
};

struct Barrier {
  int64_t arrivals = 0, pending = 0, bytes = 0;
  uint32_t phase = 0;
  bool remote = false;  // threads of the other block arrive here
  int initialiser = -1;
  bool fenced = false;  // the initialisation is visible to asynchronous units and to the other block
  std::vector<int> waiting;
};

struct State {
  Launch launch;
  uint32_t cluster = 0;
  int mode = 0;
  host::Fibers fibers;
  std::vector<Worker> workers;
  int live[2] = {0, 0};
  Memory memory[2];
  Tmem tmem[2];
  std::map<std::pair<int, uint32_t>, Barrier> barriers;
  std::vector<int> at_cluster;
  std::vector<std::function<void()>> copies;
  std::deque<std::function<void()>> tensor[2];  // by issuing block
  std::vector<std::function<void()>> steals;
  std::deque<uint32_t>* waiting = nullptr;  // clusters of the grid that nobody has started
  std::deque<uint32_t> elsewhere;
  bool refused = false;
  bool polling = false;  // the last thread to run looked for a flag: units must not wait for everybody to sleep
  int polls = 0;

  State(const Launch& launched, uint32_t index, std::deque<uint32_t>& unstarted, uint32_t seed);
  uint32_t random() { return static_cast<uint32_t>(fibers.random()()); }
  Worker& me() { return workers[static_cast<size_t>(fibers.self())]; }
};

extern State* state;

Chunk& chunk_at(int block, uint32_t address, uint32_t bytes);
uint8_t* bytes_at(int block, uint32_t address);
void begin_async_read(int block, uint32_t address);
void end_async_read(int block, uint32_t address);
void begin_async_write(int block, uint32_t address);
void arrive(int block, uint32_t address, int64_t expect_bytes);  // by a thread, after its checks
void arrive_by_unit(int block, uint32_t address);

}  // namespace moe::machine
