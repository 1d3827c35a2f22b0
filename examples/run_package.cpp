// Runs a package of AOTInductor, whose program calls sdpa, without Python:
//
//   run_package PACKAGE.pt2 INPUTS.pt OUTPUTS.pt [LIBRARY]
//
// INPUTS.pt is what torch.save writes of a list of tensors, OUTPUTS.pt what torch.load reads as a
// tuple. LIBRARY is what `python -c "import sdpa; print(sdpa.operators_library())"` says; a package of a decomposed
// program needs none.
//
//   TORCH=$(python -c "import torch, os; print(os.path.dirname(torch.__file__))")
//   g++ -std=c++20 -I$TORCH/include -I$TORCH/include/torch/csrc/api/include run_package.cpp -o run_package \
//       -L$TORCH/lib -Wl,-rpath,$TORCH/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -ldl
//
// A torch whose C++ has the old ABI (torch.compiled_with_cxx11_abi() is False) wants -D_GLIBCXX_USE_CXX11_ABI=0.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

std::vector<at::Tensor> read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const c10::IValue list = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : list.toListRef()) tensors.push_back(value.toTensor());
  return tensors;
}

void write_tensors(const std::string& path, const std::vector<at::Tensor>& tensors) {
  const std::vector<c10::IValue> values(tensors.begin(), tensors.end());
  const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(values));
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path);
}

int run(const std::vector<std::string>& paths) {
  if (paths.size() > 3 && dlopen(paths[3].c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr)
    throw std::runtime_error(dlerror());
  torch::inductor::AOTIModelPackageLoader package(paths[0]);
  at::manual_seed(0);  // dropout of a package is the same in every run
  write_tensors(paths[2], package.run(read_tensors(paths[1])));
  return 0;
}

int main(int count, char** words) {
  try {
    const std::vector<std::string> paths(words + 1, words + count);
    if (paths.size() < 3) throw std::invalid_argument("run_package PACKAGE.pt2 INPUTS.pt OUTPUTS.pt [LIBRARY]");
    return run(paths);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
