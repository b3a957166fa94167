// The instruction layer for Blackwell on the host: the members of Sm100 (../sm100.cuh) on the machine of sm100_machine.h. Plain
// arithmetic is that of the Hopper twin.
#pragma once

#include <cstring>

#include "../sm100_layout.h"
#include "host.h"
#include "sm100_machine.h"

namespace moe {

struct HostSm100 : Host {
  using TensorMap = machine::Map;

  // --- who am I ---
  static uint32_t thread_index() { return machine::thread(); }
  static uint32_t warp_index() { return machine::thread() / 32; }
  static uint32_t lane_index() { return machine::thread() % 32; }
  static uint32_t shared_base() { return 1024; }
  template <int kBlocks>
  static uint32_t block_rank() {
    if (kBlocks != machine::blocks()) machine::fail("a program for " + std::to_string(kBlocks) + " block(s) was launched otherwise");
    return machine::block();
  }
  template <int kBlocks>
  static uint32_t cluster_id() {
    return machine::cluster_index();
  }
  template <int kBlocks>
  static uint32_t cluster_count() {
    return machine::num_clusters();
  }
  static bool elect_one() {
    warp("elect", 0, nullptr, nullptr);
    machine::part();
    return lane_index() == 0;
  }

  // --- barriers ---
  static void barrier_init(uint32_t bar, uint32_t arrivals) { machine::barrier_init(bar, arrivals); }
  static void barrier_init_fence() { machine::barrier_init_fence(); }
  static void barrier_expect_bytes(uint32_t bar, uint32_t bytes) { machine::barrier_arrive(machine::block(), bar, bytes); }
  static void barrier_arrive(uint32_t bar) { machine::barrier_arrive(machine::block(), bar, 0); }
  template <int kBlocks>
  static void arrive_leader(uint32_t bar) {
    machine::barrier_arrive(0, bar, 0, machine::Scope::kCluster);
  }
  static void barrier_wait(uint32_t bar, uint32_t parity) { machine::barrier_wait(bar, parity); }
  template <int kBlocks>
  static void wait_cluster(uint32_t bar, uint32_t parity) {
    machine::barrier_wait(bar, parity, machine::Scope::kCluster);
  }
  static void warp_sync() {
    machine::come_together();  // of this lane; nobody passes before all have
    warp("warp_sync", 0, nullptr, nullptr);
  }
  template <int kBlocks>
  static void everyone() {
    machine::cluster_sync();
  }

  // --- bulk tensor copies ---
  static void prefetch_map(const TensorMap*) {}
  template <int kBlocks>
  static void load_box(const TensorMap* map, uint32_t bar, uint32_t dst, int c0, int c1, int c2, int c3) {
    machine::load_box(*map, 0, bar, dst, {c0, c1, c2, c3});
  }
  static void store_box(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3) {
    machine::store_box(*map, src, {c0, c1, c2, c3});
  }
  static void store_commit() { machine::store_commit(); }
  template <int kPending>
  static void store_wait_read() {
    machine::store_wait_read(kPending);
  }
  static void store_wait_done() { machine::store_wait_done(); }
  static void fence_async_shared() { machine::fence_async(); }
  static void fence_async_all() { machine::fence_async_all(); }

  // --- tensor memory ---
  template <int kBlocks>
  static void tmem_alloc(uint32_t result, uint32_t columns) {
    machine::check_together("tcgen05.alloc");
    warp("tcgen05.alloc", columns, nullptr, [=](void**) {
      machine::tmem_alloc(result, columns);
      machine::tmem_relinquish();
    });
  }
  template <int kBlocks>
  static void tmem_dealloc(uint32_t address, uint32_t columns) {
    machine::check_together("tcgen05.dealloc");
    warp("tcgen05.dealloc", columns, nullptr, [=](void**) { machine::tmem_dealloc(address, columns); });
  }
  static void tmem_load(uint32_t address, uint32_t (&r)[32]) {
    machine::check_together("tcgen05.ld");
    warp("tcgen05.ld", address, nullptr, nullptr);
    machine::tmem_load(address, r, 32);
  }
  static void tmem_wait_load(uint32_t (&)[32]) {
    warp("tcgen05.wait::ld", 0, nullptr, nullptr);
    machine::tmem_wait_load();
  }
  static void fence_before_sync() { machine::fence_before_sync(); }
  static void fence_after_sync() { machine::fence_after_sync(); }

  // --- tensor cores ---
  template <int kBlocks>
  static void copy_scales(uint32_t tmem, uint64_t descriptor) {
    machine::copy_scales(tmem, descriptor);
  }
  template <int kBlocks>
  static void mma_mx(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t scale_a, uint32_t scale_b, bool accumulate) {
    machine::product(true, d, a, b, instruction, scale_a, scale_b, accumulate);
  }
  template <int kBlocks>
  static void mma_bf16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate) {
    machine::product(false, d, a, b, instruction, 0, 0, accumulate);
  }
  template <int kBlocks>
  static void commit(uint32_t bar) {
    machine::commit(bar, kBlocks == 1 ? 1u : 3u);
  }

  // --- Cluster Launch Control ---
  template <int kBlocks>
  static void steal(uint32_t response, uint32_t bar) {
    machine::steal(response, bar);
  }
  static bool stolen(uint32_t response, uint32_t& first_block) { return machine::stolen(response, &first_block); }

  // --- memory and arithmetic ---
  static uint32_t load_word(uint32_t address) {
    uint32_t v;
    machine::read_shared(address, &v, 4);
    return v;
  }
  static void store_words(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t v[4] = {a, b, c, d};
    machine::write_shared(address, v, 16);
  }
  static void store_sector(void* address, const uint32_t (&v)[8]) {
    check_aligned(address, 32);
    machine::stored_global();
    std::memcpy(address, v, 32);
  }
  static void load_sector(const void* address, uint32_t (&v)[8]) {
    check_aligned(address, 32);
    std::memcpy(v, address, 32);
  }
  static void load_chunk(const void* address, uint32_t* v) {
    check_aligned(address, 16);
    std::memcpy(v, address, 16);
  }
  static int load_acquire(const int* address) {
    machine::poll();
    machine::acquired();
    return *address;
  }
  static void add_release(int* address, int value) {
    machine::check_release();
    *address += value;
  }
  static void warp_max(uint32_t (&v)[32]) {
    warp("redux.max", 0, v, [](void** data) {
      for (int i = 0; i < 32; ++i) {
        uint32_t largest = 0;
        for (int lane = 0; lane < 32; ++lane) {
          const uint32_t x = static_cast<uint32_t*>(data[lane])[i];
          largest = x > largest ? x : largest;
        }
        for (int lane = 0; lane < 32; ++lane) static_cast<uint32_t*>(data[lane])[i] = largest;
      }
    });
  }

 private:
  static void warp(const char* name, uint64_t argument, void* data, const std::function<void(void**)>& combine) {
    machine::meet(static_cast<int>(warp_index()), static_cast<int>(lane_index()), 32, name, argument, data, combine);
  }
  static void check_aligned(const void* address, int bytes) {
    if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
    machine::fail("an access of " + std::to_string(bytes) + " bytes to an address that is no multiple of that");
  }
};

}  // namespace moe
