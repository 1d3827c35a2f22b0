// What a launch is told, and the instances there are to launch. No header of CUDA or torch: bindings and kernels share
// it.
#pragma once
#include <cstdint>

namespace sdpa_cuda {

// (B, H, rows, D) whose last stride is 1; the others in elements.
struct View {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
};

struct FlashParams {
  View q, k, v, out;
  float* lse = nullptr;  // (B, H, M), contiguous
  int B = 0, H = 0, Hkv = 0, M = 0, N = 0, D = 0;
  float scale = 1.f;
  int shift = 0;    // where causal, row i sees the keys up to i + shift
  int section = 1;  // heads (of all B * H) that run side by side, so that their keys and values stay in the L2 cache
  int cores = 1;    // multiprocessors: one block runs on each
};

enum class Element { kBFloat16, kFloat16 };

struct Instance {
  Element element;
  int D;  // the largest head size; smaller ones are filled up with zeros on their way into shared memory
  bool causal;
  int (*launch)(const FlashParams&, void* stream);  // a cudaError_t
};

#define INSTANCE(name, element, D, causal) int launch_##name(const FlashParams&, void* stream);
#include "instances.def"
#undef INSTANCE

extern const Instance kInstances[];
extern const int kInstanceCount;

}  // namespace sdpa_cuda
