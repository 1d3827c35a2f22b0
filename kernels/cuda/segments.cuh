// The mask of segments as a policy, and the kernel that finds beforehand which keys a consumer's rows can see.
#pragma once
#include <cooperative_groups.h>

#include <algorithm>

#include "mask.cuh"

namespace sdpa_cuda {

// A row sees, of the keys inside its band, those of its own id. Blocks of keys are laid out as the band lays them out.
// The kernel find_spans has found which of them each consumer visits, and which of these need no mask because rows and
// keys have one id only. In sorted ids those blocks are next to each other.
template <int BLOCK_N, int ROWS>
struct SegmentMask : Mask<MaskKind::kSegments, BLOCK_N, ROWS> {
  using Band = Mask<MaskKind::kSegments, BLOCK_N, ROWS>;
  SegmentParams const& p;
  int batch;

  CUTE_DEVICE SegmentMask(SegmentParams const& p, int batch) : Band(p, batch), p(p), batch(batch) {}

  CUTE_DEVICE Span span_of(int row) const { return p.spans[int64_t(batch) * p.groups + row / ROWS]; }

  // From the first block that any consumer visits to the last. Producer and consumers get the same answer.
  CUTE_DEVICE Blocks blocks(int row0, int row_end) const {
    Blocks tile{kUnlimited, 0};
#pragma unroll 4
    for (int row = row0; row < row_end; row += ROWS) {
      Span const own = span_of(row);
      tile = {cute::min(tile.begin, own.begin), cute::max(tile.end, own.end)};
    }
    return tile.end > 0 ? tile : Blocks{0, 1};
  }
  CUTE_DEVICE Blocks blocks_of_consumer(Blocks tile, int row0, int) const {
    Span const own = span_of(row0);
    return own.end > 0 ? Blocks{own.begin, own.end} : Blocks{tile.end - 1, tile.end};
  }
  CUTE_DEVICE int unmasked_begin(int row0) const { return span_of(row0).unmasked_begin; }
  CUTE_DEVICE int unmasked_end(int row0) const { return span_of(row0).unmasked_end; }

  template <Masking MASKING, class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, Coords const& coords, int row0, int key0) const {
    using namespace cute;
    int const entry = opaque(batch);
    // The band is computed again: scores need the registers that it would stay in.
    Band(p, entry).template apply<MASKING>(scores, coords, row0, key0);
    int const column = get<1>(coords(0, 0));
    int32_t const* const q_ids = p.q_ids.data + entry * p.q_ids.batch;
    int32_t const* const k_ids = p.padded_k_ids + int64_t(entry) * p.blocks * BLOCK_N;
    int2 const* const pairs = reinterpret_cast<int2 const*>(k_ids + key0 + column);
    static_assert(BLOCK_N % 2 == 0);  // a thread has columns in pairs, the first of them even
#pragma unroll
    for (int i = 0; i < size<0>(scores); ++i) {
      int32_t const id = __ldg(q_ids + cute::min(row0 + int(get<0>(coords(i, 0))), p.M - 1));
#pragma unroll
      for (int j = 0; j < size<1>(scores); j += 2) {
        int2 const ids = __ldg(pairs + (int(get<1>(coords(0, j))) - column) / 2);
        if (ids.x != id) scores(i, j) = -INFINITY;
        if (ids.y != id) scores(i, j + 1) = -INFINITY;
      }
    }
  }
};

constexpr int kWarpLanes = 32, kMaxWarps = 32;
constexpr int kClusterSize = 8;  // thread blocks of a cluster: as many as every device grants

CUTE_DEVICE IdRange empty_range() { return {INT32_MAX, INT32_MIN}; }
CUTE_DEVICE void widen(IdRange& range, int32_t id) { range = {cute::min(range.least, id), cute::max(range.most, id)}; }
CUTE_DEVICE bool overlap(IdRange a, IdRange b) { return a.least <= b.most && b.least <= a.most; }
// Whether both hold one id only, and the same one.
CUTE_DEVICE bool same_single_id(IdRange a, IdRange b) {
  return a.least == a.most && b.least == a.least && b.most == a.most;
}

CUTE_DEVICE IdRange reduce_warp(IdRange range) {
  return {__reduce_min_sync(0xffffffff, range.least), __reduce_max_sync(0xffffffff, range.most)};
}

// Writes the ids of block n of a batch entry's keys to their padded positions, and returns their range. The numbers in
// the pad stay what they are.
template <int BLOCK_N, int ROWS>
CUTE_DEVICE IdRange pad_ids(Mask<MaskKind::kSegments, BLOCK_N, ROWS> const& band, int32_t const* ids, int n,
                            int32_t* padded, int lane) {
  IdRange found = empty_range();
  for (int key = n * BLOCK_N + lane; key < (n + 1) * BLOCK_N; key += kWarpLanes) {
    if (key < band.pad) continue;
    padded[key] = ids[key - band.pad];
    widen(found, padded[key]);
  }
  return reduce_warp(found);
}

// The blocks that the consumer with the rows from row0 on visits, out of those that the band leaves it. Its blocks
// without a mask count only where they are next to each other.
template <int BLOCK_N, int ROWS>
CUTE_DEVICE Span find_span(Mask<MaskKind::kSegments, BLOCK_N, ROWS> const& band, IdRange const* id_ranges,
                           int32_t const* ids, int row0, int row_end, int lane) {
  IdRange own = empty_range();
  for (int row = row0 + lane; row < row_end; row += kWarpLanes) widen(own, ids[row]);
  own = reduce_warp(own);
  Span found{kUnlimited, 0, kUnlimited, 0};
  int unmasked = 0;
  if (row0 < row_end) {
    Blocks const near = band.blocks(row0, row_end);
    int const first = cute::max(near.begin, band.unmasked_begin(row0)), end = band.unmasked_end(row0);
    for (int n = near.begin + lane; n < near.end; n += kWarpLanes) {
      IdRange const keys = id_ranges[n];
      if (overlap(keys, own)) found.begin = cute::min(found.begin, n), found.end = n + 1;
      if (!same_single_id(keys, own) || n < first || n >= end) continue;
      found.unmasked_begin = cute::min(found.unmasked_begin, n), found.unmasked_end = n + 1;
      ++unmasked;
    }
  }
  found.begin = __reduce_min_sync(0xffffffff, found.begin), found.end = __reduce_max_sync(0xffffffff, found.end);
  found.unmasked_begin = __reduce_min_sync(0xffffffff, found.unmasked_begin);
  found.unmasked_end = __reduce_max_sync(0xffffffff, found.unmasked_end);
  unmasked = __reduce_add_sync(0xffffffff, unmasked);
  if (unmasked == 0 || found.unmasked_end - found.unmasked_begin != unmasked)
    found.unmasked_begin = found.unmasked_end = 0;
  return found;
}

// A cluster of thread blocks has one batch entry. A warp takes a block of keys and, after all blocks are done, a group
// of rows.
template <int BLOCK_N, int ROWS>
__global__ void __cluster_dims__(kClusterSize, 1, 1) find_spans(__grid_constant__ SegmentParams const p) {
  int const batch = blockIdx.x / kClusterSize, lane = threadIdx.x % kWarpLanes;
  int const warps = kClusterSize * blockDim.x / kWarpLanes;
  int const warp = (blockIdx.x % kClusterSize * blockDim.x + threadIdx.x) / kWarpLanes;
  Mask<MaskKind::kSegments, BLOCK_N, ROWS> const band(p, batch);
  IdRange* const id_ranges = p.id_ranges + int64_t(batch) * p.blocks;
  int32_t* const padded = p.padded_k_ids + int64_t(batch) * p.blocks * BLOCK_N;
  for (int n = warp; n < band.N / BLOCK_N; n += warps) {
    IdRange const found = pad_ids(band, p.k_ids.data + batch * p.k_ids.batch, n, padded, lane);
    if (lane == 0) id_ranges[n] = found;
  }
  cooperative_groups::this_cluster().sync();
  for (int g = warp; g < p.groups; g += warps) {
    int const row0 = g * ROWS, row_end = cute::min(cute::min(p.M, band.rows), row0 + ROWS);
    Span const found = find_span(band, id_ranges, p.q_ids.data + batch * p.q_ids.batch, row0, row_end, lane);
    if (lane == 0) p.spans[int64_t(batch) * p.groups + g] = found;
  }
}

template <int BLOCK_N, int ROWS>
cudaError_t launch_find_spans(SegmentParams const& p, cudaStream_t stream) {
  int const most = std::max(p.groups, p.blocks);
  int const warps = std::min(kMaxWarps, (most + kClusterSize - 1) / kClusterSize);
  find_spans<BLOCK_N, ROWS><<<kClusterSize * p.B, warps * kWarpLanes, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sdpa_cuda
