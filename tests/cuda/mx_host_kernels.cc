// Runs every kind of FP8 grouped GEMM of kernels_cuda/mx_roles.h on the host emulator, on a small layer with unequal, unaligned sizes and short last
// blocks along every dimension, and compares with plain loops over the dequantised operands: relative norm per expert, zero padding, equal bits
// for every interleaving seed. KIND_tokens_n: with tokens on either side (mx_tokens_n.h), KIND_strips: in tiles and in strips (mx_resident.h), whose
// bits must be equal too. KIND_deep: with more K blocks of gate/up and dgrad-down than the ring has stages.
// Usage: mx_host_kernels KIND SEED... [--without=FAULT] (host_faults.h); prints one line and exits with 1 on a mismatch.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "host_faults.h"
#include "host_tasks.h"
#include "isa/host/host_mx.h"
#include "mx_resident.h"
#include "mx_tokens_n.h"

namespace {

using namespace moe;
struct Isa : Faulty<HostMx> {
  static inline uint32_t cluster = 0, clusters = 1;  // which one runs; they run one after the other
  static uint32_t cluster_index() { return cluster; }
  static uint32_t num_clusters() { return clusters; }
};
using Arguments = MxArguments<host::Map>;

constexpr int kF = 288;
int d_extent = 160;

// Rows of the experts. By default two row tiles that pair, an empty expert, an odd tile with a warpgroup of padding.
int experts = 3, num_rows = 384;
std::vector<int> count_E = {200, 0, 40}, start_E = {0, 256, 256};

void set_groups(const std::vector<int>& count) {
  experts = static_cast<int>(count.size());
  count_E = count;
  start_E.clear();
  num_rows = 0;
  for (int rows : count) {
    start_E.push_back(num_rows);
    num_rows += (rows + 127) / 128 * 128;
  }
}

std::mt19937 generator(7);

int expert_of(int row) {
  for (int e = 0; e < experts; ++e) {
    if (row >= start_E[e] && row < start_E[e] + count_E[e]) return e;
  }
  return -1;
}

float bf16_value(uint16_t bits) { return Host::from_bits(static_cast<uint32_t>(bits) << 16); }

// Normal numbers, each 32 at a scale of its own, so that codes differ and re-basing loses bits.
std::vector<float> random_values(size_t n, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::uniform_int_distribution<int> exponent(-3, 3);
  std::vector<float> v(n);
  for (size_t i = 0; i < n; ++i) {
    static float block = 1.0f;
    if (i % 32 == 0) block = std::ldexp(1.0f, exponent(generator));
    v[i] = normal(generator) * block;
  }
  return v;
}

std::vector<float> random_rows(int width) {  // of experts, zeros in between
  auto v = random_values(static_cast<size_t>(num_rows) * width);
  for (int r = 0; r < num_rows; ++r) {
    if (expert_of(r) < 0) std::memset(&v[static_cast<size_t>(r) * width], 0, 4 * static_cast<size_t>(width));
  }
  return v;
}

int blocks_of(int n) { return (n + 127) / 128; }

// A matrix of `lines` x `length`, blocks along the length, one code per `group` lines x 128, and what it stands for.
struct Quantized {
  int lines, length;
  std::vector<uint8_t> bytes;
  std::vector<int> code;  // by line and block of 128
  std::vector<float> values;

  Quantized(const float* x, int lines_, int length_, int group) : lines(lines_), length(length_), bytes(size_t(lines_) * length_) {
    const int blocks = (length + 31) / 32, wide = blocks_of(length);
    std::vector<uint32_t> fine(static_cast<size_t>(lines) * blocks);
    code.assign(static_cast<size_t>(lines) * wide, 0);
    for (int l = 0; l < lines; ++l) {
      for (int b = 0; b < blocks; ++b) {
        uint32_t amax = 0;
        for (int k = 32 * b; k < std::min(32 * b + 32, length); ++k) amax = std::max(amax, mx::bits_of(x[size_t(l) * length + k]) & 0x7FFFFFFFu);
        fine[l * blocks + b] = mx::scale_code(amax);
        for (int m = l / group * group; m < std::min(l / group * group + group, lines); ++m) {
          int& c = code[size_t(m) * wide + b / 4];
          c = std::max(c, static_cast<int>(fine[l * blocks + b]));
        }
      }
    }
    values.resize(bytes.size());
    for (int l = 0; l < lines; ++l) {
      for (int k = 0; k < length; ++k) {
        const size_t at = size_t(l) * length + k;
        const uint32_t s = fine[l * blocks + k / 32];
        const uint32_t q = mx::to_e4m3(x[at] * mx::reciprocal_scale(s));
        bytes[at] = static_cast<uint8_t>(mx::rebase_e4m3(q, mx::rebase_factor(s, code[size_t(l) * wide + k / 128])) & 0xFF);
        values[at] = mx::from_e4m3(bytes[at]) * mx::scale_value(code[size_t(l) * wide + k / 128]);
      }
    }
  }
  // (blocks, lines rounded up to 128).
  std::vector<uint8_t> codes_by_block() const {
    const int pitch = blocks_of(lines) * 128, wide = blocks_of(length);
    std::vector<uint8_t> out(static_cast<size_t>(wide) * pitch, 0);
    for (int b = 0; b < wide; ++b) {
      for (int l = 0; l < lines; ++l) out[size_t(b) * pitch + l] = static_cast<uint8_t>(code[size_t(l) * wide + b]);
    }
    return out;
  }
  // The same as scales in BF16, in fragment order within each 128.
  std::vector<uint16_t> scales_by_block() const {
    const auto codes = codes_by_block();
    std::vector<uint16_t> out(codes.size());
    for (size_t i = 0; i < codes.size(); ++i) {
      out[i / 128 * 128 + mx::fragment_position(static_cast<int>(i % 128))] = static_cast<uint16_t>(mx::bits_of(mx::finite_scale_value(codes[i])) >> 16);
    }
    return out;
  }
  std::vector<uint8_t> codes_by_tile() const {  // (lines / 128, blocks)
    const int wide = blocks_of(length);
    std::vector<uint8_t> out;
    for (int l = 0; l < lines; l += 128) {
      for (int b = 0; b < wide; ++b) out.push_back(static_cast<uint8_t>(code[size_t(l) * wide + b]));
    }
    return out;
  }
};

// Several matrices one after the other.
struct Stack {
  std::vector<Quantized> parts;
  std::vector<uint8_t> bytes, codes;
  void add(Quantized q, const std::vector<uint8_t>& c) {
    bytes.insert(bytes.end(), q.bytes.begin(), q.bytes.end());
    codes.insert(codes.end(), c.begin(), c.end());
    parts.push_back(std::move(q));
  }
};

std::vector<float> transposed(const float* x, int rows, int columns) {
  std::vector<float> t(static_cast<size_t>(rows) * columns);
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) t[size_t(c) * rows + r] = x[size_t(r) * columns + c];
  }
  return t;
}

// `matrices` of rows x columns: re-based per 128 x 128, along the columns or, transposed, along the rows.
Stack weights(const std::vector<float>& w, int matrices, int rows, int columns, bool along_rows) {
  Stack s;
  for (int i = 0; i < matrices; ++i) {
    const float* x = &w[size_t(i) * rows * columns];
    const auto t = transposed(x, rows, columns);
    Quantized q(along_rows ? t.data() : x, along_rows ? columns : rows, along_rows ? rows : columns, 128);
    s.add(q, q.codes_by_tile());
  }
  return s;
}
// `halves` of rows: along the width, or transposed along the rows.
Stack rows_of(const std::vector<float>& x, int halves, int width, bool along_rows) {
  Stack s;
  for (int i = 0; i < halves; ++i) {
    const float* part = &x[size_t(i) * num_rows * width];
    const auto t = transposed(part, num_rows, width);
    Quantized q(along_rows ? t.data() : part, along_rows ? width : num_rows, along_rows ? num_rows : width, 1);
    s.add(q, q.codes_by_block());
  }
  return s;
}

host::Map map_of(const void* data, int element_bytes, int64_t inner, int64_t outer, int64_t halves = 1, int64_t experts = 1) {
  host::Map map;
  map.data = static_cast<uint8_t*>(const_cast<void*>(data));
  map.element_bytes = element_bytes;
  const int64_t dims[4] = {inner, outer, halves, experts};
  std::memcpy(map.dims, dims, sizeof(dims));
  return map;
}

bool both_sides = false;  // of the tokens; faults are those of the N side then
bool strips = false;      // weight gradients in strips too; faults are theirs then

int failures = 0;

template <class Roles>
void run_list(const Tiling& tiling, Arguments args, uint32_t seed, uint32_t clusters = 1, bool signalled = true) {
  auto tasks = list_tasks(tiling, count_E, start_E);
  const int count = static_cast<int>(tasks.size());
  std::vector<int> signals(tasks.size());
  if (signalled) {
    for (int i = 0; i < count; ++i) tasks[i].signal = i;
    args.signals = signals.data();
  }
  MxBatch<host::Map> batch = {{args}, tasks.data(), &count};
  Isa::clusters = clusters;
  for (Isa::cluster = 0; Isa::cluster < clusters; ++Isa::cluster) {
    host::run_cluster(Roles::Config::kThreads, Roles::Config::kSharedBytes, seed, [&] { run_roles<Roles, Isa>(batch); });
  }
  for (int i = 0; signalled && i < count; ++i) {  // by the store warp of each consumer, in both blocks
    if (signals[i] == 4) continue;
    std::printf("task %d signalled %d times, not 4\n", i, signals[i]);
    ++failures;
  }
}
template <Kind kKind>
void run(const Arguments& args, uint32_t seed) {
  using Config = MxConfig<kKind>;
  const Tiling tiling = {kKind, 2 * Config::kTileM, step_n<Config>(kKind), args.m_extent, args.n_extent, false, Pairs::kRows};
  Fault none;
  if (both_sides || strips) std::swap(fault, none);
  run_list<MxRoles<kKind, true, Isa>>(tiling, args, seed);
  if (both_sides || strips) std::swap(fault, none);
}
// Weight gradients with columns at rest: by one cluster; or with shorter strips and fewer K blocks that fit, by four, which share the tiles of
// strips that are left over, unless somebody waits for them.
struct ShortStrips : MxResidentConfig {
  static constexpr int kStripTiles = 3;
  struct Columns : MxResidentConfig::Columns {
    static constexpr int kStages = 3;
  };
};
template <Kind kKind, class Config>
void run_strips(const Arguments& args, uint32_t seed, uint32_t clusters, bool signalled) {
  Tiling tiling = {kKind, Config::kStripTiles * Config::kTileM, Config::kTileN, args.m_extent, args.n_extent, false, Pairs::kStrips};
  tiling.m_extent = div_up(tiling.m_extent, Config::kTileM) * Config::kTileM;
  run_list<MxResident<kKind, Isa, Config>>(tiling, args, seed, clusters, signalled);
}
template <Kind kKind>
void run_tokens_n(Arguments args, uint32_t seed) {
  using Config = MxTokensNConfig;
  const int lines = (kKind == kDgradGateUp ? 2 : 1) * blocks_of(args.k_extent);
  std::vector<uint16_t> scales(size_t(lines) * num_rows, 0xFFFF);
  for (int line = 0; line < lines; ++line) {
    for (int r = 0; r < num_rows; ++r) {
      const float scale = mx::finite_scale_value(args.a_codes[size_t(line) * num_rows + r]);
      scales[size_t(line) * num_rows + r / 64 * 64 + mx::lane_position(r % 64)] = uint16_t(mx::bits_of(scale) >> 16);
    }
  }
  args.a_scales = scales.data();
  args.a.box_rows = args.zero_to = Config::kBoxRows;
  if (kKind != kGateUp) args.out.box_rows = Config::kBoxRows;
  run_list<MxTokensN<kKind, true, Isa>>({kKind, Config::kTileM, step_n<Config>(kKind), args.m_extent, args.n_extent, false, Pairs::kColumns}, args, seed);
}

void compare(const char* what, int expert, const std::vector<double>& out, const std::vector<double>& ref, double tolerance) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < ref.size(); ++i) {
    difference += (out[i] - ref[i]) * (out[i] - ref[i]);
    norm += ref[i] * ref[i];
  }
  const double error = norm > 0 ? std::sqrt(difference / norm) : (difference == 0 ? 0.0 : INFINITY);
  if (!(error <= tolerance)) {
    std::printf("%s, expert %d: relative norm %g is above %g\n", what, expert, error, tolerance);
    ++failures;
  }
}

template <class Reference>
void compare_rows(const char* what, const uint16_t* out, int width, double tolerance, Reference reference) {
  for (int e = 0; e < experts; ++e) {
    std::vector<double> got, want;
    for (int r = start_E[e]; r < start_E[e] + count_E[e]; ++r) {
      for (int c = 0; c < width; ++c) {
        got.push_back(bf16_value(out[size_t(r) * width + c]));
        want.push_back(reference(r, e, c));
      }
    }
    compare(what, e, got, want, tolerance);
    for (int r = start_E[e] + count_E[e]; r < start_E[e] + (count_E[e] + 63) / 64 * 64; ++r) {
      for (int c = 0; c < width; ++c) {
        if (out[size_t(r) * width + c] != 0) {
          std::printf("%s: padded row %d is not zero\n", what, r);
          ++failures;
          return;
        }
      }
    }
  }
}

// A factor made of two scales, as with tokens on the N side, is the one made of two codes: rounded, subnormal and infinite ones too.
void compare_factors() {
  for (uint32_t a = 0; a < mx::kPoison; ++a) {
    for (uint32_t b = 0; b < mx::kPoison; ++b) {
      const float product = Isa::mul(mx::float_of(mx::bf16_scales(a << 16 | b) & 0xFFFF0000u), mx::finite_scale_value(b));
      if (mx::bits_of(product) == mx::bits_of(mx::product_scale(a, b))) continue;
      std::printf("codes %u and %u: their scales multiply to %g\n", a, b, product);
      ++failures;
    }
  }
}

uint64_t digest(const void* data, size_t bytes) {
  uint64_t hash = 1469598103934665603ull;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211ull;
  return hash;
}

Arguments arguments(int k_extent, int m_extent, int n_extent) {
  Arguments args = {};
  args.num_rows = num_rows;
  args.k_extent = k_extent;
  args.m_extent = m_extent;
  args.n_extent = n_extent;
  return args;
}

double dot(const Quantized& a, int i, const Quantized& b, int j) {
  double sum = 0;
  for (int k = 0; k < a.length; ++k) sum += double{a.values[size_t(i) * a.length + k]} * b.values[size_t(j) * b.length + k];
  return sum;
}
double sigmoid(double z) { return 1.0 / (1.0 + std::exp(-z)); }

size_t wide() { return size_t(num_rows) * kF; }
size_t deep() { return size_t(num_rows) * d_extent; }

// Rows as a Quantized has them, up to the end of each expert's last 64 rows.
void compare_bytes(const char* what, const Quantized& q, const uint8_t* bytes, const uint8_t* codes) {
  const auto expected = q.codes_by_block();
  for (int e = 0; e < experts; ++e) {
    for (int r = start_E[e]; r < start_E[e] + (count_E[e] + 63) / 64 * 64; ++r) {  // padding of a warpgroup too: zeros
      bool same = std::memcmp(&q.bytes[size_t(r) * q.length], &bytes[size_t(r) * q.length], q.length) == 0;
      for (int b = 0; b < blocks_of(q.length); ++b) same = same && expected[size_t(b) * num_rows + r] == codes[size_t(b) * num_rows + r];
      if (!same) {
        std::printf("%s: row %d differs from the quantised BF16 values\n", what, r);
        ++failures;
        return;
      }
    }
  }
}
template <class Code>
void compare_lines(const char* what, const Quantized& q, const uint8_t* bytes, const std::vector<Code>& expected, const Code* codes) {
  if (std::memcmp(q.bytes.data(), bytes, q.bytes.size()) != 0 || std::memcmp(expected.data(), codes, sizeof(Code) * expected.size()) != 0) {
    std::printf("%s: differs from the quantised BF16 values\n", what);
    ++failures;
  }
}

// BF16 rows of both sides, up to the end of each expert's last box of so many rows.
void compare_sides(const char* what, int matrices, int width, int box, const std::vector<uint16_t>& m, const std::vector<uint16_t>& n) {
  for (int e = 0; e < experts; ++e) {
    for (int r = start_E[e]; r < start_E[e] + div_up(count_E[e], box) * box; ++r) {
      for (int i = 0; i < matrices; ++i) {
        const size_t at = (size_t(i) * num_rows + r) * width;
        if (std::memcmp(&m[at], &n[at], 2 * size_t(width)) == 0) continue;
        std::printf("%s: row %d of expert %d differs with tokens on the N side\n", what, r - start_E[e], e);
        ++failures;
        return;
      }
    }
  }
}

uint64_t gate_up(uint32_t seed) {
  const Stack x = rows_of(random_rows(d_extent), 1, d_extent, false);
  const Stack w = weights(random_values(size_t(experts) * 2 * kF * d_extent, 0.1f), 2 * experts, kF, d_extent, false);
  std::vector<uint16_t> saved(2 * wide(), 0xFFFF);
  std::vector<uint8_t> h(wide(), 0xFF), h_codes(size_t(blocks_of(kF)) * num_rows, 0xFF);
  Arguments args = arguments(d_extent, kF, kF);
  args.a = map_of(x.bytes.data(), 1, d_extent, num_rows);
  args.b = map_of(w.bytes.data(), 1, d_extent, kF, 2, experts);
  args.a_codes = x.codes.data();
  args.b_codes = w.codes.data();
  args.out = map_of(h.data(), 1, kF, num_rows);
  args.row_codes = h_codes.data();
  args.gate_up = map_of(saved.data(), 2, kF, num_rows, 2);
  args.save_gate_up = args.write_out = 1;
  run<kGateUp>(args, seed);
  for (int half = 0; half < 2; ++half) {
    compare_rows(half ? "up" : "gate", &saved[half * wide()], kF, 3e-3, [&](int r, int e, int f) { return dot(x.parts[0], r, w.parts[2 * e + half], f); });
  }
  std::vector<float> expected(wide(), 0.0f);  // h from the gate and up that were written, rounded to BF16
  for (int r = 0; r < num_rows; ++r) {
    for (int f = 0; f < kF && expert_of(r) >= 0; ++f) {
      const size_t at = size_t(r) * kF + f;
      expected[at] = bf16_value(Host::bf16(activation_forward<true, Isa>(bf16_value(saved[at]), bf16_value(saved[wide() + at]), Activation{})));
    }
  }
  compare_bytes("h", Quantized(expected.data(), num_rows, kF, 1), h.data(), h_codes.data());
  if (both_sides) {
    const Quantized h_m(expected.data(), num_rows, kF, 1);
    std::vector<uint16_t> saved_n(2 * wide(), 0xFFFF);
    std::fill(h.begin(), h.end(), uint8_t{0xFF});
    std::fill(h_codes.begin(), h_codes.end(), uint8_t{0xFF});
    args.b.box_rows = 8;
    args.out = {};
    args.h_MxF = h.data();
    args.gate_up = map_of(saved_n.data(), 2, kF, num_rows, 2);
    run_tokens_n<kGateUp>(args, seed);
    compare_sides("gate, up", 2, kF, kPanelRows, saved, saved_n);
    compare_bytes("h, tokens on the N side", h_m, h.data(), h_codes.data());
    args.save_gate_up = 0;  // each alone
    std::fill(h.begin(), h.end(), uint8_t{0xFF});
    std::fill(h_codes.begin(), h_codes.end(), uint8_t{0xFF});
    run_tokens_n<kGateUp>(args, seed);
    compare_bytes("h alone, tokens on the N side", h_m, h.data(), h_codes.data());
    args.save_gate_up = 1, args.write_out = 0;
    std::fill(saved_n.begin(), saved_n.end(), uint16_t{0xFFFF});
    run_tokens_n<kGateUp>(args, seed);
    compare_sides("gate, up alone", 2, kF, kPanelRows, saved, saved_n);
  }
  return digest(h.data(), h.size()) ^ digest(h_codes.data(), h_codes.size()) ^ digest(saved.data(), 2 * saved.size());
}

uint64_t down(uint32_t seed) {
  const Stack h = rows_of(random_rows(kF), 1, kF, false), w = weights(random_values(size_t(experts) * d_extent * kF, 0.1f), experts, d_extent, kF, false);
  std::vector<uint16_t> y(deep(), 0xFFFF);
  Arguments args = arguments(kF, d_extent, d_extent);
  args.a = map_of(h.bytes.data(), 1, kF, num_rows);
  args.b = map_of(w.bytes.data(), 1, kF, d_extent, 1, experts);
  args.a_codes = h.codes.data();
  args.b_codes = w.codes.data();
  args.out = map_of(y.data(), 2, d_extent, num_rows);
  run<kDown>(args, seed);
  compare_rows("y", y.data(), d_extent, 3e-3, [&](int r, int e, int d) { return dot(h.parts[0], r, w.parts[e], d); });
  if (both_sides) {
    std::vector<uint16_t> y_n(deep(), 0xFFFF);
    args.out = map_of(y_n.data(), 2, d_extent, num_rows);
    run_tokens_n<kDown>(args, seed);
    compare_sides("y", 1, d_extent, MxTokensNConfig::kBoxRows, y, y_n);
  }
  return digest(y.data(), 2 * y.size());
}

// Twice: with BF16 results beside the quantised rows, and with everything quantised and dY gathered from tokens; the second is held to the BF16
// values of the first.
uint64_t dgrad_down(uint32_t seed) {
  const Stack dy = rows_of(random_rows(d_extent), 1, d_extent, false);
  const Stack w = weights(random_values(size_t(experts) * d_extent * kF, 0.1f), experts, d_extent, kF, true);
  std::vector<uint16_t> gate_up(2 * wide()), out(2 * wide(), 0xFFFF), scaled(wide(), 0xFFFF);
  for (auto& v : gate_up) v = Host::bf16(std::normal_distribution<float>()(generator));
  std::vector<float> partial(size_t(blocks_of(kF)) * num_rows, NAN), weight(num_rows);
  std::vector<int> slot(num_rows);
  for (int r = 0; r < num_rows; ++r) {
    slot[r] = expert_of(r) < 0 ? -1 : num_rows - 1 - r;
    weight[r] = std::ldexp(std::uniform_real_distribution<float>(0.0f, 1.0f)(generator), r / 32 % 4);  // column blocks at scales of their own
    if (expert_of(r) < 0) gate_up[size_t(r) * kF] = 0x7FFF;  // nothing of a padded row may reach anything
  }
  constexpr int kPitch = (kF + 127) / 128 * 128;
  std::vector<uint8_t> rows(2 * wide(), 0xFF), row_codes(size_t(2 * blocks_of(kF)) * num_rows, 0xFF), again(rows), codes_again(row_codes);
  std::vector<uint8_t> columns(2 * wide(), 0xFF), column_codes(size_t{2} * num_rows / 128 * kPitch, 0xFF), scaled_columns(wide(), 0xFF);
  std::vector<uint16_t> scales(size_t(num_rows) / 128 * kPitch, 0xFFFF);
  Arguments args = arguments(d_extent, kF, kF);
  args.a = map_of(dy.bytes.data(), 1, d_extent, num_rows);
  args.b = map_of(w.bytes.data(), 1, d_extent, kF, 1, experts);
  args.a_codes = dy.codes.data();
  args.b_codes = w.codes.data();
  args.gate_up = map_of(gate_up.data(), 2, kF, num_rows, 2);
  args.out = map_of(rows.data(), 1, kF, num_rows, 2);
  args.row_codes = row_codes.data();
  args.d_gate_up = map_of(out.data(), 2, kF, num_rows, 2);
  args.scaled_h = map_of(scaled.data(), 2, kF, num_rows);
  args.weight_TxK = weight.data();
  args.slot_M = slot.data();
  args.weight_partial = partial.data();
  run<kDgradDown>(args, seed);
  auto g = [&](int r, int f) { return double{bf16_value(gate_up[size_t(r) * kF + f])}; };
  auto u = [&](int r, int f) { return double{bf16_value(gate_up[wide() + size_t(r) * kF + f])}; };
  compare_rows("d_gate", out.data(), kF, 3e-3, [&](int r, int e, int f) {
    const double s = sigmoid(g(r, f));
    return weight[slot[r]] * dot(dy.parts[0], r, w.parts[e], f) * u(r, f) * s * (1 + g(r, f) * (1 - s));
  });
  compare_rows("d_up", &out[wide()], kF, 3e-3,
               [&](int r, int e, int f) { return weight[slot[r]] * dot(dy.parts[0], r, w.parts[e], f) * g(r, f) * sigmoid(g(r, f)); });
  compare_rows("weight * h", scaled.data(), kF, 4e-3,
               [&](int r, int, int f) { return weight[slot[r]] * g(r, f) * sigmoid(g(r, f)) * u(r, f); });

  args.out = map_of(again.data(), 1, kF, num_rows, 2);
  args.row_codes = codes_again.data();
  args.d_gate_up = map_of(columns.data(), 1, num_rows, kF, 2);
  args.column_codes = column_codes.data();
  args.scaled_h = map_of(scaled_columns.data(), 1, num_rows, kF);
  args.scaled_h_scales = scales.data();
  std::vector<uint8_t> tokens(deep(), static_cast<uint8_t>(mx::kNanByte));  // one slot each
  for (int r = 0; r < num_rows; ++r) {
    if (slot[r] >= 0) std::copy_n(&dy.bytes[size_t(r) * d_extent], d_extent, &tokens[size_t(slot[r]) * d_extent]);
  }
  args.gather = tokens.data();
  args.top_k = 1;
  args.gather_vectors = d_extent / 16;
  run<kDgradDown>(args, seed);
  auto values = [&](const uint16_t* bits) {  // rows outside the experts count as zero
    std::vector<float> v(wide(), 0.0f);
    for (size_t i = 0; i < wide(); ++i) {
      if (expert_of(static_cast<int>(i / kF)) >= 0) v[i] = bf16_value(bits[i]);
    }
    return v;
  };
  const size_t codes_wide = size_t(blocks_of(kF)) * num_rows, codes_deep = size_t(num_rows) / 128 * kPitch;
  for (int half = 0; half < 2; ++half) {
    const auto x = values(&out[half * wide()]), t = transposed(x.data(), num_rows, kF);
    const Quantized by_row(x.data(), num_rows, kF, 1), by_column(t.data(), kF, num_rows, 1);
    const char* what[2][3] = {{"d_gate by rows, beside BF16", "d_gate by rows", "d_gate by columns"},
                              {"d_up by rows, beside BF16", "d_up by rows", "d_up by columns"}};
    compare_bytes(what[half][0], by_row, &rows[half * wide()], &row_codes[half * codes_wide]);
    compare_bytes(what[half][1], by_row, &again[half * wide()], &codes_again[half * codes_wide]);
    compare_lines(what[half][2], by_column, &columns[half * wide()], by_column.codes_by_block(), &column_codes[half * codes_deep]);
  }
  const auto t = transposed(values(scaled.data()).data(), num_rows, kF);
  const Quantized by_column(t.data(), kF, num_rows, 1);
  compare_lines("weight * h by columns", by_column, scaled_columns.data(), by_column.scales_by_block(), scales.data());
  return digest(out.data(), 2 * out.size()) ^ digest(partial.data(), 4 * partial.size()) ^ digest(again.data(), again.size()) ^
         digest(columns.data(), columns.size());
}

uint64_t dgrad_gate_up(uint32_t seed) {
  auto both = random_rows(kF), other = random_rows(kF);
  both.insert(both.end(), other.begin(), other.end());
  const Stack da = rows_of(both, 2, kF, false), w = weights(random_values(size_t(experts) * 2 * kF * d_extent, 0.1f), 2 * experts, kF, d_extent, true);
  std::vector<uint16_t> dx(deep(), 0xFFFF);
  Arguments args = arguments(kF, kF, d_extent);
  args.a = map_of(da.bytes.data(), 1, kF, num_rows, 2);
  args.b = map_of(w.bytes.data(), 1, kF, d_extent, 2, experts);
  args.a_codes = da.codes.data();
  args.b_codes = w.codes.data();
  args.out = map_of(dx.data(), 2, d_extent, num_rows);
  run<kDgradGateUp>(args, seed);
  compare_rows("dx", dx.data(), d_extent, 3e-3,
               [&](int r, int e, int d) { return dot(da.parts[0], r, w.parts[2 * e], d) + dot(da.parts[1], r, w.parts[2 * e + 1], d); });
  if (both_sides) {
    std::vector<uint16_t> dx_n(deep(), 0xFFFF);
    args.out = map_of(dx_n.data(), 2, d_extent, num_rows);
    run_tokens_n<kDgradGateUp>(args, seed);
    compare_sides("dx", 1, d_extent, MxTokensNConfig::kBoxRows, dx, dx_n);
  }
  return digest(dx.data(), 2 * dx.size());
}

template <Kind kKind>
uint64_t wgrad(int m_extent, int n_extent, int halves, bool accumulate, uint32_t seed) {
  auto left = random_rows(m_extent);
  if (halves == 2) {
    const auto other = random_rows(m_extent);
    left.insert(left.end(), other.begin(), other.end());
  }
  const Stack a = rows_of(left, halves, m_extent, true), b = rows_of(random_rows(n_extent), 1, n_extent, true);
  const auto scales = b.parts[0].scales_by_block();
  std::vector<uint16_t> space(scales.size() + 8);  // scales are read in pieces of 16 bytes
  uint16_t* aligned = space.data() + (16 - reinterpret_cast<uintptr_t>(space.data()) % 16) % 16 / 2;
  std::memcpy(aligned, scales.data(), 2 * scales.size());
  std::vector<uint8_t> code_space(a.codes.size() + 16);
  uint8_t* a_codes = code_space.data() + (16 - reinterpret_cast<uintptr_t>(code_space.data()) % 16) % 16;
  std::memcpy(a_codes, a.codes.data(), a.codes.size());
  const size_t size = size_t(experts) * halves * m_extent * n_extent;
  std::vector<float> dw(size, NAN), before(size, 0.0f);
  if (accumulate) {
    for (auto& v : before) v = std::normal_distribution<float>()(generator);
    dw = before;
  }
  Arguments args = arguments(num_rows, m_extent, n_extent);
  args.a = map_of(a.bytes.data(), 1, num_rows, m_extent, halves);
  args.b = map_of(b.bytes.data(), 1, num_rows, n_extent);
  args.a_codes = a_codes;
  args.b_scales = aligned;
  args.out = map_of(dw.data(), 4, n_extent, m_extent, halves, experts);
  args.dw = dw.data();
  args.accumulate = accumulate;
  run<kKind>(args, seed);
  for (int e = 0; e < experts; ++e) {
    std::vector<double> got, want;
    for (int half = 0; half < halves; ++half) {
      for (int m = 0; m < m_extent; ++m) {
        for (int n = 0; n < n_extent; ++n) {
          const size_t at = (size_t(e * halves + half) * m_extent + m) * n_extent + n;
          double sum = before[at];
          for (int r = start_E[e]; r < start_E[e] + count_E[e]; ++r) {
            sum += double{a.parts[half].values[size_t(m) * num_rows + r]} * b.parts[0].values[size_t(n) * num_rows + r];
          }
          got.push_back(dw[at]);
          want.push_back(sum);
        }
      }
    }
    compare(kKind == kWgradDown ? "dw_down" : "dw_gate_up", e, got, want, 1e-5);
  }
  for (int form = 0; form < (strips ? 3 : 0); ++form) {
    const bool few = form > 0, signalled = form > 1;
    std::vector<float> other(size, NAN);
    args.out = map_of(other.data(), 4, n_extent, m_extent, halves, experts);
    args.dw = other.data();
    few ? run_strips<kKind, ShortStrips>(args, seed, 4, signalled) : run_strips<kKind, MxResidentConfig>(args, seed, 1, signalled);
    if (std::memcmp(other.data(), dw.data(), 4 * size) != 0) {
      std::printf("dw differs in strips%s%s\n", few ? ", short ones" : "", signalled ? ", signalled" : "");
      ++failures;
    }
  }
  return digest(dw.data(), 4 * dw.size());
}

// Of kDgradDown, but for those of tokens on the N side and of strips.
std::vector<uint32_t> barriers_of(const std::string& name) {
  using Config = MxConfig<kDgradDown>;
  using Group = GroupBarriers<Config>;
  using GateUpN = MxTokensNConfigOf<kGateUp>;
  const uint32_t base = Isa::shared_base();
  if (name == "shared") return {Group::shared(base)};
  if (name == "taken") return {Group::taken(base)};
  if (name == "staging") return {Group::staging(base, 0), Group::staging(base, 1)};
  if (name == "weights") return {Group::weights(base, 0), Group::weights(base, 1)};
  if (name == "room") return {GateUpN::left(base)};
  if (name == "exchanged") return {GateUpN::exchanged(base, 0), GateUpN::exchanged(base, 1)};
  if (name == "joint") {  // what the first store warp waits for besides its own consumer
    std::vector<uint32_t> found;
    for (int unit = 0; unit < MxTokensNConfig::kMaxUnits; ++unit) found.push_back(written_barrier<MxTokensNConfig>(base, 1, unit));
    return found;
  }
  if (name == "left") {
    std::vector<uint32_t> found;
    for (uint32_t i = 0; i < MxResidentConfig::kConsumers * MxResidentConfig::kMaxUnits; ++i) found.push_back(MxResidentConfig::left_barrier(base, 0, i));
    return found;
  }
  std::fprintf(stderr, "unknown barrier %s\n", name.c_str());
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  take_fault(argc, argv, barriers_of);
  if (argc < 3) {
    std::fprintf(stderr, "usage: mx_host_kernels KIND SEED... [--without=FAULT]\n");
    return 2;
  }
  std::string kind = argv[1];
  auto take_suffix = [&](const std::string& suffix) {
    if (kind.size() <= suffix.size() || kind.substr(kind.size() - suffix.size()) != suffix) return false;
    kind.resize(kind.size() - suffix.size());
    return true;
  };
  both_sides = take_suffix("_tokens_n");
  strips = take_suffix("_strips");
  if (take_suffix("_deep")) d_extent = 672;
  if (strips) set_groups({200, 0, 700, 40, 300});  // one that does not fit
  if (both_sides) {
    set_groups({0, 1, 250, 31, 160, 192, 97, 140, 170});  // every width of a product, tiles that are full, that overflow and that end within 64 tokens
    compare_factors();
  }
  uint64_t first = 0;
  for (int i = 2; i < argc; ++i) {
    generator.seed(7);
    const uint32_t seed = static_cast<uint32_t>(std::atoi(argv[i]));
    uint64_t bits;
    if (kind == "gate_up") bits = gate_up(seed);
    else if (kind == "down") bits = down(seed);
    else if (kind == "dgrad_down") bits = dgrad_down(seed);
    else if (kind == "dgrad_gate_up") bits = dgrad_gate_up(seed);
    else if (kind == "wgrad_down") bits = wgrad<kWgradDown>(d_extent, kF, 1, false, seed);
    else if (kind == "wgrad_gate_up") bits = wgrad<kWgradGateUp>(kF, d_extent, 2, false, seed);
    else if (kind == "wgrad_down_accumulate") bits = wgrad<kWgradDown>(d_extent, kF, 1, true, seed);
    else {
      std::fprintf(stderr, "unknown kind %s\n", kind.c_str());
      return 2;
    }
    if (i == 2) first = bits;
    if (bits != first) {
      std::printf("%s: seeds %s and %s give different bits\n", kind.c_str(), argv[2], argv[i]);
      ++failures;
    }
  }
  std::printf("%s: %s\n", kind.c_str(), failures == 0 ? "ok" : "failed");
  return failures == 0 ? 0 : 1;
}
