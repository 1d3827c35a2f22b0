// Calls as they were planned: all that their launches need but a workspace, a counter and a stream. A thread may record
// its last one, to launch it again for tensors at other addresses (sdpa/repeated/launches.cpp).
#pragma once
#include <cuda_runtime_api.h>

#include "params.h"
#include "workspace.h"

namespace sdpa_cuda {

struct ForwardPlan {
  SegmentParams p;
  const Instance* instance;
  int64_t spans = 0, id_ranges = 0, ids = 0;  // bytes of the workspace, with segments
  Need need{};
  bool draws = false;  // thread blocks draw their work tiles from a counter
  int64_t bytes() const { return spans + id_ranges + ids; }
};

// What the backward kernels keep: base2 and delta of every row, the sums of grad_q, and those of grad_k and grad_v;
// ids of segments and what is found out about them; semaphores. In numbers of four bytes, but for spans.
struct Kept {
  int64_t rows = 0, grad_q = 0, grad_k = 0, grad_v = 0, row_ids = 0, key_ids = 0, spans = 0, semaphores = 0;
  int64_t sums() const { return 2 * rows + grad_q + grad_k + grad_v; }  // a multiple of 16 bytes
  int64_t all() const { return sums() + row_ids + key_ids + 2 * spans + semaphores; }
};

struct BackwardPlan {
  BackwardParams p;
  const BackwardInstance* instance;
  Kept kept;
  Need need;
  int64_t rows;  // of out, in all heads
  bool draws;
};

// Launches a plan on a stream of its device, whose context is current from then on. Raises where memory is lacking.
cudaError_t launched(ForwardPlan plan, void* stream);
cudaError_t launched(BackwardPlan plan, void* stream);

// Records a plan where this thread asked for it by sdpa_cuda_record.
void record(const ForwardPlan& plan);
void record(const BackwardPlan& plan);

}  // namespace sdpa_cuda
