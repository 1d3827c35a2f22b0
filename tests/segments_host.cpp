// Plays the CUDA kernel's mask of segments on the host: test_cuda_segments.py puts its source, for one lane, beside
// this.
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

struct Place {
  int x;
} blockIdx, threadIdx, blockDim{1};
template <class T>
T __ldg(T const* p) {
  return *p;
}
int __reduce_min_sync(unsigned, int x) { return x; }
int __reduce_max_sync(unsigned, int x) { return x; }
int __reduce_add_sync(unsigned, int x) { return x; }
#undef __global__
#define __global__

#include "segments.cuh"

using namespace sdpa_cuda;

std::mt19937 generator;
int draw(int low, int high) { return low + int(generator() % unsigned(high - low + 1)); }
long visited = 0, unmasked = 0;

// Ids of `entries` rows: sorted, in runs, in any order, at the ends of int32.
std::vector<int> draw_ids(int entries, int size, int kind) {
  static const int kFar[] = {INT_MIN, -1, 0, INT_MAX};
  std::vector<int> ids(entries * size);
  int const most = draw(0, 6);
  int run = 0;
  for (int i = 0; i < entries * size; ++i) {
    if (draw(0, 150) == 0) run = draw(-3, 3);
    ids[i] = kind == 1 ? run : kind == 3 ? kFar[draw(0, 3)] : draw(0, most) - 2;
  }
  if (kind == 0)
    for (int b = 0; b < entries; ++b) std::sort(&ids[b * size], &ids[b * size] + size);
  return ids;
}

struct Problem {
  SegmentParams p;
  std::vector<int> k_lengths, q_lengths, q_ids, k_ids, padded;
  std::vector<Span> spans;
  std::vector<IdRange> id_ranges;

  Problem(int BLOCK_N, int CONSUMERS) {
    p.B = draw(1, 3), p.M = draw(1, 700), p.N = draw(0, 1) ? p.M : draw(1, 700);
    p.left = draw(0, 2) ? kUnlimited : draw(0, 300);
    p.right = draw(0, 1) ? kUnlimited : draw(0, 1) * draw(0, 100);
    p.bottom_right = draw(0, 1);
    for (int b = 0; b < p.B; ++b) {
      k_lengths.push_back(draw(0, 3) ? draw(0, p.N) : p.N);
      q_lengths.push_back(draw(0, 3) ? draw(0, p.M) : p.M);
    }
    if (draw(0, 1)) p.k_lengths = k_lengths.data();
    if (draw(0, 2) == 0) p.q_lengths = q_lengths.data();
    int const kind = draw(0, 3);
    q_ids = draw_ids(p.B, p.M, kind), k_ids = p.M == p.N && draw(0, 2) ? q_ids : draw_ids(p.B, p.N, kind);
    p.q_ids = {q_ids.data(), draw(0, 1) * p.M}, p.k_ids = {k_ids.data(), draw(0, 1) * p.N};
    p.groups = (p.M + 64 * CONSUMERS - 1) / (64 * CONSUMERS) * CONSUMERS, p.blocks = (p.N + BLOCK_N - 1) / BLOCK_N;
    spans.assign(p.B * p.groups, Span{-777, 777, -777, 777}), id_ranges.assign(p.B * p.blocks, IdRange{0, 0});
    padded.assign(p.B * p.blocks * BLOCK_N, 1);
    p.spans = spans.data(), p.id_ranges = id_ranges.data(), p.padded_k_ids = padded.data();
  }

  bool sees(int b, int i, int j) const {
    int const keys = p.k_lengths ? k_lengths[b] : p.N, rows = p.q_lengths ? q_lengths[b] : p.M;
    int const distance = j - i - (p.bottom_right ? keys - rows : 0);
    return i < rows && j < keys && -p.left <= distance && distance <= p.right &&
           p.q_ids.data[b * p.q_ids.batch + i] == p.k_ids.data[b * p.k_ids.batch + j];
  }
};

void expect(bool holds, char const* what, int round) {
  if (holds) return;
  printf("round %d: %s\n", round, what);
  exit(1);
}

// The loops of sm90/flash.cuh: what a consumer's rows see of the blocks they visit, each key once.
template <int BLOCK_N, int ROWS>
void play_consumer(Problem const& problem, int b, Blocks tile, int row0, int round) {
  using namespace cute;
  SegmentParams const& p = problem.p;
  SegmentMask<BLOCK_N, ROWS> const mask(p, b);
  Blocks const own = mask.blocks_of_consumer(tile, row0, p.M);
  expect(tile.begin <= own.begin && own.begin < own.end && own.end <= tile.end, "a consumer outside of what is loaded",
         round);
  std::vector<float> numbers(ROWS * BLOCK_N);
  Tensor scores = make_tensor(numbers.data(), make_layout(Shape<Int<ROWS>, Int<BLOCK_N>>{}));
  Tensor coords = make_identity_tensor(Shape<Int<ROWS>, Int<BLOCK_N>>{});
  std::vector<int> seen(ROWS * p.N, 0);
  auto visit = [&](int n, Masking cut) {
    ++visited, unmasked += cut == Masking::kNone;
    std::fill(numbers.begin(), numbers.end(), 1.f);
    if (cut == Masking::kBoth) mask.template apply<Masking::kBoth>(scores, coords, row0, mask.key_of(n));
    if (cut == Masking::kLeft) mask.template apply<Masking::kLeft>(scores, coords, row0, mask.key_of(n));
    for (int i = 0; i < ROWS && row0 + i < p.M; ++i)
      for (int c = 0; c < BLOCK_N; ++c) {
        int const j = n * BLOCK_N + c - mask.pad;
        if (scores(i, c) != 1.f) continue;
        expect(0 <= j && j < p.N, "a key that there is not", round);
        ++seen[i * p.N + j];
      }
  };
  int n = own.end - 1;
  visit(n, n >= mask.unmasked_end(row0) || n < mask.unmasked_begin(row0) ? Masking::kBoth : Masking::kNone);
  --n;
  for (int const end = std::max(own.begin, mask.unmasked_end(row0)); n >= end; --n) visit(n, Masking::kBoth);
  for (int const end = std::max(own.begin, mask.unmasked_begin(row0)); n >= end; --n) visit(n, Masking::kNone);
  for (; n >= own.begin; --n) visit(n, Masking::kLeft);
  for (int i = 0; i < ROWS && row0 + i < p.M; ++i)
    for (int j = 0; j < p.N; ++j)
      expect(seen[i * p.N + j] == problem.sees(b, row0 + i, j), "another key than the mask's", round);
}

template <int BLOCK_N, int CONSUMERS>
void play(int round) {
  constexpr int ROWS = 64, BLOCK_M = ROWS * CONSUMERS;
  Problem problem(BLOCK_N, CONSUMERS);
  SegmentParams& p = problem.p;
  for (blockIdx.x = 0; blockIdx.x < p.B; ++blockIdx.x) find_spans<BLOCK_N, ROWS>(p);
  for (int b = 0; b < p.B; ++b)
    for (int row0 = 0; row0 < p.M; row0 += BLOCK_M) {
      Blocks const tile = SegmentMask<BLOCK_N, ROWS>(p, b).blocks(row0, std::min(p.M, row0 + BLOCK_M));
      expect(0 <= tile.begin && tile.begin < tile.end && tile.end <= p.blocks, "blocks that there are not", round);
      for (int g = 0; g < CONSUMERS; ++g) play_consumer<BLOCK_N, ROWS>(problem, b, tile, row0 + g * ROWS, round);
    }
}

int main(int, char** arguments) {
  for (int round = 0; round < atoi(arguments[1]); ++round)
    play<64, 4>(round), play<128, 2>(round), play<96, 2>(round), play<48, 2>(round);
  printf("%ld %ld\n", visited, unmasked);
}
