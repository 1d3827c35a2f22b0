// The primitives in NEON with products of bfloat16. BFMMLA multiplies two rows and two columns, each four deep, at four
// times the rate of float32. Operands are quads, interleaved two by two as the instruction wants them.
#include <arm_neon.h>

#include "primitives.h"

namespace {

using namespace sdpa_cpu;

#include "neon.h"

inline void narrow_bf16(Floats x, uint16_t* p) { vst1_u16(p, vreinterpret_u16_bf16(vcvt_bf16_f32(x))); }

#include "microkernels.h"

constexpr int64_t kQuad = kDepth<Quad>;
constexpr int kTilePairs = kTileRows / 2;  // pairs of rows: 3 x 8 accumulators of 2 x 2

inline uint16x8_t load_quads(const Quad* p) { return vld1q_u16(p->values); }
inline void store_quads(Quad* p, uint16x8_t x) { vst1q_u16(p->values, x); }

inline uint16x8_t low_quads(uint16x8_t a, uint16x8_t b) {
  return vreinterpretq_u16_u64(vzip1q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}
inline uint16x8_t high_quads(uint16x8_t a, uint16x8_t b) {
  return vreinterpretq_u16_u64(vzip2q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}

// Up to 8 values of a row, from `column` on. Values beyond the width are zero.
inline uint16x8_t values_of(Source src, int64_t row, int64_t rows, int64_t column, int64_t width) {
  constexpr int64_t kValues = 2 * kQuad;
  if (row >= rows) return vdupq_n_u16(0);
  const uint16_t* p = static_cast<const uint16_t*>(src.data) + row * src.row_stride + column * src.column_stride;
  if (src.column_stride == 1 && column + kValues <= width) return vld1q_u16(p);
  uint16_t part[kValues] = {};
  for (int64_t i = 0; i < kValues && column + i < width; ++i) part[i] = p[i * src.column_stride];
  return vld1q_u16(part);
}

void pack_left_quads(Source src, int64_t rows, int64_t width, Quad* dst, int64_t ld) {
  assert(width <= ld && ld % kQuad == 0);
  for (int64_t row = 0; row < rows; row += 2)
    for (int64_t c = 0; c < ld; c += 2 * kQuad) {
      const uint16x8_t first = values_of(src, row, rows, c, width), second = values_of(src, row + 1, rows, c, width);
      Quad* to = dst + row * (ld / kQuad) + c / kQuad * 2;
      store_quads(to, low_quads(first, second));
      if (c + kQuad < ld) store_quads(to + 2, high_quads(first, second));
    }
}

// Packs keys as columns: rows cut into quads.
void pack_quad_columns(Source src, int64_t rows, int64_t width, Quad* dst, int64_t ld) {
  const int64_t end = (rows + kLanes<float> - 1) / kLanes<float> * kLanes<float>;
  assert(end <= ld);
  for (int64_t row = 0; row < end; row += 2)
    for (int64_t c = 0; c < width; c += 2 * kQuad) {
      const uint16x8_t first = values_of(src, row, rows, c, width), second = values_of(src, row + 1, rows, c, width);
      Quad* to = dst + c / kQuad * ld + row;
      store_quads(to, low_quads(first, second));
      if (c + kQuad < width) store_quads(to + ld, high_quads(first, second));
    }
}

// The quads of 4 columns, from the values of 4 rows.
inline void quads_of_columns(const uint16x8_t (&low)[2], Quad* to) {
  const uint32x4_t even = vreinterpretq_u32_u16(low[0]), odd = vreinterpretq_u32_u16(low[1]);
  store_quads(to, vreinterpretq_u16_u32(vzip1q_u32(even, odd)));
  store_quads(to + 2, vreinterpretq_u16_u32(vzip2q_u32(even, odd)));
}

void pack_quad_steps(Source src, int64_t rows, int64_t width, Quad* dst, int64_t ld) {
  assert(width <= ld && ld % kQuad == 0);
  for (int64_t row = 0; row < rows; row += kQuad)
    for (int64_t c = 0; c < ld; c += 2 * kQuad) {
      uint16x8_t x[kQuad];
      for (int64_t i = 0; i < kQuad; ++i) x[i] = values_of(src, row + i, rows, c, width);
      Quad* to = dst + row / kQuad * ld + c;
      quads_of_columns({vzip1q_u16(x[0], x[1]), vzip1q_u16(x[2], x[3])}, to);
      if (c + kQuad < ld) quads_of_columns({vzip2q_u16(x[0], x[1]), vzip2q_u16(x[2], x[3])}, to + kQuad);
    }
}

// Four scores. Those beyond `columns` are zero, and so is a row beyond the last.
inline float32x4_t scores_of(const float* s, int64_t ld, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  if (row >= rows) return vdupq_n_f32(0.0f);
  return widen_part<float>(s + row * ld + column, 1, columns - column);
}

const Quad* as_left_quads(int64_t rows, int64_t columns, float* s, Quad* buffer, int64_t ld) {
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t c = 0; c < columns; c += kQuad) {
      const bfloat16x8_t first = vcvtq_low_bf16_f32(scores_of(s, ld, r, rows, c, columns));
      const bfloat16x8_t both = vcvtq_high_bf16_f32(first, scores_of(s, ld, r + 1, rows, c, columns));
      store_quads(buffer + r * (ld / 2) + c / kQuad * 2, vreinterpretq_u16_bf16(both));
    }
  return buffer;
}

const Quad* softmax_left_quads(int64_t rows, int64_t columns, float* s, int64_t ld, float* row_max, float* row_sum,
                               float* alpha, Quad* buffer) {
  softmax_step<float, ExpShort>(rows, columns, s, ld, row_max, row_sum, alpha);
  return as_left_quads(rows, columns, s, buffer, ld);
}

const Quad* as_left_transposed_quads(int64_t rows, int64_t columns, float* s, Quad* buffer, int64_t ld) {
  for (int64_t r = 0; r < rows; r += kQuad)
    for (int64_t c = 0; c < columns; c += kLanes<float>) {
      uint16x8_t x[kQuad];
      for (int64_t i = 0; i < kQuad; ++i)
        x[i] = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(scores_of(s, ld, r + i, rows, c, columns)));
      quads_of_columns({vzip1q_u16(x[0], x[1]), vzip1q_u16(x[2], x[3])}, buffer + r * (ld / 2) + c);
    }
  return buffer;
}

// Writes four columns of a row of c.
template <bool kAdd>
inline void finish(float32x4_t sum, float factor, float* c, const float* alpha) {
  if (kAdd)
    vst1q_f32(c, alpha ? vfmaq_n_f32(sum, vld1q_f32(c), *alpha) : vaddq_f32(sum, vld1q_f32(c)));
  else
    vst1q_f32(c, vmulq_n_f32(sum, factor));
}

// One register tile, like `tile` in microkernels.h. The last pair of rows may have one row only.
template <int kPairs, int kVectors, bool kAdd>
void quad_tile(int64_t rows, int64_t steps, const Quad* a, int64_t row_stride, int64_t step_stride, const Quad* b,
               int64_t ldb, float factor, float* c, int64_t ldc, const float* alpha) {
  float32x4_t acc[kPairs][2 * kVectors] = {};
  for (int64_t k = 0; k < steps; ++k) {
    bfloat16x8_t x[kPairs];
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p)
      x[p] = vreinterpretq_bf16_u16(load_quads(a + 2 * p * row_stride + k * step_stride));
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) {
      const bfloat16x8_t y = vreinterpretq_bf16_u16(load_quads(b + k * ldb + 2 * v));
#pragma GCC unroll 8
      for (int p = 0; p < kPairs; ++p) acc[p][v] = vbfmmlaq_f32(acc[p][v], x[p], y);
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const float64x2_t left = vreinterpretq_f64_f32(acc[p][2 * v]), right = vreinterpretq_f64_f32(acc[p][2 * v + 1]);
      const int r = 2 * p;
      float* at = c + r * ldc + v * kLanes<float>;
      finish<kAdd>(vreinterpretq_f32_f64(vzip1q_f64(left, right)), factor, at, alpha ? alpha + r : nullptr);
      if (r + 1 == rows) continue;
      finish<kAdd>(vreinterpretq_f32_f64(vzip2q_f64(left, right)), factor, at + ldc, alpha ? alpha + r + 1 : nullptr);
    }
}

using QuadTile = void (*)(int64_t, int64_t, const Quad*, int64_t, int64_t, const Quad*, int64_t, float, float*, int64_t,
                          const float*);

template <bool kAdd>
constexpr QuadTile kQuadTiles[kTilePairs][kPanel] = {
    {quad_tile<1, 1, kAdd>, quad_tile<1, 2, kAdd>, quad_tile<1, 3, kAdd>, quad_tile<1, 4, kAdd>},
    {quad_tile<2, 1, kAdd>, quad_tile<2, 2, kAdd>, quad_tile<2, 3, kAdd>, quad_tile<2, 4, kAdd>},
    {quad_tile<3, 1, kAdd>, quad_tile<3, 2, kAdd>, quad_tile<3, 3, kAdd>, quad_tile<3, 4, kAdd>}};

// The whole product, register tile by register tile. `vectors` is the width of c.
template <bool kAdd>
void multiply_quads(int64_t all_rows, int64_t vectors, int64_t steps, const Quad* a, int64_t row_stride,
                    int64_t step_stride, const Quad* b, int64_t ldb, float factor, float* c, int64_t ldc,
                    const float* alpha) {
  assert(all_rows > 0 && (row_stride == 1 || step_stride == kInterleave<Quad>));
  for (int64_t v = 0; v < vectors; v += kPanel)
    for (int64_t r = 0; r < all_rows; r += kTileRows) {
      const int64_t panel = vectors - v < kPanel ? vectors - v : kPanel;
      const int64_t rows = all_rows - r < kTileRows ? all_rows - r : kTileRows;
      kQuadTiles<kAdd>[(rows - 1) / 2][panel - 1](rows, steps, a + r* row_stride, row_stride, step_stride,
                                                  b + v* kLanes<float>, ldb, factor, c + r* ldc + v* kLanes<float>, ldc,
                                                  alpha ? alpha + r : nullptr);
    }
}

int64_t steps_of(int64_t depth) { return (depth + kQuad - 1) / kQuad; }

void score_quads(int64_t rows, int64_t columns, int64_t depth, const Quad* a, int64_t lda, const Quad* b, int64_t ldb,
                 float factor, float* c, int64_t ldc) {
  const int64_t vectors = (columns + kLanes<float> - 1) / kLanes<float>;
  multiply_quads<false>(rows, vectors, steps_of(depth), a, lda, kInterleave<Quad>, b, ldb, factor, c, ldc, nullptr);
}

void accumulate_quads(int64_t rows, int64_t width, int64_t depth, const Quad* a, int64_t row_stride,
                      int64_t depth_stride, Source b, float* c, int64_t ldc, const float* alpha) {
  assert(width % kLanes<float> == 0 && b.column_stride == 1);
  multiply_quads<true>(rows, width / kLanes<float>, steps_of(depth), a, row_stride, depth_stride,
                       static_cast<const Quad*>(b.data), b.row_stride, 1.0f, c, ldc, alpha);
}

constexpr Primitives<float, Quad> kQuads = {kScorePrimitives<float, ExpShort>,
                                            kLanes<float>,
                                            pack_left_quads,
                                            pack_quad_columns,
                                            pack_quad_steps,
                                            store_rows<float>,
                                            as_left_quads,
                                            softmax_left_quads,
                                            as_left_transposed_quads,
                                            score_quads,
                                            nullptr,
                                            accumulate_quads};

}  // namespace

namespace sdpa_cpu {
const InstructionSet kNeonBf16 = {"neonbf16", &kPrimitives<float>, &kPrimitives<double>, &kQuads};
}
