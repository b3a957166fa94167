// The instruction layer on the host: the same members as Sm90 (../sm90.cuh), on the engine of engine.h. Descriptors and swizzles are
// decoded from the bits that the kernel builds.
#pragma once

#include <cmath>
#include <cstring>

#include "../portable.h"
#include "engine.h"

namespace moe {

struct Host {
  using TensorMap = host::Map;

  static uint32_t thread_index() { return host::thread(); }
  static uint32_t warp_index() { return host::thread() / 32; }
  static uint32_t lane_index() { return host::thread() % 32; }
  static uint32_t cluster_rank() { return host::block(); }
  static uint32_t cluster_index() { return 0; }
  static uint32_t num_clusters() { return 1; }
  static uint32_t shared_base() { return 1024; }
  static bool elect_one() {
    warp("elect", 0, nullptr, nullptr);
    return lane_index() == 0;
  }

  // --- barriers ---
  static void barrier_init(uint32_t bar, uint32_t arrivals) { host::barrier_init(bar, arrivals); }
  static void barrier_init_fence() {}
  static void barrier_expect_bytes(uint32_t bar, uint32_t bytes) { host::barrier_arrive(host::block(), bar, 1, bytes); }
  static void barrier_arrive(uint32_t bar) { host::barrier_arrive(host::block(), bar, 1, 0); }
  static void barrier_arrive_cluster(uint32_t bar, uint32_t rank, uint32_t count) {
    host::barrier_arrive(static_cast<int>(rank), bar, count, 0);
  }
  static void barrier_wait(uint32_t bar, uint32_t parity) { host::barrier_wait(bar, parity); }
  static bool barrier_passed(uint32_t bar, uint32_t parity) { return host::barrier_passed(bar, parity); }
  template <class T>
  static T not_before(T value) {
    return value;
  }
  static void warp_sync() {
    warp("warp_sync", 0, nullptr, [](void**) { host::warp_synced(); });
  }
  template <int kShift>
  static void wait_tick() {}  // any time will do
  static bool any(bool condition) {
    bool pair[2] = {condition, false};
    warp("vote.any", 0, pair, [](void** data) {
      bool found = false;
      for (int l = 0; l < 32; ++l) found |= static_cast<bool*>(data[l])[0];
      for (int l = 0; l < 32; ++l) static_cast<bool*>(data[l])[1] = found;
    });
    return pair[1];
  }
  static void cluster_sync() { host::cluster_sync(); }

  // --- bulk tensor copies ---
  static void prefetch_map(const TensorMap*) {}
  template <bool kOnce = false>
  static void load_panel(const TensorMap* map, uint32_t bar, uint32_t dst, int c0, int c1, int c2, int c3) {
    load(map, bar, dst, c0, c1, c2, c3, 1 << host::block());
  }
  static void load_joint_panel(const TensorMap* map, uint32_t bar, uint32_t dst, int k, int row, int expert) {
    if (map->box_rows != 8) host::fail("joint gate and up have a map of their own");
    for (int i = 0; i < 8; ++i) load(map, bar, dst + i * 1024, k, row + 8 * (i / 2), i % 2, expert, 1 << host::block());
  }
  template <bool kKeep = false>
  static void load_panel_both(const TensorMap* map, uint32_t bar, uint32_t dst, int c0, int c1, int c2, int c3) {
    load(map, bar, dst, c0, c1, c2, c3, 3);
  }
  static void store_panel(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3) {
    const int block = host::block();
    host::store_reads(src, map->box_rows * kPanelRowBytes);  // what is clipped too: the program must not count on it
    host::copy_out([=] {
      for_chunks(map, c0, c1, c2, c3, [&](uint32_t offset, uint8_t* global) {
        if (global != nullptr) std::memcpy(global, host::shared(block, src + offset, 16), 16);
      });
    });
  }
  static void store_bytes_once(void* to, uint32_t from, uint32_t bytes) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || from % 16 != 0 || bytes % 16 != 0) host::fail("bulk copies are of 16 bytes, on 16 bytes");
    const int block = host::block();
    host::store_reads(from, bytes);
    host::copy_out([=] { std::memcpy(to, host::shared(block, from, bytes), bytes); });
  }
  static void store_commit() { host::commit_stores(); }
  template <int kPending>
  static void store_wait_read() {
    host::wait_stores(kPending);
  }
  static void store_wait_done() { host::wait_stores(0); }
  static void fence_async_shared() { host::fence_async(); }
  static void fence_async_all() { host::fence_async(); }

  // --- gathers: a lane's copies since its last arrival land together with the next one ---
  static void gather_vector(uint32_t dst, const uint8_t* src, uint32_t bytes) {
    const int block = host::block();
    std::memset(host::shared(block, dst, 16), 0xFF, 16);  // unreadable until it lands
    host::gather(dst, [=] {
      uint8_t* to = host::shared(block, dst, 16);
      std::memset(to, 0, 16);
      if (bytes > 0) std::memcpy(to, src, bytes);
    });
  }
  static void gather_arrive(uint32_t bar) { host::gather_arrive(bar); }

  // --- tensor cores ---
  static void mma_fence() {}
  static void mma_commit() {
    warpgroup("mma_commit", 0, nullptr, [](void**) { host::commit_products(warpgroup_index()); });
  }
  template <int kPending>
  static void mma_wait() {
    warpgroup("mma_wait", kPending, nullptr, [](void**) { host::wait_products(warpgroup_index(), kPending); });
  }
  template <int kN, bool kMnMajorA, bool kMnMajorB, int kCount>
  static void mma(float (&acc)[kCount], uint64_t desc_a, uint64_t desc_b) {
    const int block = host::block();
    warpgroup("mma", desc_a * 31 + desc_b, acc, [=](void** data) {
      for_operand(desc_a, kMnMajorA, 64, [](uint32_t address) { host::product_reads(address, 16); });
      for_operand(desc_b, kMnMajorB, kN, [](uint32_t address) { host::product_reads(address, 16); });
      host::queue_product(warpgroup_index(), data, kCount, [=](const host::Accumulators& accs) {
        product(block, accs, kN, desc_a, kMnMajorA, desc_b, kMnMajorB);
      });
    });
  }
  template <bool kMnMajorB, int kCount>
  static void mma_registers(float (&acc)[kCount], const uint32_t (&a)[4], uint64_t desc_b) {
    constexpr int kN = 128;
    const int block = host::block();
    const void* mine[2] = {acc, a};
    warpgroup("mma_registers", desc_b, mine, [=](void** data) {
      for_operand(desc_b, kMnMajorB, kN, [](uint32_t address) { host::product_reads(address, 16); });
      std::vector<float> rows(64 * 16);  // as they are now: the program must not change them before it waits
      void* accs[128];
      for (int thread = 0; thread < 128; ++thread) {
        const void* const* of = static_cast<const void* const*>(data[thread]);
        accs[thread] = const_cast<void*>(of[0]);
        const uint32_t* pairs = static_cast<const uint32_t*>(of[1]);
        const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
        for (int i = 0; i < 4; ++i) {
          float* at = &rows[static_cast<size_t>((row + i % 2 * 8) * 16 + column + i / 2 * 8)];
          at[0] = bf16_lo(pairs[i]);
          at[1] = bf16_hi(pairs[i]);
        }
      }
      host::queue_product(warpgroup_index(), accs, kCount, [=](const host::Accumulators& sums) {
        add_product(sums, kN, rows, operand_rows(block, kN, desc_b, kMnMajorB));
      });
    });
  }
  template <int kRegisters>
  static void registers_grow() {
    warpgroup("setmaxnreg.inc", kRegisters, nullptr, nullptr);
  }
  template <int kRegisters>
  static void registers_shrink() {
    warpgroup("setmaxnreg.dec", kRegisters, nullptr, nullptr);
  }

  // --- shared memory ---
  struct Matrices {
    uint32_t address;
    uint32_t* values;
  };
  static void store_matrices(uint32_t address, const uint32_t (&r)[4]) { move_matrices("stmatrix", address, const_cast<uint32_t*>(r)); }
  static void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
    uint32_t flipped[4];
    transpose_matrices("stmatrix.trans", r, flipped);
    move_matrices("stmatrix", address, flipped);
  }
  static void load_matrices(uint32_t address, uint32_t (&r)[4]) { move_matrices("ldmatrix", address, r); }
  static void load_matrices_transposed(uint32_t address, uint32_t (&r)[4]) {
    uint32_t lines[4];
    move_matrices("ldmatrix", address, lines);
    transpose_matrices("ldmatrix.trans", lines, r);
  }
  static void store_float2(uint32_t address, float a, float b) {
    const float v[2] = {a, b};
    std::memcpy(host::written(address, 8), v, 8);
  }
  static void load_float2(uint32_t address, float& a, float& b) {
    float v[2];
    std::memcpy(v, host::read(address, 8), 8);
    a = v[0];
    b = v[1];
  }
  static void store_float(uint32_t address, float x) { std::memcpy(host::written(address, 4), &x, 4); }
  static void store_word(uint32_t address, uint32_t x) { std::memcpy(host::written(address, 4), &x, 4); }
  static uint32_t load_word(uint32_t address) {
    uint32_t x;
    std::memcpy(&x, host::read(address, 4), 4);
    return x;
  }
  struct Vector {
    uint32_t x, y, z, w;
  };
  static Vector load_vector(uint32_t address) {
    Vector v;
    std::memcpy(&v, host::read(address, 16), 16);
    return v;
  }

  // --- global memory, flags ---
  static Vector load_global_vector(const void* address) {
    Vector v;
    std::memcpy(&v, address, 16);
    return v;
  }
  static void store_vector(void* address, const Vector& v) { std::memcpy(address, &v, 16); }
  template <bool kStream>
  static void store_float4(float* address, float a, float b, float c, float d) {
    const float v[4] = {a, b, c, d};
    std::memcpy(address, v, 16);
  }
  static int load_acquire(const int* address) { return *address; }
  static void add_release(int* address, int value) { *address += value; }

  // --- arithmetic ---
  static uint32_t pack_bf16(float lo, float hi) { return bf16(lo) | static_cast<uint32_t>(bf16(hi)) << 16; }
  static float bf16_lo(uint32_t packed) { return from_bits(packed << 16); }
  static float bf16_hi(uint32_t packed) { return from_bits(packed & 0xffff0000u); }
  static float exp2(float x) { return std::exp2(x); }
  static float reciprocal(float x) { return 1.0f / x; }
  static float select(uint32_t condition, float a, float b) { return condition ? a : b; }
  static float fma(float a, float b, float c) { return std::fma(a, b, c); }
  static float mul(float a, float b) { return a * b; }
  static float add(float a, float b) { return a + b; }
  static float shuffle_xor(float x, uint32_t mask) {
    float pair[2] = {x, 0.0f};
    warp("shfl.xor", mask, pair, [mask](void** data) {
      for (uint32_t l = 0; l < 32; ++l) static_cast<float*>(data[l])[1] = static_cast<float*>(data[l ^ mask])[0];
    });
    return pair[1];
  }
  static int shuffle(int x, uint32_t from) {
    int triple[3] = {x, static_cast<int>(from % 32), 0};
    warp("shfl.idx", 0, triple, [](void** data) {
      for (int l = 0; l < 32; ++l) {
        int* mine = static_cast<int*>(data[l]);
        mine[2] = static_cast<int*>(data[mine[1]])[0];
      }
    });
    return triple[2];
  }

  static uint16_t bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (std::isnan(x)) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
  static float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }

 private:
  static int warpgroup_index() { return host::thread() / 128; }
  static void warp(const char* name, uint64_t argument, void* data, const std::function<void(void**)>& combine) {
    host::meet(static_cast<int>(warp_index()), static_cast<int>(lane_index()), 32, name, argument, data, combine);
  }
  static void warpgroup(const char* name, uint64_t argument, void* data, const std::function<void(void**)>& combine) {
    host::meet(1000 + warpgroup_index(), host::thread() % 128, 128, name, argument, data, combine);
  }

  // Every 16-byte chunk of a box: its offset in (swizzled) shared memory, and where it lies, or null outside the tensor.
  template <class F>
  static void for_chunks(const TensorMap* map, int c0, int c1, int c2, int c3, F f) {
    const int per_chunk = 16 / map->element_bytes;
    for (int row = 0; row < map->box_rows; ++row) {
      for (int chunk = 0; chunk < 8; ++chunk) {
        const int64_t at[4] = {c0 + chunk * per_chunk, c1 + row, c2, c3};
        bool inside = true;
        for (int d = 0; d < 4; ++d) inside = inside && at[d] >= 0 && at[d] < map->dims[d];
        const int64_t element = ((at[3] * map->dims[2] + at[2]) * map->dims[1] + at[1]) * map->dims[0] + at[0];
        f(panel_offset(row, chunk), inside ? map->data + element * map->element_bytes : nullptr);
      }
    }
  }

  static void load(const TensorMap* map, uint32_t bar, uint32_t dst, int c0, int c1, int c2, int c3, int blocks) {
    if (dst % 1024 != 0) host::fail("a box must start at a multiple of 1024 bytes");
    const int bytes = map->box_rows * kPanelRowBytes;
    for (int b = 0; b < host::kBlocks; ++b) {
      if (!(blocks >> b & 1)) continue;
      std::memset(host::shared(b, dst, bytes), 0xFF, bytes);  // unreadable until it lands
      host::copy_writes(b, dst, bytes, bar);
      host::copy_in([=] {
        for_chunks(map, c0, c1, c2, c3, [&](uint32_t offset, uint8_t* global) {
          uint8_t* to = host::shared(b, dst + offset, 16);
          if (global != nullptr) {
            std::memcpy(to, global, 16);
          } else {
            std::memset(to, 0, 16);
          }
        });
        host::barrier_complete(b, bar, bytes);
      });
    }
  }

  static void move_matrices(const char* name, uint32_t address, uint32_t* values) {
    const bool store = std::string(name) == "stmatrix";
    Matrices mine = {address, values};
    warp(name, 0, &mine, [=](void** data) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        for (int row = 0; row < 8; ++row) {
          const uint32_t from = static_cast<Matrices*>(data[8 * matrix + row])->address;
          uint8_t* line = store ? host::written_by_warp(from, 16) : host::read_by_warp(from, 16);
          for (int quad = 0; quad < 4; ++quad) {
            uint32_t* value = &static_cast<Matrices*>(data[4 * row + quad])->values[matrix];
            if (store) {
              std::memcpy(line + 4 * quad, value, 4);
            } else {
              std::memcpy(value, line + 4 * quad, 4);
            }
          }
        }
      }
    });
  }

  // Lane 4 i + j holds row i, columns 2 j and 2 j + 1, of each matrix, before and after.
  static void transpose_matrices(const char* name, const uint32_t (&from)[4], uint32_t (&to)[4]) {
    uint32_t* pair[2] = {const_cast<uint32_t*>(from), to};
    warp(name, 0, pair, [](void** data) {
      auto half = [&](int lane, int matrix, int column) {
        return static_cast<uint32_t**>(data[lane])[0][matrix] >> (16 * column) & 0xffffu;
      };
      for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4, column = 2 * (lane % 4);  // of the transpose: element (row, column) is (column, row) of the matrix
        for (int matrix = 0; matrix < 4; ++matrix) {
          const uint32_t lo = half(4 * column + row / 2, matrix, row % 2), hi = half(4 * (column + 1) + row / 2, matrix, row % 2);
          static_cast<uint32_t**>(data[lane])[1][matrix] = lo | hi << 16;
        }
      }
    });
  }

  // Where element (mn, k) of an operand lies: the descriptor's offsets first, then the 128-byte swizzle on the address.
  static uint32_t operand_address(uint64_t desc, bool mn_major, int mn, int k) {
    if (desc >> 62 != 1) host::fail("a wgmma descriptor must say 128-byte swizzle");
    const uint32_t start = static_cast<uint32_t>(desc & 0x3FFF) << 4;
    const uint32_t leading = static_cast<uint32_t>(desc >> 16 & 0x3FFF) << 4;
    const uint32_t stride = static_cast<uint32_t>(desc >> 32 & 0x3FFF) << 4;
    uint32_t address = mn_major ? start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                                : start + mn / 8 * stride + mn % 8 * 128 + k * 2;
    return address ^ (address >> 7 & 7) << 4;
  }
  static float operand(int block, uint64_t desc, bool mn_major, int mn, int k) {
    uint16_t bits;
    std::memcpy(&bits, host::shared(block, operand_address(desc, mn_major, mn, k), 2), 2);
    return from_bits(static_cast<uint32_t>(bits) << 16);
  }

  // Every 16 bytes of an operand of `lines` x 16: f(address).
  template <class F>
  static void for_operand(uint64_t desc, bool mn_major, int lines, F f) {
    for (int i = 0; i < lines * 2; ++i) f(mn_major ? operand_address(desc, true, i / 16 * 8, i % 16) : operand_address(desc, false, i / 2, i % 2 * 8));
  }

  // Lines of an operand, 16 values each.
  static std::vector<float> operand_rows(int block, int lines, uint64_t desc, bool mn_major) {
    std::vector<float> rows(static_cast<size_t>(lines) * 16);
    for (int i = 0; i < lines; ++i) {
      for (int k = 0; k < 16; ++k) rows[static_cast<size_t>(i * 16 + k)] = operand(block, desc, mn_major, i, k);
    }
    return rows;
  }
  static void product(int block, const host::Accumulators& accs, int n, uint64_t desc_a, bool mn_a, uint64_t desc_b, bool mn_b) {
    add_product(accs, n, operand_rows(block, 64, desc_a, mn_a), operand_rows(block, n, desc_b, mn_b));
  }
  static void add_product(const host::Accumulators& accs, int n, const std::vector<float>& a, const std::vector<float>& b) {
    for (int i = 0; i < 64; ++i) {
      for (int j = 0; j < n; ++j) {
        const int thread = i / 16 * 32 + i % 8 * 4 + j % 8 / 2;
        float& d = accs[thread][j / 8 * 4 + i % 16 / 8 * 2 + j % 2];
        for (int k = 0; k < 16; ++k) d += a[static_cast<size_t>(i * 16 + k)] * b[static_cast<size_t>(j * 16 + k)];
      }
    }
  }
};

}  // namespace moe
