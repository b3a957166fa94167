// Turns CUDA errors into Status, right after the call they belong to, and passes them on.
#pragma once

#include <cuda_runtime_api.h>

#include "moe.h"

#define MOE_RETURN_IF_ERROR(expression)   \
  do {                                    \
    Status status_ = (expression);        \
    if (!status_.ok()) return status_;    \
  } while (0)

namespace moe {

// An error left unread would be blamed on an unrelated call later.
inline Status failed(const char* what, cudaError_t error) {
  static_cast<void>(cudaGetLastError());
  return {std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

// After a kernel launch.
inline Status launched(const char* what) {
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status{} : failed(what, error);
}

}  // namespace moe
