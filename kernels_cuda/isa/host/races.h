// A race detector for shared memory on the host (engine.h): every two accesses of a word of which one writes must be ordered by what the program
// synchronises with, whatever the interleaving that was run. Orders come from arrivals on barriers that a wait saw complete, from warp_sync and
// cluster_sync, from waits for bulk stores and for products, and from bytes counted on a barrier; collectives such as shuffles and ldmatrix order
// nothing. The copy engine and the tensor core reach memory by another path: what ordinary stores wrote is theirs, to read or to overwrite, only
// behind a fence (fence_async_shared) of a thread to which those stores had happened.
//
// Clocks. A vector clock has an entry for every actor: a lane (its releases), a warp (its warp_syncs), the products of a warpgroup (groups), the bulk
// stores of a thread (groups), what is counted on a barrier (phases). Lanes of a warp mostly share one clock; what they know of themselves and of
// their own warp is kept beside it, so that a warp_sync costs a comparison of pointers. Each clock is twice as long: what has happened, and as much
// of it as was fenced.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace moe::host {

using Clock = std::vector<uint32_t>;
using SharedClock = std::shared_ptr<const Clock>;

class Races {
 public:
  using Report = std::function<void(const std::string&)>;
  // Of `blocks` blocks of `threads` threads with `bytes` of shared memory each, whose first address is `base`.
  Races(int blocks, int threads, uint32_t base, uint32_t bytes, Report report);

  // What `lane` (of all blocks) does, in its own block unless `block` says which.
  void read(int lane, uint32_t address, uint32_t bytes) { touch(lane, lane / threads_, address, bytes, false, false); }
  void write(int lane, int block, uint32_t address, uint32_t bytes) { touch(lane, block, address, bytes, true, false); }
  // As one of the whole warp: which of its lanes is not said.
  void warp_read(int lane, uint32_t address, uint32_t bytes) { touch(lane, lane / threads_, address, bytes, false, true); }
  void warp_write(int lane, uint32_t address, uint32_t bytes) { touch(lane, lane / threads_, address, bytes, true, true); }
  void fence(int lane);
  void warp_sync(int lane);
  void sync_all();

  // Barriers are numbered in the order of their initialisation.
  int new_barrier(int block, uint32_t address);
  void arrive(int lane, int barrier);
  void complete(int barrier, uint32_t phase);  // phases completed by now, this one included
  void acquire(int lane, int barrier);         // of the last completed phase

  // A copy that `lane` starts, counted on `barrier` of `block` when `phase` (as above) completes. Ordinary ones are not the copy engine's.
  void copy_in(int lane, int block, uint32_t address, uint32_t bytes, int barrier, uint32_t phase, bool ordinary);
  // A bulk store that `lane` starts, of its group `group`; `done` groups have been waited for.
  void copy_out(int lane, uint32_t address, uint32_t bytes, uint32_t group);
  void stores_done(int lane, uint32_t done);
  // The same for operands of products of the lane's warpgroup.
  void operand(int lane, uint32_t address, uint32_t bytes, uint32_t group);
  void products_done(int lane, uint32_t done);

 private:
  struct Event {
    int16_t actor = -1;
    bool several = false;  // lanes: somebody in the warp of this lane
    bool ordinary = true;  // not by the copy engine or the tensor core
    uint32_t count = 0;    // of the actor; known when a clock says at least as much
    uint32_t syncs = 0;    // lanes: warp_syncs before it
  };
  struct Reader {
    Event event;
    int32_t next;  // in readers_; -1: the last
  };
  struct Cell {  // four bytes
    Event write;
    int32_t readers = -1;  // since the write
    uint8_t halves = 0;    // that the write wrote, if it was of two bytes
  };
  struct Lane {
    SharedClock clock;
    uint32_t count = 1, fenced = 0;  // releases, and of these before the last fence
    uint32_t fenced_syncs = 0;       // of its warp, before a fence known to this lane
    bool clean = true;               // has not written since its last fence
  };
  struct Memo {  // the last operation of a warp's lanes on a clock: the others do the same
    SharedClock from, with, result;
    uint32_t value = 0;
  };
  struct Warp {
    uint32_t syncs = 0;
    Memo acquired, fenced, stored;
  };
  struct BarrierState {
    int block;
    uint32_t address;
    Clock gathering;
    SharedClock last;
  };

  int warps() const { return lanes_ / 32; }
  int warp_entry(int warp) const { return lanes_ + warp; }
  int product_entry(int lane) const { return lanes_ + warps() + lane / 128; }
  int store_entry(int lane);
  int barrier_entry(int barrier) const { return first_barrier_ + barrier; }
  Event event_of(int actor, uint32_t count, bool ordinary) const { return {static_cast<int16_t>(actor), false, ordinary, count, 0}; }
  Event now(int lane, bool several) const;
  bool known(int lane, const Event& event) const;
  bool is_fenced(int lane, const Event& event) const;
  void touch(int lane, int block, uint32_t address, uint32_t bytes, bool write, bool several);
  // Records `event`, which `lane` does or starts.
  void record(int lane, int block, uint32_t address, uint32_t bytes, bool write, const Event& event);
  void note_read(int lane, Cell& cell, const Event& event);
  void conflict(int block, uint32_t address, const Event& first, bool first_writes, const Event& second, bool second_writes, bool unfenced);
  std::string describe(const Event& event) const;

  int blocks_, threads_, lanes_, first_store_, first_barrier_, half_;
  uint32_t base_, bytes_;
  Report report_;
  std::vector<Cell> cells_;
  std::vector<Reader> readers_;
  int32_t free_reader_ = -1;
  std::vector<Lane> all_;
  std::vector<Warp> warps_;
  std::vector<uint32_t> products_done_;  // by warpgroup
  std::vector<int> storing_;             // lanes
  std::vector<BarrierState> barriers_;
};

}  // namespace moe::host
