// The mask of segments as a policy, and the kernel that finds beforehand which keys a group of queries can see.
#pragma once
#include <cooperative_groups.h>

#include <algorithm>

#include "mask.cuh"

namespace sdpa_cuda {

// Of what a band leaves, a row sees the keys of its own id. Blocks of keys are the band's; which of them a group of
// ROWS visits, and which of these are of its one id alone, was found before. In sorted ids those are next to each
// other.
template <int BN, int ROWS>
struct SegmentMask : Mask<MaskKind::kSegments, BN, ROWS> {
  using Band = Mask<MaskKind::kSegments, BN, ROWS>;
  SegmentParams const& p;
  int batch;

  CUTE_DEVICE SegmentMask(SegmentParams const& p, int batch) : Band(p, batch), p(p), batch(batch) {}

  CUTE_DEVICE Span span_of(int row) const { return p.spans[int64_t(batch) * p.groups + row / ROWS]; }

  // From the first block that any group of the rows visits to the last: the same for who loads and who multiplies.
  CUTE_DEVICE Blocks blocks(int row0, int row_end) const {
    Blocks all{kUnlimited, 0};
#pragma unroll 4
    for (int row = row0; row < row_end; row += ROWS) {
      Span const own = span_of(row);
      all = {cute::min(all.begin, own.begin), cute::max(all.end, own.end)};
    }
    return all.end > 0 ? all : Blocks{0, 1};
  }
  CUTE_DEVICE Blocks blocks_of_group(Blocks all, int row0, int) const {
    Span const own = span_of(row0);
    return own.end > 0 ? Blocks{own.begin, own.end} : Blocks{all.end - 1, all.end};
  }
  CUTE_DEVICE int whole(int row0) const { return span_of(row0).whole_end; }
  CUTE_DEVICE int reached(int row0) const { return span_of(row0).whole_begin; }

  template <Cut CUT, class Scores, class Place>
  CUTE_DEVICE void hide(Scores& scores, Place const& place, int row0, int key0) const {
    using namespace cute;
    int const entry = anew(batch);
    Band(p, entry).template hide<CUT>(scores, place, row0, key0);  // made again: registers are for the scores
    int const column = get<1>(place(0, 0));
    int32_t const* const q_ids = p.q_ids.data + entry * p.q_ids.batch;
    int32_t const* const k_ids = p.laid_k_ids + int64_t(entry) * p.blocks * BN;
    int2 const* const pairs = reinterpret_cast<int2 const*>(k_ids + key0 + column);
    static_assert(BN % 2 == 0);  // a thread has columns in pairs, the first of them even
#pragma unroll
    for (int i = 0; i < size<0>(scores); ++i) {
      int32_t const id = __ldg(q_ids + cute::min(row0 + int(get<0>(place(i, 0))), p.M - 1));
#pragma unroll
      for (int j = 0; j < size<1>(scores); j += 2) {
        int2 const ids = __ldg(pairs + (int(get<1>(place(0, j))) - column) / 2);
        if (ids.x != id) scores(i, j) = -INFINITY;
        if (ids.y != id) scores(i, j + 1) = -INFINITY;
      }
    }
  }
};

constexpr int kLanes = 32, kMostWarps = 32;
constexpr int kSharesOfEntry = 8;  // thread blocks of a cluster: as many as every device grants

CUTE_DEVICE Extent nothing() { return {INT32_MAX, INT32_MIN}; }
CUTE_DEVICE void widen(Extent& e, int32_t id) { e = {cute::min(e.least, id), cute::max(e.most, id)}; }
CUTE_DEVICE bool meet(Extent a, Extent b) { return a.least <= b.most && b.least <= a.most; }
CUTE_DEVICE bool are_one(Extent a, Extent b) { return a.least == a.most && b.least == a.least && b.most == a.most; }

CUTE_DEVICE Extent of_warp(Extent e) {
  return {__reduce_min_sync(0xffffffff, e.least), __reduce_max_sync(0xffffffff, e.most)};
}

// Block n of a batch entry's keys: its ids in their places, of which those before the first key stay what they are.
template <int BN, int ROWS>
CUTE_DEVICE Extent lay_out(Mask<MaskKind::kSegments, BN, ROWS> const& band, int32_t const* ids, int n, int32_t* laid,
                           int lane) {
  Extent found = nothing();
  for (int place = n * BN + lane; place < (n + 1) * BN; place += kLanes) {
    if (place < band.pad) continue;
    laid[place] = ids[place - band.pad];
    widen(found, laid[place]);
  }
  return of_warp(found);
}

// What the group of ROWS from row0 visits of the blocks that the band leaves it. Blocks that it sees whole count where
// they are next to each other.
template <int BN, int ROWS>
CUTE_DEVICE Span find_span(Mask<MaskKind::kSegments, BN, ROWS> const& band, Extent const* extents, int32_t const* ids,
                           int row0, int row_end, int lane) {
  Extent own = nothing();
  for (int row = row0 + lane; row < row_end; row += kLanes) widen(own, ids[row]);
  own = of_warp(own);
  Span found{kUnlimited, 0, kUnlimited, 0};
  int whole = 0;
  if (row0 < row_end) {
    Blocks const near = band.blocks(row0, row_end);
    int const first = cute::max(near.begin, band.reached(row0)), end = band.whole(row0);
    for (int n = near.begin + lane; n < near.end; n += kLanes) {
      Extent const keys = extents[n];
      if (meet(keys, own)) found.begin = cute::min(found.begin, n), found.end = n + 1;
      if (!are_one(keys, own) || n < first || n >= end) continue;
      found.whole_begin = cute::min(found.whole_begin, n), found.whole_end = n + 1;
      ++whole;
    }
  }
  found.begin = __reduce_min_sync(0xffffffff, found.begin), found.end = __reduce_max_sync(0xffffffff, found.end);
  found.whole_begin = __reduce_min_sync(0xffffffff, found.whole_begin);
  found.whole_end = __reduce_max_sync(0xffffffff, found.whole_end);
  whole = __reduce_add_sync(0xffffffff, whole);
  if (whole == 0 || found.whole_end - found.whole_begin != whole) found.whole_begin = found.whole_end = 0;
  return found;
}

// A cluster has a batch entry; a warp takes a block of keys, later a group of queries.
template <int BN, int ROWS>
__global__ void __cluster_dims__(kSharesOfEntry, 1, 1) find_spans(__grid_constant__ SegmentParams const p) {
  int const batch = blockIdx.x / kSharesOfEntry, lane = threadIdx.x % kLanes;
  int const warps = kSharesOfEntry * blockDim.x / kLanes;
  int const warp = (blockIdx.x % kSharesOfEntry * blockDim.x + threadIdx.x) / kLanes;
  Mask<MaskKind::kSegments, BN, ROWS> const band(p, batch);
  Extent* const extents = p.extents + int64_t(batch) * p.blocks;
  int32_t* const laid = p.laid_k_ids + int64_t(batch) * p.blocks * BN;
  for (int n = warp; n < band.N / BN; n += warps) {
    Extent const found = lay_out(band, p.k_ids.data + batch * p.k_ids.batch, n, laid, lane);
    if (lane == 0) extents[n] = found;
  }
  cooperative_groups::this_cluster().sync();
  for (int g = warp; g < p.groups; g += warps) {
    int const row0 = g * ROWS, row_end = cute::min(cute::min(p.M, band.rows), row0 + ROWS);
    Span const found = find_span(band, extents, p.q_ids.data + batch * p.q_ids.batch, row0, row_end, lane);
    if (lane == 0) p.spans[int64_t(batch) * p.groups + g] = found;
  }
}

template <int BN, int ROWS>
cudaError_t launch_find_spans(SegmentParams const& p, cudaStream_t stream) {
  int const most = std::max(p.groups, p.blocks);
  int const warps = std::min(kMostWarps, (most + kSharesOfEntry - 1) / kSharesOfEntry);
  find_spans<BN, ROWS><<<kSharesOfEntry * p.B, warps * kLanes, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sdpa_cuda
