// The conversions of sm_100 as the host emulates them (kernels_cuda/quantize_math.h), over every FP32 bit pattern, against the host forms in
// CUDA's own cuda_fp8.h; and the scale code by conversion against the one in integers, over every magnitude.
// Usage: sm100_conversions [STRIDE]; with a stride above 1 every STRIDE-th pattern and all neighbours of the steps. Exits with 1 on a difference.
#include <cuda_fp8.h>

#include <cstdio>
#include <cstdlib>

#include "quantize_math.h"

namespace {

using namespace moe::mx;

uint64_t compared = 0, different = 0;

void expect(const char* what, uint32_t bits, uint32_t ours, uint32_t theirs) {
  ++compared;
  if (ours != theirs && different++ < 5) std::printf("%s of 0x%08x: 0x%02x, expected 0x%02x\n", what, bits, ours, theirs);
}

void compare(uint32_t bits) {
  const float x = float_of(bits);
  expect("E4M3", bits, to_e4m3(x) & 0xFF, __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
  expect("UE8M0", bits, round_up_to_ue8m0(x, 0.0f) & 0xFF, __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf));
  const uint32_t amax = bits & 0x7FFFFFFFu;
  expect("the scale code", amax, scale_codes_by_conversion(amax, 0x3F800000u) & 0xFF, scale_code_by_integers(amax));
  expect("the second scale code", amax, scale_codes_by_conversion(0, amax) >> 8, scale_code_by_integers(amax));
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t stride = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += stride) compare(static_cast<uint32_t>(bits));
  for (uint64_t step = 0; stride > 1 && step < uint64_t{1} << 32; step += 1 << 18) {  // every step of three mantissa bits lies at one of these
    for (int64_t near = -3; near <= 3; ++near) compare(static_cast<uint32_t>(static_cast<int64_t>(step) + near));
  }
  std::printf("%llu of %llu differ\n", static_cast<unsigned long long>(different), static_cast<unsigned long long>(compared));
  return different == 0 ? 0 : 1;
}
