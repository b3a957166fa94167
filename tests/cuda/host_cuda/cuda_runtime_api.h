// What kernels_cuda's layers need of CUDA's runtime header: errors, of which the host emulator has one.
#pragma once

typedef struct CUstream_st* cudaStream_t;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };

inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInvalidValue"; }
inline const char* cudaGetErrorString(cudaError_t) { return "no such product"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
