// Chooses the variant of the elementwise loops for this processor.
#include <cstdlib>
#include <cstring>

#include "cpu/vector_ops.h"

namespace moejax::cpu {

extern const VectorOps kVectorOps_baseline;
#ifdef MOEJAX_HAVE_X86_VARIANTS
extern const VectorOps kVectorOps_avx2;
extern const VectorOps kVectorOps_avx512;
#endif

const VectorOps* const* VectorVariants() {
  static const struct Variants {
    const VectorOps* list[4] = {};
    Variants() {
      int count = 0;
#ifdef MOEJAX_HAVE_X86_VARIANTS
      __builtin_cpu_init();
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")) {
        list[count++] = &kVectorOps_avx512;
      }
      if (__builtin_cpu_supports("avx2")) list[count++] = &kVectorOps_avx2;
#endif
      list[count++] = &kVectorOps_baseline;
    }
  } variants;
  return variants.list;
}

const VectorOps& Vector() {
  static const VectorOps& chosen = []() -> const VectorOps& {
    const VectorOps* const* variant = VectorVariants();
    if (const char* wanted = std::getenv("MOEJAX_CPU_ISA")) {
      for (; *variant != nullptr; ++variant) {
        if (std::strcmp((*variant)->name, wanted) == 0) return **variant;
      }
      variant = VectorVariants();  // `moejax.native` reports a name that is not available
    }
    return **variant;
  }();
  return chosen;
}

}  // namespace moejax::cpu
