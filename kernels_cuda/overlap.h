// Steps of a layer, each of which may start while the step before it drains. A persistent product ends at a different time on every
// multiprocessor, up to a tile apart; a next step that needs nothing of it begins on those that are done (NOTES.md, v18).
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

#include "moe.h"

namespace moe {

// What a step waits for, besides everything that was on the stream before the first one.
enum class After {
  kAll,        // every step before it
  kAllButOne,  // every step before it but the last: the two may run at the same time, and must not touch what the other writes
};

// Not for more than one thread. As a stream, it runs nothing out of order by itself: steps start in the order they are given in.
class Overlap {
 public:
  using Launch = std::function<Status(cudaStream_t)>;
  class Steps;

  // `overlaps`: false lets every step wait for all, on the one stream.
  explicit Overlap(cudaStream_t stream, bool overlaps = true);
  ~Overlap();  // joins: what is on the stream next never meets a step that is still running, also not after an error
  Overlap(const Overlap&) = delete;
  Overlap& operator=(const Overlap&) = delete;

  // Launches a step. `launch` puts its kernels on the stream that it is given; what it refers to must live until join().
  // Errors: those of `launch`, and of CUDA.
  Status step(After after, const Launch& launch);
  // What is put on the stream from here on waits for all steps. No step may follow.
  Status join();

 private:
  std::unique_ptr<Steps> steps_;  // until join()
  Status error_;                  // of the constructor
};

}  // namespace moe
