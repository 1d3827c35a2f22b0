// Eight tiles of 16 rows of 64 bytes for each thread, and what instructions do with them.
#include "tiles.h"

#include <stdio.h>
#include <stdlib.h>

#include "arithmetic.h"

namespace tiles {
namespace {

constexpr int kTiles = 8, kRows = 16, kBytes = 64, kNumbers = kBytes / 4;

struct Configuration {
  uint8_t palette, first_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct Registers {
  Configuration shape = {};
  alignas(kBytes) uint8_t data[kTiles][kRows][kBytes] = {};
};
thread_local Registers registers;

void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "tiles: %s\n", what);
  abort();
}

void require_tile(int tile) {
  require(registers.shape.palette == 1, "used without a configuration");
  require(0 <= tile && tile < kTiles, "no such tile");
  require(registers.shape.rows[tile] > 0 && registers.shape.row_bytes[tile] > 0, "a tile that is not configured");
}

void clear(int tile) { memset(registers.data[tile], 0, sizeof(registers.data[tile])); }

float number(int tile, int row, int n) {
  float x;
  memcpy(&x, registers.data[tile][row] + 4 * n, sizeof(x));
  return x;
}

float half(int tile, int row, int pair, int which) {
  uint16_t bits;
  memcpy(&bits, registers.data[tile][row] + 4 * pair + 2 * which, sizeof(bits));
  return widened(bits);
}

void require_shapes(int c, int a, int b) {
  require_tile(c);
  require_tile(a);
  require_tile(b);
  const Configuration& shape = registers.shape;
  require(c != a && c != b && a != b, "a product wants three tiles");
  require(shape.rows[a] == shape.rows[c] && shape.row_bytes[b] == shape.row_bytes[c] &&
              shape.row_bytes[a] == 4 * shape.rows[b] && shape.row_bytes[c] % 4 == 0,
          "the shapes of a product do not fit");
}

}  // namespace

void load_configuration(const void* from) {
  Configuration shape;
  memcpy(&shape, from, sizeof(shape));
  if (shape.palette == 0) return release();
  require(shape.palette == 1, "no such palette");
  for (const uint8_t byte : shape.reserved) require(byte == 0, "reserved bytes are not zero");
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = shape.rows[tile], bytes = shape.row_bytes[tile];
    require(rows <= kRows && bytes <= kBytes && (rows == 0) == (bytes == 0), "a tile of impossible size");
    require(tile < kTiles || rows == 0, "more tiles than there are");
  }
  registers.shape = shape;
  for (int tile = 0; tile < kTiles; ++tile) clear(tile);
}

void store_configuration(void* to) { memcpy(to, &registers.shape, sizeof(registers.shape)); }

void release() { registers = Registers(); }

void zero(int tile) {
  require_tile(tile);
  clear(tile);
}

void load(int tile, const void* base, int64_t stride) {
  require_tile(tile);
  clear(tile);
  for (int row = 0; row < registers.shape.rows[tile]; ++row)
    memcpy(registers.data[tile][row], static_cast<const char*>(base) + row * stride, registers.shape.row_bytes[tile]);
}

void store(int tile, void* base, int64_t stride) {
  require_tile(tile);
  for (int row = 0; row < registers.shape.rows[tile]; ++row)
    memcpy(static_cast<char*>(base) + row * stride, registers.data[tile][row], registers.shape.row_bytes[tile]);
}

// First and second values of pairs are summed apart, each from zero and fused; the two sums meet, and then the old one.
void multiply(int c, int a, int b) {
  require_shapes(c, a, b);
  const int columns = registers.shape.row_bytes[c] / 4;
  for (int m = 0; m < registers.shape.rows[c]; ++m) {
    float sums[2][kNumbers] = {};
    for (int k = 0; k < registers.shape.rows[b]; ++k)
      for (int which = 0; which < 2; ++which) {
        const float left = half(a, m, k, which);
        for (int n = 0; n < columns; ++n) sums[which][n] = fused(left, half(b, k, n, which), sums[which][n]);
      }
    for (int n = 0; n < columns; ++n) {
      const float sum = added(number(c, m, n), added(sums[0][n], sums[1][n]));
      memcpy(registers.data[c][m] + 4 * n, &sum, sizeof(sum));
    }
  }
}

}  // namespace tiles
