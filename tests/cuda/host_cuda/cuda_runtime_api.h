// What kernels_cuda's layers need of CUDA's runtime header, on the host emulator: errors, of which it has one; and what overlap.cc calls, which
// overlap_host.cc defines.
#pragma once

#include <cstddef>
#include <utility>

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef struct CUgraphNode_st* cudaGraphNode_t;
typedef struct CUgraph_st* cudaGraph_t;
struct cudaGraphEdgeData {
  unsigned char from_port, to_port, type, reserved[5];
};
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaStreamSetCaptureDependencies = 1 };

inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInvalidValue"; }
inline const char* cudaGetErrorString(cudaError_t) { return "no such product"; }
inline cudaError_t last_error = cudaSuccess;
inline cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* size);
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* nodes, const cudaGraphEdgeData* edges, size_t size,
                                                unsigned flags);
