// What starts a kernel: builtin values of a thread in the type that a kernel asks for, codes of buffers' types.
#pragma once

namespace emulator {

template <typename T>
inline T builtin(Position p) {
  constexpr int count = metal::detail::Parts<T>::count;
  if constexpr (count == 1) {
    return T(p.x);
  } else {
    T result;
    result[0] = p.x;
    result[1] = p.y;
    if constexpr (count == 3) result[2] = p.z;
    return result;
  }
}
template <typename T>
inline T builtin(uint32_t x) {
  return T(x);
}

// What emulator.py calls the types: the letter of the kind, and the size of an element.
template <typename T>
struct Element {
  using type = T;
};
template <typename T, int N>
struct Element<T __attribute__((ext_vector_type(N)))> {
  using type = T;
};
template <typename T, typename U>
constexpr bool same = false;
template <typename T>
constexpr bool same<T, T> = true;

template <typename T>
constexpr int code() {
  using E = typename Element<T>::type;
  constexpr int size = int(sizeof(E));
  if (same<E, bfloat>) return 'b' * 16 + size;
  if (same<E, half> || same<E, float>) return 'f' * 16 + size;
  if (same<E, bool>) return 'u' * 16 + size;
  return (E(-1) < E(0) ? 'i' : 'u') * 16 + size;
}

}  // namespace emulator
