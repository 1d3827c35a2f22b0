// Errors of the runtime, and memory for results and for what kernels keep while they run.
#pragma once
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <optional>
#include <vector>

// A torch that lacks them has tensors for the backward's workspace.
#pragma weak aoti_torch_cuda_caching_allocator_raw_alloc
#pragma weak aoti_torch_cuda_caching_allocator_raw_delete

namespace sdpa_cuda {

// Makes the device's context current. The driver makes TMA descriptors, and has none in a thread that called nothing of
// the runtime: as autograd's thread, when all memory comes from the allocator's cache. A DeviceGuard calls nothing
// where it finds its device set.
inline void make_context_current(int device) {
  const cudaError_t status = cudaSetDevice(device);
  STD_TORCH_CHECK(status == cudaSuccess, "cuda_flash: ", cudaGetErrorString(status), " on device ", device);
}

inline void check_status(cudaError_t status, const char* what) {
  STD_TORCH_CHECK(status == cudaSuccess, "cuda_flash: ", cudaGetErrorString(status), " in ", what);
}

// What a call allocates, which an error tells of.
struct Need {
  int device;
  int64_t bytes;
};

// The dispatcher knows an error that says "out of memory", and lets another kernel answer. An allocation fails, too,
// where a kernel in front had an error that leaves the device unusable.
inline void check_allocated(AOTITorchError status, const Need& need) {
  if (status == AOTI_TORCH_SUCCESS) return;
  size_t free = 0, all = 0;
  check_status(cudaMemGetInfo(&free, &all), "a kernel in front, found by an allocation");
  STD_TORCH_CHECK(false, "cuda_flash: out of memory: needs ", (need.bytes + (1 << 20) - 1) >> 20, " MiB of device ",
                  need.device, " for results and for what it adds up");
}

inline torch::stable::Tensor new_tensor(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                                        int32_t dtype, const Need& need) {
  AtenTensorHandle handle;
  check_allocated(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                                           aoti_torch_device_type_cuda(), need.device, &handle),
                  need);
  return torch::stable::Tensor(handle);
}

// Memory of the caching allocator until the call returns. It is no tensor, because torch fills new tensors under
// torch.use_deterministic_algorithms.
class Workspace {
 public:
  Workspace(int64_t bytes, const Need& need) {
    // compute-sanitizer sees the ends of allocations where torch does not cache them, which is so for tensors alone.
    static const bool cached = !std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING");
    if (cached && aoti_torch_cuda_caching_allocator_raw_alloc && aoti_torch_cuda_caching_allocator_raw_delete) {
      check_allocated(aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &data_), need);
    } else {
      tensor_ = new_tensor({(bytes + 3) / 4}, {1}, aoti_torch_dtype_int32(), need);
      data_ = tensor_->data_ptr();
    }
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() {
    if (!tensor_) aoti_torch_cuda_caching_allocator_raw_delete(data_);
  }
  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset);
  }

 private:
  void* data_ = nullptr;
  std::optional<torch::stable::Tensor> tensor_;
};

}  // namespace sdpa_cuda
