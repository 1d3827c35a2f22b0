// Tiles by head size, and why. Shared memory has 227 KB; 65536 registers are shared by the loader and the groups.
#pragma once

namespace sdpa_cuda {

struct Tile {
  int keys;    // of a block
  int groups;  // warpgroups, each with 64 rows of queries
  int stages;  // of keys, and of values
  bool turns;  // groups issue their products in turns, so that one's softmax runs beside the other's products
};

template <int D, bool CAUSAL>
constexpr Tile tile_of() {
  // Three groups: with 32 registers of output and 64 of scores all fit, and the products of two hide the softmax of
  // one.
  if (D <= 64) return {128, 3, 2, false};
  // 208 KB and 196 registers of scores, exponentials and output; where causal, wide blocks hide too much of the
  // diagonal.
  if (D <= 128) return {CAUSAL ? 128 : 176, 2, 2, true};
  // 224 KB of shared memory; 64 keys where causal, whose mask takes registers.
  return {CAUSAL ? 64 : 80, 2, 2, false};
}

}  // namespace sdpa_cuda
