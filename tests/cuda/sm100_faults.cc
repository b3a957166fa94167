// Seeds faults into the Blackwell tile programs, one at a time, at the border between program and instruction layer, and demands that the
// host machine or the comparison with plain loops catches each. Every fault names what must be said: a piece of the machine's
// message, or "differ" where wrong numbers are all there is. Usage: sm100_faults [NAME].
#include <array>
#include <functional>
#include <memory>
#include <set>

#include "sm100_chain.h"

namespace {

using namespace sm100_test;

// What is broken now. Every member below is the correct operation unless its fault is on.
const char* fault = "";
int runs = 0;
bool on(const char* name) { return std::strcmp(fault, name) == 0; }

// What a thread of this run has done: which call of a kind an operation is.
struct Past {
  int everyone = 0, warp_syncs = 0, fences_before = 0;
  bool stored = false;     // ordinary stores to memory since the last warp_sync
  bool fenced = false;     // fence_before_sync was the last fence or store
  bool answered = false;   // an answer was read and not fenced
};
Past& past() {
  static std::array<Past, 512> all;
  static int of_run = -1;
  if (of_run != runs) all.fill({});
  of_run = runs;
  return all[static_cast<size_t>(256 * machine::block() + machine::thread())];
}

template <class Config>
struct Faulty : HostSm100 {
  static uint32_t barrier_of(uint32_t bar) { return (bar - 1024 - Config::kBarrierOffset) / 8; }
  static bool is_full(uint32_t bar) { return barrier_of(bar) < Config::kStages; }
  static bool is_empty(uint32_t bar) { return !is_full(bar) && barrier_of(bar) < 2 * Config::kStages; }
  static bool is_acc_full(uint32_t bar) { return barrier_of(bar) - 2 * Config::kStages < 2u; }
  static bool is_acc_empty(uint32_t bar) { return barrier_of(bar) - 2 * Config::kStages - 2 < 2u; }
  static bool is_clc_empty(uint32_t bar) { return barrier_of(bar) >= 2 * Config::kStages + 4 + Config::kClcSlots; }
  static bool is_clc_full(uint32_t bar) { return barrier_of(bar) >= 2 * Config::kStages + 4 && !is_clc_empty(bar); }

  static uint32_t broken_parity(uint32_t bar, uint32_t parity) {
    const bool flip = (on("wrong phase: full") && is_full(bar)) || (on("wrong phase: empty") && is_empty(bar)) ||
                      (on("wrong phase: accumulators full") && is_acc_full(bar)) ||
                      (on("wrong phase: accumulators empty") && is_acc_empty(bar)) || (on("wrong phase: answer") && is_clc_full(bar));
    return flip ? parity ^ 1 : parity;
  }
  static bool skips(uint32_t bar) {
    return (on("stage filled without waiting") && is_empty(bar)) || (on("accumulators overwritten without waiting") && is_acc_empty(bar)) ||
           (on("accumulators that share columns overwritten without waiting") && is_acc_empty(bar)) ||
           (on("answer overwritten without waiting") && is_clc_empty(bar)) || (on("products before their operands") && is_full(bar)) ||
           (on("accumulators read before they are complete") && is_acc_full(bar));
  }
  static void barrier_wait(uint32_t bar, uint32_t parity) {
    if (!skips(bar)) HostSm100::barrier_wait(bar, broken_parity(bar, parity));
  }
  template <int kBlocks>
  static void wait_cluster(uint32_t bar, uint32_t parity) {
    if (on("wait with block scope")) return HostSm100::barrier_wait(bar, parity);
    if (!skips(bar)) HostSm100::wait_cluster<kBlocks>(bar, broken_parity(bar, parity));
  }
  static void barrier_init(uint32_t bar, uint32_t arrivals) {
    if (on("arrival count too small") && is_acc_empty(bar)) arrivals = 1;
    if (on("arrival count too large") && is_acc_empty(bar)) arrivals += 1;
    HostSm100::barrier_init(bar, arrivals);
  }
  static void barrier_expect_bytes(uint32_t bar, uint32_t bytes) {
    if (is_full(bar)) {
      if (on("too few bytes expected")) bytes -= 512;
      if (on("too many bytes expected")) bytes += 512;
      if (on("peer's scales not waited for")) bytes -= 3 * 512;
    }
    HostSm100::barrier_expect_bytes(bar, bytes);
  }
  template <int kBlocks>
  static void arrive_leader(uint32_t bar) {
    if (on("arrival with block scope")) return machine::barrier_arrive(0, bar, 0);
    HostSm100::arrive_leader<kBlocks>(bar);
    if (on("a warp arrives more than once") && is_acc_empty(bar)) HostSm100::arrive_leader<kBlocks>(bar);
  }
  template <int kBlocks>
  static void load_box(const Map* map, uint32_t bar, uint32_t dst, int c0, int c1, int c2, int c3) {
    int block = 0;
    if (on("load into the next stage") && map->swizzle) dst += dst + Config::kStageBytes < 1024 + Config::kSlotOffset ? Config::kStageBytes : 0;
    if (on("load from the next block of K") && map->swizzle) c0 += map->box_inner;
    if (on("scales of the next block of K") && !map->swizzle) c1 += 1;
    if (on("peer's scales not waited for") && !map->swizzle && machine::block() == 1) block = 1;
    if (on("operands without swizzle") && map->swizzle) {
      static std::vector<std::unique_ptr<Map>> plain;  // outlives the copy
      plain.emplace_back(new Map(*map));
      plain.back()->swizzle = false;
      map = plain.back().get();
    }
    machine::load_box(*map, block, bar, dst, {c0, c1, c2, c3});
  }

  template <int kBlocks>
  static void copy_scales(uint32_t tmem, uint64_t descriptor) {
    if (on("scale copy with a swizzle")) descriptor |= uint64_t{sm100::kSwizzle128} << 61;
    if (on("scale copy with a wrong stride")) descriptor += uint64_t{8} << 32;
    if (on("scales never copied")) return;
    if (on("scales copied to the wrong column")) tmem += 4;
    HostSm100::copy_scales<kBlocks>(tmem, descriptor);
  }
  template <int kBlocks>
  static void mma_mx(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t scale_a, uint32_t scale_b, bool accumulate) {
    if (on("layout code of the 64-byte swizzle")) a = (a & ~(uint64_t{7} << 61)) | uint64_t{sm100::kSwizzle64} << 61;
    if (on("descriptor version missing")) b &= ~(uint64_t{1} << 46);
    if (on("stride offset halved")) a = (a & ~(uint64_t{0x3FFF} << 32)) | uint64_t{32} << 32;
    if (on("leading offset halved")) b = (b & ~(uint64_t{0x3FFF} << 16)) | uint64_t{512} << 16;
    if (on("descriptor one row off")) a += 128 >> 4;
    if (on("operands swapped")) std::swap(a, b);
    if (on("step along K missing")) a -= (instruction >> 29 & 3) * sm100::operand_k_step(false, 1);
    if (on("N halved")) instruction = (instruction & ~(63u << 17)) | (instruction >> 18 & 31u) << 17;
    if (on("M of the other block count")) instruction ^= 24u << 24;
    if (on("major of A flipped")) instruction ^= 1u << 15;
    if (on("operand format E5M2")) instruction |= 1u << 7;
    if (on("scale format E4M3")) instruction &= ~(1u << 23);
    if (on("scale id of A off by one")) instruction ^= 1u << 29;
    if (on("scale id of B missing")) instruction &= ~(3u << 4);
    if (on("A and B scales swapped")) std::swap(scale_a, scale_b);
    if (on("B scales one column off")) scale_b += 1;
    if (on("always accumulates")) accumulate = true;
    if (on("never accumulates")) accumulate = false;
    if (on("accumulators one column off")) d += 1;
    HostSm100::mma_mx<kBlocks>(d, a, b, instruction, scale_a, scale_b, accumulate);
  }
  template <int kBlocks>
  static void commit(uint32_t bar) {
    if (on("commit to the next stage") && is_empty(bar)) bar = 1024 + Config::kBarrierOffset + 8 * (Config::kStages + (barrier_of(bar) + 1) % Config::kStages);
    if (on("commit left out") && is_acc_full(bar)) return;
    if (on("commit does not reach the peer")) return machine::commit(bar, 1);
    HostSm100::commit<kBlocks>(bar);
  }

  static void fence_after_sync() {
    if (!on("no fence after a wait")) HostSm100::fence_after_sync();
  }
  static void fence_before_sync() {
    const bool first = past().fences_before++ == 0;
    past().fenced = true;
    if (!on(first ? "no fence after the allocation" : "no fence before an arrival")) HostSm100::fence_before_sync();
  }
  static void fence_async_shared() {
    const bool of_answer = past().answered;
    past().answered = false;
    if (!on(of_answer ? "no proxy fence after an answer was read" : "no proxy fence before a bulk store")) HostSm100::fence_async_shared();
  }
  static void fence_async_all() {
    if (!on("no proxy fence after an acquire")) HostSm100::fence_async_all();
  }
  static void barrier_init_fence() {
    if (!on("barriers not fenced after their initialisation") && !on("barriers not fenced before the peer uses them")) HostSm100::barrier_init_fence();
  }
  // The one before a release follows a fence and, without another in between, the stores of the task's last piece.
  static void warp_sync() {
    Past& p = past();
    const bool releases = p.stored && p.fenced, first = p.warp_syncs++ == 0;
    p.stored = p.fenced = false;
    if (on("warp not together at the first cluster barrier") && first) return;
    if (on("warp not together before a release") && releases) return;
    HostSm100::warp_sync();
  }
  static void store_sector(void* address, const uint32_t (&v)[8]) {
    past().stored = true;
    past().fenced = false;
    HostSm100::store_sector(address, v);
  }
  static int load_acquire(const int* address) {
    return on("a task does not wait for what it reads") || on("a task does not wait for what it reads: bulk stores") ? 1 << 30 : HostSm100::load_acquire(address);
  }
  static void store_wait_done() {
    if (on("a release after stores that have only read")) return HostSm100::template store_wait_read<0>();
    if (!on("shared memory does not outlive the stores")) HostSm100::store_wait_done();
  }
  template <int kPending>
  static void store_wait_read() {
    if (!on("panel reused while it is being stored")) HostSm100::store_wait_read<kPending>();
  }
  static void store_commit() {
    if (!on("bulk stores never committed")) HostSm100::store_commit();
  }
  static void tmem_load(uint32_t address, uint32_t (&r)[32]) {
    if (on("another warp's lanes")) address ^= 32u << 16;
    if (on("the other accumulators")) address ^= Config::kTileN;
    HostSm100::tmem_load(address, r);
  }
  static void tmem_wait_load(uint32_t (&r)[32]) {
    if (!on("loads not waited for")) HostSm100::tmem_wait_load(r);
  }
  template <int kBlocks>
  static void tmem_alloc(uint32_t result, uint32_t columns) {
    if (on("allocation of 48 columns")) columns = 48;
    HostSm100::tmem_alloc<kBlocks>(result, columns);
  }
  template <int kBlocks>
  static void tmem_dealloc(uint32_t address, uint32_t columns) {
    if (on("never deallocated")) return;
    if (on("half deallocated")) columns /= 2;
    HostSm100::tmem_dealloc<kBlocks>(address, columns);
    if (on("deallocated twice")) HostSm100::tmem_dealloc<kBlocks>(address, columns);
  }
  // The last cluster barrier is the second one a thread comes to.
  template <int kBlocks>
  static void everyone() {
    const bool last = past().everyone++ % 2 == 1;
    if (on("no cluster barrier at the end") && last) return;
    if (on("address used before the peer has allocated") && !last) return;
    HostSm100::everyone<kBlocks>();
  }
  template <int kBlocks>
  static void steal(uint32_t response, uint32_t bar) {
    HostSm100::steal<kBlocks>(response, bar);
  }
  static bool stolen(uint32_t response, uint32_t& first_block) {
    const bool granted = HostSm100::stolen(response, first_block);
    past().answered = true;
    if (on("first block taken for the cluster")) first_block *= 2;
    return granted || (on("asks on after a refusal") && machine::thread() / 32 == 2);
  }
};

using One = Sm100Config<1, 128, true, true>;
using Two = Sm100Config<2, 256, true, true>;
using Wide = Sm100Config<1, 256, true, false>;
using Links = Sm100Config<1, 128, true, false>;
using Rows = Sm100Config<1, 64, false, false>;
// Down with one block, the same without signals, with two blocks; a weight gradient; chains by ordinary and by bulk stores.
enum Where { kOne, kQuiet, kPair, kWide, kLinks, kRows };

struct Fault {
  const char* name;
  Where where;
  const char* said;  // part of the message; "differ": wrong numbers
};

const Fault kFaults[] = {
    {"wrong phase: full", kOne, "never written"},
    {"wrong phase: empty", kOne, "deadlock"},
    {"wrong phase: accumulators full", kOne, "tensor memory is read"},
    {"wrong phase: accumulators empty", kOne, "deadlock"},
    {"wrong phase: answer", kPair, "never written"},
    {"stage filled without waiting", kPair, "two copies fill"},
    {"accumulators overwritten without waiting", kPair, "while a product is still writing it"},
    {"accumulators that share columns overwritten without waiting", kWide, "while a product is still writing it"},
    {"answer overwritten without waiting", kPair, "deadlock"},
    {"products before their operands", kOne, "never written"},
    {"accumulators read before they are complete", kOne, "tensor memory is read"},
    {"arrival count too small", kOne, "deadlock"},
    {"arrival count too large", kOne, "deadlock"},
    {"too few bytes expected", kOne, "while a copy is filling it"},
    {"too many bytes expected", kOne, "deadlock"},
    {"arrival with block scope", kPair, "block scope"},
    {"wait with block scope", kPair, "block scope"},
    {"peer's scales not waited for", kPair, "too many"},
    {"a warp arrives more than once", kOne, "deadlock"},
    {"load into the next stage", kOne, "never written"},
    {"load from the next block of K", kOne, "differ"},
    {"scales of the next block of K", kOne, "differ"},
    {"operands without swizzle", kOne, "differ"},
    {"scale copy with a swizzle", kOne, "no swizzle"},
    {"scale copy with a wrong stride", kOne, "never written"},
    {"scales never copied", kOne, "never copied"},
    {"scales copied to the wrong column", kOne, "never copied"},
    {"layout code of the 64-byte swizzle", kOne, "128-byte swizzle"},
    {"descriptor version missing", kOne, "version 1"},
    {"stride offset halved", kOne, "1024 bytes apart"},
    {"leading offset halved", kWide, "differ"},
    {"descriptor one row off", kOne, "differ"},
    {"operands swapped", kOne, "differ"},
    {"step along K missing", kOne, "differ"},
    {"N halved", kOne, "never written"},
    {"M of the other block count", kOne, "does not exist"},
    {"major of A flipped", kOne, "differ"},
    {"operand format E5M2", kOne, "E5M2"},
    {"scale format E4M3", kOne, "UE8M0"},
    {"scale id of A off by one", kOne, "differ"},
    {"scale id of B missing", kOne, "differ"},
    {"A and B scales swapped", kOne, "differ"},
    {"B scales one column off", kOne, "never copied"},
    {"always accumulates", kOne, "never written"},
    {"never accumulates", kOne, "differ"},
    {"accumulators one column off", kOne, "never written"},
    {"commit to the next stage", kOne, "deadlock"},
    {"commit left out", kOne, "deadlock"},
    {"commit does not reach the peer", kPair, "deadlock"},
    {"no fence after a wait", kOne, "fence::after"},
    {"no fence before an arrival", kOne, "an arrival after tensor-memory accesses"},
    {"no proxy fence before a bulk store", kOne, "proxy fence"},
    {"panel reused while it is being stored", kWide, "is overwritten while a unit still reads it"},
    {"bulk stores never committed", kOne, "committed"},
    {"another warp's lanes", kOne, "may read lanes"},
    {"the other accumulators", kOne, "tensor memory is read"},
    {"loads not waited for", kOne, "loads are under way"},
    {"allocation of 48 columns", kOne, "power of two"},
    {"never deallocated", kOne, "never deallocated"},
    {"half deallocated", kOne, "were allocated"},
    {"deallocated twice", kOne, "twice"},
    {"no cluster barrier at the end", kPair, "not allocated"},
    {"address used before the peer has allocated", kPair, "is read and was never written"},
    {"asks on after a refusal", kPair, "refused"},
    {"first block taken for the cluster", kPair, "differ"},
    {"shared memory does not outlive the stores", kQuiet, "a thread ends without having waited"},
    {"a release after stores that have only read", kRows, "a release before the bulk stores"},
    {"warp not together before a release", kLinks, "a release before the warp has met"},
    {"no proxy fence after an acquire", kLinks, "after an acquire without a proxy fence"},
    {"a task does not wait for what it reads", kLinks, "rows of the chain"},
    {"a task does not wait for what it reads: bulk stores", kRows, "rows of the chain"},
    {"no proxy fence after an answer was read", kPair, "after ordinary loads without a proxy fence"},
    {"barriers not fenced after their initialisation", kOne, "before its initialisation was fenced"},
    {"barriers not fenced before the peer uses them", kPair, "before its initialisation was fenced"},
    {"no fence after the allocation", kOne, "a cluster barrier after tensor-memory accesses"},
    {"warp not together at the first cluster barrier", kPair, "have not come together"},
};

}  // namespace

int main(int argc, char** argv) {
  const Shape shape = {{150, 0, 1, 40}, 160, 416};
  Case<kDown, One> one(shape, Data::kIntegers);
  Case<kDown, Two> pair(shape, Data::kIntegers);
  Case<kWgradDown, Wide> wide(shape, Data::kIntegers);
  Case<kDown, One> quiet(shape, Data::kIntegers);
  for (Task& task : quiet.tasks) task.signal = -1;
  Chain<kGateUp, Links> links;
  Chain<kDown, Rows> rows;
  auto run = [&](Where where, uint32_t seed) {
    ++runs;
    switch (where) {
      case kOne: return one.run<Faulty<One>>(seed);
      case kQuiet: return quiet.run<Faulty<One>>(seed);
      case kPair: return pair.run<Faulty<Two>>(seed);
      case kWide: return wide.run<Faulty<Wide>>(seed);
      case kLinks: return links.run<Faulty<Links>>(seed);
      default: return rows.run<Faulty<Rows>>(seed);
    }
  };
  int missed = 0, seeded = 0;
  constexpr uint32_t kSeeds = 6;
  for (Where where : {kOne, kQuiet, kPair, kWide, kLinks, kRows}) {  // without a fault all is well, under the same schedules
    for (uint32_t seed = 0; seed < kSeeds; ++seed) {
      const std::string wrong = run(where, seed);
      if (!wrong.empty()) {
        std::printf("MISS without a fault, program %d, schedule %u: %s\n", where, seed, wrong.c_str());
        return 1;
      }
    }
  }
  std::set<std::string> names;
  for (const Fault& f : kFaults) {
    if (!names.insert(f.name).second) {
      std::printf("MISS %s: twice in the list\n", f.name);
      return 1;
    }
    if (argc > 1 && std::strcmp(argv[1], f.name) != 0) continue;
    fault = f.name;
    ++seeded;
    std::string caught;
    for (uint32_t seed = 0; seed < kSeeds && (caught.empty() || caught.find(f.said) == std::string::npos); ++seed) caught = run(f.where, seed);
    const bool good = !caught.empty() && caught.find(f.said) != std::string::npos;
    std::printf("%s %s: %s\n", good ? "ok  " : "MISS", f.name, caught.empty() ? "not noticed" : caught.c_str());
    missed += !good;
  }
  std::printf("%d faults, %d missed\n", seeded, missed);
  return missed == 0 && seeded > 0 ? 0 : 1;
}
