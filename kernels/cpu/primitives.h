// The table of primitives that each instruction set fills in, and nothing with code in it: these translation units
// are compiled with different flags, so anything they shared inline could leak wide instructions into narrow machines.
#pragma once

#include <stdint.h>

namespace sdpa_cpu {

enum class Dtype : int { kFloat32, kFloat64, kBFloat16, kFloat16 };

// Rows of a tensor as it lies in memory; strides count elements.
struct Source {
  const void* data;
  Dtype dtype;
  int64_t row_stride;
  int64_t column_stride;
};

// The widest vector of any instruction set in float32: the row sums keep one partial sum per lane.
constexpr int kMaxLanes = 16;

// Two consecutive bfloat16 values along the depth of a product, as instructions for products of bfloat16 take them.
struct Pair {
  uint16_t first, second;
};

// Four of them, where an instruction takes two rows and two columns at once.
struct Quad {
  uint16_t values[4];
};

// Values along the depth that one operand holds.
template <typename Operand>
constexpr int64_t kDepth = 1;
template <>
constexpr int64_t kDepth<Pair> = 2;
template <>
constexpr int64_t kDepth<Quad> = 4;

// Rows of a left operand that lie together, step by step: that of `row` and `step` lies at
// [row / kTogether * kTogether * ld + step * kTogether + row % kTogether].
template <typename Operand>
constexpr int64_t kTogether = 1;
template <>
constexpr int64_t kTogether<Quad> = 2;

// What products of bfloat16 take on this family of machines.
#ifdef SDPA_ARM
typedef Quad Narrow;
#else
typedef Pair Narrow;
#endif

// How the forward loop cuts its work.
struct Blocking {
  int64_t rows;     // of scores computed together, those of the widest tile: they stay in a near cache
  int64_t block_m;  // queries that share the packing of a key
  int64_t least_m;  // so many are halved no more to give all threads something
  int64_t block_n;  // keys
};
// Rows of the widest tile. Packing a key costs as much as using it for 10 to 20 queries; a block of keys costs
// reading and writing its queries' outputs once.
constexpr Blocking kVectorBlocking = {6, 768, 48, 384};

// What a thread does before its products and after them, where those need registers set up; `saved` is room for what
// they were before.
struct Setup {
  static constexpr int kBytes = 64;
  void (*begin)(void* saved);
  void (*end)(const void* saved);
};

// What is done to scores [rows, ld] as they are, whatever takes part in products. Rows are written up to a whole
// vector.
template <typename T>
struct ScorePrimitives {
  // One step of the online softmax: s becomes exp(s - row_max), keep[row] what older sums are worth now.
  // row_sum [rows, kMaxLanes].
  void (*softmax_step)(int64_t rows, int64_t columns, T* s, int64_t ld, T* row_max, T* row_sum, T* keep);
  // s = exp(s - lse[row]).
  void (*probabilities)(int64_t rows, int64_t columns, T* s, int64_t ld, const T* lse);
  // dp = p * (dp - delta[row]).
  void (*score_gradient)(int64_t rows, int64_t columns, const T* p, T* dp, int64_t ld, const T* delta);
  // s = cap * tanh(s / cap), and slope (null: not wanted) = its derivative.
  void (*softcap)(int64_t rows, int64_t columns, T* s, T* slope, int64_t ld, T cap);
  // s += bias; strides may be 0.
  void (*add_bias)(Source bias, int64_t rows, int64_t columns, T* s, int64_t ld);
  // line -= slope * |diagonal - column|.
  void (*subtract_distance)(int64_t columns, T slope, T diagonal, T* line);
  // Minus infinity where a byte of allowed is zero; strides may be 0.
  void (*hide)(const uint8_t* allowed, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, T* s,
               int64_t ld);
  // Whether all of x [rows, width] is finite.
  bool (*finite)(const T* x, int64_t rows, int64_t width, int64_t ld);
  // c = keep[row] * c + a b (keep null: 1): c [rows, width], a [rows, depth], b rows of values in memory, of column
  // stride 1; width is a multiple of `lanes`.
  void (*accumulate_direct)(int64_t rows, int64_t width, int64_t depth, const T* a, int64_t lda, Source b, T* c,
                            int64_t ldc, const T* keep);
};

// T is the type computed in: float for everything but float64. Products take operands of another type where the
// instruction set multiplies it faster: a left operand is [rows, depth / kDepth], a right one [depth / kDepth,
// columns], both padded with zeros to whole vectors and to a whole operand. Depths are counted in values. The rows of a
// left operand are a multiple of kTogether, of which those beyond the last may hold anything.
template <typename T, typename Operand = T>
struct Primitives : ScorePrimitives<T> {
  int64_t lanes;  // elements of a vector; leading dimensions are multiples of it

  // dst[row][column] = src, columns beyond width up to ld are zero.                            dst [rows, ld]
  void (*load_rows)(Source src, int64_t rows, int64_t width, T* dst, int64_t ld);
  // The same as a left operand whose depth is the width.                                       dst [rows, ld / kDepth]
  void (*load_left)(Source src, int64_t rows, int64_t width, Operand* dst, int64_t ld);
  // A right operand whose depth is the width and whose columns are the rows of src.
  void (*load_columns)(Source src, int64_t rows, int64_t width, Operand* dst, int64_t ld);
  // A right operand whose depth is the rows of src.
  void (*load_steps)(Source src, int64_t rows, int64_t width, Operand* dst, int64_t ld);
  // dst[row] = src[row] * factor[row], or src[row] where factor is null.
  void (*store_rows)(const T* src, int64_t ld, const T* factor, int64_t rows, int64_t width, void* dst, Dtype dtype,
                     int64_t row_stride);

  // s [rows, columns] as a left operand in `room`, whose rows take as many bytes as the ld values of a row of s; or s
  // itself where T is one.
  const Operand* (*as_left)(int64_t rows, int64_t columns, T* s, Operand* room, int64_t ld);
  // softmax_step and as_left in one.
  const Operand* (*softmax_left)(int64_t rows, int64_t columns, T* s, int64_t ld, T* row_max, T* row_sum, T* keep,
                                 Operand* room);
  // The transpose of s as a left operand, in `room` where kTogether rows lie together and in s elsewhere: each column
  // is one operand after the other, each step takes as many bytes as kDepth rows of s.
  const Operand* (*as_left_transposed)(int64_t rows, int64_t columns, T* s, Operand* room, int64_t ld);

  // c = factor * a b: c [rows, columns up to a whole vector], a [rows, depth] of leading dimension lda operands.
  void (*scores)(int64_t rows, int64_t columns, int64_t depth, const Operand* a, int64_t lda, const Operand* b,
                 int64_t ldb, T factor, T* c, int64_t ldc);
  // The same with b as rows of keys in memory, column stride 1: no packing, for few rows. Null where it is not there.
  void (*scores_direct)(int64_t rows, int64_t columns, int64_t depth, const Operand* a, int64_t lda, Source keys,
                        T factor, T* c, int64_t ldc);
  // c = keep[row] * c + a b (keep null: 1): c [rows, width], a[row * row_stride + k * depth_stride], where one of these
  // strides is 1, b a right operand with column stride 1; width is a multiple of `lanes`. Where scores_direct is there
  // and depth_stride is 1, b may be rows of values of a narrower type as they lie in memory.
  void (*accumulate)(int64_t rows, int64_t width, int64_t depth, const Operand* a, int64_t row_stride,
                     int64_t depth_stride, Source b, T* c, int64_t ldc, const T* keep);

  Blocking blocking = kVectorBlocking;
  const Setup* setup = nullptr;  // null: nothing to set up
};

struct InstructionSet {
  const char* name;
  const Primitives<float>* f32;
  const Primitives<double>* f64;
  const Primitives<float, Narrow>* bf16;  // null: bfloat16 is computed like float32
};

extern const InstructionSet kScalar;
#ifdef SDPA_X86
extern const InstructionSet kAvx2;
extern const InstructionSet kAvx512;
extern const InstructionSet kAvx512Bf16;
// Puts products by AMX tiles in a table of kAvx512Bf16's products.
void use_tiles(Primitives<float, Pair>* table);
#endif
#ifdef SDPA_ARM
extern const InstructionSet kNeon;
extern const InstructionSet kNeonBf16;
#endif

}  // namespace sdpa_cpu
