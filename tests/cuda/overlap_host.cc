// kernels_cuda/overlap.cc on a CUDA runtime that only remembers what comes after what: streams, events, and streams that are being captured.
// A shared library for test_overlap.py.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "overlap.h"

using Launches = uint64_t;  // a bit each

struct CUgraphNode_st {
  Launches before;  // itself too
};
struct CUstream_st {
  Launches before = 0;  // what is launched next
  bool capturing = false;
  std::vector<cudaGraphNode_t> front;
  std::vector<cudaGraphEdgeData> edges;
};
struct CUevent_st {
  Launches before = 0;
};

namespace {

std::deque<CUgraphNode_st> nodes;
std::deque<CUstream_st> streams;  // that overlap.cc made, and its events
std::deque<CUevent_st> events;
bool device_fails = false;

cudaError_t refuse_if(bool wrong) { return wrong ? cudaErrorInvalidValue : cudaSuccess; }

// The launches that end before this one starts.
Launches launch(cudaStream_t stream, int id) {
  Launches before = stream->before;
  if (stream->capturing) {
    for (cudaGraphNode_t node : stream->front) before |= node->before;
    nodes.push_back({before | Launches{1} << id});
    stream->front = {&nodes.back()};
    stream->edges.assign(1, cudaGraphEdgeData{});
  } else {
    stream->before |= Launches{1} << id;
  }
  return before;
}

}  // namespace

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return refuse_if(device_fails);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = &streams.emplace_back();
  return refuse_if(flags != cudaStreamNonBlocking);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = &events.emplace_back();
  return refuse_if(flags != cudaEventDisableTiming);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->before = stream->before;
  return refuse_if(stream->capturing);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  stream->before |= event->before;
  return refuse_if(stream->capturing);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t** front, const cudaGraphEdgeData** edges, size_t* size) {
  *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (!stream->capturing) return cudaSuccess;
  *front = stream->front.data();
  *edges = stream->edges.data();
  *size = stream->front.size();
  return cudaSuccess;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* front, const cudaGraphEdgeData* edges, size_t size,
                                                unsigned flags) {
  std::vector<cudaGraphNode_t> unique(front, front + size);
  std::sort(unique.begin(), unique.end());
  if (std::unique(unique.begin(), unique.end()) != unique.end()) return cudaErrorInvalidValue;  // as CUDA, at the next node
  stream->front.assign(front, front + size);
  stream->edges.assign(edges, edges + size);
  return refuse_if(!stream->capturing || flags != cudaStreamSetCaptureDependencies);
}

// Two layers at the same time, each on its own stream: launch 0 of a layer is on its stream before its steps, which have `kernels` launches each
// and wait for all but one where `overlaps` says so; one launch comes after them. Where `fails` says so a step returns an error after its launches.
// before_2xL: of each launch those of the same layer that end before it starts, or with bit 63 one of the other layer. Returns how many streams
// were made, or -1 after an error other than the step's own.
extern "C" int overlap(int capturing, int steps, const int* overlaps, const int* kernels, int fails, Launches* before_2xL) {
  using moe::Status;
  device_fails = false;
  for (CUstream_st& s : streams) s.before = 0;  // all that was launched before has ended
  for (CUevent_st& e : events) e.before = 0;
  CUstream_st stream[2];
  for (CUstream_st& s : stream) s.capturing = capturing != 0;
  int id[2] = {0, 24};
  Launches* next[2] = {before_2xL, before_2xL + 24};
  const auto put = [&](int layer, cudaStream_t on) {
    const Launches others = layer == 0 ? ~((Launches{1} << 24) - 1) : (Launches{1} << 24) - 1;
    const Launches before = launch(on, id[layer]++);
    *next[layer]++ = ((before & ~others) >> (24 * layer)) | (before & others ? Launches{1} << 63 : 0);
  };
  bool wrong = false;
  {
    put(0, &stream[0]);
    put(1, &stream[1]);
    moe::Overlap overlap[2] = {moe::Overlap(&stream[0]), moe::Overlap(&stream[1])};
    for (int i = 0; i < steps; ++i) {
      for (int layer = 0; layer < 2; ++layer) {
        const Status status = overlap[layer].step(overlaps[i] ? moe::After::kAllButOne : moe::After::kAll, [&](cudaStream_t lane) {
          for (int k = 0; k < kernels[i]; ++k) put(layer, lane);
          return i == fails ? Status{"as asked"} : Status{};
        });
        wrong |= status.message != (i == fails ? "as asked" : "");
      }
      if (i == fails) break;
    }
    // After an error nobody calls join().
    for (int layer = 0; layer < 2 && fails < 0; ++layer) {
      wrong |= !overlap[layer].join().ok();
      wrong |= overlap[layer].step(moe::After::kAll, [](cudaStream_t) { return Status{}; }).ok();
    }
  }
  put(0, &stream[0]);
  put(1, &stream[1]);
  return wrong ? -1 : static_cast<int>(streams.size());
}

// Whether an error of the runtime reaches who asks for a step, and runs none.
extern "C" int reports_errors() {
  device_fails = true;
  CUstream_st stream;
  moe::Overlap overlap(&stream);
  bool ran = false;
  const bool stepped = overlap.step(moe::After::kAll, [&](cudaStream_t) { return ran = true, moe::Status{}; }).ok();
  return !stepped && !ran && !overlap.join().ok();
}
