// The handlers of the CPU module, by the name of their target.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace moejax::xla_ffi {

XLA_FFI_Error* MoeForward(XLA_FFI_CallFrame*);
XLA_FFI_Error* MoeBackward(XLA_FFI_CallFrame*);
XLA_FFI_Error* Schedule(XLA_FFI_CallFrame*);
XLA_FFI_Error* Dispatch(XLA_FFI_CallFrame*);
XLA_FFI_Error* Combine(XLA_FFI_CallFrame*);
XLA_FFI_Error* GroupedProduct(XLA_FFI_CallFrame*);
XLA_FFI_Error* GroupedWgrad(XLA_FFI_CallFrame*);
XLA_FFI_Error* MxQuantize(XLA_FFI_CallFrame*);
XLA_FFI_Error* MxDequantize(XLA_FFI_CallFrame*);

// Defines the function `name` above: it decodes a call frame as `binding` says and calls `implementation`.
#define MOEJAX_DEFINE_HANDLER(name, implementation, binding)                 \
  XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame) {                       \
    static auto* const handler = (binding).To(implementation).release();     \
    return handler->Call(call_frame);                                        \
  }

}  // namespace moejax::xla_ffi
