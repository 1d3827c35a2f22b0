// What the kernels for sm_90a share: barriers, positions in pipelines, layouts of fragments, WGMMA, stores, TMA.
#pragma once
#include <cuda_runtime.h>

#include <cute/tensor.hpp>  // before other headers of CuTe, which count on it
// clang-format off
#include <cute/arch/copy_sm90.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>
#include <cutlass/gemm/collective/builders/sm90_common.inl>
// clang-format on
#include <atomic>
#include <type_traits>

#include "../mask.cuh"
#include "../params.h"

namespace sdpa_cuda {

using namespace cute;

constexpr int kRows = kWarpgroupRows;
constexpr int kThreads = 128;        // of a warpgroup
constexpr int kWarps = 4;            // of a warpgroup
constexpr int kNoTile = -1;          // the index that ends a persistent thread block
constexpr int kSwizzleBytes = 1024;  // alignment of a swizzled tile in shared memory

template <Element ELEMENT>
using ElementOf = std::conditional_t<ELEMENT == Element::kBFloat16, cutlass::bfloat16_t, cutlass::half_t>;

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;

// A position in a circular pipeline, in one register.
template <int STAGES>
struct PipelineState {
  static_assert((STAGES & (STAGES - 1)) == 0, "a power of two");
  uint32_t count = 0;
  CUTE_DEVICE int stage() const { return count % STAGES; }
  CUTE_DEVICE uint32_t phase() const { return count / STAGES & 1; }
  CUTE_DEVICE void advance() { ++count; }
};

// An accumulator's layout ((2, 2, n), 1, 1) as [2 rows, (2, n) columns].
template <class L>
CUTE_DEVICE auto rows_of(L const& l) {
  return make_layout(make_layout(get<0, 1>(l)), make_layout(get<0, 0>(l), get<0, 2>(l)));
}

// An accumulator's layout ((2, 2, n), 1, 1) as that of a WGMMA's register operand, ((2, 2, 2), 1, n / 2).
template <class L>
CUTE_DEVICE auto operand_of(L const& l) {
  auto pairs = logical_divide(get<0, 2>(l), Layout<_2>{});
  return make_layout(make_layout(get<0, 0>(l), get<0, 1>(l), get<0>(pairs)), get<1>(l), get<1>(pairs));
}

// Issues the WGMMAs of acc += a b, or with ZERO those of acc = a b, and commits them as one batch.
template <bool ZERO, class Mma, class A, class B, class Acc>
CUTE_DEVICE void issue_wgmma(Mma& mma, A const& a, B const& b, Acc& acc) {
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ = ZERO ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
#pragma unroll
  for (int k = 0; k < size<2>(a); ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, k), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// The same, with the first HELD slices of a, of 16 columns, in registers; `mma_held` is their WGMMA.
template <bool ZERO, int HELD, class Mma, class A, class B, class Acc, class MmaHeld, class Held>
CUTE_DEVICE void issue_wgmma(Mma& mma, A const& a, B const& b, Acc& acc, MmaHeld& mma_held, Held& held) {
  if constexpr (HELD == 0) return issue_wgmma<ZERO>(mma, a, b, acc);
  warpgroup_fence_operand(acc);
  warpgroup_fence_operand(held);
  warpgroup_arrive();
  mma_held.accumulate_ = ZERO ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
#pragma unroll
  for (int k = 0; k < HELD; ++k) {
    cute::gemm(mma_held, held(_, _, k), b(_, _, k), acc);
    mma_held.accumulate_ = GMMA::ScaleOut::One;
  }
  mma.accumulate_ = GMMA::ScaleOut::One;
#pragma unroll
  for (int k = HELD; k < size<2>(a); ++k) cute::gemm(mma, a(_, _, k), b(_, _, k), acc);
  warpgroup_commit_batch();
}

// A tile in shared memory as the operand a or b of a warpgroup's WGMMA.
template <class Mma, class Tile>
CUTE_DEVICE auto operand_a(Mma const& mma, Tile const& tile, int thread) {
  auto const slice = mma.get_slice(thread);
  return slice.make_fragment_A(slice.partition_A(tile));
}
template <class Mma, class Tile>
CUTE_DEVICE auto operand_b(Mma const& mma, Tile const& tile, int thread) {
  auto const slice = mma.get_slice(thread);
  return slice.make_fragment_B(slice.partition_B(tile));
}

// Reads a register operand of a warpgroup's WGMMA from a swizzled tile in shared memory.
template <class Mma, class Source, class Operand>
CUTE_DEVICE void read_operand(Mma const& mma, Source const& source, Operand& operand, int thread) {
  auto const tiled = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, typename Operand::value_type>{}, mma);
  auto const slice = tiled.get_slice(thread);
  copy(tiled, slice.partition_S(source), slice.retile_D(operand));
}

// A fragment in shared memory whose descriptors are computed where they are used. Those of a loop's invariants would be
// kept in registers for the whole loop.
template <class Fragment>
CUTE_DEVICE auto anew(Fragment const& fragment) {
  return make_tensor(fragment.data() + opaque(0), fragment.layout());
}

template <class Target, class Source>
CUTE_DEVICE void convert(Source const& source, Target& target) {
  constexpr int kCount = decltype(size(source))::value;
  using From = cutlass::Array<float, kCount>;
  using To = cutlass::Array<typename Target::value_type, kCount>;
  cutlass::NumericArrayConverter<typename Target::value_type, float, kCount> cast;
  *reinterpret_cast<To*>(target.data()) = cast(*reinterpret_cast<From const*>(source.data()));
}

// Scores / scale become softcap * tanh(score / softcap) / scale. Near 0, cancellation loses 1e-7 of the softcap. The
// catalog does not give this kernel large softcaps for that reason.
template <class Scores>
CUTE_DEVICE void cap(Scores& scores, FlashParams const& p) {
  float const inside = 2.f * float(M_LOG2E) * p.scale / p.softcap, outside = p.softcap / p.scale;
#pragma unroll
  for (int i = 0; i < size(scores); ++i)
    scores(i) = outside - __fdividef(2.f * outside, 1.f + exp2f(scores(i) * inside));
}

// Writes rows of the output, which a quad of lanes holds in pairs of columns. A transpose among its lanes gives each
// lane 16 bytes in a row of memory; an exchange between two quads, whose rows are neighbours, leads to writes of 128
// bytes, a line of the cache. `row` is this quad's first one, of which the second one is 8 below it.
template <int D, class E>
CUTE_DEVICE void store_rows(uint32_t const* words, E* out, int64_t stride, int row, int rows, int columns, int lane) {
  using Words = cutlass::Array<uint32_t, 4>;
  auto const transpose = [&](Words x) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      bool const high = lane & bit;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j & bit) continue;
        uint32_t const got = __shfl_xor_sync(0xffffffff, high ? x[j] : x[j | bit], bit);
        x[j] = high ? got : x[j];
        x[j | bit] = high ? x[j | bit] : got;
      }
    }
    return x;
  };
  auto const transposed = [&](int i, int b) {  // 32 columns of row i
    uint32_t const* const x = words + 8 * b + i;
    return transpose({x[0], x[2], x[4], x[6]});
  };
  auto const write = [&](auto const& x, int at, int column) {
    if (at < rows && column < columns)
      *reinterpret_cast<uint4*>(out + at * stride + column) = make_uint4(x[0], x[1], x[2], x[3]);
  };
  bool const odd = row & 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int b = 0; b < D / 64; ++b) {
      auto x = transposed(i, 2 * b), y = transposed(i, 2 * b + 1);
      // Of the even row, the odd quad gets the right half; of the odd row, the even quad gets the left one.
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t const got = __shfl_xor_sync(0xffffffff, odd ? x[j] : y[j], 4);
        x[j] = odd ? got : x[j];
        y[j] = odd ? y[j] : got;
      }
      int const column = 64 * b + 32 * odd + 8 * lane;
      write(x, (row & ~1) + 8 * i, column);
      write(y, (row | 1) + 8 * i, column);
    }
    if constexpr (D % 64 >= 32) write(transposed(i, D / 64 * 2), row + 8 * i, D / 64 * 64 + 8 * lane);
  }
  static_assert(D % 16 == 0);
  if constexpr (D % 32 != 0) {  // 16 columns of both rows
    uint32_t const* const x = words + D / 8 * 2 - 4;
    write(transpose({x[0], x[2], x[1], x[3]}), row + lane / 2 * 8, D - 16 + lane % 2 * 8);
  }
}

// Says that the registers of an accumulator hold nothing that is needed. A product that begins with zeros would else
// keep its old numbers alive, since a WGMMA is written as reading what it writes.
template <class Acc>
CUTE_DEVICE void forget(Acc& acc) {
#pragma unroll
  for (int i = 0; i < size(acc); ++i) asm volatile("" : "=f"(acc(i)));
}

// Adds bytes of shared memory to float32 numbers in global memory, later.
CUTE_DEVICE void add_later(float* target, float const* source, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
               "r"(cast_smem_ptr_to_uint(source)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the numbers that this thread adds later have been read from shared memory.
CUTE_DEVICE void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until the numbers that this thread adds later have been added.
CUTE_DEVICE void wait_until_added() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Waits until it is this block's turn, and sees what those before it added.
CUTE_DEVICE void wait_for_turn(int32_t const* semaphore, int block) {
  int32_t found;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(semaphore) : "memory");
  while (found != block);
}

// It is the turn of the block in front.
CUTE_DEVICE void pass_turn(int32_t* semaphore) {
  asm volatile("red.release.gpu.global.add.s32 [%0], -1;" ::"l"(semaphore) : "memory");
}

// Writes a warp's registers of an accumulator to shared memory, in the order that write_sums reads.
template <class Acc>
CUTE_DEVICE void stage(Acc const& acc, float* staged) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < size(acc) / 4; ++j)
    *reinterpret_cast<float4*>(staged + (j * 32 + lane) * 4) =
        make_float4(acc(4 * j), acc(4 * j + 1), acc(4 * j + 2), acc(4 * j + 3));
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
}

// The same, and adds them to `sums`.
template <class Acc>
CUTE_DEVICE void stage_and_add(Acc const& acc, float* staged, float* sums) {
  if (threadIdx.x % 32 == 0) wait_until_read();  // what was staged before
  __syncwarp();
  stage(acc, staged);
  if (threadIdx.x % 32 == 0) add_later(sums, staged, 32 * size(acc) * sizeof(float));
}

// Sets the rows from `first` on of a tile in shared memory to 0. Behind a length lies anything, and behind a packed
// sequence the next one. A NaN there times a weight of 0 would be NaN. Every consumer writes these zeros for itself.
template <int ROWS, class Tile>
CUTE_DEVICE void clear_from(Tile const& tile, int first) {
  int const id = opaque(threadIdx.x), thread = id % kThreads;  // not kept in registers for this
  constexpr int kChunks = decltype(size<1>(tile))::value / 8;  // of 16 bytes, which the swizzle leaves together
  for (int i = cute::max(0, first) * kChunks + thread; i < ROWS * kChunks; i += kThreads)
    *reinterpret_cast<uint4*>(const_cast<void*>(static_cast<void const*>(&tile(i / kChunks, i % kChunks * 8)))) =
        make_uint4(0, 0, 0, 0);
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(kThreads, id / kThreads);
}

// The same for a tile of which `count` rows are of its sequence. Without lengths and packed sequences, TMA wrote zeros
// behind these.
template <int ROWS, class Tile>
CUTE_DEVICE void clear_behind(Tile const& tile, int count, bool may_end) {
  if (count < ROWS && may_end) clear_from<ROWS>(tile, count);
}

// Queries or keys for TMA: (rows, D, heads, batch).
template <class E>
auto rows_tensor(View const& t, int rows, int D, int heads, int batch) {
  return make_tensor(make_gmem_ptr(static_cast<E const*>(t.data)), make_shape(rows, D, heads, batch),
                     make_stride(t.row, _1{}, t.head, t.batch));
}

// Values for TMA: (D, rows, heads, batch).
template <class E>
auto columns_tensor(View const& t, int rows, int D, int heads, int batch) {
  return make_tensor(make_gmem_ptr(static_cast<E const*>(t.data)), make_shape(D, rows, heads, batch),
                     make_stride(_1{}, t.row, t.head, t.batch));
}

// Launches a kernel that may begin before the one in front of it in the stream has ended (programmatic dependent
// launch). It calls `wait_for_kernel_in_front` before it reads or writes what that one writes.
template <class... Params>
void launch_early(void (*kernel)(Params...), int grid, int threads, int bytes, cudaStream_t stream,
                  std::common_type_t<Params> const&... params) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = bytes, config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, params...);
}

// Waits until the kernel in front has ended, and sees what it wrote.
CUTE_DEVICE void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Thread blocks of the kernel behind, if it is launched early, may begin wherever there is room.
CUTE_DEVICE void let_kernel_behind_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Lets a kernel have so much shared memory, once on each device. C is the kernel's configuration: a kernel has one.
template <class C, class Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, int bytes, int device) {
  static std::atomic<uint64_t> allowed{0};  // a bit for each device
  uint64_t const bit = device < kMaxDevices ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  cudaError_t const refused = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (refused == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return refused == cudaSuccess ? refused : cudaGetLastError();  // or the next launch would seem to fail
}

}  // namespace sdpa_cuda
