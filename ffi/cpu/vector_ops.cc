// Compiled once per instruction set, with MOEJAX_ISA naming the variant. Nothing here may use an inline function of the standard
// library: the linker keeps one copy of those, and it could be the one with instructions the processor lacks.
#include "cpu/vector_ops.h"

#include <stdint.h>
#include <string.h>

#ifndef MOEJAX_ISA
#error "compile with -DMOEJAX_ISA=baseline, avx2 or avx512"
#endif
#define MOEJAX_STRING_(x) #x
#define MOEJAX_STRING(x) MOEJAX_STRING_(x)
#define MOEJAX_CONCAT_(a, b) a##b
#define MOEJAX_CONCAT(a, b) MOEJAX_CONCAT_(a, b)

namespace moejax::cpu {
namespace {

constexpr uint32_t kAbs = 0x7FFFFFFFu;
constexpr uint32_t kInf = 0x7F800000u;
constexpr int kColumns = 64;  // columns handled at a time by the column-wise loops

inline uint32_t Bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float FromBits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float Nan() { return FromBits(0x7FC00000u); }

// --- BF16 ---------------------------------------------------------------------------------------------------------------------------

inline float Widen(uint16_t x) { return FromBits(static_cast<uint32_t>(x) << 16); }
inline uint32_t RoundBits(uint32_t bits) {  // the upper half holds the BF16 value
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  return (bits & kAbs) > kInf ? (bits | 0x00400000u) : rounded;  // adding to a NaN's bits could carry it into another number
}
inline float RoundBf16(float x) { return FromBits(RoundBits(Bits(x)) & 0xFFFF0000u); }

void WidenBf16(const uint16_t* __restrict in, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = Widen(in[i]);
}
void NarrowBf16(const float* __restrict in, uint16_t* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint16_t>(RoundBits(Bits(in[i])) >> 16);
}
void RoundBf16Row(float* __restrict values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = RoundBf16(values[i]);
}

// --- MX (the definition: `moejax/ops/mxfp8.py`) --------------------------------------------------------------------------------------

// E8M0 code of a block from the bits of its largest magnitude: the smallest s with 448 * 2^(s-127) >= amax.
inline uint32_t ScaleCode(uint32_t amax) {
  const int32_t up = (amax & 0x7FFFFFu) > 0x600000u ? 1 : 0;  // mantissa above 1.75
  int32_t code = static_cast<int32_t>(amax >> 23) - 8 + up;
  code = code < 0 ? 0 : code;
  code = amax == 0x04600001u ? 0 : code;  // its product with fl32(1/448) rounds to 2^-127
  return amax >= kInf ? 255u : static_cast<uint32_t>(code);
}
// 2^(127 - code) as a float; 0 for the code 255, whose elements are replaced anyway. Finite blocks have codes up to 247.
inline float Reciprocal(uint32_t code) { return FromBits(code == 255u ? 0u : (254u - code) << 23); }
inline float Scale(uint32_t code) {
  const uint32_t bits = code == 0u ? 0x00400000u : code << 23;  // code 0 is 2^-127, a subnormal
  return code == 255u ? Nan() : FromBits(bits);
}

// The magnitude rounded to E4M3, as an FP32 value; v <= 448.
inline float RoundE4m3(float v) {
  const uint32_t bits = Bits(v);
  const float normal = FromBits((bits + 0x7FFFFu + ((bits >> 20) & 1u)) & 0xFFF00000u);
  const float tiny = (v + 16384.0f) - 16384.0f;  // 2^14 has an ulp of 2^-9, the smallest E4M3 number
  return v >= 0.015625f ? normal : tiny;
}
inline uint32_t E4m3Byte(float rounded) {
  const uint32_t normal = (Bits(rounded) >> 20) - (120u << 3);
  const uint32_t tiny = Bits(rounded + 16384.0f) - 0x46800000u;
  return rounded >= 0.015625f ? normal : tiny;
}
inline float E4m3Value(uint32_t magnitude) {
  const float normal = FromBits((magnitude << 20) + (120u << 23));
  const float tiny = static_cast<float>(static_cast<int32_t>(magnitude)) * 0.001953125f;
  const float value = magnitude < 8u ? tiny : normal;
  return magnitude == 0x7Fu ? Nan() : value;
}
inline uint8_t QuantizeOne(float x, uint32_t code, float reciprocal) {
  const uint32_t bits = Bits(x);
  const uint32_t byte = E4m3Byte(RoundE4m3(FromBits(bits & kAbs) * reciprocal)) | ((bits >> 24) & 0x80u);
  return static_cast<uint8_t>(code == 255u ? 0x7Fu : byte);
}
inline float DecodeOne(uint32_t byte, float scale) {
  const float value = E4m3Value(byte & 0x7Fu) * scale;
  const uint32_t bits = value != value ? 0x7FC00000u : Bits(value);
  return FromBits(bits | ((byte & 0x80u) << 24));
}
inline float RoundOne(float x, float reciprocal, float scale) {
  const uint32_t bits = Bits(x);
  const float value = RoundE4m3(FromBits(bits & kAbs) * reciprocal) * scale;
  return FromBits(Bits(value) | (bits & 0x80000000u));
}

inline uint32_t RowAmax(const float* in, int64_t n) {
  int32_t amax = 0;
  if (n == kBlock) {
    for (int i = 0; i < kBlock; ++i) {
      const int32_t magnitude = static_cast<int32_t>(Bits(in[i]) & kAbs);
      amax = magnitude > amax ? magnitude : amax;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const int32_t magnitude = static_cast<int32_t>(Bits(in[i]) & kAbs);
      amax = magnitude > amax ? magnitude : amax;
    }
  }
  return static_cast<uint32_t>(amax);
}

void MxQuantizeRow(const float* __restrict in, uint8_t* __restrict elements, uint8_t* __restrict codes, int64_t n) {
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t size = n - first < kBlock ? n - first : kBlock;
    const uint32_t code = ScaleCode(RowAmax(in + first, size));
    const float reciprocal = Reciprocal(code);
    codes[first / kBlock] = static_cast<uint8_t>(code);
    for (int64_t i = first; i < first + size; ++i) elements[i] = QuantizeOne(in[i], code, reciprocal);
  }
}
void MxDecodeRow(const uint8_t* __restrict elements, const uint8_t* __restrict codes, float* __restrict out, int64_t n) {
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t last = n - first < kBlock ? n : first + kBlock;
    const float scale = Scale(codes[first / kBlock]);
    for (int64_t i = first; i < last; ++i) out[i] = DecodeOne(elements[i], scale);
  }
}
void MxRoundRow(float* __restrict values, int64_t n) {
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t size = n - first < kBlock ? n - first : kBlock;
    const uint32_t code = ScaleCode(RowAmax(values + first, size));
    const float reciprocal = Reciprocal(code), scale = Scale(code);
    for (int64_t i = first; i < first + size; ++i) values[i] = RoundOne(values[i], reciprocal, scale);
  }
}

// Codes of up to 64 columns of a block.
inline void ColumnCodes(const float* in, int64_t stride, int64_t rows, int64_t n, uint32_t* code) {
  int32_t amax[kColumns] = {};
  for (int64_t row = 0; row < rows; ++row) {
    const float* line = in + row * stride;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t magnitude = static_cast<int32_t>(Bits(line[i]) & kAbs);
      amax[i] = magnitude > amax[i] ? magnitude : amax[i];
    }
  }
  for (int i = 0; i < kColumns; ++i) code[i] = ScaleCode(static_cast<uint32_t>(amax[i]));
}

void MxQuantizeDown(const float* __restrict in, int64_t in_stride, int64_t rows, uint8_t* __restrict elements, int64_t stride,
                    uint8_t* __restrict codes, int64_t n) {
  for (int64_t first = 0; first < n; first += kColumns) {
    const int64_t size = n - first < kColumns ? n - first : kColumns;
    uint32_t code[kColumns];
    float reciprocal[kColumns];
    ColumnCodes(in + first, in_stride, rows, size, code);
    for (int i = 0; i < kColumns; ++i) reciprocal[i] = Reciprocal(code[i]);
    for (int64_t i = 0; i < size; ++i) codes[first + i] = static_cast<uint8_t>(code[i]);
    for (int64_t row = 0; row < rows; ++row) {
      const float* line = in + row * in_stride + first;
      uint8_t* out = elements + row * stride + first;
      for (int64_t i = 0; i < size; ++i) out[i] = QuantizeOne(line[i], code[i], reciprocal[i]);
    }
  }
}
void MxDecodeDown(const uint8_t* __restrict elements, const uint8_t* __restrict codes, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = DecodeOne(elements[i], Scale(codes[i]));
}
void MxRoundDown(float* __restrict values, int64_t stride, int64_t rows, int64_t n) {
  for (int64_t first = 0; first < n; first += kColumns) {
    const int64_t size = n - first < kColumns ? n - first : kColumns;
    uint32_t code[kColumns];
    float reciprocal[kColumns], scale[kColumns];
    ColumnCodes(values + first, stride, rows, size, code);
    for (int i = 0; i < kColumns; ++i) {
      reciprocal[i] = Reciprocal(code[i]);
      scale[i] = Scale(code[i]);
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* line = values + row * stride + first;
      for (int64_t i = 0; i < size; ++i) line[i] = RoundOne(line[i], reciprocal[i], scale[i]);
    }
  }
}

// --- Activations (the formulas: `moejax/ops/activation.py`) --------------------------------------------------------------------------

// e^x within about 2 ulp: range reduction and polynomial of Cephes' expf (S. Moshier, netlib.org/cephes). x is bounded so that the result
// stays a normal number; NaN stays NaN.
inline float Exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the sum rounds to an integer
  const float whole = shifted - 12582912.0f;
  float r = x - whole * 0.693359375f;
  r = r - whole * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return FromBits(Bits(p) + ((Bits(shifted) - 0x4B400000u) << 23));
}
// Exp is bounded at 88, so below -88 the quotient would stay at 6e-39, and times a gate of -1e38 that is no longer nothing.
inline float Sigmoid(float x) {
  const float sigmoid = 1.0f / (1.0f + Exp(-x));
  return x < -88.0f ? 0.0f : sigmoid;
}

template <ActivationKind kind>
inline float ClampGate(float gate, float limit) {
  if constexpr (kind == ActivationKind::kSwigluClamped || kind == ActivationKind::kSwigluOai) return gate > limit ? limit : gate;
  return gate;
}
template <ActivationKind kind>
inline float ClampUp(float up, float limit) {
  if constexpr (kind == ActivationKind::kSwigluClamped || kind == ActivationKind::kSwigluOai) {
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
  }
  return up;
}

// The factor made of the (clamped) gate, and its derivative in the gate.
template <ActivationKind kind>
inline float GateValue(float gate, float alpha, float* slope) {
  if constexpr (kind == ActivationKind::kGeglu) {
    constexpr float kRoot = 0.7978845608028654f, kCubic = 0.044715f;
    float bounded = gate > 30.0f ? 30.0f : gate;  // the cube of a huge gate would be Inf, and Inf * 0 NaN
    bounded = bounded < -30.0f ? -30.0f : bounded;
    const float square = bounded * bounded;
    const float sigmoid = Sigmoid(2.0f * kRoot * (bounded + kCubic * square * bounded));  // (1 + tanh z) / 2 is sigmoid(2z)
    const float inner = 2.0f * kRoot * (1.0f + 3.0f * kCubic * square);
    *slope = sigmoid + gate * (sigmoid * (1.0f - sigmoid) * inner);
    return gate * sigmoid;
  } else {
    const float a = kind == ActivationKind::kSwigluOai ? alpha : 1.0f;
    const float sigmoid = Sigmoid(a * gate);
    *slope = sigmoid + a * gate * sigmoid * (1.0f - sigmoid);
    return gate * sigmoid;
  }
}

template <ActivationKind kind>
void ActivateKind(float limit, float alpha, const float* __restrict gate, const float* __restrict up, float* __restrict h, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float slope;
    const float value = GateValue<kind>(ClampGate<kind>(gate[i], limit), alpha, &slope);
    const float u = ClampUp<kind>(up[i], limit);
    h[i] = value * (kind == ActivationKind::kSwigluOai ? u + 1.0f : u);
  }
}

constexpr int kLanes = 16;  // independent sums, in every variant

inline float SumLanes(const float* lane) {
  float half[8], quarter[4];
  for (int i = 0; i < 8; ++i) half[i] = lane[i] + lane[i + 8];
  for (int i = 0; i < 4; ++i) quarter[i] = half[i] + half[i + 4];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

float Dot(const float* __restrict a, const float* __restrict b, int64_t n) {
  float total = 0.0f;
  for (int64_t first = 0; first < n; first += kTile) {
    const int64_t last = n - first < kTile ? n : first + kTile;
    float lane[kLanes] = {};
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes)
      for (int j = 0; j < kLanes; ++j) lane[j] += a[i + j] * b[i + j];
    for (int j = 0; i < last; ++i, ++j) lane[j] += a[i] * b[i];
    total += SumLanes(lane);
  }
  return total;
}

template <ActivationKind kind>
float ActivateBackwardKind(float limit, float alpha, const float* __restrict gate, const float* __restrict up,
                           const float* __restrict dh0, float weight, bool bf16, float* __restrict d_gate, float* __restrict d_up,
                           float* __restrict weighted_h, int64_t n) {
  constexpr bool clamped = kind == ActivationKind::kSwigluClamped || kind == ActivationKind::kSwigluOai;
  float total = 0.0f;
  for (int64_t first = 0; first < n; first += kTile) {
    const int64_t size = n - first < kTile ? n - first : kTile;
    float h[kTile];
    for (int64_t i = 0; i < size; ++i) {
      const float g_in = gate[first + i], u_in = up[first + i];
      const float g = ClampGate<kind>(g_in, limit), u = ClampUp<kind>(u_in, limit);
      float slope;
      const float value = GateValue<kind>(g, alpha, &slope);
      const float factor = kind == ActivationKind::kSwigluOai ? u + 1.0f : u;
      const float dh = weight * dh0[first + i];
      float dg = dh * slope * factor, du = dh * value;
      if constexpr (clamped) {  // derivative 1 on the limit, 0 beyond it; NaN keeps its derivative and stays visible
        dg = g_in > limit ? 0.0f : dg;
        du = FromBits(Bits(u_in) & kAbs) > limit ? 0.0f : du;
      }
      d_gate[first + i] = dg;
      d_up[first + i] = du;
      h[i] = value * factor;
    }
    if (bf16) RoundBf16Row(h, size);
    for (int64_t i = 0; i < size; ++i) weighted_h[first + i] = weight * h[i];
    total += Dot(h, dh0 + first, size);
  }
  return total;
}

#define MOEJAX_BY_KIND(act, call)                                                              \
  switch ((act).kind) {                                                                        \
    case ActivationKind::kSwiglu: return call<ActivationKind::kSwiglu>;                        \
    case ActivationKind::kSwigluClamped: return call<ActivationKind::kSwigluClamped>;          \
    case ActivationKind::kSwigluOai: return call<ActivationKind::kSwigluOai>;                  \
    case ActivationKind::kGeglu: break;                                                        \
  }                                                                                            \
  return call<ActivationKind::kGeglu>;

auto* ActivateFor(const Activation& act) { MOEJAX_BY_KIND(act, &ActivateKind) }
auto* ActivateBackwardFor(const Activation& act) { MOEJAX_BY_KIND(act, &ActivateBackwardKind) }

void Activate(const Activation& act, const float* gate, const float* up, float* h, int64_t n) {
  ActivateFor(act)(act.limit, act.alpha, gate, up, h, n);
}
float ActivateBackward(const Activation& act, const float* gate, const float* up, const float* dh0, float weight, bool bf16,
                       float* d_gate, float* d_up, float* weighted_h, int64_t n) {
  return ActivateBackwardFor(act)(act.limit, act.alpha, gate, up, dh0, weight, bf16, d_gate, d_up, weighted_h, n);
}

// --- Sums of rows -------------------------------------------------------------------------------------------------------------------

void Add(const float* __restrict in, float* __restrict total, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += in[i];
}
void AddScaled(float scale, const float* __restrict in, float* __restrict total, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += scale * in[i];
}
void AddScaledBf16(float scale, const uint16_t* __restrict in, float* __restrict total, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += scale * Widen(in[i]);
}

}  // namespace

extern const VectorOps MOEJAX_CONCAT(kVectorOps_, MOEJAX_ISA);
const VectorOps MOEJAX_CONCAT(kVectorOps_, MOEJAX_ISA) = {
    MOEJAX_STRING(MOEJAX_ISA), WidenBf16, NarrowBf16, RoundBf16Row, MxQuantizeRow, MxDecodeRow, MxRoundRow, MxQuantizeDown,
    MxDecodeDown, MxRoundDown, Activate, ActivateBackward, Dot, Add, AddScaled, AddScaledBf16};

}  // namespace moejax::cpu
