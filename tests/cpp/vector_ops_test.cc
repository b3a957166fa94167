// The elementwise loops: each variant against a scalar definition in double precision or integers, and all variants bit for bit alike.
#include <limits>

#include "check.h"
#include "cpu/vector_ops.h"

namespace moejax::cpu {
namespace {

// Random bits: every exponent, subnormals, NaN and Inf.
std::vector<float> RandomBits(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(n);
  for (float& value : values) value = FloatOf(random());
  return values;
}
std::vector<float> Gaussian(int64_t n, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

// All 127 magnitudes of E4M3, from its definition.
std::vector<double> E4m3Table() {
  std::vector<double> table;
  for (int byte = 0; byte < 127; ++byte) {
    const int exponent = byte >> 3, mantissa = byte & 7;
    table.push_back(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
  }
  return table;
}

// The smallest code with 448 * 2^(s - 127) >= amax, in exact arithmetic (double holds both sides).
int OracleCode(const std::vector<float>& block) {
  double amax = 0;
  for (float x : block) {
    if (!std::isfinite(x)) return 255;
    amax = std::max(amax, std::fabs(double(x)));
  }
  if (BitsOf(float(amax)) == 0x04600001u) return 0;  // the documented exception
  int code = 0;
  while (448.0 * std::ldexp(1.0, code - 127) < amax) ++code;
  return code;
}
int OracleByte(float x, int code, const std::vector<double>& table) {
  if (code == 255) return 0x7F;
  const double target = std::min(448.0, std::ldexp(std::fabs(double(x)), 127 - code));
  int best = 0;
  for (int byte = 1; byte < 127; ++byte) {
    const double now = std::fabs(table[byte] - target), before = std::fabs(table[best] - target);
    if (now < before || (now == before && byte % 2 == 0)) best = byte;
  }
  return best | (std::signbit(x) ? 0x80 : 0);
}

void MxMatchesTheDefinition(const VectorOps& vector) {
  const std::vector<double> table = E4m3Table();
  std::mt19937 random(7);
  for (int trial = 0; trial < 400; ++trial) {
    const int size = trial % 5 == 0 ? 1 + int(random() % 32) : 32;
    std::vector<float> block = Gaussian(size, random(), std::ldexp(1.0f, int(random() % 254) - 140));
    if (trial % 11 == 0) block = RandomBits(size, random());
    if (trial % 7 == 0) block[random() % size] = trial % 2 ? 0.0f : -0.0f;
    if (trial == 33) std::fill(block.begin(), block.end(), FloatOf(0x04600001u));
    const int code = OracleCode(block);

    std::vector<uint8_t> elements(size, 0xEE), down(size * 3, 0xEE);
    uint8_t codes[1] = {0xEE}, down_codes[3] = {0xEE, 0xEE, 0xEE};
    vector.mx_quantize_row(block.data(), elements.data(), codes, size);
    std::vector<float> columns(size * 3, 1.0f);
    for (int i = 0; i < size; ++i) columns[i * 3 + 1] = block[i];
    vector.mx_quantize_down(columns.data(), 3, size, down.data(), 3, down_codes, 3);
    CHECK(codes[0] == code && down_codes[1] == code, "code %d and %d, expected %d", codes[0], down_codes[1], code);

    std::vector<float> decoded(size), rounded = block;
    vector.mx_decode_row(elements.data(), codes, decoded.data(), size);
    vector.mx_round_row(rounded.data(), size);
    vector.mx_round_down(columns.data(), 3, size, 3);
    for (int i = 0; i < size; ++i) {
      const int byte = OracleByte(block[i], code, table);
      CHECK(elements[i] == byte && down[i * 3 + 1] == byte, "%s: %a under code %d gives %02x, expected %02x", vector.name, block[i], code,
            elements[i], byte);
      if (code == 255) {
        CHECK(std::isnan(decoded[i]) && std::isnan(rounded[i]) && std::isnan(columns[i * 3 + 1]), "poison must be visible");
        continue;
      }
      const double exact = (byte & 0x80 ? -1.0 : 1.0) * std::ldexp(table[byte & 0x7F], code - 127);
      const float value = std::fabs(exact) >= std::ldexp(1.0, 128) ? std::copysign(std::numeric_limits<float>::infinity(), float(exact))
                                                                    : float(exact);
      CHECK(BitsOf(decoded[i]) == BitsOf(value), "decoded %a, expected %a", decoded[i], value);
      CHECK(BitsOf(rounded[i]) == BitsOf(value) && BitsOf(columns[i * 3 + 1]) == BitsOf(value), "rounded %a", rounded[i]);
    }
  }
}

void Bf16RoundsToNearestEven(const VectorOps& vector) {
  const std::vector<float> in = RandomBits(10007, 3);
  std::vector<uint16_t> narrow(in.size());
  std::vector<float> rounded = in, wide(in.size());
  vector.narrow_bf16(in.data(), narrow.data(), int64_t(in.size()));
  vector.round_bf16(rounded.data(), int64_t(in.size()));
  vector.widen_bf16(narrow.data(), wide.data(), int64_t(in.size()));
  CHECK(SameBits(rounded, wide), "rounding in place differs");
  for (size_t i = 0; i < in.size(); ++i) {
    if (std::isnan(in[i])) {
      CHECK(std::isnan(wide[i]), "NaN became %a", wide[i]);
      continue;
    }
    const uint32_t low = BitsOf(in[i]) & 0xFFFF0000u;
    const double below = FloatOf(low), exact = in[i];
    const double above = std::isinf(FloatOf(low + 0x10000)) ? std::copysign(std::ldexp(1.0, 128), below) : FloatOf(low + 0x10000);
    const bool up = std::fabs(exact - below) > std::fabs(above - exact) ||
                    (std::fabs(exact - below) == std::fabs(above - exact) && (low & 0x10000));
    CHECK(BitsOf(wide[i]) == low + (up ? 0x10000 : 0), "%a became %a", in[i], wide[i]);
  }
}

double OracleActivation(const Activation& act, double g, double u) {
  if (act.kind == ActivationKind::kSwigluClamped || act.kind == ActivationKind::kSwigluOai) {
    g = std::min(g, double(act.limit));
    u = std::max(-double(act.limit), std::min(u, double(act.limit)));
  }
  switch (act.kind) {
    case ActivationKind::kGeglu:
      return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
    case ActivationKind::kSwigluOai:
      return g / (1 + std::exp(-double(act.alpha) * g)) * (u + 1);
    default:
      return g / (1 + std::exp(-g)) * u;
  }
}

// Forward against double; derivatives against central differences of the same; the sum and weight * h too.
void ActivationsAndDerivatives(const VectorOps& vector) {
  const int64_t n = 300;
  const Activation kinds[] = {{ActivationKind::kSwiglu, 0, 1}, {ActivationKind::kSwigluClamped, 1.5f, 1},
                              {ActivationKind::kSwigluOai, 1.5f, 1.702f}, {ActivationKind::kGeglu, 0, 1}};
  for (const Activation& act : kinds) {
    const std::vector<float> gate = Gaussian(n, 1, 2.0f), up = Gaussian(n, 2, 2.0f), dh0 = Gaussian(n, 3);
    std::vector<float> h(n), d_gate(n), d_up(n), weighted(n);
    const float weight = 0.75f;
    vector.activate(act, gate.data(), up.data(), h.data(), n);
    const float dot = vector.activate_backward(act, gate.data(), up.data(), dh0.data(), weight, false, d_gate.data(), d_up.data(),
                                               weighted.data(), n);
    double sum = 0, error = 0, norm = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double g = gate[i], u = up[i], step = 1e-5;
      const double exact = OracleActivation(act, g, u);
      CHECK(std::fabs(h[i] - exact) <= 2e-6 * std::fabs(exact) + 1e-7, "h(%f, %f) is %f, expected %f", g, u, h[i], exact);
      const double dg = (OracleActivation(act, g + step, u) - OracleActivation(act, g - step, u)) / (2 * step) * weight * dh0[i];
      const double du = (OracleActivation(act, g, u + step) - OracleActivation(act, g, u - step)) / (2 * step) * weight * dh0[i];
      error += (d_gate[i] - dg) * (d_gate[i] - dg) + (d_up[i] - du) * (d_up[i] - du);
      norm += dg * dg + du * du;
      CHECK(weighted[i] == weight * h[i], "weight * h");
      sum += exact * dh0[i];
    }
    CHECK(std::sqrt(error / norm) < 1e-6, "derivatives are off by %g", std::sqrt(error / norm));
    CHECK(std::fabs(dot - sum) < 1e-4, "d(weight) is %f, expected %f", dot, sum);
  }
  const float on_limit = 1.5f, nan = std::nanf(""), one = 1.0f;
  float dg, du, wh;
  vector.activate_backward(kinds[1], &on_limit, &on_limit, &one, 1.0f, false, &dg, &du, &wh, 1);
  CHECK(dg != 0.0f && du != 0.0f, "a value on the limit keeps its derivative");
  vector.activate_backward(kinds[1], &nan, &one, &one, 1.0f, false, &dg, &du, &wh, 1);
  CHECK(std::isnan(dg) && std::isnan(wh), "NaN must stay visible");
}

// Every output of every loop as bits, on the same data.
std::vector<uint32_t> Everything(const VectorOps& vector) {
  std::vector<uint32_t> bits;
  const auto add = [&](const std::vector<float>& values) {
    for (float value : values) bits.push_back(BitsOf(value));
  };
  const int64_t n = 421;
  const std::vector<float> a = Gaussian(n, 11, 3.0f), b = Gaussian(n, 12, 3.0f), c = Gaussian(n, 13), wild = RandomBits(n * 32, 14);
  for (int kind = 0; kind < 4; ++kind) {
    const Activation act{ActivationKind(kind), 1.0f, 1.702f};
    std::vector<float> h(n), dg(n), du(n), wh(n);
    vector.activate(act, a.data(), b.data(), h.data(), n);
    add(h);
    for (bool bf16 : {false, true}) {
      bits.push_back(BitsOf(vector.activate_backward(act, a.data(), b.data(), c.data(), 0.3f, bf16, dg.data(), du.data(), wh.data(), n)));
      add(dg), add(du), add(wh);
    }
  }
  bits.push_back(BitsOf(vector.dot(a.data(), b.data(), n)));
  std::vector<float> total = a;
  vector.add(b.data(), total.data(), n);
  vector.add_scaled(0.1f, c.data(), total.data(), n);
  add(total);
  std::vector<float> rows = wild, columns = wild;
  vector.mx_round_row(rows.data(), n);
  vector.mx_round_down(columns.data(), n, 32, n);
  for (float value : rows) bits.push_back(std::isnan(value) ? 1 : BitsOf(value));
  for (float value : columns) bits.push_back(std::isnan(value) ? 1 : BitsOf(value));
  return bits;
}

}  // namespace
}  // namespace moejax::cpu

int main() {
  using namespace moejax::cpu;
  IeeeScope ieee;
  std::vector<uint32_t> first;
  for (const VectorOps* const* variant = VectorVariants(); *variant != nullptr; ++variant) {
    MxMatchesTheDefinition(**variant);
    Bf16RoundsToNearestEven(**variant);
    ActivationsAndDerivatives(**variant);
    const std::vector<uint32_t> bits = Everything(**variant);
    if (first.empty()) first = bits;
    CHECK(bits == first, "variant %s gives other bits", (*variant)->name);
    std::printf("vector_ops: %s ok\n", (*variant)->name);
  }
}
