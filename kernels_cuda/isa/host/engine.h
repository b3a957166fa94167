// Runs one cluster of two blocks on the host: every GPU thread is a fiber (fibers.h), of which one runs at a time, chosen by a
// seed. It ends the process with a message on a deadlock, a collective with a missing lane or differing arguments, a barrier that
// overflows, an access outside shared memory, or two accesses that nothing orders (races.h). Copies and products take effect as late as
// their waits allow, or earlier at the seed's whim, and shared memory that a copy will fill is poisoned meanwhile, so that a missing wait
// shows in the numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace moe::host {

struct Map {  // what a tensor map says: a dense tensor of four dimensions, innermost first, and the rows of a box
  uint8_t* data = nullptr;
  int element_bytes = 2;
  int64_t dims[4] = {1, 1, 1, 1};
  int box_rows = 64;
};

constexpr int kBlocks = 2;

// Even seeds are lazy: copies and stores happen only when someone must wait for them.
// Runs `body` on kBlocks x `threads` threads with `shared_bytes` of shared memory each.
void run_cluster(int threads, int shared_bytes, uint32_t seed, const std::function<void()>& body);

// --- called from inside ---------------------------------------------------------------------------------------------------
int block();
int thread();
[[noreturn]] void fail(const std::string& what);
uint8_t* shared(int block, uint32_t address, uint32_t bytes);  // checked
// The same of this thread's block, for ordinary accesses of this thread, or of its warp as one.
uint8_t* read(uint32_t address, uint32_t bytes);
uint8_t* written(uint32_t address, uint32_t bytes);
uint8_t* written_in(int block, uint32_t address, uint32_t bytes);  // of another block
uint8_t* read_by_warp(uint32_t address, uint32_t bytes);
uint8_t* written_by_warp(uint32_t address, uint32_t bytes);
// What the next copy_in writes, counted on the barrier of that block; what the next copy_out or queue_product reads.
void copy_writes(int block, uint32_t address, uint32_t bytes, uint32_t bar);
void store_reads(uint32_t address, uint32_t bytes);
void product_reads(uint32_t address, uint32_t bytes);

// All `threads` members of group `group` of this block meet: `name` and `argument` must agree. The last to arrive runs
// `combine` on everyone's `data` (by member); nobody goes on before.
void meet(int group, int member, int threads, const char* name, uint64_t argument, void* data,
          const std::function<void(void**)>& combine);

void barrier_init(uint32_t address, uint32_t arrivals);
void barrier_arrive(int block, uint32_t address, uint32_t count, int64_t expect_bytes);
void barrier_complete(int block, uint32_t address, int64_t bytes);
void barrier_wait(uint32_t address, uint32_t parity);
bool barrier_passed(uint32_t address, uint32_t parity);  // if so, it has been waited for
void cluster_sync();
void warp_synced();  // all lanes of this warp have met to order their accesses
void fence_async();  // of this thread: what it knows to be written is there for the copy engine and the tensor core

// Runs `action` some time before its bytes are counted on the barrier of `block`.
void copy_in(std::function<void()> action);
// Copies of this thread, 16 bytes to `dst` each, that count on no barrier themselves: queued until gather_arrive, which makes one arrival on the
// barrier of this block some time after them.
void gather(uint32_t dst, std::function<void()> action);
void gather_arrive(uint32_t address);
// Stores of this thread: queued until its commit, then done at any time; wait_stores returns when at most `pending` are left.
void copy_out(std::function<void()> action);
void commit_stores();
void wait_stores(int pending);
// Products of this warpgroup, in order; wait_products runs all but the newest `pending` committed groups. Collective. The accumulators of
// its 128 threads, `floats` each, are NaN until the last product on them has been waited for; `action` gets where they are meanwhile.
using Accumulators = std::vector<float*>;
void queue_product(int warpgroup, void** accumulators, int floats, std::function<void(const Accumulators&)> action);
void commit_products(int warpgroup);
void wait_products(int warpgroup, int pending);

}  // namespace moe::host
