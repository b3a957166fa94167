// The Blackwell layer's handlers in the CUDA module.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace moejax::xla_ffi {

XLA_FFI_Error* CudaSm100Prepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaSm100Forward(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaSm100Backward(XLA_FFI_CallFrame*);

}  // namespace moejax::xla_ffi
