// Tiles by head size, and why. A multiprocessor has 227 KB of shared memory and 65536 registers.
#pragma once
#include "../params.h"

namespace sdpa_cuda {

struct Tile {
  int BLOCK_N;     // keys
  int stages;      // of the pipelines of keys and of values
  bool ping_pong;  // consumer warpgroups take turns: one's softmax runs beside the others' WGMMAs
};

// CONSUMERS are warpgroups, each with 64 rows of queries. The number of stages is a power of two.
template <int D, int DV, MaskKind MASK, int CONSUMERS>
constexpr Tile tile_of() {
  constexpr bool MASKED = MASK != MaskKind::kNone;
  // Four consumers have 112 registers per thread: 32 for acc, 32 for scores, 16 for weights. Three have room for blocks
  // of 128 keys, which a long row visits with fewer pauses. Under a mask they take turns; without one that is slightly
  // slower.
  if (D <= 64) return CONSUMERS == 4 ? Tile{64, 4, false} : Tile{128, 2, MASKED};
  // Three consumers have 160 registers per thread: 64 for acc, 40 for scores, 20 for weights. At D = 128 the tile takes
  // 208 KB of shared memory.
  if (D <= 128 && CONSUMERS == 3) return {80, 4, false};
  // At D = 96 the wider tile takes 156 KB of shared memory, and 180 registers for scores, weights and acc. Under a mask
  // narrower blocks are better: of a wide block on the diagonal too much is masked.
  if (D <= 96) return {MASKED ? 128 : 176, 2, true};
  // At D = 128 the tile takes 160 KB of shared memory, and 160 registers. Without a mask 176 keys would fit. They are
  // better in long rows, which instances of three consumers take, and worse in short rows, which are no multiples of
  // 176.
  if (D <= 128) return {128, 2, true};
  // 208 KB of shared memory. 64 registers for acc, 64 for scores, 32 for weights.
  if (D <= 192 && DV <= 128) return {128, 2, true};
  // 216 KB of shared memory, under a mask 192 KB.
  if (D <= 192) return {MASKED ? 96 : 112, 2, false};
  // 160 KB of shared memory. With 64 keys the ids of segments, beside the mask's numbers, would spill a few registers.
  if (MASK == MaskKind::kSegments) return {48, 2, false};
  // 224 KB of shared memory. Under a mask 64 keys, because the mask takes registers.
  return {MASKED ? 64 : 80, 2, false};
}

// The backward's blocks of rows of queries, and its stages of dS. Without a barrier that says when a stage has been
// read, four stages are needed: one consumer may write the dS of block i + 1 while the other one still reads that of
// block i - 2.
struct BackwardTile {
  int BLOCK_M, ds_stages;
};

constexpr int kSharedBytes = 227 * 1024;

// Both gradients of 64 keys take 128 registers of a thread at D = 128, which leaves scores and dP of 64 rows. At D = 64
// they are of 128 rows, with which four stages of dS would not fit into shared memory, and beside the ids of segments
// no three.
template <int D, MaskKind MASK>
constexpr BackwardTile backward_tile_of() {
  return D <= 64 ? BackwardTile{128, MASK == MaskKind::kSegments ? 2 : 3} : BackwardTile{64, 4};
}

}  // namespace sdpa_cuda
