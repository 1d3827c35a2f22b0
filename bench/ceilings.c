// What one core can do at most: products in registers, and reads one after the other. ceilings.py compiles it for the
// machine it runs on, and says what is made of it.
#include <stddef.h>
#include <string.h>

// Bytes of a vector, and sums: more than two pipes of a latency of 4 or 5 keep busy, and no more than registers hold.
#if defined(__AVX512F__)
enum { kBytes = 64, kSums = 24 };
#elif defined(__AVX__)
enum { kBytes = 32, kSums = 12 };
#else
enum { kBytes = 16, kSums = 24 };
#endif
enum { kLanes = kBytes / 4 };

typedef float Vector __attribute__((vector_size(kBytes)));
typedef unsigned Bits __attribute__((vector_size(kBytes)));

size_t operations_of_round(void) { return 2 * kSums * kLanes; }

// The total of sums that begin with their numbers and become sum * factor + addend in each round: unlike in each lane,
// and all asked for in the end, so that no compiler can do less.
float multiply(size_t rounds, float factor, float addend) {
  Vector sums[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i)
    for (int lane = 0; lane < kLanes; ++lane) sums[i][lane] = (float)(i * kLanes + lane);
  for (size_t round = 0; round < rounds; ++round)
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * factor + addend;
  float total = 0;
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i)
    for (int lane = 0; lane < kLanes; ++lane) total += sums[i][lane];
  return total;
}

// Everything by "or", of whole groups of four vectors.
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
  unsigned all = 0;
  for (int i = 0; i < kTogether; ++i)
    for (int lane = 0; lane < kLanes; ++lane) all |= seen[i][lane];
  return all;
}
