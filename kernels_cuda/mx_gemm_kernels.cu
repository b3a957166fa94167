// The FP8 grouped GEMM kernel for sm_90a, one instantiation per kind, side of the tokens and (where it matters) activation form. Everything of
// substance is in mx_roles.h, mx_tokens_n.h and mx_resident.h.
#include "mx_gemm_kernels.h"

#include "gemm_launch.h"
#include "isa/sm90_mx.cuh"

namespace moe {
namespace {

template <class Roles>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Roles::Config::kThreads, 1)
    mx_grouped_gemm(const __grid_constant__ MxBatch<CUtensorMap> batch) {
  run_roles<Roles, Sm90Mx>(batch);
}

template <class Roles>
cudaError_t launch(const MxBatch<CUtensorMap>& batch, cudaStream_t stream) {
  return launch_blocks<typename Roles::Config, mx_grouped_gemm<Roles>>(batch, stream);
}

template <Kind kKind, bool kPlain>
using OnM = MxRoles<kKind, kPlain, Sm90Mx>;
template <Kind kKind, bool kPlain>
using OnN = MxTokensN<kKind, kPlain, Sm90Mx>;

}  // namespace

cudaError_t launch_mx_gemm(Kind kind, const MxBatch<CUtensorMap>& batch, cudaStream_t stream, Layout layout) {
  const bool plain = is_plain_swiglu(batch.kinds[0].act);
  if (layout == Layout::kTokensN) {
    switch (kind) {
      case kGateUp: return plain ? launch<OnN<kGateUp, true>>(batch, stream) : launch<OnN<kGateUp, false>>(batch, stream);
      case kDown: return launch<OnN<kDown, true>>(batch, stream);
      case kDgradGateUp: return launch<OnN<kDgradGateUp, true>>(batch, stream);
      default: return cudaErrorInvalidValue;
    }
  }
  if (layout == Layout::kResidentFp8) {
    switch (kind) {
      case kWgradDown: return launch<MxResident<kWgradDown, Sm90Mx>>(batch, stream);
      case kWgradGateUp: return launch<MxResident<kWgradGateUp, Sm90Mx>>(batch, stream);
      default: return cudaErrorInvalidValue;
    }
  }
  if (layout != Layout::kTokensM) return cudaErrorInvalidValue;
  switch (kind) {
    case kGateUp: return plain ? launch<OnM<kGateUp, true>>(batch, stream) : launch<OnM<kGateUp, false>>(batch, stream);
    case kDown: return launch<OnM<kDown, true>>(batch, stream);
    case kDgradDown: return plain ? launch<OnM<kDgradDown, true>>(batch, stream) : launch<OnM<kDgradDown, false>>(batch, stream);
    case kDgradGateUp: return launch<OnM<kDgradGateUp, true>>(batch, stream);
    case kWgradDown: return launch<OnM<kWgradDown, true>>(batch, stream);
    case kWgradGateUp: return launch<OnM<kWgradGateUp, true>>(batch, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moe
