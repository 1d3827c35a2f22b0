// Dropout's random numbers (sdpa/philox.py). It is a part of microkernels.h, in the including file's unnamed namespace.
#pragma once

typedef uint64_t Wide __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Narrowed __attribute__((vector_size(kVectorBytes / 2)));

constexpr int kChains = 4;  // of rounds, which wait for one another
constexpr int kWide = kVectorBytes / 8;
constexpr int kGroups = kChains * kWide;  // groups of four keys whose numbers are computed together
constexpr int kPeriod = 16;               // of the keys j, j + 1, j + 8 and j + 9 of a group
constexpr int kStrip = kGroups * 4;
static_assert(kStrip % kPeriod == 0);

// The products of the low halves. An instruction set that has them in one instruction overloads it.
template <typename V>
inline V multiply_low(V x, V constant) {
  return (x & 0xFFFFFFFF) * constant;
}

struct Groups {
  uint64_t index[kGroups];
  constexpr Groups() : index() {
    for (int g = 0; g < kGroups; ++g) index[g] = static_cast<uint64_t>(g);
  }
};

// The words of Philox4x32-7 of groups from `group` on: first those of the lower row, then those of the upper one. Upper
// halves hold anything.
inline void random_words(const Dropout& rows, uint64_t group, Wide (&words)[4][kChains]) {
  constexpr int kRounds = 7;
  static constexpr Groups kFirst;
  const Wide multipliers[2] = {Wide{} + 0xD2511F53, Wide{} + 0xCD9E8D57};
  Wide(&c0)[kChains] = words[0], (&c1)[kChains] = words[1], (&c2)[kChains] = words[2], (&c3)[kChains] = words[3];
  for (int v = 0; v < kChains; ++v) {
    c0[v] = load(kFirst.index + v * kWide) + group;
    c1[v] = Wide{} + rows.row_group;
    c2[v] = Wide{} + rows.stream;
    c3[v] = Wide{} + rows.offset;
  }
  uint64_t low = rows.key, high = rows.key >> 32;
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 4
    for (int v = 0; v < kChains; ++v) {
      const Wide first = multiply_low(c0[v], multipliers[0]), second = multiply_low(c2[v], multipliers[1]);
      c0[v] = (second >> 32) ^ c1[v] ^ low;
      c2[v] = (first >> 32) ^ c3[v] ^ high;
      c1[v] = second;
      c3[v] = first;
    }
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
}

// The numbers of a strip's keys in order: those of eight keys are four near words in memory, of the next the far ones.
inline void in_order(const Wide (&near)[kChains], const Wide (&far)[kChains], uint16_t (&numbers)[kStrip + kMaxLanes]) {
  uint32_t words[2][kGroups];
  for (int v = 0; v < kChains; ++v) {
    const Narrowed parts[2] = {__builtin_convertvector(near[v], Narrowed), __builtin_convertvector(far[v], Narrowed)};
    for (int w = 0; w < 2; ++w) __builtin_memcpy(words[w] + v * kWide, &parts[w], sizeof(Narrowed));
  }
  constexpr int kHalf = kPeriod / 2;
  for (int n = 0; n < kStrip; n += kHalf)
    __builtin_memcpy(numbers + n, words[n / kHalf % 2] + n / kPeriod * 4, kHalf * sizeof(numbers[0]));
}

// As many numbers as fill a vector of T.
inline auto load_numbers(const uint16_t* p, float) {
  typedef uint16_t Stored __attribute__((vector_size(kVectorBytes / 2)));
  typedef int32_t Numbers __attribute__((vector_size(kVectorBytes)));
  Stored x;
  __builtin_memcpy(&x, p, sizeof(x));
  return __builtin_convertvector(x, Numbers);
}
inline auto load_numbers(const uint16_t* p, double) {
  typedef uint16_t Stored __attribute__((vector_size(kVectorBytes / 4)));
  typedef int64_t Numbers __attribute__((vector_size(kVectorBytes)));
  Stored x;
  __builtin_memcpy(&x, p, sizeof(x));
  return __builtin_convertvector(x, Numbers);
}

// line *= kept, or 0 where its number is below the threshold. Whole vectors are read, and written.
template <typename T>
void drop_below(const uint16_t* numbers, int32_t threshold, int64_t count, T kept, T* line) {
  int64_t c = 0;
  for (; c + kLanes<T> <= count; c += kLanes<T>)
    store(line + c, load(line + c) * (load_numbers(numbers + c, T()) >= threshold ? fill(kept) : Vec<T>{}));
  if (c == count) return;
  const Vec<T> factor = load_numbers(numbers + c, T()) >= threshold ? fill(kept) : Vec<T>{};
  store(line + c, load(line + c) * (first_lanes<T>(count - c) ? factor : fill(T(1))));
}

template <typename T>
void drop(const Dropout& rows, int64_t begin, int64_t columns, T kept, T* lower, T* upper) {
  const int64_t end = begin + columns;
  T* const lines[2] = {lower, upper};
  Wide words[4][kChains];
  uint16_t numbers[kStrip + kMaxLanes] = {};
  for (int64_t strip = begin / kPeriod * kPeriod; strip < end; strip += kStrip) {
    random_words(rows, static_cast<uint64_t>(strip / 4), words);
    const int64_t from = strip > begin ? strip : begin, to = strip + kStrip < end ? strip + kStrip : end;
    for (int half = 0; half < 2; ++half) {
      if (lines[half] == nullptr) continue;
      in_order(words[2 * half], words[2 * half + 1], numbers);
      drop_below(numbers + (from - strip), rows.threshold, to - from, kept, lines[half] + (from - begin));
    }
  }
}
