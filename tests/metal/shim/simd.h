// What the lanes of a simdgroup do together: barriers, shuffles, reductions, and 8x8 matrices spread over them.
#pragma once

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

// The line of the caller, by which the runtime tells apart two calls of one function.
#define EMULATOR_LINE int line = __builtin_LINE()

inline void threadgroup_barrier(mem_flags flags, EMULATOR_LINE) {
  emulator::emulator_arrive(emulator::THREADGROUP_BARRIER, line, int(flags));
}
inline void simdgroup_barrier(mem_flags flags, EMULATOR_LINE) {
  if (emulator::emulator_arrive(emulator::SIMDGROUP_BARRIER, line, int(flags))) emulator::emulator_release();
}

namespace detail {

template <typename T>
inline uint64_t pack(T x) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &x, sizeof(T));
  return bits;
}
template <typename T>
inline T unpack(uint64_t bits) {
  T x;
  __builtin_memcpy(&x, &bits, sizeof(T));
  return x;
}

// The value that lane `source` brought; `parameter` has to be the same in both lanes.
template <typename T>
inline T from_lane(emulator::Kind kind, T x, uint source, uint parameter, int line) {
  emulator::Lane* me = emulator::emulator_lane;
  emulator::Simdgroup* group = me->simdgroup;
  const int parity = group->parity;
  if (source >= uint(emulator::LANES)) emulator::emulator_fail("a lane outside of the simdgroup", line);
  group->value[parity][me->lane] = pack(x);
  group->parameter[parity][me->lane] = parameter;
  if (emulator::emulator_arrive(kind, line, 0)) emulator::emulator_release();
  const uint64_t* parameters = group->parameter[parity];
  if (parameters[source] != parameter || parameters[0] != parameters[me->lane])
    emulator::emulator_fail("lanes that differ in the parameter", line);
  return unpack<T>(group->value[parity][source]);
}

// All lanes' values, combined pair by pair as a butterfly of shuffles does.
template <typename T, typename Combine>
inline T reduce(emulator::Kind kind, T x, Combine combine, int line) {
  emulator::Lane* me = emulator::emulator_lane;
  emulator::Simdgroup* group = me->simdgroup;
  const int parity = group->parity;
  group->value[parity][me->lane] = pack(x);
  if (emulator::emulator_arrive(kind, line, 0)) {
    T values[emulator::LANES];
    for (int i = 0; i < emulator::LANES; ++i) values[i] = unpack<T>(group->value[parity][i]);
    for (int half_of = emulator::LANES / 2; half_of; half_of /= 2)
      for (int i = 0; i < half_of; ++i) values[i] = combine(values[i], values[i + half_of]);
    group->result = pack(values[0]);
    emulator::emulator_release();
  }
  return unpack<T>(group->result);
}

}  // namespace detail

template <typename T>
inline T simd_shuffle_xor(T x, ushort mask, EMULATOR_LINE) {
  return detail::from_lane(emulator::SHUFFLE_XOR, x, emulator::emulator_lane->lane ^ mask, mask, line);
}
template <typename T>
inline T simd_broadcast(T x, ushort lane, EMULATOR_LINE) {
  return detail::from_lane(emulator::BROADCAST, x, lane, lane, line);
}
template <typename T>
inline T simd_sum(T x, EMULATOR_LINE) {
  return detail::reduce(emulator::SIMD_SUM, x, [](T a, T b) { return T(a + b); }, line);
}
template <typename T>
inline T simd_max(T x, EMULATOR_LINE) {
  return detail::reduce(emulator::SIMD_MAX, x, [](T a, T b) { return max(a, b); }, line);
}
template <typename T>
inline T simd_min(T x, EMULATOR_LINE) {
  return detail::reduce(emulator::SIMD_MIN, x, [](T a, T b) { return min(a, b); }, line);
}
inline bool simd_any(bool x, EMULATOR_LINE) {
  return detail::reduce(emulator::SIMD_ANY, x, [](bool a, bool b) { return a || b; }, line);
}
inline bool simd_all(bool x, EMULATOR_LINE) {
  return detail::reduce(emulator::SIMD_ALL, x, [](bool a, bool b) { return a && b; }, line);
}

// Each lane holds two neighbours of a row. Which ones is not in Metal's specification; MLX's and torch's kernels rely
// on it.
template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "Apple GPUs multiply 8x8 matrices");
  vec<T, 2> elements;
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <typename T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Columns, Rows> result;
  result.elements[0] = x;
  result.elements[1] = x;
  return result;
}

namespace detail {

// The place of a lane's two elements in a matrix by rows.
inline int place(uint lane) {
  const uint quad = lane / 4, row = (quad & 4) + (lane / 2) % 4, column = (quad & 2) * 2 + (lane % 2) * 2;
  return int(row * 8 + column);
}

template <typename T>
inline void bring(float* matrix, int at, const vec<T, 2>& elements) {
  matrix[at] = float(elements[0]);
  matrix[at + 1] = float(elements[1]);
}

inline void multiply(const float* a, const float* b, const float* c, float* product) {
  using Row = vec<float, 8>;
  for (int i = 0; i < 8; ++i) {
    Row sum = *(const Row*)(c + 8 * i);
    for (int k = 0; k < 8; ++k) sum = a[8 * i + k] * *(const Row*)(b + 8 * k) + sum;
    *(Row*)(product + 8 * i) = sum;
  }
}

}  // namespace detail

template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                          EMULATOR_LINE) {
  emulator::Lane* me = emulator::emulator_lane;
  emulator::Simdgroup* group = me->simdgroup;
  const int at = detail::place(me->lane);
  detail::bring<A>(group->a, at, a.elements);
  detail::bring<B>(group->b, at, b.elements);
  detail::bring<C>(group->c, at, c.elements);
  if (emulator::emulator_arrive(emulator::MULTIPLY_ACCUMULATE, line, 0)) {
    detail::multiply(group->a, group->b, group->c, group->product);
    emulator::emulator_release();
  }
  d.elements[0] = D(group->product[at]);
  d.elements[1] = D(group->product[at + 1]);
}

template <typename D, typename A, typename B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, EMULATOR_LINE) {
  simdgroup_matrix<float, 8, 8> zero = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(d, a, b, zero, line);
}

}  // namespace metal
