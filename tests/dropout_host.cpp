// Says which pairs the CUDA kernels drop: test_cuda_dropout.py puts their source, for a host, beside this. Lanes run
// one after the other, and twice, so that what one gives another is there.
//
// Arguments: "queries" or "keys" (what a thread's two rows are), the columns, the first query, the first key, the
// head, the key and the offset of Philox, the threshold, and two numbers of a part of a call, or 0. Prints a digit for
// each pair of 64 rows, 1 where it is dropped.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

template <class T>
T __ldg(T const* p) {
  return *p;
}
int now;  // the thread
std::map<int, uint32_t> given;
uint32_t __shfl_xor_sync(unsigned, uint32_t x, int lane) {
  given[now] = x;
  return given[now ^ lane];
}

#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include "dropout.cuh"

using namespace sdpa_cuda;

int64_t number(char const* text) { return std::strtoll(text, nullptr, 10); }

template <int COLUMNS>
void play(bool keys, int row0, int key0, int head, FlashParams const& p) {
  int const stream = stream_of(p, 0, head);
  static bool dropped[64][COLUMNS];
  cute::SM90::GMMA::CLayout_64xN<COLUMNS> const place;  // of (thread, number of its accumulator), rows side by side
  for (int pass = 0; pass < 2; ++pass) {
    for (now = 0; now < 128; ++now) {
      auto weights = cute::make_tensor<float>(cute::Shape<cute::_2, cute::Int<COLUMNS / 4>>{});
      cute::fill(weights, 1.f);
      Dropped found;
      if (keys)
        found = find_dropped<COLUMNS>(Philox(p), p, stream, row0, key0, now);
      else
        drop(weights, Philox(p), p, stream, row0, key0, now);
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < COLUMNS / 4; ++j) {
          int const at = place(now, j % 2 + 2 * i + 4 * (j / 2));
          dropped[at % 64][at / 64] = keys ? found(i, j) : weights(i, j) == 0.f;
        }
    }
  }
  for (auto const& row : dropped) {
    for (bool const x : row) std::putchar(x ? '1' : '0');
    std::putchar('\n');
  }
}

int main(int, char** arguments) {
  int64_t const rng[4] = {number(arguments[6]), number(arguments[7]), number(arguments[9]), number(arguments[10])};
  FlashParams p;
  p.rng = rng;
  p.has_part = rng[2] != 0;
  p.dropped = uint32_t(number(arguments[8])) << 16;
  auto const run = [&](auto columns) {
    play<decltype(columns)::value>(!std::strcmp(arguments[1], "keys"), number(arguments[3]), number(arguments[4]),
                                   number(arguments[5]), p);
  };
  number(arguments[2]) == 64 ? run(cute::Int<64>{}) : run(cute::Int<128>{});
}
