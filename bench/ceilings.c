// What one core can do at most: products in registers, and reads one after the other. ceilings.py compiles it for the
// machine it runs on, and says what is made of it.
#include <stddef.h>
#include <string.h>

// Bytes of a vector, and as many sums as there are registers for, beside a factor and an addend.
#if defined(__AVX512F__)
enum { kBytes = 64, kSums = 24 };
#elif defined(__AVX__)
enum { kBytes = 32, kSums = 12 };
#else
enum { kBytes = 16, kSums = 24 };
#endif

typedef float Vector __attribute__((vector_size(kBytes)));
typedef unsigned Bits __attribute__((vector_size(kBytes)));

size_t operations_of_round(void) { return 2 * kSums * sizeof(Vector) / sizeof(float); }

// Sums that begin unlike, or a compiler would keep one of them.
float multiply(size_t rounds, float factor, float addend) {
  Vector sums[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) sums[i] = (Vector){0} + (float)i;
  for (size_t round = 0; round < rounds; ++round)
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * factor + addend;
  Vector all = {0};
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) all += sums[i];
  return all[0];
}

// Of whole groups of four vectors.
unsigned read_all(const char* data, size_t bytes) {
  enum { kTogether = 4 };
  Bits seen[kTogether] = {{0}};
  for (size_t at = 0; at + kTogether * kBytes <= bytes; at += kTogether * kBytes)
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) {
      Bits line;
      memcpy(&line, data + at + i * kBytes, kBytes);
      seen[i] |= line;
    }
  return ((seen[0] | seen[1]) | (seen[2] | seen[3]))[0];
}
