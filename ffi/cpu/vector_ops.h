// The elementwise loops of the CPU kernels, compiled once per instruction set and chosen when the module loads.
//
// One source (`vector_ops.cc`) gives every variant, without fused multiply-add and with a fixed order of every sum, so AVX-512, AVX2 and
// plain x86-64 return the same bits. All of it assumes IEEE arithmetic (`IeeeScope`): subnormals count in the MX format.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace moejax::cpu {

struct VectorOps {
  const char* name;

  // BF16 <-> FP32. Narrowing rounds to nearest even and keeps NaN.
  void (*widen_bf16)(const uint16_t* in, float* out, int64_t n);
  void (*narrow_bf16)(const float* in, uint16_t* out, int64_t n);
  void (*round_bf16)(float* values, int64_t n);

  // MX, one row with blocks along it (a last block may be shorter than 32). `round` replaces values by what the format keeps of them.
  void (*mx_quantize_row)(const float* in, uint8_t* elements, uint8_t* codes, int64_t n);
  void (*mx_decode_row)(const uint8_t* elements, const uint8_t* codes, float* out, int64_t n);
  void (*mx_round_row)(float* values, int64_t n);

  // MX, one block per column: `rows` <= 32 rows of `n` columns, `stride` elements apart.
  void (*mx_quantize_down)(const float* in, int64_t in_stride, int64_t rows, uint8_t* elements, int64_t stride, uint8_t* codes,
                           int64_t n);
  void (*mx_decode_down)(const uint8_t* elements, const uint8_t* codes, float* out, int64_t n);  // one row of such a block
  void (*mx_round_down)(float* values, int64_t stride, int64_t rows, int64_t n);

  // h = act(gate, up).
  void (*activate)(const Activation& act, const float* gate, const float* up, float* h, int64_t n);
  // One row of the backward, with dh = weight * dh0: d_gate, d_up and weighted_h = weight * h. h is rounded to BF16 first if `bf16`, as
  // the forward product saw it; nothing else is rounded. Returns sum(h * dh0), per-128-column partials added in order.
  float (*activate_backward)(const Activation& act, const float* gate, const float* up, const float* dh0, float weight, bool bf16,
                             float* d_gate, float* d_up, float* weighted_h, int64_t n);

  float (*dot)(const float* a, const float* b, int64_t n);                        // same order as above
  void (*add)(const float* in, float* total, int64_t n);                          // total += in
  void (*add_scaled)(float scale, const float* in, float* total, int64_t n);      // total += scale * in, rounded twice
  void (*add_scaled_bf16)(float scale, const uint16_t* in, float* total, int64_t n);
};

// The widest variant this processor runs. MOEJAX_CPU_ISA=baseline|avx2|avx512 chooses a narrower one, for tests.
const VectorOps& Vector();

// Every variant this processor runs, widest first; ends with a null pointer.
const VectorOps* const* VectorVariants();

}  // namespace moejax::cpu
