// The MXFP8 layer's handlers in the CUDA module.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace moejax::xla_ffi {

XLA_FFI_Error* CudaMxPrepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaMxForward(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaMxBackward(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaMxLossCounts(XLA_FFI_CallFrame*);

}  // namespace moejax::xla_ffi
