// The layer's handlers in the CUDA module.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace moejax::xla_ffi {

XLA_FFI_Error* CudaMoeForward(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaMoeBackward(XLA_FFI_CallFrame*);

}  // namespace moejax::xla_ffi
