// The memory of the counters, and which stream or captured launch has which of them.
#include "counters.h"

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
#include <unordered_map>

#include "params.h"

namespace sdpa_cuda {
namespace {

constexpr uint32_t kCounters = 131072;   // of a device: 512 KB, kept for the life of the process
constexpr uint32_t kRetryLaunches = 64;  // between two attempts to allocate the memory

class Counters {
 public:
  int32_t* take(cudaStream_t stream) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!memory_ && launches_++ % kRetryLaunches == 0) memory_ = allocate();
    if (!memory_) return nullptr;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;  // a stream's handle may be used again for another stream, its id is not
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone ||
        cudaStreamGetId(stream, &id) != cudaSuccess) {
      if (status == cudaStreamCaptureStatusNone) cudaGetLastError();  // or the next launch would seem to fail
      return fresh();
    }
    const auto known = of_stream_.find(id);
    if (known != of_stream_.end()) return known->second;
    int32_t* const counter = fresh();
    if (counter) of_stream_.emplace(id, counter);
    return counter;
  }

 private:
  int32_t* fresh() { return taken_ < kCounters ? memory_ + taken_++ : nullptr; }

  // The capture mode is relaxed: none of this belongs to what this thread or another one may be capturing.
  static int32_t* allocate() {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    constexpr size_t kBytes = kCounters * sizeof(int32_t);
    void* memory = nullptr;
    cudaStream_t stream = nullptr;
    const bool done = cudaMalloc(&memory, kBytes) == cudaSuccess &&
                      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
                      cudaMemsetAsync(memory, 0, kBytes, stream) == cudaSuccess &&
                      cudaStreamSynchronize(stream) == cudaSuccess;
    if (stream) cudaStreamDestroy(stream);
    if (!done && memory) cudaFree(memory);
    if (!done) cudaGetLastError();
    cudaThreadExchangeStreamCaptureMode(&mode);
    return done ? static_cast<int32_t*>(memory) : nullptr;
  }

  std::mutex mutex_;
  std::unordered_map<unsigned long long, int32_t*> of_stream_;
  int32_t* memory_ = nullptr;
  uint32_t taken_ = 0, launches_ = 0;
};

}  // namespace

int32_t* take_counter(int device, void* stream) {
  static std::array<Counters, kMaxDevices> all;
  return device < kMaxDevices ? all[device].take(static_cast<cudaStream_t>(stream)) : nullptr;
}

}  // namespace sdpa_cuda
