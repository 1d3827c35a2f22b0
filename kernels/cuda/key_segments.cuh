// Segments as the backward needs them, and the kernel that finds beforehand which rows a block of keys is seen by.
#pragma once
#include "key_mask.cuh"
#include "scheduler.cuh"
#include "segments.cuh"

namespace sdpa_cuda {

// Whether a block of ROWS rows and one of kWarpgroupRows keys have one id only, and the same one.
template <int ROWS>
CUTE_DEVICE bool all_same(int32_t const* row_ids, int32_t const* key_ids) {
  int2 const rows = *reinterpret_cast<int2 const*>(row_ids + ROWS);
  int2 const keys = *reinterpret_cast<int2 const*>(key_ids + kWarpgroupRows);
  return same_single_id({rows.x, rows.y}, {keys.x, keys.y});
}

// Sets the weights of a thread to 0 where row and key are of different ids. Its weights are [2 keys, rows], and
// `coords` are their (key, row).
template <class Weights, class Coords>
CUTE_DEVICE void part_segments(Weights& weights, Coords const& coords, int32_t const* row_ids, int32_t const* key_ids) {
  using namespace cute;
  static_assert(decltype(size<0>(weights))::value == 2);
  int32_t const own[2] = {key_ids[int(get<0>(coords(0, 0)))], key_ids[int(get<0>(coords(1, 0)))]};
#pragma unroll
  for (int j = 0; j < size<1>(weights); j += 2) {  // a thread has rows in pairs, the first of them even
    int2 const ids = *reinterpret_cast<int2 const*>(row_ids + int(get<1>(coords(0, j))));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (own[i] != ids.x) weights(i, j) = 0.f;
      if (own[i] != ids.y) weights(i, j + 1) = 0.f;
    }
  }
}

// The ids that a thread block has in shared memory: of a stage's block of rows, and of its keys. Nothing without
// segments.
template <class C, bool SEGMENTS = C::SEGMENTS>
struct IdsOfTile {
  alignas(16) int32_t rows[C::STAGES][C::BLOCK_M + kRangeNumbers];
  alignas(16) int32_t keys[C::BLOCK_N / kWarpgroupRows][kWarpgroupRows + kRangeNumbers];
};
template <class C>
struct IdsOfTile<C, false> {};

// Of the producer: a block of rows' ids, or `groups` groups of keys' ids, on their way to shared memory beside the rows
// or keys themselves, for which the barrier waits, too.
template <class C, class Barrier, class Copy>
CUTE_DEVICE void load_row_ids(BackwardParams const& p, int batch, int m, IdsOfTile<C>& to, int stage, uint64_t& full) {
  if constexpr (C::SEGMENTS) {
    Barrier::expect_transaction(&full, sizeof(to.rows[0]));
    Copy::copy(p.row_ids + (int64_t(batch) * p.row_blocks + m) * (C::BLOCK_M + kRangeNumbers), &full, to.rows[stage],
               sizeof(to.rows[0]));
  }
}
template <class C, class Barrier, class Copy>
CUTE_DEVICE void load_key_ids(BackwardParams const& p, int batch, int group, int groups, IdsOfTile<C>& to,
                              uint64_t& full) {
  if constexpr (C::SEGMENTS) {
    int const bytes = groups * sizeof(to.keys[0]);
    Barrier::expect_transaction(&full, bytes);
    Copy::copy(p.key_ids + (int64_t(batch) * p.key_blocks * 2 + group) * (kWarpgroupRows + kRangeNumbers), &full,
               to.keys[0], bytes);
  }
}

// The blocks of rows that a work tile visits: all that see some of its keys, or its part of them.
template <class C>
CUTE_DEVICE Blocks rows_of_tile(BackwardParams const& p, typename C::MaskPolicy const& mask, WorkTile const& at) {
  if constexpr (C::SEGMENTS) {  // of which no parts are made
    RowSpan const found = p.row_spans[int64_t(at.batch) * p.key_blocks + at.block];
    return {found.begin, found.end};
  }
  Blocks const all = mask.blocks(at.block * C::BLOCK_N);
  if (p.parts == 1) return all;
  int const count = all.end - all.begin;
  return {all.begin + count * at.part / p.parts, all.begin + count * (at.part + 1) / p.parts};
}

// Applies them to weights, where a block of rows and keys is of more than one id.
template <class C, class Weights, class Coords>
CUTE_DEVICE void part_segments(Weights& weights, Coords const& coords, IdsOfTile<C> const& ids, int stage, int group) {
  if constexpr (C::SEGMENTS) {
    auto const *const row_ids = ids.rows[stage], *const key_ids = ids.keys[group];
    if (!all_same<C::BLOCK_M>(row_ids, key_ids)) part_segments(weights, coords, row_ids, key_ids);
  }
}

// Writes the ids from `first` to `end` - 1 to the begin of a block of SIZE, and behind it their range. By one warp.
template <int SIZE>
CUTE_DEVICE void copy_ids(int32_t const* ids, int first, int end, int32_t* block, int lane) {
  IdRange found = empty_range();
  for (int i = lane; i < SIZE; i += kWarpLanes) {
    bool const there = first + i < end;
    block[i] = there ? ids[first + i] : 0;
    if (there) widen(found, block[i]);
  }
  found = reduce_warp(found);
  if (lane == 0) *reinterpret_cast<IdRange*>(block + SIZE) = found;
}

// A cluster of thread blocks has one batch entry. A warp takes a block of rows or a group of keys and, after all of
// these are done, a block of keys, whose rows lie between the first and the last block with ids near its own.
template <class C>
__global__ void __cluster_dims__(kClusterSize, 1, 1) find_row_spans(__grid_constant__ BackwardParams const p) {
  constexpr int kRowIds = C::BLOCK_M + kRangeNumbers, kKeyIds = kWarpgroupRows + kRangeNumbers;
  int const batch = blockIdx.x / kClusterSize, lane = threadIdx.x % kWarpLanes;
  int const warps = kClusterSize * blockDim.x / kWarpLanes;
  int const warp = (blockIdx.x % kClusterSize * blockDim.x + threadIdx.x) / kWarpLanes;
  typename C::MaskPolicy const band(p, batch);
  int32_t* const row_ids = p.row_ids + int64_t(batch) * p.row_blocks * kRowIds;
  int32_t* const key_ids = p.key_ids + int64_t(batch) * p.key_blocks * 2 * kKeyIds;
  for (int m = warp; m < p.row_blocks; m += warps)
    copy_ids<C::BLOCK_M>(p.q_ids.data + batch * p.q_ids.batch, m * C::BLOCK_M, band.rows, row_ids + m * kRowIds, lane);
  for (int n = warp; n < 2 * p.key_blocks; n += warps)
    copy_ids<kWarpgroupRows>(p.k_ids.data + batch * p.k_ids.batch, n * kWarpgroupRows, band.N, key_ids + n * kKeyIds,
                             lane);
  cooperative_groups::this_cluster().sync();
  auto const range = [](int32_t const* block, int size) { return *reinterpret_cast<IdRange const*>(block + size); };
  for (int n = warp; n < p.key_blocks; n += warps) {
    Blocks const near = band.blocks(n * C::BLOCK_N);
    IdRange own = range(key_ids + 2 * n * kKeyIds, kWarpgroupRows);
    IdRange const other = range(key_ids + (2 * n + 1) * kKeyIds, kWarpgroupRows);
    own = {cute::min(own.least, other.least), cute::max(own.most, other.most)};
    int begin = kUnlimited, end = 0;
    for (int m = near.begin + lane; m < near.end; m += kWarpLanes)
      if (overlap(range(row_ids + m * kRowIds, C::BLOCK_M), own)) begin = cute::min(begin, m), end = m + 1;
    begin = __reduce_min_sync(0xffffffff, begin), end = __reduce_max_sync(0xffffffff, end);
    if (lane == 0) p.row_spans[int64_t(batch) * p.key_blocks + n] = end > 0 ? RowSpan{begin, end} : RowSpan{0, 0};
  }
}

template <class C>
void launch_find_row_spans(BackwardParams const& p, cudaStream_t stream) {
  int const most = std::max(p.row_blocks + 2 * p.key_blocks, 1);
  int const warps = std::min(kMaxWarps, (most + kClusterSize - 1) / kClusterSize);
  find_row_spans<C><<<kClusterSize * p.B, warps * kWarpLanes, 0, stream>>>(p);
}

}  // namespace sdpa_cuda
