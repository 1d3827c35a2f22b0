// Which blocks of queries of which heads a thread block takes, one after the other.
#pragma once
#include <algorithm>
#include <cute/config.hpp>

#include "params.h"

namespace sdpa_cuda {

struct Work {
  int block, head, batch, kv_head;
};

// A persistent thread block takes every gridDim.x-th share. A share is a block of queries or, where causal, a long one
// and a short one, so that all are equally long; where there are too few of those, each thread block has one block of
// queries, the longest first.
struct Scheduler {
  static constexpr int kFewest = 4;  // blocks of queries per multiprocessor for which pairs are worth it

  int blocks, shares, entries, section, H, group, grid;
  bool pairs, longest_last;

  Scheduler(FlashParams const& p, int rows, bool causal)
      : blocks((p.M + rows - 1) / rows),
        entries(p.B * p.H),
        section(p.section),
        H(p.H),
        group(p.H / p.Hkv),
        pairs(causal && blocks * entries >= kFewest * p.cores),
        longest_last(causal) {
    shares = pairs ? (blocks + 1) / 2 : blocks;
    grid = causal && !pairs ? shares * entries : std::min(shares * entries, p.cores);
  }

  // Whether a thread block has a step of that number; that one may be empty: the second half of the middle block.
  CUTE_DEVICE bool has(int step) const { return share_of(step) < shares * entries; }

  CUTE_DEVICE int share_of(int step) const { return (pairs ? step / 2 : step) * int(gridDim.x) + int(blockIdx.x); }

  // The step after this one. The middle block of an odd number is a share by itself, whose second half is left out.
  CUTE_DEVICE int next(int step) const {
    ++step;
    bool const odd = pairs && step % 2 && blocks % 2;
    return odd && has(step) && 2 * locate(step).block == blocks - 1 ? step + 1 : step;
  }

  // Heads come in sections whose keys and values fit the L2 cache; equal shares of all of them run side by side.
  CUTE_DEVICE Work locate(int step) const {
    int const share = share_of(step);
    int const first = share / (section * shares) * section;
    int const inside = share - first * shares, width = min(section, entries - first);
    int const place = inside / width, entry = first + inside % width;
    int const head = entry % H;
    bool const from_end = longest_last && !(pairs && step % 2);
    return {from_end ? blocks - 1 - place : place, head, entry / H, head / group};
  }
};

}  // namespace sdpa_cuda
