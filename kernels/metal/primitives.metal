// What all kernels are made of: fragments of simdgroup matrices, tiles in threadgroup memory, and the arguments of a
// call as one struct.
//
// A fragment is an 8 x 8 matrix that the 32 lanes of a simdgroup hold together, two neighbours in a row each. Operands
// are converted to float32 when a lane reads them, so that products and sums are those of float32 for every dtype.

#define UNROLL _Pragma("clang loop unroll(full)")  // so that arrays stay in registers

struct Lane {
  ushort row, col;  // of a fragment: the lane's row, and the first of its two columns
};

inline Lane lane_of(uint lane) {
  const ushort quad = lane / 4;
  Lane at;
  at.row = (quad & 4) + (lane / 2) % 4;
  at.col = (quad & 2) * 2 + (lane % 2) * 2;
  return at;
}

// The lanes that share a row differ in bits 0 and 3 of their number.
inline float max_of_row(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}
inline float sum_of_row(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}
// The lanes that share a column differ in bits 1, 2 and 4.
inline float sum_of_column(float x) {
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  return x + simd_shuffle_xor(x, ushort(16));
}

// d += a b
inline void multiply_add(thread float2& d, float2 a, float2 b) {
  simdgroup_matrix<float, 8, 8> left, right, sum;
  reinterpret_cast<thread float2&>(left.thread_elements()) = a;
  reinterpret_cast<thread float2&>(right.thread_elements()) = b;
  reinterpret_cast<thread float2&>(sum.thread_elements()) = d;
  simdgroup_multiply_accumulate(sum, left, right, sum);
  d = reinterpret_cast<thread float2&>(sum.thread_elements());
}

// The fragment at `tile`, whose rows are LD elements apart.
template <int LD>
inline float2 load_fragment(threadgroup const ELEMENT* tile, Lane at) {
  threadgroup const ELEMENT* from = tile + at.row * LD + at.col;
  return float2(float(from[0]), float(from[1]));
}
// The transpose of the fragment at `tile`, whose rows are ROW_STEP elements apart and whose columns COLUMN_STEP.
template <int ROW_STEP, int COLUMN_STEP>
inline float2 load_transposed(threadgroup const ELEMENT* tile, Lane at) {
  threadgroup const ELEMENT* from = tile + at.col * ROW_STEP + at.row * COLUMN_STEP;
  return float2(float(from[0]), float(from[ROW_STEP]));
}

// scores[n] = left right^T for 8 rows of `left` and the rows 8 n and following of `right`. left and right [rows, WIDTH]
// LD and ROW_STEP are between their rows, COLUMN_STEP between the columns of `right`.
template <int WIDTH, int LD, int COUNT, int ROW_STEP = LD, int COLUMN_STEP = 1>
inline void multiply_transposed(threadgroup const ELEMENT* left, threadgroup const ELEMENT* right, Lane at,
                                thread float2* scores) {
  UNROLL
  for (int n = 0; n < COUNT; ++n) scores[n] = float2(0);
  UNROLL
  for (int d = 0; d < WIDTH; d += 8) {
    const float2 a = load_fragment<LD>(left + d, at);
    UNROLL
    for (int n = 0; n < COUNT; ++n) {
      threadgroup const ELEMENT* b = right + 8 * n * ROW_STEP + d * COLUMN_STEP;
      multiply_add(scores[n], a, load_transposed<ROW_STEP, COLUMN_STEP>(b, at));
    }
  }
}

// acc += p right for 8 rows of weights p. p [8, 8 COUNT], right [8 COUNT, 8 WIDE]
template <int LD, int COUNT, int WIDE>
inline void multiply_rows(thread const float2* p, threadgroup const ELEMENT* right, Lane at, thread float2* acc) {
  UNROLL
  for (int n = 0; n < COUNT; ++n) {
    UNROLL
    for (int d = 0; d < WIDE; ++d) multiply_add(acc[d], p[n], load_fragment<LD>(right + 8 * n * LD + 8 * d, at));
  }
}

// The arguments that all kernels share. Tensors that a call does not have are never read.
struct Call {
  device const ELEMENT *q, *k, *v;
  device const BIAS_ELEMENT* bias;
  device const uchar* allowed;
  device const int *q_lengths, *k_lengths, *q_segments, *k_segments, *prefix;
  device const float* alibi;
  device const SINK_ELEMENT* sinks;
  device const long* rng;
  device const int *cu_q, *cu_k, *block_table;
  constant long* n;   // integers, at the places I_...
  constant float* x;  // floats, at the places X_...
};

// Where a threadgroup stands among all of its call. A long call has several dispatches, each with a part of them.
struct Place {
  int x, y, z;
};

inline Place place_of(thread const Call& call, uint3 group) {
  Place place;
  place.x = int(group.x) + int(call.n[I_FIRST]);
  place.y = int(group.y) + int(call.n[I_FIRST + 1]);
  place.z = int(group.z) + int(call.n[I_FIRST + 2]);
  return place;
}

// Rows of q, out and their gradients: consecutive queries of a head, or with GROUPED of all heads of a group.
struct QueryRows {
  long head, query;  // strides
  int first, queries;

  // The offset of row `row` from the first head of the group, where the strides are in elements.
  long offset(int row) const {
    const int number = first + row;
    if (!GROUPED) return number * query;
    return number / queries * head + number % queries * query;
  }
};

// Rows of k, v and their gradients: consecutive keys, or keys of pages.
struct KeyRows {
  long page, key;  // strides
  int first;
  device const int* table;
  int page_size;

  long offset(int row) const {
    const long number = first + row;
    if (!PAGED) return number * key;
    return table[number / page_size] * page + number % page_size * key;
  }
};

// tile = the first `count` rows of `source`, and zeros behind them up to ROWS and behind WIDTH up to a multiple of 8.
// Its rows are ROW_STEP elements apart and its columns COLUMN_STEP: one of these is 1.
template <int ROWS, int WIDTH, int ROW_STEP, int COLUMN_STEP = 1, typename Places>
inline void load_tile(threadgroup ELEMENT* tile, device const ELEMENT* source, Places rows, int count, uint index) {
  constexpr int kVectors = (WIDTH > 0 ? (WIDTH + 7) / 8 * 8 : 8) / VECTOR;  // of a row
  for (int number = index; number < ROWS * kVectors; number += THREADS) {
    const int row = number / kVectors, column = number % kVectors * VECTOR;
    const bool inside = row < count && column < WIDTH;
#if VECTOR == 4
    vec<ELEMENT, 4> part = vec<ELEMENT, 4>(ELEMENT(0));
    if (inside) part = *reinterpret_cast<device const vec<ELEMENT, 4>*>(source + rows.offset(row) + column);
    UNROLL
    for (int i = 0; i < 4; ++i) tile[row * ROW_STEP + (column + i) * COLUMN_STEP] = part[i];
#else
    tile[row * ROW_STEP + column * COLUMN_STEP] = inside ? source[rows.offset(row) + column] : ELEMENT(0);
#endif
  }
}

// Writes the fragments of 8 rows, times `factor`, to a row of memory: what is in WIDTH.
template <int WIDTH, int WIDE, typename Out>
inline void store_row(thread const float2* acc, float factor, device Out* to, Lane at) {
  UNROLL
  for (int d = 0; d < WIDE; ++d)
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * d + at.col + i;
      if (column < WIDTH) to[column] = Out(acc[d][i] * factor);
    }
}
