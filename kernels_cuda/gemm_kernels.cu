// The grouped GEMM kernel for sm_90a, one instantiation per kind, side of the tokens and (where it matters) activation form.
// Everything of substance is in mma_sm90.h, gemm_tokens_n.h, gemm_resident.h and gemm_resident_rows.h.
#include "gemm_kernels.h"

#include "gemm_launch.h"
#include "gemm_resident.h"
#include "gemm_resident_rows.h"
#include "gemm_tokens_n.h"
#include "isa/sm90.cuh"
#include "mma_sm90.h"

namespace moe {
namespace {

template <class Roles>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Roles::Config::kThreads, 1)
    grouped_gemm(const __grid_constant__ GemmBatch<CUtensorMap, 1> batch) {
  run_roles<Roles, Sm90>(batch);
}

template <class Roles>
cudaError_t launch(const GemmBatch<CUtensorMap, 1>& batch, cudaStream_t stream, int spare = 0) {
  return launch_blocks<typename Roles::Config, grouped_gemm<Roles>>(batch, stream, spare);
}

// The epilogue of kDgradDown takes the registers that nobody else of the block needs: there is no gathering warp, and it dispatches nothing.
struct DgradDownConfig : GemmConfig<256> {
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
};
template <Kind kKind, bool kPlain>
using OnM = TokensM<KindSet<kKind>, kPlain, Sm90, std::conditional_t<kKind == kDgradDown, DgradDownConfig, GemmConfig<256>>>;
template <Kind kKind, bool kPlain>
using OnN = TokensN<kKind, kPlain, Sm90>;

template <template <Kind, class, class> class Roles, class Config>
cudaError_t launch_strips(Kind kind, const GemmBatch<CUtensorMap, 1>& batch, cudaStream_t stream) {
  switch (kind) {
    case kWgradDown: return launch<Roles<kWgradDown, Sm90, Config>>(batch, stream);
    case kWgradGateUp: return launch<Roles<kWgradGateUp, Sm90, Config>>(batch, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t count_blocks(int* blocks) {
  using Roles = OnM<kGateUp, true>;
  return resident_blocks<Roles::Config, grouped_gemm<Roles>>(blocks);
}

cudaError_t launch_gemm(Kind kind, const GemmBatch<CUtensorMap, 1>& batch, cudaStream_t stream, Layout layout, int spare) {
  const bool plain = is_plain_swiglu(batch.kinds[0].act);
  if (layout == Layout::kTokensN) {
    switch (kind) {
      case kGateUp: return plain ? launch<OnN<kGateUp, true>>(batch, stream) : launch<OnN<kGateUp, false>>(batch, stream);
      case kDown: return launch<OnN<kDown, true>>(batch, stream);
      case kDgradDown: return plain ? launch<OnN<kDgradDown, true>>(batch, stream) : launch<OnN<kDgradDown, false>>(batch, stream);
      case kDgradGateUp: return launch<OnN<kDgradGateUp, true>>(batch, stream);
      default: return cudaErrorInvalidValue;
    }
  }
  if (layout == Layout::kResident512) return launch_strips<Resident, ResidentConfig>(kind, batch, stream);
  if (layout == Layout::kResidentRows) return launch_strips<ResidentRows, ResidentRowsConfig>(kind, batch, stream);
  switch (kind) {
    case kGateUp: return plain ? launch<OnM<kGateUp, true>>(batch, stream, spare) : launch<OnM<kGateUp, false>>(batch, stream, spare);
    case kDown: return launch<OnM<kDown, true>>(batch, stream);
    case kDgradDown: return plain ? launch<OnM<kDgradDown, true>>(batch, stream) : launch<OnM<kDgradDown, false>>(batch, stream);
    case kDgradGateUp: return launch<OnM<kDgradGateUp, true>>(batch, stream);
    case kWgradDown: return launch<OnM<kWgradDown, true>>(batch, stream);
    case kWgradGateUp: return launch<OnM<kWgradGateUp, true>>(batch, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moe
