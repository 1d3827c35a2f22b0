// Metal's vector types: clang's, which know .x .y .z .w, arithmetic by element, and every address space.
#pragma once

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

namespace detail {

template <typename V>
struct Parts {
  static constexpr int count = 1;
};
template <typename T, int N>
struct Parts<T __attribute__((ext_vector_type(N)))> {
  static constexpr int count = N;
};

template <typename T, typename P>
inline void put(T* elements, int& filled, P part) {
  if constexpr (Parts<P>::count == 1) {
    elements[filled++] = static_cast<T>(part);
  } else {
    for (int i = 0; i < Parts<P>::count; ++i) elements[filled++] = static_cast<T>(part[i]);
  }
}

}  // namespace detail

// float4(x), float4(x, y, z, w), float4(xy, zw), float4(other) and the like.
template <typename T, int N, typename... P>
inline vec<T, N> make_vector(P... parts) {
  constexpr int given = (detail::Parts<P>::count + ... + 0);
  static_assert(given == N || (given == 1 && sizeof...(P) == 1), "a vector wants one value, or one for each element");
  T elements[N];
  int filled = 0;
  (detail::put(elements, filled, parts), ...);
  vec<T, N> result;
  for (int i = 0; i < N; ++i) result[i] = elements[given == 1 ? 0 : i];
  return result;
}

#define EMULATOR_VECTORS(T) \
  using T##2 = vec<T, 2>;   \
  using T##3 = vec<T, 3>;   \
  using T##4 = vec<T, 4>;
EMULATOR_VECTORS(bool)
EMULATOR_VECTORS(char)
EMULATOR_VECTORS(uchar)
EMULATOR_VECTORS(short)
EMULATOR_VECTORS(ushort)
EMULATOR_VECTORS(int)
EMULATOR_VECTORS(uint)
EMULATOR_VECTORS(long)
EMULATOR_VECTORS(ulong)
EMULATOR_VECTORS(half)
EMULATOR_VECTORS(bfloat)
EMULATOR_VECTORS(float)
#undef EMULATOR_VECTORS

}  // namespace metal

using namespace metal;
