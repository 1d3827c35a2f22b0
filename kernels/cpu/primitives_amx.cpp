// Products of bfloat16 by AMX tiles: the difference between the instruction sets "amx" and "avx512bf16".
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own intrinsics start from an undefined vector
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <assert.h>
#include <immintrin.h>

#include "primitives.h"

namespace {

using namespace sdpa_cpu;

#include "avx512.h"

constexpr int64_t kTile = 16;          // rows of a tile, and its columns of floats or pairs
constexpr int64_t kSide = 2 * kTile;   // of a square of sums: four tiles, beside two tiles of each operand
constexpr int64_t kChunk = 4 * kTile;  // pairs along the depth that are copied at a time: 8 KiB for 32 rows
constexpr int64_t kFewestRows = 4;     // fewer left over rows go to vectors: a tile takes as long for one row as for 16

// The memory operand of LDTILECFG.
struct alignas(64) Configuration {
  uint8_t palette, first_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Configuration) == Setup::kBytes, "the size of the instruction's operand");

constexpr Configuration kAllTilesFull = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile}};

// Another library that finds its configuration gone would fault, so it is saved and restored. Most threads have none.
void begin(void* saved) {
  _tile_storeconfig(saved);
  _tile_loadconfig(&kAllTilesFull);
}

void end(const void* saved) {
  if (static_cast<const Configuration*>(saved)->palette == 0)
    _tile_release();
  else
    _tile_loadconfig(saved);
}

// The intrinsics do not tell the compiler that they read memory.
inline void settle_memory() { __asm__ volatile("" ::: "memory"); }

// Tiles 0 to 3 += a b. a [kRows tiles, steps tiles], b [steps tiles, kColumns tiles].
template <int kRows, int kColumns>
inline void add_tiles(int64_t steps, const Pair* a, int64_t lda, const Pair* b, int64_t ldb) {
  const int64_t a_bytes = lda * static_cast<int64_t>(sizeof(Pair)), b_bytes = ldb * static_cast<int64_t>(sizeof(Pair));
  settle_memory();
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, b, b_bytes);
    _tile_loadd(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns == 2) {
      _tile_loadd(7, b + kTile, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows == 2) {
      _tile_loadd(5, a + kTile * lda, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kColumns == 2) _tile_dpbf16ps(3, 5, 7);
    }
    a += kTile;
    b += kTile * ldb;
  }
  settle_memory();
}

// Up to 32 rows of a left operand. Tiles are loaded from where they are. Rows that do not fill a tile, the end of the
// depth, and transposed operands are copied first, filled up with zeros.
struct Left {
  const Pair* data;
  int64_t rows, row_stride, depth_stride;

  bool in_place() const { return depth_stride == 1 && rows % kTile == 0; }
  int64_t tiles() const { return (rows + kTile - 1) / kTile; }

  // Copies `pairs` of the depth, from `first` on.                                                 to [kSide, kChunk]
  void copy(int64_t first, int64_t pairs, Pair* to) const {
    for (int64_t row = 0; row < tiles() * kTile; row += kTile)
      for (int64_t k = 0; k < pairs; k += kTile) {
        const Pair* from = data + row * row_stride + (first + k) * depth_stride;
        __m512 square[kTile];
        if (depth_stride == 1)
          load(from, row_stride, rows - row, pairs - k, square);
        else
          load(from, depth_stride, pairs - k, rows - row, square);
        if (depth_stride != 1) transpose(square);
        for (int64_t i = 0; i < kTile; ++i) _mm512_store_ps(to + (row + i) * kChunk + k, square[i]);
      }
  }

  // Loads 16 lines of 16 pairs. Only `lines` and `pairs` of them exist; the others are zero.
  static void load(const Pair* from, int64_t stride, int64_t lines, int64_t pairs, __m512* square) {
    const __mmask16 there = static_cast<__mmask16>(pairs < kTile ? (1 << pairs) - 1 : 0xffff);
    for (int64_t i = 0; i < kTile; ++i)
      square[i] = i < lines ? _mm512_maskz_loadu_ps(there, from + i * stride) : _mm512_setzero_ps();
  }
};

// Copies the end of the depth of a right operand, filled up with zeros.                             to [kTile, kSide]
inline void copy_right(const Pair* b, int64_t ldb, int64_t pairs, int64_t vectors, Pair* to) {
  for (int64_t k = 0; k < kTile; ++k)
    for (int64_t v = 0; v < vectors; ++v)
      _mm512_store_ps(to + k * kSide + v * kTile,
                      k < pairs ? _mm512_loadu_ps(b + k * ldb + v * kTile) : _mm512_setzero_ps());
}

struct Staging {
  alignas(64) Pair left[kSide * kChunk];
  alignas(64) Pair right[kTile * kSide];
  alignas(64) float sums[kSide * kSide];
};

// staging.sums = a b for one square of sums. Where one chunk holds all that is copied of `a`, the copy for the first
// square of a row serves the others, too.
template <int kRows, int kColumns>
void sum_square(const Left& a, int64_t pairs, const Pair* b, int64_t ldb, bool first, Staging& staging) {
  _tile_zero(0);
  if constexpr (kColumns == 2) _tile_zero(1);
  if constexpr (kRows == 2) _tile_zero(2);
  if constexpr (kRows == 2 && kColumns == 2) _tile_zero(3);
  const int64_t in_place = a.in_place() ? pairs / kTile * kTile : 0;
  add_tiles<kRows, kColumns>(in_place / kTile, a.data, a.row_stride, b, ldb);
  for (int64_t k = in_place; k < pairs; k += kChunk) {
    const int64_t count = pairs - k < kChunk ? pairs - k : kChunk, whole = count / kTile * kTile;
    if (first || pairs - in_place > kChunk) a.copy(k, count, staging.left);
    add_tiles<kRows, kColumns>(whole / kTile, staging.left, kChunk, b + k * ldb, ldb);
    if (whole == count) continue;
    copy_right(b + (k + whole) * ldb, ldb, count - whole, kColumns, staging.right);
    add_tiles<kRows, kColumns>(1, staging.left + whole, kChunk, staging.right, kSide);
  }
  constexpr int64_t kLine = kSide * sizeof(float);
  _tile_stored(0, staging.sums, kLine);
  if constexpr (kColumns == 2) _tile_stored(1, staging.sums + kTile, kLine);
  if constexpr (kRows == 2) _tile_stored(2, staging.sums + kTile * kSide, kLine);
  if constexpr (kRows == 2 && kColumns == 2) _tile_stored(3, staging.sums + kTile * kSide + kTile, kLine);
}

// c = factor * sums, or with kAdd c = alpha * c + sums (alpha null: 1).
template <bool kAdd>
void finish(int64_t rows, int64_t vectors, const float* sums, float factor, float* c, int64_t ldc, const float* alpha) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t v = 0; v < vectors; ++v) {
      float* at = c + r * ldc + v * kTile;
      const __m512 sum = _mm512_load_ps(sums + r * kSide + v * kTile);
      if (kAdd)
        _mm512_storeu_ps(at, alpha ? _mm512_fmadd_ps(_mm512_loadu_ps(at), _mm512_set1_ps(alpha[r]), sum)
                                   : _mm512_add_ps(_mm512_loadu_ps(at), sum));
      else
        _mm512_storeu_ps(at, _mm512_mul_ps(sum, _mm512_set1_ps(factor)));
    }
}

// The product of up to 32 rows. `vectors` is the width of c.
template <bool kAdd>
void multiply_rows(const Left& a, int64_t vectors, int64_t pairs, const Pair* b, int64_t ldb, float factor, float* c,
                   int64_t ldc, const float* alpha) {
  using Square = void (*)(const Left&, int64_t, const Pair*, int64_t, bool, Staging&);
  static constexpr Square squares[2][2] = {{sum_square<1, 1>, sum_square<1, 2>}, {sum_square<2, 1>, sum_square<2, 2>}};
  Staging staging;
  for (int64_t v = 0; v < vectors; v += 2) {
    const int64_t side = vectors - v < 2 ? 1 : 2;
    squares[a.tiles() - 1][side - 1](a, pairs, b + v * kTile, ldb, v == 0, staging);
    finish<kAdd>(a.rows, side, staging.sums, factor, c + v * kTile, ldc, alpha);
  }
}

// How many of these rows go to tiles. The others go to vectors.
inline int64_t tiled(int64_t rows) { return rows % kSide < kFewestRows ? rows / kSide * kSide : rows; }

void scores(int64_t rows, int64_t columns, int64_t depth, const Pair* a, int64_t lda, const Pair* b, int64_t ldb,
            float factor, float* c, int64_t ldc) {
  assert(rows > 0 && columns > 0);
  const int64_t vectors = (columns + kTile - 1) / kTile, pairs = (depth + 1) / 2, end = tiled(rows);
  assert(ldb >= vectors * kTile && (rows == 1 || (lda >= pairs && ldc >= vectors * kTile)));
  for (int64_t r = 0; r < end; r += kSide) {
    const Left left = {a + r * lda, end - r < kSide ? end - r : kSide, lda, 1};
    multiply_rows<false>(left, vectors, pairs, b, ldb, factor, c + r * ldc, ldc, nullptr);
  }
  if (end < rows)
    kAvx512Bf16.bf16->scores(rows - end, columns, depth, a + end * lda, lda, b, ldb, factor, c + end * ldc, ldc);
}

void accumulate(int64_t rows, int64_t width, int64_t depth, const Pair* a, int64_t row_stride, int64_t depth_stride,
                Source b, float* c, int64_t ldc, const float* alpha) {
  assert(rows > 0 && width % kTile == 0 && b.column_stride == 1);
  assert(row_stride == 1 || depth_stride == 1);
  const bool in_place = b.dtype == Dtype::kBFloat16;
  const int64_t vectors = width / kTile, pairs = (depth + 1) / 2, end = in_place ? 0 : tiled(rows);
  for (int64_t r = 0; r < end; r += kSide) {
    const Left left = {a + r * row_stride, end - r < kSide ? end - r : kSide, row_stride, depth_stride};
    multiply_rows<true>(left, vectors, pairs, static_cast<const Pair*>(b.data), b.row_stride, 1.0f, c + r * ldc, ldc,
                        alpha ? alpha + r : nullptr);
  }
  if (end < rows)
    kAvx512Bf16.bf16->accumulate(rows - end, width, depth, a + end * row_stride, row_stride, depth_stride, b,
                                 c + end * ldc, ldc, alpha ? alpha + end : nullptr);
}

constexpr Setup kSetup = {begin, end};

// Products are so fast that packing a key and reading acc count. So many queries share a key, and many keys share a
// pass over acc, as far as the second cache allows. Blocks are multiples of 32, because a part of a square takes as
// long as the whole.
constexpr Blocking kBlocking = {kSide, 1024, kSide, 512};

}  // namespace

namespace sdpa_cpu {

void use_tiles(Primitives<float, Pair>* table) {
  table->scores = scores;
  table->accumulate = accumulate;
  table->blocking = kBlocking;
  table->setup = &kSetup;
}

}  // namespace sdpa_cpu
