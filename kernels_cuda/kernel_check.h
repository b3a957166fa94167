// Turns CUDA errors into Status, right after the call they belong to.
#pragma once

#include <cuda_runtime_api.h>

#include "moe.h"

namespace moe {

inline Status failed(const char* what, cudaError_t error) {
  return {std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

// After a kernel launch: an error left unread would be blamed on an unrelated call later.
inline Status launched(const char* what) {
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status{} : failed(what, error);
}

}  // namespace moe
