#include "overlap.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kernel_check.h"

// Two lanes: the stream that the layer was given, and one beside it. A step that waits for all goes into the first; one that need not wait for the
// step before it goes into the lane where that one is not, and waits for what was in the other lane before it.
namespace moe {
namespace {

// The second lane, and events: where each lane stood after the last two of its steps. A wait takes an event as it is when the wait is given, so
// each may be recorded again as soon as the waits for it are given.
struct Lane {
  cudaStream_t stream = nullptr;
  cudaEvent_t ended[2][2] = {};
};

cudaError_t make(Lane* lane) {
  cudaError_t error = cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking);
  for (auto& of_lane : lane->ended) {
    for (cudaEvent_t& event : of_lane) {
      if (error == cudaSuccess) error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    }
  }
  return error;
}

// Lanes that nobody puts steps in, by the device and the stream that they lay beside. They are kept until the process ends: as many as layers were
// ever launched at the same time. A lane goes back to its own stream, which waits for what still runs there in any case; beside another one its
// next steps would stand behind steps that wait for a stream of no concern to them, and for ever where that one waits for theirs.
class Lanes {
 public:
  using Beside = std::pair<int, cudaStream_t>;

  cudaError_t take(Lane* lane, Beside beside) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<Lane>& free = free_[beside];
      if (!free.empty()) {
        *lane = free.back();
        free.pop_back();
        return cudaSuccess;
      }
    }
    return make(lane);
  }
  void give_back(const Lane& lane, Beside beside) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[beside].push_back(lane);
  }

 private:
  std::mutex mutex_;
  std::map<Beside, std::vector<Lane>> free_;
};

Lanes& lanes() {
  static Lanes& all = *new Lanes;  // never destroyed: threads may launch while the process ends
  return all;
}

// Nodes that what is captured next depends on.
struct Front {
  std::vector<cudaGraphNode_t> nodes;
  std::vector<cudaGraphEdgeData> edges;

  void add(const Front& other) {
    for (size_t i = 0; i < other.nodes.size(); ++i) {
      if (std::find(nodes.begin(), nodes.end(), other.nodes[i]) != nodes.end()) continue;
      nodes.push_back(other.nodes[i]);
      edges.push_back(other.edges[i]);
    }
  }
};

cudaError_t front_of(cudaStream_t stream, cudaStreamCaptureStatus* status, Front* front) {
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t size = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, &nodes, &edges, &size);
  if (error != cudaSuccess || *status != cudaStreamCaptureStatusActive) return error;
  front->nodes.assign(nodes, nodes + size);
  front->edges.assign(size, cudaGraphEdgeData{});  // without data where every edge is a plain one
  if (edges != nullptr) front->edges.assign(edges, edges + size);
  return cudaSuccess;
}

cudaError_t set_front(cudaStream_t stream, Front front) {
  return cudaStreamUpdateCaptureDependencies(stream, front.nodes.data(), front.edges.data(), front.nodes.size(), cudaStreamSetCaptureDependencies);
}

}  // namespace

class Overlap::Steps {
 public:
  virtual ~Steps() = default;
  virtual cudaError_t begin(After after, cudaStream_t* stream) = 0;  // where to put the kernels of the next step
  virtual cudaError_t end() = 0;
  virtual cudaError_t join() = 0;
};

namespace {

class InLanes : public Overlap::Steps {
 public:
  explicit InLanes(cudaStream_t stream) : streams_{stream, nullptr} {}
  ~InLanes() override {
    if (taken_) lanes().give_back(lane_, {device_, streams_[0]});
  }
  cudaError_t open() {
    cudaError_t error = cudaGetDevice(&device_);
    if (error == cudaSuccess) error = lanes().take(&lane_, {device_, streams_[0]});
    if (error != cudaSuccess) return error;
    taken_ = true;
    streams_[1] = lane_.stream;
    return end();  // what was on the stream before stands for a step in the first lane
  }
  cudaError_t begin(After after, cudaStream_t* stream) override {
    const int other = after == After::kAll ? 1 : now_, back = after == After::kAll ? 1 : 2;
    now_ = 1 - other;
    *stream = streams_[now_];
    return wait(now_, other, steps_[other] - back);
  }
  cudaError_t end() override {
    const int step = steps_[now_]++;
    return cudaEventRecord(lane_.ended[now_][step % 2], streams_[now_]);
  }
  cudaError_t join() override { return wait(0, 1, steps_[1] - 1); }

 private:
  // Lane `waiting` for the given step of the other lane, if there is one and it hasn't. What was on the stream before is waited for in any case.
  cudaError_t wait(int waiting, int lane, int step) {
    if (lane == 0) step = std::max(step, 0);
    if (step < waited_for_[waiting]) return cudaSuccess;
    waited_for_[waiting] = step + 1;
    return cudaStreamWaitEvent(streams_[waiting], lane_.ended[lane][step % 2], 0);
  }

  cudaStream_t streams_[2];
  Lane lane_;
  bool taken_ = false;
  int device_ = 0;
  int now_ = 0;                // lane of the last step
  int steps_[2] = {};          // in each lane
  int waited_for_[2] = {};     // steps of the other lane
};

// A stream that is being captured into a graph stays the only one; a step is given its edges.
class InGraph : public Overlap::Steps {
 public:
  InGraph(cudaStream_t stream, const Front& begun) : stream_(stream), before_last_(begun), last_(begun), third_last_(begun) {}
  cudaError_t begin(After after, cudaStream_t* stream) override {
    *stream = stream_;
    Front front = before_last_;
    front.add(after == After::kAll ? last_ : third_last_);
    return set_front(stream_, front);
  }
  cudaError_t end() override {
    third_last_ = before_last_;
    before_last_ = last_;
    cudaStreamCaptureStatus status;
    return front_of(stream_, &status, &last_);
  }
  cudaError_t join() override {
    Front front = before_last_;
    front.add(last_);
    return set_front(stream_, front);
  }

 private:
  const cudaStream_t stream_;
  Front before_last_, last_, third_last_;  // what the steps before the next one have ended in
};

// One after the other, as a stream has it.
class InOrder : public Overlap::Steps {
 public:
  explicit InOrder(cudaStream_t stream) : stream_(stream) {}
  cudaError_t begin(After, cudaStream_t* stream) override {
    *stream = stream_;
    return cudaSuccess;
  }
  cudaError_t end() override { return cudaSuccess; }
  cudaError_t join() override { return cudaSuccess; }

 private:
  const cudaStream_t stream_;
};

Status checked(cudaError_t error) { return error == cudaSuccess ? Status{} : failed("overlap of launches", error); }

}  // namespace

Overlap::Overlap(cudaStream_t stream, bool overlaps) {
  if (!overlaps) {
    steps_ = std::make_unique<InOrder>(stream);
    return;
  }
  // An error leaves this without steps; step() and join() report it.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  Front begun;
  error_ = checked(front_of(stream, &status, &begun));
  if (!error_.ok()) return;
  if (status == cudaStreamCaptureStatusActive) {
    steps_ = std::make_unique<InGraph>(stream, begun);
    return;
  }
  auto steps = std::make_unique<InLanes>(stream);
  error_ = checked(steps->open());
  if (error_.ok()) steps_ = std::move(steps);
}

Overlap::~Overlap() { join(); }

Status Overlap::step(After after, const Launch& launch) {
  if (steps_ == nullptr) return error_.ok() ? Status{"overlap of launches: a step after join()"} : error_;
  cudaStream_t stream = nullptr;
  if (Status status = checked(steps_->begin(after, &stream)); !status.ok()) return status;
  const Status launched = launch(stream);
  const Status ended = checked(steps_->end());  // also after an error: what was launched is waited for
  return launched.ok() ? ended : launched;
}

Status Overlap::join() {
  if (steps_ == nullptr) return error_;
  const Status status = checked(steps_->join());
  steps_.reset();
  return status;
}

}  // namespace moe
