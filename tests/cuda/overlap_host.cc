// kernels_cuda/overlap.cc on a CUDA runtime that only remembers what comes after what: streams, events, and streams that are being captured.
// A shared library for test_overlap.py.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "overlap.h"

using Launches = uint64_t;  // a bit each

struct CUgraphNode_st {
  Launches before;  // itself too
};
struct CUstream_st {
  int device = 0;
  Launches before = 0;  // what is launched next
  bool capturing = false;
  std::vector<cudaGraphNode_t> front;
  std::vector<cudaGraphEdgeData> edges;
};
struct CUevent_st {
  int device = 0;
  Launches before = 0;
};

namespace {

std::deque<CUgraphNode_st> nodes;
std::deque<CUstream_st> streams;  // that overlap.cc made, and its events
std::deque<CUevent_st> events;
int device_now = 0;
int calls_until_failure = -1;  // of the runtime; negative: none fails

cudaError_t refuse_if(bool wrong) {
  if (calls_until_failure-- == 0 || wrong) last_error = cudaErrorInvalidValue;
  return last_error;
}

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
  *device = device_now;
  return refuse_if(false);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = &streams.emplace_back();
  (*stream)->device = device_now;
  return refuse_if(flags != cudaStreamNonBlocking);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = &events.emplace_back();
  (*event)->device = device_now;
  return refuse_if(flags != cudaEventDisableTiming);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->before = stream->before;
  return refuse_if(stream->capturing || event->device != stream->device);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  stream->before |= event->before;
  return refuse_if(stream->capturing);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t** front, const cudaGraphEdgeData** edges, size_t* size) {
  *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (stream->capturing) {
    *front = stream->front.data();
    *edges = stream->edges.data();
    *size = stream->front.size();
  }
  return refuse_if(false);
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* front, const cudaGraphEdgeData* edges, size_t size,
                                                unsigned flags) {
  std::vector<cudaGraphNode_t> unique(front, front + size);
  std::sort(unique.begin(), unique.end());
  const bool twice = std::unique(unique.begin(), unique.end()) != unique.end();  // CUDA refuses it at the next node
  stream->front.assign(front, front + size);
  stream->edges.assign(edges, edges + size);
  return refuse_if(twice || !stream->capturing || flags != cudaStreamSetCaptureDependencies);
}

// Two layers, each on its own stream: launch 0 of a layer is on its stream before its steps, which have `kernels` launches each and wait for all
// but one where `overlaps` says so; one launch comes after them. Where `fails` says so a step returns an error after its launches.
// Mode 0: on streams; 1: the streams are being captured; 2: steps may not overlap. The layers take turns, or, `apart`, one is launched after the other; with `two_devices` the second one is on a device of its own.
// before_2xL: of each launch those of the same layer that end before it starts, or with bit 63 one of the other layer. Returns how many streams
// were made, or -1 after an error other than the step's own.
extern "C" int overlap(int mode, int steps, const int* overlaps, const int* kernels, int fails, int apart, int two_devices,
                       Launches* before_2xL) {
  using moe::Status;
  calls_until_failure = -1;
  for (CUstream_st& s : streams) s.before = 0;  // all that was launched before has ended
  for (CUevent_st& e : events) e.before = 0;
  static CUstream_st stream[2];
  std::optional<moe::Overlap> overlap[2];
  int id[2] = {0, 24};
  Launches* next[2] = {before_2xL, before_2xL + 24};
  const auto put = [&](int layer, cudaStream_t on) {
    const Launches others = layer == 0 ? ~((Launches{1} << 24) - 1) : (Launches{1} << 24) - 1;
    const Launches before = launch(on, id[layer]++);
    *next[layer]++ = ((before & ~others) >> (24 * layer)) | (before & others ? Launches{1} << 63 : 0);
  };
  bool wrong = false;
  const auto turn = [&](int layer) { device_now = two_devices != 0 ? layer : 0; };
  const auto begin = [&](int layer) {
    turn(layer);
    stream[layer] = {};
    stream[layer].device = device_now;
    stream[layer].capturing = mode == 1;
    put(layer, &stream[layer]);
    overlap[layer].emplace(&stream[layer], mode != 2);
  };
  const auto step = [&](int layer, int i) {
    turn(layer);
    const Status status = overlap[layer]->step(overlaps[i] ? moe::After::kAllButOne : moe::After::kAll, [&](cudaStream_t lane) {
      for (int k = 0; k < kernels[i]; ++k) put(layer, lane);
      return i == fails ? Status{"as asked"} : Status{};
    });
    wrong |= status.message != (i == fails ? "as asked" : "");
  };
  const auto end = [&](int layer) {
    turn(layer);
    if (fails < 0) {  // after an error nobody calls join()
      wrong |= !overlap[layer]->join().ok();
      wrong |= overlap[layer]->step(moe::After::kAll, [](cudaStream_t) { return Status{}; }).ok();
    }
    overlap[layer].reset();
    put(layer, &stream[layer]);
  };
  if (fails >= 0) steps = fails + 1;
  for (int first = 0; first < 2; first += apart != 0 ? 1 : 2) {
    const int last = apart != 0 ? first : 1;
    for (int layer = first; layer <= last; ++layer) begin(layer);
    for (int i = 0; i < steps; ++i) {
      for (int layer = first; layer <= last; ++layer) step(layer, i);
    }
    for (int layer = first; layer <= last; ++layer) end(layer);
  }
  return wrong || last_error != cudaSuccess ? -1 : static_cast<int>(streams.size());
}

// Four steps, of which the runtime fails one call, counted from 0. Returns 0 where there is no such call; 1 if the error is reported, what comes
// after it does not run, and nothing is left of it for others; else -1.
extern "C" int reports_an_error(int capturing, int call) {
  last_error = cudaSuccess;
  device_now = 0;
  calls_until_failure = call;
  CUstream_st stream;
  stream.capturing = capturing != 0;
  moe::Status status;
  int ran = 0;
  {
    moe::Overlap overlap(&stream);
    for (int i = 0; i < 4 && status.ok(); ++i) {
      status = overlap.step(i % 2 == 0 ? moe::After::kAll : moe::After::kAllButOne, [&](cudaStream_t) { return ++ran, moe::Status{}; });
    }
    if (status.ok()) status = overlap.join();
  }
  if (calls_until_failure >= 0) return status.ok() && ran == 4 ? 0 : -1;
  return !status.ok() && last_error == cudaSuccess ? 1 : -1;
}
