// The instruction layer on the host, with the FP8 products: the members of Sm90Mx (../sm90_mx.cuh). Sums are FP32, not the tensor core's shorter ones.
#pragma once

#include "../../quantize_math.h"
#include "host.h"

namespace moe {

struct HostMx : Host {
  template <bool kFirst, int kCount>
  static void mma_e4m3(float (&acc)[kCount], uint64_t desc_a, uint64_t desc_b) {
    const int block = host::block(), group = host::thread() / 128;
    host::meet(1000 + group, host::thread() % 128, 128, "mma_e4m3", desc_a * 31 + desc_b, acc, [=](void** data) {
      for (int i = 0; i < 128; ++i) host::product_reads(element_address(desc_a, i / 2, i % 2 * 16), 16);
      for (int i = 0; i < 4 * kCount; ++i) host::product_reads(element_address(desc_b, i / 2, i % 2 * 16), 16);
      host::queue_product(group, data, kCount, [=](const host::Accumulators& accs) { product(block, accs, 2 * kCount, desc_a, desc_b, kFirst); });
    });
  }
  static uint32_t load_code(const uint8_t* address) { return *address; }
  static void load_bytes(const void* from, uint32_t bar, uint32_t dst, uint32_t bytes) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || dst % 16 != 0 || bytes % 16 != 0) host::fail("bulk copies are of 16 bytes, on 16 bytes");
    const int block = host::block();
    std::memset(host::shared(block, dst, bytes), 0xFF, bytes);  // unreadable until they land
    host::copy_writes(block, dst, bytes, bar);
    host::copy_in([=] {
      std::memcpy(host::shared(block, dst, bytes), from, bytes);
      host::barrier_complete(block, bar, bytes);
    });
  }
  static uint32_t load_shared_byte(uint32_t address) { return *host::read(address, 1); }
  static void store_short(uint32_t address, uint32_t value) {
    const uint16_t v = static_cast<uint16_t>(value);
    std::memcpy(host::written(address, 2), &v, 2);
  }
  static void store_word_cluster(uint32_t address, uint32_t rank, uint32_t x) {
    std::memcpy(host::written_in(static_cast<int>(rank), address, 4), &x, 4);
  }
  static void barrier_release_cluster(uint32_t bar, uint32_t rank) { host::barrier_arrive(static_cast<int>(rank), bar, 1, 0); }
  static void barrier_acquire_cluster(uint32_t bar, uint32_t parity) { host::barrier_wait(bar, parity); }

 private:
  // Where element (row, k) of a K-major operand lies under the 128-byte swizzle.
  static uint32_t element_address(uint64_t desc, int row, int k) {
    if (desc >> 62 != 1) host::fail("a wgmma descriptor must say 128-byte swizzle");
    const uint32_t start = static_cast<uint32_t>(desc & 0x3FFF) << 4, stride = static_cast<uint32_t>(desc >> 32 & 0x3FFF) << 4;
    uint32_t address = start + row / 8 * stride + row % 8 * 128 + k;
    return address ^ (address >> 7 & 7) << 4;
  }
  static float element(int block, uint64_t desc, int row, int k) {
    return mx::from_e4m3(*host::shared(block, element_address(desc, row, k), 1));
  }

  static void product(int block, const host::Accumulators& accs, int columns, uint64_t desc_a, uint64_t desc_b, bool first) {
    std::vector<float> b(static_cast<size_t>(columns) * 32);
    for (int j = 0; j < columns; ++j) {
      for (int k = 0; k < 32; ++k) b[j * 32 + k] = element(block, desc_b, j, k);
    }
    for (int i = 0; i < 64; ++i) {
      float a[32];
      for (int k = 0; k < 32; ++k) a[k] = element(block, desc_a, i, k);
      for (int j = 0; j < columns; ++j) {
        float& d = accs[i / 16 * 32 + i % 8 * 4 + j % 8 / 2][j / 8 * 4 + i % 16 / 8 * 2 + j % 2];
        if (first) d = 0.0f;
        for (int k = 0; k < 32; ++k) d += a[k] * b[j * 32 + k];
      }
    }
  }
};

}  // namespace moe
