// The table of primitives that each instruction set fills in. This file holds no code: the translation units that
// include it are compiled with different flags, and shared inline code could bring wide instructions to machines
// without them.
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

// The widest vector of any instruction set, in float32. row_sum has one partial sum per lane.
constexpr int kMaxLanes = 16;

// Two consecutive bfloat16 values along the depth of a product, as VDPBF16PS and AMX multiply them.
struct Pair {
  uint16_t first, second;
};

// Four consecutive bfloat16 values along the depth of a product, as BFMMLA multiplies them.
struct Quad {
  uint16_t values[4];
};

// Two consecutive values along the depth, each as the sum of two bfloat16 values: the value rounded, and what that
// leaves of it, rounded. Together they have 16 bits of it, and all 11 of a float16 number. In a row, 16 of these lie as
// 16 pairs of first parts, then 16 of second ones.
struct Split {
  Pair first, second;
};

// How many values along the depth one operand packs together.
template <typename Operand>
inline constexpr int64_t kDepth = 1;
template <>
inline constexpr int64_t kDepth<Pair> = 2;
template <>
inline constexpr int64_t kDepth<Quad> = 4;
template <>
inline constexpr int64_t kDepth<Split> = 2;

// How many products of weights and values are summed in one chain of roundings.
constexpr int64_t kValueChain = 64;

// How many rows of a left operand are interleaved step by step: the operand of `row` and `step` is at
// [row / kInterleave * kInterleave * ld + step * kInterleave + row % kInterleave].
template <typename Operand>
inline constexpr int64_t kInterleave = 1;
template <>
inline constexpr int64_t kInterleave<Quad> = 2;

// The room of a left operand is for a multiple of so many rows; those beyond the last may hold anything.
template <typename Operand>
inline constexpr int64_t kRoom = kInterleave<Operand>;
template <>
inline constexpr int64_t kRoom<Split> = 16;

// The operand of bfloat16 products on this family of machines.
#ifdef SDPA_ARM
typedef Quad Narrow;
#else
typedef Pair Narrow;
#endif

// The block sizes of the forward loop.
struct Blocking {
  int64_t rows;     // of scores computed together: those of the widest register tile, so that they stay in a near cache
  int64_t block_m;  // BLOCK_M: queries that share the packing of a key
  int64_t least_m;  // a BLOCK_M of so many is not halved to give more threads work
  int64_t block_n;  // BLOCK_N: keys
};
// The widest register tile has 6 rows. Packing a key costs as much as using it for 10 to 20 queries, so BLOCK_M is
// large. Each block of keys costs reading and writing acc once, so BLOCK_N is large, too.
constexpr Blocking kVectorBlocking = {6, 768, 48, 384};

// What a thread does before its products and after them, where an instruction set has registers to configure. `saved`
// holds their former state.
struct Setup {
  static constexpr int kBytes = 64;
  void (*begin)(void* saved);
  void (*end)(const void* saved);
};

// Dropout of two rows of weights that are eight apart, of 16: what their random numbers are made of beside the keys,
// and below what a pair is dropped.
struct Dropout {
  uint64_t key;
  uint32_t row_group, stream, offset;  // counter words of Philox
  int32_t threshold;
};

// The primitives on scores [rows, ld], which are the same for every type of operand.
//
// Preconditions, which the sanitizer build asserts: `columns` is positive and at most `ld`, `ld` is a multiple of the
// vector's lanes. Columns beyond `columns` are written up to a whole vector.
template <typename T>
struct ScorePrimitives {
  // One step of the online softmax: s becomes exp(s - row_max). alpha[row] is the factor for older sums and for acc.
  // row_max [rows], row_sum [rows, kMaxLanes], alpha [rows].
  void (*softmax_step)(int64_t rows, int64_t columns, T* s, int64_t ld, T* row_max, T* row_sum, T* alpha);
  // s = exp(s - lse[row]).
  void (*probabilities)(int64_t rows, int64_t columns, T* s, int64_t ld, const T* lse);
  // dp = kept * dp - p * delta[row], where kept (null: p) is p after dropout.
  void (*score_gradient)(int64_t rows, int64_t columns, const T* p, const T* kept, T* dp, int64_t ld, const T* delta);
  // s = cap * tanh(s / cap), and slope (null: not wanted) = its derivative; cap is not 0.
  void (*softcap)(int64_t rows, int64_t columns, T* s, T* slope, int64_t ld, T cap);
  // to += x. Nothing beyond `columns` is written.                        x [rows, ld], to [rows, to_ld]
  void (*add_rows)(int64_t rows, int64_t columns, const T* x, int64_t ld, T* to, int64_t to_ld);
  // s += bias; strides may be 0.
  void (*add_bias)(Source bias, int64_t rows, int64_t columns, T* s, int64_t ld);
  // line -= slope * |diagonal - column|.
  void (*subtract_distance)(int64_t columns, T slope, T diagonal, T* line);
  // s = -inf where a byte of allowed is zero; strides may be 0.
  void (*hide)(const uint8_t* allowed, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, T* s,
               int64_t ld);
  // lower[column] and upper[column] *= kept, or 0 where the row drops key begin + column. Either may be null.
  void (*drop)(const Dropout& rows, int64_t begin, int64_t columns, T kept, T* lower, T* upper);
  // sums[row] = the sum of x[row] * y[row].                                                    x, y [rows, width]
  void (*row_products)(Source x, Source y, int64_t rows, int64_t width, T* sums);
  // Whether all of x [rows, width] is finite.
  bool (*finite)(const T* x, int64_t rows, int64_t width, int64_t ld);
  // c = alpha[row] * c + a b (alpha null: 1). c [rows, width], a [rows, depth], b [depth, width]: values in memory with
  // column stride 1. `width` is a multiple of the lanes.
  void (*accumulate_direct)(int64_t rows, int64_t width, int64_t depth, const T* a, int64_t lda, Source b, T* c,
                            int64_t ldc, const T* alpha);
};

// All primitives of an instruction set. T is the type computed in: double for float64, float for all others. Products
// take operands of another type where the instruction set multiplies it faster.
//
// A left operand is [rows, depth / kDepth], a right one [depth / kDepth, columns]. Both are padded with zeros to whole
// vectors and to whole operands. Depths count values.
//
// Preconditions, which the sanitizer build asserts: leading dimensions are multiples of a vector's elements, in values,
// those of left operands and of values multiples of `lanes`; none is smaller than the rows that it holds. Products and
// the softmax have at least one row and one column.
template <typename T, typename Operand = T>
struct Primitives : ScorePrimitives<T> {
  int64_t lanes;  // values of a row that are packed together: a vector of them, of Split the 32 of 16 operands

  // Packs src as a left operand, whose depth is the width.                                     dst [rows, ld / kDepth]
  void (*pack_left)(Source src, int64_t rows, int64_t width, Operand* dst, int64_t ld);
  // Packs src as a right operand, whose depth is the width and whose columns are the rows.     dst [width / kDepth, ld]
  void (*pack_columns)(Source src, int64_t rows, int64_t width, Operand* dst, int64_t ld);
  // Packs src as a right operand, whose depth is the rows.                                     dst [rows / kDepth, ld]
  void (*pack_steps)(Source src, int64_t rows, int64_t width, Operand* dst, int64_t ld);
  // dst[row] = src[row] * factor[row] (factor null: 1) in `dtype`. src is read in whole vectors.
  void (*store_rows)(const T* src, int64_t ld, const T* factor, int64_t rows, int64_t width, void* dst, Dtype dtype,
                     int64_t row_stride);

  // Packs s [rows, columns] as a left operand in `buffer`, whose rows take as many bytes as those of s; of Split they
  // have ld values, rounded up to a multiple of `lanes`. Where operands are T, the result is s itself.
  const Operand* (*as_left)(int64_t rows, int64_t columns, T* s, Operand* buffer, int64_t ld);
  // softmax_step and as_left in one.
  const Operand* (*softmax_left)(int64_t rows, int64_t columns, T* s, int64_t ld, T* row_max, T* row_sum, T* alpha,
                                 Operand* buffer);
  // Packs the transpose of s as a left operand: a row of operands for each step, of as many bytes as kDepth rows of s,
  // and in it one operand for each column. The result is in s, or in `buffer` where rows are interleaved.
  const Operand* (*as_left_transposed)(int64_t rows, int64_t columns, T* s, Operand* buffer, int64_t ld);

  // c = factor * a b. c [rows, columns up to a whole vector], a [rows, depth]; lda and ldb count operands.
  void (*scores)(int64_t rows, int64_t columns, int64_t depth, const Operand* a, int64_t lda, const Operand* b,
                 int64_t ldb, T factor, T* c, int64_t ldc);
  // The same with keys [columns, depth] in memory as b, column stride 1. It is for few rows, for which packing does not
  // pay. Null where an instruction set does not have it.
  void (*scores_direct)(int64_t rows, int64_t columns, int64_t depth, const Operand* a, int64_t lda, Source keys,
                        T factor, T* c, int64_t ldc);
  // c = alpha[row] * c + a b (alpha null: 1). c [rows, width], where `width` is a multiple of `lanes`; b is a right
  // operand with column stride 1. The operand of row and step of a is a[row * row_stride + step * depth_stride]; one of
  // these strides is 1, or kInterleave where rows are interleaved. Where scores_direct is there and depth_stride is 1,
  // b may be values in memory of a narrower type.
  void (*accumulate)(int64_t rows, int64_t width, int64_t depth, const Operand* a, int64_t row_stride,
                     int64_t depth_stride, Source b, T* c, int64_t ldc, const T* alpha);

  Blocking blocking = kVectorBlocking;
  const Setup* setup = nullptr;  // null: nothing to set up
};

struct InstructionSet {
  const char* name;
  const Primitives<float>* f32;
  const Primitives<double>* f64;
  const Primitives<float, Narrow>* bf16;          // null: products of bfloat16 are computed in float32
  const Primitives<float, Split>* f16 = nullptr;  // likewise of float16
};

extern const InstructionSet kScalar;
#ifdef SDPA_X86
extern const InstructionSet kAvx2;
extern const InstructionSet kAvx512;
extern const InstructionSet kAvx512Bf16;
// Replaces the products in a table of kAvx512Bf16 by those of AMX tiles.
void use_tiles(Primitives<float, Pair>* table);
extern const Primitives<float, Split> kAmxSplit;
#endif
#ifdef SDPA_ARM
extern const InstructionSet kNeon;
extern const InstructionSet kNeonBf16;
#endif

}  // namespace sdpa_cpu
