// Rows beyond 2^31 elements: the arithmetic, and the kernels on an array of that size (reserved, not committed).
#include <sys/mman.h>

#include "check.h"
#include "cpu/moe.h"
#include "cpu/rows.h"

namespace moejax::cpu {
namespace {

void OffsetsAre64Bit() {
  static_assert(Offset(299594, 7168) == 2147489792, "passes 2^31");
  static_assert(Offset(4194304, 2048) == 8589934592, "64 ranks of 65,536 rows");
  CHECK(Offset(149797, 7168) * 2 == 2147489792, "bytes of BF16");
}

// One expert with two rows, behind 2^31 elements of x and y: a 32-bit offset would read or write elsewhere, or crash.
void RowsBeyond31BitsAreReadAndWritten() {
  constexpr int64_t kRows = (int64_t{1} << 31) / 64 + 256, kWidth = 64;
  const size_t bytes = size_t(kRows) * kWidth * sizeof(float);
  const auto reserve = [&] {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(data != MAP_FAILED, "cannot reserve %zu bytes", bytes);
    return static_cast<float*>(data);
  };
  float *x = reserve(), *y = reserve();
  const int32_t start = int32_t(kRows - 128), count = 2;
  CHECK(Offset(start, kWidth) > (int64_t{1} << 31), "not beyond 2^31 elements");
  std::vector<float> w(kWidth * kWidth, 0.0f);
  for (int64_t i = 0; i < kWidth; ++i) w[i * kWidth + i] = 2.0f;
  for (int64_t i = 0; i < 2 * kWidth; ++i) x[Offset(start, kWidth, i)] = float(i + 1);
  TestPool pool(2);
  // Only the groups' rows are touched: padding is zeroed by rows, which would commit the whole array, so products are called as tiles.
  const Groups groups{1, kRows, &count, &start};
  const std::vector<Tile> tiles = Tiles(groups);
  CHECK(tiles.size() == 1 && tiles[0].first_row == start, "tiles");
  std::vector<float> rows(2 * kWidth), products(2 * kWidth), dw(kWidth * kWidth, 0.0f);
  for (int64_t i = 0; i < 2; ++i) ReadRow({x, Format::kFp32}, start + i, kWidth, false, rows.data() + i * kWidth);
  ProductWithTranspose(rows.data(), 2, {w.data(), nullptr, Format::kFp32, kWidth, kWidth, false}, 0, products.data());
  for (int64_t i = 0; i < 2; ++i) WriteRow(products.data() + i * kWidth, start + i, kWidth, {y, Format::kFp32});
  for (int64_t i = 0; i < 2 * kWidth; ++i) CHECK(y[Offset(start, kWidth, i)] == 2.0f * float(i + 1), "element %d", int(i));

  GroupedWgrad(pool, groups, {y, Format::kFp32}, {x, Format::kFp32}, kWidth, kWidth, false, dw.data());
  CHECK(dw[0] == 2.0f * (1.0f + 65.0f * 65.0f), "dw[0][0] is %f", dw[0]);
  std::vector<float> token(kWidth);
  const int32_t row_TxK[1] = {start + 1};
  Combine(pool, {y, Format::kFp32}, nullptr, nullptr, row_TxK, 1, 1, kWidth, {token.data(), Format::kFp32});
  CHECK(token[0] == 130.0f, "combine read %f", token[0]);
  munmap(x, bytes);
  munmap(y, bytes);
}

}  // namespace
}  // namespace moejax::cpu

int main() {
  using namespace moejax::cpu;
  OffsetsAre64Bit();
  RowsBeyond31BitsAreReadAndWritten();
  std::puts("offsets: ok");
}
