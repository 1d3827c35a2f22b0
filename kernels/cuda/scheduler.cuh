// Which blocks of queries of which heads a thread block takes, one after the other.
#pragma once
#include <cutlass/fast_math.h>

#include <algorithm>

#include "params.h"

namespace sdpa_cuda {

struct Work {
  int block, head, batch, kv_head;
};

// Blocks of queries have numbers, in whose order they are begun. A thread block begins with its own number, then draws
// from a counter. Heads come in sections, whose keys and values the L2 cache holds. Where rows further down see more
// keys, a section's longest blocks come first, so that what is under way at the end is short; that wants many of them.
struct Scheduler {
  static constexpr int kShort = 1024;  // keys up to which neighbours do best with blocks of one head, if all are alike
  static constexpr int kSharers = 8;   // thread blocks that read keys of one head side by side: enough for the memory

  int blocks, all, section, last, grid;  // `last`: the first head of the last section, which may be a narrow one
  bool longest_last;
  // Each division by the hardware's sequence would take a group more than a hundred cycles, twice per block of queries.
  cutlass::FastDivmod by_section, by_width, by_last_width, by_head, by_group;

  Scheduler(FlashParams const& p, int rows, bool grows)
      : blocks(blocks_of(p, rows)), longest_last(grows), by_head(p.H), by_group(p.H / p.Hkv) {
    int const entries = p.B * p.H;
    all = blocks * entries;
    grid = std::min(all, p.cores);
    section = !grows && p.N <= kShort && p.M % rows == 0 ? 1 : p.section;
    if (grows) {  // no narrow one at the end
      int const most = std::max(section, p.cores / kSharers), sections = std::max(1, (entries + most / 2) / most);
      section = (entries + sections - 1) / sections;
    }
    last = (entries - 1) / section * section;
    by_section = section * blocks, by_width = section, by_last_width = entries - last;
  }

  // The number after this one. Who draws the last is the last to draw.
  CUTE_DEVICE int next(int number, int32_t* counter) const {
    if (!counter) return number + int(gridDim.x);
    int const drawn = atomicAdd(counter, 1);
    if (drawn == all - 1) *counter = 0;
    return drawn + int(gridDim.x);
  }

  // Equal blocks of all heads of a section run side by side.
  CUTE_DEVICE Work locate(int number) const {
    int part, inside, place, entry, batch, head;
    by_section(part, inside, number);
    int const first = part * section;
    (first == last ? by_last_width : by_width)(place, entry, inside);
    by_head(batch, head, first + entry);
    return {longest_last ? blocks - 1 - place : place, head, batch, by_group.div(head)};
  }
};

}  // namespace sdpa_cuda
