// The persistent scheduler: which work tiles a thread block takes, one after the other.
#pragma once
#include <cutlass/fast_math.h>

#include <algorithm>

#include "params.h"

namespace sdpa_cuda {

// A block of BLOCK_M queries of one head of one batch entry. In the backward a block of BLOCK_N keys, the first of the
// heads of queries that it visits, and which part of their rows.
struct WorkTile {
  int block, head, batch, kv_head, part = 0;
};

// The index after `index`, where `grid` indices are begun at once. The thread block that draws the last index sets the
// counter back: nobody draws after it.
CUTE_DEVICE int next_index(int index, int32_t* counter, int tiles, int grid) {
  if (!counter) return index + grid;
  int const drawn = atomicAdd(counter, 1);
  if (drawn == tiles - 1) *counter = 0;
  return drawn + grid;
}

// Work tiles have indices, and are begun in the order of these. A thread block begins with the index blockIdx.x, then
// draws from a counter.
//
// Heads come in sections, whose keys and values the L2 cache holds. Where rows further down see more keys, a section's
// longest work tiles come first, so that those under way at the end are short. That wants a section of many heads.
struct TileScheduler {
  // Up to so many keys, neighbours do best with blocks of one head, if all blocks are alike.
  static constexpr int kShort = 1024;
  // So many thread blocks read the keys of one head side by side: enough for the memory's bandwidth.
  static constexpr int kSharers = 8;

  int blocks, tiles, section, last, grid;  // `last`: the first head of the last section, which may be narrower
  bool longest_last;
  // The hardware's sequence for a division would take a consumer more than a hundred cycles, and each work tile needs
  // several.
  cutlass::FastDivmod by_section, by_width, by_last_width, by_head, by_group;

  TileScheduler(FlashParams const& p, int BLOCK_M, bool grows)
      : blocks(blocks_of(p, BLOCK_M)), longest_last(grows), by_head(p.H), by_group(p.H / p.Hkv) {
    int const heads = p.B * p.H;
    tiles = blocks * heads;
    grid = std::min(tiles, p.sm_count);
    section = !grows && p.N <= kShort && p.M % BLOCK_M == 0 ? 1 : p.section;
    if (grows) {  // sections of nearly equal width, so that the last one is not a narrow one
      int const most = std::max(section, p.sm_count / kSharers), sections = std::max(1, (heads + most / 2) / most);
      section = (heads + sections - 1) / sections;
    }
    last = (heads - 1) / section * section;
    by_section = section * blocks, by_width = section, by_last_width = heads - last;
  }

  CUTE_DEVICE int next(int index, int32_t* counter) const { return next_index(index, counter, tiles, grid); }

  // Equal blocks of all heads of a section run side by side.
  CUTE_DEVICE WorkTile work_tile(int index) const {
    int part, inside, place, entry, batch, head;
    by_section(part, inside, index);
    int const first = part * section;
    (first == last ? by_last_width : by_width)(place, entry, inside);
    by_head(batch, head, first + entry);
    return {longest_last ? blocks - 1 - place : place, head, batch, by_group.div(head)};
  }
};

// The same for work tiles that are blocks of BLOCK_N keys. Sections are of the heads of work tiles: L2 keeps the rows
// that their blocks all read and add to. The first keys, which most rows see under a causal mask, come first.
//
// Where blocks of keys add to a row in their order, the last keys come first. Under a causal mask a block of keys then
// seldom waits: it visits rows from the first one that sees it, and the block behind it began as many rows further
// down. Every index is drawn there, the first ones too, and when it is begun: a block of keys waits only for those that
// were begun before it, however few thread blocks the GPU has room for.
struct KeyScheduler {
  int blocks, tiles, section, last, grid;
  int tile_heads;
  bool in_order;
  cutlass::FastDivmod by_section, by_width, by_last_width, by_head, by_group, by_parts;

  // Each work tile is of so many thread blocks.
  KeyScheduler(BackwardParams const& p, int BLOCK_N, int cluster = 1)
      : blocks((p.N + BLOCK_N - 1) / BLOCK_N),
        tile_heads(p.tile_heads),
        in_order(p.semaphores),
        by_head(p.H / p.tile_heads),
        by_group(p.group),
        by_parts(p.parts) {
    int const heads = p.B * (p.H / p.tile_heads);
    tiles = blocks * p.parts * heads;
    grid = std::min(tiles, p.sm_count / cluster);
    section = p.section;
    last = (heads - 1) / section * section;
    by_section = section * blocks * p.parts, by_width = section, by_last_width = heads - last;
  }

  CUTE_DEVICE int first(int index, int32_t* counter) const { return in_order ? atomicAdd(counter, 1) : index; }
  CUTE_DEVICE int next(int index, int32_t* counter) const {
    return in_order ? atomicAdd(counter, 1) : next_index(index, counter, tiles, grid);
  }

  CUTE_DEVICE WorkTile work_tile(int index) const {
    int sections, inside, place, entry, batch, head, block, part;
    by_section(sections, inside, index);
    int const first = sections * section;
    (first == last ? by_last_width : by_width)(place, entry, inside);
    by_head(batch, head, first + entry);
    by_parts(block, part, place);
    if (in_order) block = blocks - 1 - block;
    return {block, head * tile_heads, batch, by_group.div(head * tile_heads), part};
  }
};

}  // namespace sdpa_cuda
