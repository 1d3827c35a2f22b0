// Dropout's random numbers in the registers of a WGMMA's accumulator, the same that every other kernel draws
// (sdpa/philox.py): Philox4x32 of seven rounds (Salmon et al., SC 2011), whose call has 16 bits for each of eight pairs
// of the queries i, i + 8 and the keys j, j + 1, j + 8, j + 9, j even. A thread of a WGMMA of queries by keys has all
// eight. Of one of keys by queries two lanes share them.
#pragma once
#include <cute/tensor.hpp>

#include "params.h"

namespace sdpa_cuda {

constexpr int kPhiloxRounds = 7, kPartnerLane = 4;  // the lane with the neighbouring row of an accumulator

struct Philox {
  uint2 key;
  uint32_t offset;
  uint2 first = {};  // groups of keys and of rows before those of a part of a call

  CUTE_DEVICE explicit Philox(FlashParams const& p) {
    uint64_t const seed = __ldg(p.rng);
    key = make_uint2(uint32_t(seed), uint32_t(seed >> 32));
    offset = uint32_t(__ldg(p.rng + 1));
    if (p.has_part) read_first(p.rng);
  }

  // Reads the seed again at every pass of a loop, and so needs no registers between them.
  CUTE_DEVICE Philox(FlashParams const& p, std::true_type) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(key.x), "=r"(key.y) : "l"(p.rng));
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(offset) : "l"(p.rng + 1));
    if (p.has_part) read_first(p.rng);
  }

  CUTE_DEVICE void read_first(const int64_t* rng) {
    uint32_t keys, rows;  // multiples of 16
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(keys), "=r"(rows) : "l"(rng + 3));
    first = make_uint2(keys / 4, rows / 2);
  }

  CUTE_DEVICE uint4 operator()(uint32_t keys, uint32_t rows, uint32_t stream) const {
    uint4 c = make_uint4(keys, rows, stream, offset);
    uint2 k = key;
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      uint64_t const a = uint64_t(0xD2511F53u) * c.x, b = uint64_t(0xCD9E8D57u) * c.z;
      c = make_uint4(uint32_t(b >> 32) ^ c.y ^ k.x, uint32_t(b), uint32_t(a >> 32) ^ c.w ^ k.y, uint32_t(a));
      k.x += 0x9E3779B9u, k.y += 0xBB67AE85u;
    }
    return c;
  }
};

// The number of the stream of a head among all: of a part of a call among all heads of the call.
CUTE_DEVICE int stream_of(FlashParams const& p, int batch, int head) {
  if (!p.has_part) return batch * p.H + head;
  uint64_t const part = __ldg(p.rng + 2);
  return batch * int(part >> 32) + int(uint32_t(part)) + head;
}

// The number of a row's group of queries i and i + 8, or of a key's group, without the part that a thread's place adds.
CUTE_DEVICE uint32_t group_of_rows(int row0) { return row0 / 16 * 8; }
CUTE_DEVICE uint32_t group_of_keys(int key0) { return key0 / 16 * 4; }

// Sets the weights that are dropped to 0. A thread's weights are [2 rows, columns] of the 64 rows from row0 on and the
// keys from key0 on, both multiples of 16.
template <class Weights>
CUTE_DEVICE void drop(Weights& weights, Philox const& philox, FlashParams const& p, int stream, int row0, int key0,
                      int thread) {
  using namespace cute;
  uint32_t const row = philox.first.y + group_of_rows(row0) + thread / 32 * 8 + thread % 32 / 4;
  uint32_t const key = philox.first.x + group_of_keys(key0) + thread % 4;
#pragma unroll
  for (int j = 0; j < size<1>(weights); j += 4) {
    uint4 const call = philox(key + j, row, stream);
    uint32_t const words[2][2] = {{call.x, call.y}, {call.z, call.w}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (words[i][h] << 16 < p.dropped) weights(i, j + 2 * h) = 0.f;
        if (words[i][h] < p.dropped) weights(i, j + 2 * h + 1) = 0.f;
      }
    }
  }
}

// Which weights of a thread are dropped, whose weights are [2 keys, rows]: those of even rows and of odd ones, a bit
// for each.
struct Dropped {
  uint32_t even = 0, odd = 0;

  CUTE_DEVICE bool operator()(int i, int j) const { return (j % 2 ? odd : even) >> (j / 2 * 2 + i) & 1; }
};

// The same of the rows from row0 on and the 64 keys from key0 on. Lanes with an even key call Philox for the even rows
// of both lanes' keys, those with an odd key for the odd ones.
template <int ROWS>
CUTE_DEVICE Dropped find_dropped(Philox const& philox, FlashParams const& p, int stream, int row0, int key0,
                                 int thread) {
  bool const is_odd = thread / 4 % 2;
  uint32_t const key = philox.first.x + group_of_keys(key0) + thread / 32 * 4 + thread % 32 / 8;
  uint32_t const row = philox.first.y + group_of_rows(row0) + thread % 4 * 2 + is_odd;
  uint32_t low = 0, high = 0;
#pragma unroll
  for (int t = 0; t < ROWS / 16; ++t) {
    uint4 const call = philox(key, row + 8 * t, stream);
    uint32_t const words[4] = {call.x, call.y, call.z, call.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low |= uint32_t(words[i] << 16 < p.dropped) << (4 * t + i);
      high |= uint32_t(words[i] < p.dropped) << (4 * t + i);
    }
  }
  uint32_t const given = __shfl_xor_sync(0xffffffff, is_odd ? low : high, kPartnerLane);
  return is_odd ? Dropped{given, high} : Dropped{low, given};
}

}  // namespace sdpa_cuda
