// Faults of Hopper's tile programs on the host emulator: the instruction layer without one of its orders, everywhere it stands, to see that the
// race detector (isa/host/races.h) finds that it is missing. Chosen at run time, so that one program serves for all.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "isa/host/host.h"

namespace moe {

struct Fault {
  // wait: nobody waits for `barriers`. store_wait_read: for its bulk stores to have read. fence, sync: no fence_async_shared, no warp_sync, where
  // `after` was the thread's last operation.
  std::string what, after;
  std::vector<uint32_t> barriers;
};
inline Fault fault;

// The last operation of every thread of the cluster, as far as faults ask for it.
inline std::vector<const char*> last_operation;

template <class Base>
struct Faulty : Base {
  static bool nobody_waits(uint32_t bar) { return fault.what == "wait" && std::count(fault.barriers.begin(), fault.barriers.end(), bar) > 0; }
  static void barrier_wait(uint32_t bar, uint32_t parity) {
    if (nobody_waits(bar)) return;
    Base::barrier_wait(bar, parity);
    did("wait");
  }
  static void barrier_acquire_cluster(uint32_t bar, uint32_t parity) {
    if (nobody_waits(bar)) return;
    Base::barrier_acquire_cluster(bar, parity);
    did("wait");
  }
  static bool barrier_passed(uint32_t bar, uint32_t parity) {
    if (nobody_waits(bar)) return true;
    if (!Base::barrier_passed(bar, parity)) return false;
    did("wait");
    return true;
  }
  template <int kPending>
  static void store_wait_read() {
    if (fault.what != "store_wait_read") Base::template store_wait_read<kPending>();
  }
  static void fence_async_shared() {
    if (!left_out("fence")) Base::fence_async_shared();
    did("fence");
  }
  static void warp_sync() {
    if (!left_out("sync")) Base::warp_sync();
  }
  static void load_matrices(uint32_t address, uint32_t (&r)[4]) {
    Base::load_matrices(address, r);
    did("ldmatrix");
  }
  static void load_matrices_transposed(uint32_t address, uint32_t (&r)[4]) {
    Base::load_matrices_transposed(address, r);
    did("ldmatrix.trans");
  }
  static void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
    Base::store_matrices(address, r);
    did("stmatrix");
  }
  static void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
    Base::store_matrices_transposed(address, r);
    did("stmatrix");
  }
  static void load_float2(uint32_t address, float& a, float& b) {
    Base::load_float2(address, a, b);
    did("load");
  }
  static typename Base::Vector load_vector(uint32_t address) {
    did("load");
    return Base::load_vector(address);
  }
  static void store_float2(uint32_t address, float a, float b) {
    Base::store_float2(address, a, b);
    did("store");
  }

 private:
  static const char*& last() {
    const size_t at = static_cast<size_t>(host::block()) * 1024 + static_cast<size_t>(host::thread());
    if (last_operation.empty()) last_operation.assign(2048, "");
    return last_operation[at];
  }
  static void did(const char* what) { last() = what; }
  static bool left_out(const char* what) { return fault.what == what && fault.after == last(); }
};

// Takes "--without=WHAT[:AFTER]" from the end of the arguments; barriers_of(AFTER) are the addresses of the barriers of that name.
template <class BarriersOf>
void take_fault(int& argc, char** argv, BarriersOf barriers_of) {
  const std::string option = "--without=", last = argv[argc - 1];
  if (last.compare(0, option.size(), option) != 0) return;
  const size_t colon = std::min(last.find(':'), last.size());
  fault.what = last.substr(option.size(), colon - option.size());
  if (colon < last.size()) fault.after = last.substr(colon + 1);
  if (fault.what == "wait") fault.barriers = barriers_of(fault.after);
  --argc;
}

}  // namespace moe
