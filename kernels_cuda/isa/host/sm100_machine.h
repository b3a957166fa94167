// A Blackwell SM, or a pair of them, on the host: what the tcgen05 tile programs run on when there is no such GPU. Every GPU thread is a
// fiber, of which one runs at a time, chosen by a seed; copies, products, commits and work-stealing requests are asynchronous units that
// complete late, early or out of order, as the seed says. Products decode the descriptor bits that the kernel itself built.
//
// It keeps a shadow of every 16 bytes of shared memory and of every cell of tensor memory, and stops with a message at: a read of
// something never written or still under way, an overwrite of what an asynchronous unit still reads, ordinary stores read by an
// asynchronous unit without a proxy fence, ordinary loads followed by an asynchronous write without one, a copy after an acquire without
// one, a thread that ends before its bulk stores have read shared memory, a release before they are complete or before the warp has met
// after its lanes' stores, a barrier used by a unit or the peer before its initialisation was fenced, a pair's cluster barrier or a
// warp-wide tcgen05 operation by lanes that parted, a tcgen05 operation after a wait without its fence (or an arrival without one), products
// on shapes, majors or layouts the tensor core does not take, a warp that reads another warp's lanes, allocation out of balance,
// bytes missing or left over on a barrier, too many arrivals, arrivals and waits between blocks with block scope, a signal to a block
// that has exited, a deadlock.
//
// It models order and layout, not time; it is no proof about the hardware, on which nothing of this has run. host.h and engine.h are
// the Hopper half. Read sm100_host.h next, the instruction layer on top of it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace moe::machine {

// What a tensor map says: a dense tensor of four dimensions, innermost first, and the box that one copy moves (two inner dimensions).
struct Map {
  uint8_t* data = nullptr;
  int element_bytes = 1;
  int64_t dims[4] = {1, 1, 1, 1};
  int box_inner = 0;   // elements
  int box_outer = 1;   // rows
  bool swizzle = true;  // 128-byte swizzle
};

struct Launch {
  int blocks = 1;        // per cluster, 1 or 2
  int clusters = 1;      // of the grid
  bool stealing = false;  // one cluster runs and asks for the others; those it does not get run after it
  int threads = 0;       // per block
  int shared_bytes = 0;
  uint32_t seed = 0;     // seed % 3: 0 units complete when somebody must wait, 1 at any time, 2 as early as possible
};

// Runs `body` as every thread of every cluster. Returns "" or what stopped it.
std::string run(const Launch& launch, const std::function<void()>& body);

// --- called from inside -------------------------------------------------------------------------------------------------------
[[noreturn]] void fail(const std::string& what);
int block();   // of the cluster
int thread();  // of the block
int blocks();
uint32_t cluster_index();
uint32_t num_clusters();

// All `members` of group `group` of this block meet; name and argument must agree. The last to arrive runs `combine` on everyone's
// `data`. Groups 0..31 are warps.
void meet(int group, int member, int members, const char* name, uint64_t argument, void* data, const std::function<void(void**)>& combine);

void barrier_init(uint32_t address, uint32_t arrivals);
void barrier_init_fence();
// Scope: of the release or the acquire. Block scope does not reach the peer.
enum class Scope { kBlock, kCluster };
void barrier_arrive(int block, uint32_t address, int64_t expect_bytes, Scope scope = Scope::kBlock);
void barrier_wait(uint32_t address, uint32_t parity, Scope scope = Scope::kBlock);
void cluster_sync();

// Ordinary (generic proxy) accesses of this block's shared memory.
void write_shared(uint32_t address, const void* from, uint32_t bytes);
void read_shared(uint32_t address, void* to, uint32_t bytes);
void fence_async();      // of shared memory
void fence_async_all();  // of global memory too

// Ordinary accesses of global memory, as far as they are followed: a flag's acquire and release, and stores that the release must cover.
void acquired();
void stored_global();
void check_release();

// Lanes part when one is elected, and come together at a warp_sync, which orders their memory accesses too.
void part();
void come_together();
void check_together(const char* what);

// Bulk tensor copies; bytes are counted on the barrier at `bar` of block `bar_block`.
void load_box(const Map& map, int bar_block, uint32_t bar, uint32_t dst, const int (&at)[4]);
void store_box(const Map& map, uint32_t src, const int (&at)[4]);
void store_commit();
void store_wait_read(int pending);  // until all but the last `pending` groups have read shared memory
void store_wait_done();            // until memory has been written

// Tensor memory. alloc and dealloc: once per warp, from inside a meeting's combine.
void tmem_alloc(uint32_t result_address, uint32_t columns);
void tmem_dealloc(uint32_t address, uint32_t columns);
void tmem_relinquish();
void tmem_load(uint32_t address, uint32_t* to, int columns);  // per lane; valid after tmem_wait_load
void tmem_wait_load();
void fence_before_sync();
void fence_after_sync();

// The tensor unit of this block or pair, in order.
void copy_scales(uint32_t tmem, uint64_t descriptor);
void product(bool block_scaled, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t scale_a, uint32_t scale_b,
             bool accumulate);
void commit(uint32_t bar, uint32_t block_mask);

// Work stealing: 16 bytes on the barrier at `bar` of every block of the cluster.
void steal(uint32_t response, uint32_t bar);
bool stolen(uint32_t response, uint32_t* first_block);

// A place where other threads may run; and where a thread looks for a flag in memory.
void yield();
void poll();

}  // namespace moe::machine
