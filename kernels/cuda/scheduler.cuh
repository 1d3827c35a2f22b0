// Which blocks of queries of which heads a thread block takes, one after the other.
#pragma once
#include <cutlass/fast_math.h>

#include <algorithm>

#include "params.h"

namespace sdpa_cuda {

struct Work {
  int block, head, batch, kv_head;
};

// A persistent thread block takes every gridDim.x-th share, one after the other; where there are too few for pairs,
// each thread block has one block of queries, the longest first.
struct Scheduler {
  static constexpr int kShort = 1024;  // keys up to which neighbours do best with blocks of one head, if all are alike

  int blocks, shares, section, last, grid;  // `last`: the first head of the last section, which may be a narrow one
  bool pairs, longest_last;
  // Each division by the hardware's sequence would take a group more than a hundred cycles, twice per block of queries.
  cutlass::FastDivmod by_section, by_width, by_last_width, by_head, by_group;

  Scheduler(FlashParams const& p, int rows, bool grows) : longest_last(grows), by_head(p.H), by_group(p.H / p.Hkv) {
    Shares const all(p, rows, grows);
    blocks = all.blocks, shares = all.all, pairs = all.pairs;
    grid = grows && !pairs ? all.all : std::min(all.all, p.cores);
    section = !grows && p.N <= kShort && p.M % rows == 0 ? 1 : p.section;
    int const entries = p.B * p.H;
    last = (entries - 1) / section * section;
    by_section = section * all.of_head, by_width = section, by_last_width = entries - last;
  }

  // Whether a thread block has a step of that number; that one may be empty: the second half of the middle block.
  CUTE_DEVICE bool has(int step) const { return share_of(step) < shares; }

  CUTE_DEVICE int share_of(int step) const { return (pairs ? step / 2 : step) * int(gridDim.x) + int(blockIdx.x); }

  // The step after this one. The middle block of an odd number is a share by itself, whose second half is left out.
  CUTE_DEVICE int next(int step) const {
    ++step;
    bool const odd = pairs && step % 2 && blocks % 2;
    return odd && has(step) && 2 * locate(step).block == blocks - 1 ? step + 1 : step;
  }

  // Heads come in sections whose keys and values fit the L2 cache; equal shares of all of them run side by side.
  CUTE_DEVICE Work locate(int step) const {
    int number, inside, place, entry, batch, head;
    by_section(number, inside, share_of(step));
    int const first = number * section;
    (first == last ? by_last_width : by_width)(place, entry, inside);
    by_head(batch, head, first + entry);
    bool const from_end = longest_last && !(pairs && step % 2);
    return {from_end ? blocks - 1 - place : place, head, batch, by_group.div(head)};
  }
};

}  // namespace sdpa_cuda
