// Tiles by head size, and why. Shared memory has 227 KB; 65536 registers are shared by the loader and the groups.
#pragma once
#include "../params.h"

namespace sdpa_cuda {

struct Tile {
  int keys;    // of a block
  int stages;  // of keys, and of values
  bool turns;  // groups issue their products in turns, so that one's softmax runs beside the other's products
};

// GROUPS are warpgroups, each with 64 rows of queries; stages are powers of two.
template <int D, int DV, MaskKind MASK, int GROUPS>
constexpr Tile tile_of() {
  constexpr bool CUT = MASK != MaskKind::kNone;
  // Four groups of 112 registers: 32 of output, 32 of scores, 16 of exponentials. Three have room for 128 keys, fewer
  // pauses in a long row.
  if (D <= 64) return GROUPS == 4 ? Tile{64, 4, false} : Tile{128, 2, false};
  // Three groups of 160 registers: 64 of output, 40 of scores, 20 of exponentials; 208 KB of shared memory at D = 128.
  if (D <= 128 && GROUPS == 3) return {80, 4, false};
  // 156 KB at D = 96 and 180 registers of scores, exponentials and output; where cut by a mask, wide blocks hide too
  // much of the diagonal.
  if (D <= 96) return {CUT ? 128 : 176, 2, true};
  // 160 KB at D = 128 and 160 registers. 176 keys fit where nothing is cut: better in long rows, which three groups
  // have, and worse in short ones, which are no multiples of it.
  if (D <= 128) return {128, 2, true};
  // 208 KB of shared memory; 64 registers of output, 64 of scores, 32 of exponentials.
  if (D <= 192 && DV <= 128) return {128, 2, true};
  // 216 and 192 KB of shared memory.
  if (D <= 192) return {CUT ? 96 : 112, 2, false};
  // 160 KB of shared memory: with 64 keys, ids beside the mask's numbers are a few registers too many.
  if (MASK == MaskKind::kSegments) return {48, 2, false};
  // 224 KB of shared memory; 64 keys where cut, whose mask takes registers.
  return {CUT ? 64 : 80, 2, false};
}

}  // namespace sdpa_cuda
