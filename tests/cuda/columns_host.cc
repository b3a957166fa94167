// kernels_cuda/quantize_columns.h on the host emulator: 128 rows of eight columns, wherever their vectors lie in shared memory, against the scalar
// maths that test_mx_math.py holds to the reference. Ends with 1 and says which element or code is another.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "isa/host/host.h"
#include "quantize_columns.h"

extern "C" void quantize_rows(const uint32_t* bits, uint8_t* byte, uint8_t* code, int64_t rows, int64_t width, int aligned);  // mx_math.cc

using namespace moe;

namespace {

constexpr int kTokens = 300;  // the last one is zeros
enum Data { kGaussian, kBinadesApart, kAnyBits, kTiny, kInfinite, kKinds };  // kInfinite: every block has an Inf

std::vector<uint16_t> tokens_of(int kind, std::mt19937& random) {  // BF16, eight columns each
  std::normal_distribution<float> normal;
  std::vector<uint16_t> tokens;
  for (int i = 0; i < (kTokens - 1) * 8; ++i) {
    float x = normal(random);
    if (kind == kBinadesApart) x = std::ldexp(x, static_cast<int>(random() % 30) - 15);
    if (kind == kTiny) x = random() % 3 ? 0.0f : std::ldexp(x, -110 - static_cast<int>(random() % 30));
    if (kind == kInfinite && i / 8 % 2 == 0) x = INFINITY;
    const uint32_t any = static_cast<uint32_t>(random());  // NaN and Inf among them, in half of the columns
    tokens.push_back(static_cast<uint16_t>(kind == kAnyBits && i % 8 < 4 ? any : mx::bits_of(x) >> 16));
  }
  tokens.resize(kTokens * 8, 0);
  return tokens;
}

bool same(const char* what, int kind, bool aligned, int line, const std::vector<uint8_t>& got, const std::vector<uint8_t>& wanted) {
  for (int i = 0; i < static_cast<int>(wanted.size()); ++i) {
    if (got[i] == wanted[i]) continue;
    std::printf("kind %d, aligned %d: %s %d of column %d is %02x, must be %02x\n", kind, aligned, what, i % line, i / line, got[i], wanted[i]);
    return false;
  }
  return true;
}

bool check(int kind, bool aligned, std::mt19937& random) {
  const std::vector<uint16_t> tokens = tokens_of(kind, random);
  std::vector<uint32_t> token_of(128);
  for (auto& token : token_of) token = random() % 8 ? static_cast<uint32_t>(random() % (kTokens - 1)) : kTokens - 1;
  std::vector<uint8_t> elements(8 * 128), codes(8 * 4);
  host::run_cluster(32, 1024 + 16 * kTokens, 1, [&] {
    const uint32_t base = Host::shared_base(), lane = Host::lane_index();
    for (uint32_t t = lane; t < kTokens; t += 32) {
      for (uint32_t word = 0; word < 4; ++word) {
        Host::store_word(base + 16 * t + 4 * word, tokens[8 * t + 2 * word] | static_cast<uint32_t>(tokens[8 * t + 2 * word + 1]) << 16);
      }
    }
    Host::warp_sync();
    ColumnEight<Host> eight;
    for (uint32_t i = 0; i < 4; ++i) eight.load(static_cast<int>(i), base + 16 * token_of[addressed_row(lane) + i]);
    const uint32_t code = aligned ? eight.quantize_aligned() : eight.quantize(), column = lane / 4, quarter = lane % 4;
    if (Host::cluster_rank() != 0) return;
    for (int half = 0; half < 2; ++half) Host::store_vector(&elements[128 * column + 64 * half + 16 * quarter], eight.elements(half));
    if (aligned) {
      codes[4 * column + quarter] = static_cast<uint8_t>(code);  // every lane has it
    } else if (quarter == 0) {
      for (int b = 0; b < 4; ++b) codes[4 * column + b] = static_cast<uint8_t>(code >> 8 * b);
    }
  });
  std::vector<uint32_t> bits(8 * 128);
  for (int c = 0; c < 8; ++c) {
    for (int r = 0; r < 128; ++r) bits[128 * c + r] = static_cast<uint32_t>(tokens[8 * token_of[r] + c]) << 16;
  }
  std::vector<uint8_t> wanted(8 * 128), wanted_codes(8 * 4);
  quantize_rows(bits.data(), wanted.data(), wanted_codes.data(), 8, 128, aligned);
  return same("row", kind, aligned, 128, elements, wanted) && same("code", kind, aligned, 4, codes, wanted_codes);
}

}  // namespace

int main() {
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    for (const bool aligned : {false, true}) {
      if (!check(round % kKinds, aligned, random)) return 1;
    }
  }
  std::puts("ok");
}
