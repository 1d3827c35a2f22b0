// What the backward does before and after its pass over the keys, for rows of queries, and for keys whose gradients are
// summed.
#pragma once
#include <cfloat>

#include "../key_mask.cuh"
#include "parts.cuh"

namespace sdpa_cuda {

// The first block of a head's rows among the blocks of all heads, in what the kernels keep for themselves. Each packed
// sequence begins with a new block.
template <class C>
CUTE_DEVICE int first_block_of(BackwardParams const& p, int batch, int head) {
  if (C::BAND && p.cu_q) return head * p.row_blocks + p.cu_q[batch] / C::BLOCK_M + batch;
  return (batch * p.H + head) * p.row_blocks;
}

// The same of a head's keys.
template <class C>
CUTE_DEVICE int first_key_block_of(BackwardParams const& p, int batch, int kv_head) {
  if (C::BAND && p.cu_k) return kv_head * p.key_blocks + p.cu_k[batch] / C::BLOCK_N + batch;
  return (batch * p.Hkv + kv_head) * p.key_blocks;
}

// The threads of a block of these kernels, and lanes that share a row of D numbers, eight each.
constexpr int kRowThreads = 256;
constexpr int lanes_of(int D) { return D <= 64 ? 8 : D <= 128 ? 16 : 32; }

// Thread blocks for the rows of all heads and batch entries, in one dimension, because the others end at 65535. The
// last rows come first: the pass begins with the first heads, whose zeros the L2 cache then still has, and ends with
// the last ones, whose sums it has.
struct RowGrid {
  int blocks, H;
  CUTE_DEVICE void decode(int& block, int& head, int& batch) const {
    int const index = gridDim.x - 1 - blockIdx.x;
    block = index % blocks;
    head = index / blocks % H;
    batch = index / blocks / H;
  }
};

// Before: base2 and delta of each row, zeros for its sums, and where blocks of keys add in their order, whose turn it
// is.
template <class C>
__global__ void __launch_bounds__(kRowThreads)
    prepare_rows(__grid_constant__ BackwardParams const p, __grid_constant__ RowGrid const grid) {
  using E = typename C::E;
  constexpr int kLanes = lanes_of(C::DV), kRowsOfBlock = kRowThreads / kLanes;
  let_kernel_behind_begin();
  int block, head, batch;
  grid.decode(block, head, batch);
  if (p.semaphores && blockIdx.x == 0 && threadIdx.x == 0) *p.counter = 0;
  Rows const rows = C::MaskPolicy::queries(p, batch);
  int const lane = threadIdx.x % kLanes, row = block * kRowsOfBlock + threadIdx.x / kLanes;
  if (block * kRowsOfBlock >= (rows.count + C::BLOCK_M - 1) / C::BLOCK_M * C::BLOCK_M) return;
  int64_t const place = int64_t(first_block_of<C>(p, batch, head)) * C::BLOCK_M + row;
  int64_t const given = (int64_t(rows.batch) * p.H + head) * p.query_rows + rows.first + row;
  bool const there = row < rows.count && (!C::BAND || !p.q_lengths || row < p.q_lengths[batch]);
  float const lse = there ? p.lse[given] : -INFINITY;
  float sum = 0.f;
  if (lse != -INFINITY && lane * 8 < p.Dv) {  // rows that see nothing may hold anything
    auto const read = [&](View const& t) {
      auto const* const first = static_cast<E const*>(t.data) + rows.batch * t.batch + head * t.head;
      cutlass::Array<E, 8> found;
      *reinterpret_cast<uint4*>(&found) =
          __ldg(reinterpret_cast<uint4 const*>(first + int64_t(rows.first + row) * t.row) + lane);
      return found;
    };
    auto const x = read(p.out), y = read(p.grad_out);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += float(x[i]) * float(y[i]);
  }
#pragma unroll
  for (int bit = kLanes / 2; bit; bit /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
  if (lane == 0) {
    float const delta = lse == -INFINITY ? 0.f : sum - (p.grad_lse ? p.grad_lse[given] : 0.f);
    float const base2 = lse * (C::BIAS ? 1.f : float(M_LOG2E));
    p.base2[place] =
        C::BEGINS_S ? (lse == -INFINITY ? -FLT_MAX : -base2 / p.scale_log2) : (lse == -INFINITY ? INFINITY : base2);
    p.delta[place] = C::BEGINS_DP ? -delta : C::DROPOUT ? delta / p.kept : delta;
    if (p.delta_rows && row < rows.count) p.delta_rows[given] = delta;
  }
  if (p.semaphores && row % C::BLOCK_M == 0 && lane == 0)
    p.semaphores[place / C::BLOCK_M] = typename C::MaskPolicy(p, batch).last_visit(row / C::BLOCK_M);
  float4* const sums = reinterpret_cast<float4*>(p.grad_q_acc + place * C::D);
#pragma unroll
  for (int i = lane; i < C::D / 4; i += kLanes) sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// Writes zeros to the rows of a gradient from `first` on, of one head of packed sequences.
template <class E>
CUTE_DEVICE void clear_rows(View const& t, int head, int first, int end, int D) {
  int const chunks = D / 8;
  E* const rows = static_cast<E*>(t.data) + head * t.head;
  for (int64_t i = threadIdx.x; i < int64_t(end - first) * chunks; i += blockDim.x)
    *reinterpret_cast<uint4*>(rows + (first + i / chunks) * t.row + i % chunks * 8) = make_uint4(0, 0, 0, 0);
}

// Writes rows of a gradient from their sums, which lie in the order of a WGMMA's registers, two warpgroups' one after
// the other.
template <int COLUMNS, class E>
CUTE_DEVICE void write_sums(float const* sums, float scale, E* target, int64_t stride, int row, int rows, int columns) {
  constexpr int kCount = kRows * COLUMNS / kThreads;  // numbers of a thread
  float4 const* const own = reinterpret_cast<float4 const*>(sums + threadIdx.x / 32 * 32 * kCount) + threadIdx.x % 32;
  uint32_t words[kCount / 2];
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    float4 const x = __ldcs(own + j * 32);
    cutlass::NumericArrayConverter<E, float, 4> cast;
    cutlass::Array<float, 4> from{x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    *reinterpret_cast<cutlass::Array<E, 4>*>(words + 2 * j) = cast(from);
  }
  store_rows<COLUMNS>(words, target, stride, row, rows, columns, threadIdx.x % 4);
}

// After: the gradient of q from its sums. Behind the last of packed sequences, gradients are 0; thread blocks of one
// more batch entry write that.
template <class C>
__global__ void __launch_bounds__(kRowThreads)
    finish_rows(__grid_constant__ BackwardParams const p, __grid_constant__ RowGrid const grid) {
  using E = typename C::E;
  static_assert(kRowThreads == C::CONSUMERS * kThreads);
  wait_for_kernel_in_front();
  int block, head, batch;
  grid.decode(block, head, batch);
  if (C::BAND && batch == p.B) {
    if (block > 0) return;
    clear_rows<E>(p.grad_q, head, p.cu_q[p.B], p.query_rows, p.D);
    if (head >= p.Hkv) return;
    clear_rows<E>(p.grad_k, head, p.cu_k[p.B], p.key_rows, p.D);
    clear_rows<E>(p.grad_v, head, p.cu_k[p.B], p.key_rows, p.Dv);
    return;
  }
  Rows const rows = C::MaskPolicy::queries(p, batch);
  if (block * C::BLOCK_M >= rows.count) return;
  int const consumer = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
  int const row = block * C::BLOCK_M + (C::SPLIT_D ? 0 : consumer * kRows) + thread / 32 * 16 + thread % 32 / 4;
  int const column = C::SPLIT_D ? consumer * C::DQ_COLUMNS : 0;
  E* const target = static_cast<E*>(p.grad_q.data) + rows.batch * p.grad_q.batch + head * p.grad_q.head +
                    int64_t(rows.first) * p.grad_q.row + column;
  write_sums<C::DQ_COLUMNS>(p.grad_q_acc + (int64_t(first_block_of<C>(p, batch, head)) + block) * C::BLOCK_M * C::D,
                            p.scale * p.kept, target, p.grad_q.row, row, rows.count, p.D - column);
}

// After: the gradients of k and v, where they were summed.
template <class C>
__global__ void __launch_bounds__(kRowThreads)
    finish_keys(__grid_constant__ BackwardParams const p, __grid_constant__ RowGrid const grid) {
  using E = typename C::E;
  int block, head, batch;
  grid.decode(block, head, batch);
  Rows const keys = C::MaskPolicy::keys(p, batch);
  if (block * C::BLOCK_N >= keys.count) return;
  int64_t const place = first_key_block_of<C>(p, batch, head) + block;
  int const consumer = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
  int const row = block * C::BLOCK_N + consumer * kRows + thread / 32 * 16 + thread % 32 / 4;
  auto const head_of = [&](View const& t) {
    return static_cast<E*>(t.data) + keys.batch * t.batch + head * t.head + int64_t(keys.first) * t.row;
  };
  write_sums<C::D>(p.grad_k_acc + place * C::BLOCK_N * C::D, p.scale * p.kept, head_of(p.grad_k), p.grad_k.row, row,
                   keys.count, p.D);
  write_sums<C::DV>(p.grad_v_acc + place * C::BLOCK_N * C::DV, p.kept, head_of(p.grad_v), p.grad_v.row, row, keys.count,
                    p.Dv);
}

template <class C>
void launch_prepare_rows(BackwardParams const& p, cudaStream_t stream) {
  constexpr int kRowsOfBlock = kRowThreads / lanes_of(C::DV);
  int const rows = (p.M + C::BLOCK_M - 1) / C::BLOCK_M * C::BLOCK_M;
  RowGrid const grid{(rows + kRowsOfBlock - 1) / kRowsOfBlock, p.H};
  prepare_rows<C><<<grid.blocks * p.H * p.B, kRowThreads, 0, stream>>>(p, grid);
}

template <class C>
void launch_finish_rows(BackwardParams const& p, cudaStream_t stream) {
  RowGrid const grid{(p.M + C::BLOCK_M - 1) / C::BLOCK_M, p.H};
  launch_early(finish_rows<C>, grid.blocks * p.H * (p.B + (p.cu_q ? 1 : 0)), kRowThreads, 0, stream, p, grid);
}

template <class C>
void launch_finish_keys(BackwardParams const& p, cudaStream_t stream) {
  RowGrid const grid{(p.N + C::BLOCK_N - 1) / C::BLOCK_N, p.Hkv};
  finish_keys<C><<<grid.blocks * p.Hkv * p.B, kRowThreads, 0, stream>>>(p, grid);
}

}  // namespace sdpa_cuda
