// Flash attention forward for sm_90a. A warp loads by TMA; two to four groups of four warps multiply by wgmma, each 64
// rows of queries.
//
// The design is FlashAttention-3's (Shah et al., arXiv 2407.08608): scores stay in registers, exponentials are the
// register operand of the second product, the scores of a block of keys are under way while the block before is
// multiplied by its values. Heads in sections, blocks drawn from a counter and the output by transposing quads, which
// leaves shared memory to the next tile, are ours.
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
#include "../scheduler.cuh"
#include "../segments.cuh"
#include "../softmax.cuh"
#include "tiles.cuh"

namespace sdpa_cuda {

using namespace cute;

constexpr int kRows = kGroupRows;
constexpr int kThreads = 128;  // of a group
constexpr int kWarps = 4;      // of a group
// Named barriers, behind those that CUTLASS keeps for itself: of turns, which two groups take at most, then one for
// each of four groups. The last of the hardware's 16 nobody meets.
constexpr int kTurnBarrier = 0, kClearBarrier = 2, kMostGroups = 4, kNeverBarrier = 15;
static_assert(cutlass::arch::NamedBarrier::ReservedNamedBarrierCount + kClearBarrier + kMostGroups <= kNeverBarrier);
constexpr int kNoBlock = -1;
constexpr int kSwizzleBytes = 1024;  // alignment of a tile in shared memory

template <Element ELEMENT>
using ElementOf = std::conditional_t<ELEMENT == Element::kBFloat16, cutlass::bfloat16_t, cutlass::half_t>;

template <class E_, int D_, int DV_, MaskKind MASK_, int GROUPS_>
struct Config {
  using E = E_;
  static constexpr MaskKind MASK = MASK_;
  static constexpr int D = D_, DV = DV_, GROUPS = GROUPS_, BM = kRows * GROUPS;
  static_assert(GROUPS <= kMostGroups);
  static constexpr Tile TILE = tile_of<D, DV, MASK, GROUPS>();
  static constexpr int BN = TILE.keys, STAGES = TILE.stages;
  static constexpr bool CUT = MASK != MaskKind::kNone, SEGMENTS = MASK == MaskKind::kSegments;
  static constexpr bool PACKED = MASK == MaskKind::kBand, BAND = PACKED || SEGMENTS;
  using Seen = std::conditional_t<SEGMENTS, SegmentMask<BN, kRows>, Mask<MASK, BN, kRows>>;
  using Params = std::conditional_t<SEGMENTS, SegmentParams, FlashParams>;
  static constexpr int THREADS = kThreads * (GROUPS + 1);
  // Registers per thread, of as many as the launch had: 40 + 2 x 232 = 3 x 168, 32 + 3 x 160 = 4 x 128,
  // 32 + 4 x 112 = 5 x 96.
  static constexpr int LOADER_REGISTERS = GROUPS >= 3 ? 32 : 40;
  static constexpr int GROUP_REGISTERS = GROUPS == 4 ? 112 : GROUPS == 3 ? 160 : 232;

  template <GMMA::Major MAJOR, int ROWS, int COLUMNS>
  using Atom = decltype(cutlass::gemm::collective::detail::ss_smem_selector<MAJOR, E, Int<ROWS>, Int<COLUMNS>>());
  using LayoutQ = decltype(tile_to_shape(Atom<GMMA::Major::K, kRows, D>{}, Shape<Int<kRows>, Int<D>, Int<GROUPS>>{}));
  using LayoutK = decltype(tile_to_shape(Atom<GMMA::Major::K, BN, D>{}, Shape<Int<BN>, Int<D>, Int<STAGES>>{}));
  // Values as (DV, keys): in memory they are (keys, DV), which the product can read so.
  using LayoutV = decltype(tile_to_shape(Atom<GMMA::Major::MN, DV, BN>{}, Shape<Int<DV>, Int<BN>, Int<STAGES>>{},
                                         Step<_2, _1, _3>{}));
  using MmaS = decltype(make_tiled_mma(GMMA::ss_op_selector<E, E, float, Shape<Int<kRows>, Int<BN>, Int<D>>>()));
  using MmaO = decltype(make_tiled_mma(
      GMMA::rs_op_selector<E, E, float, Shape<Int<kRows>, Int<DV>, Int<BN>>, GMMA::Major::K, GMMA::Major::MN>()));
};

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;

template <class C>
struct Shared {
  alignas(kSwizzleBytes) array_aligned<typename C::E, cosize_v<typename C::LayoutQ>> q;
  alignas(kSwizzleBytes) array_aligned<typename C::E, cosize_v<typename C::LayoutK>> k;
  alignas(kSwizzleBytes) array_aligned<typename C::E, cosize_v<typename C::LayoutV>> v;
  int number[C::GROUPS];  // of the block whose queries are there; none after the last
  uint64_t q_full[C::GROUPS], q_empty[C::GROUPS];
  uint64_t k_full[C::STAGES], k_empty[C::STAGES], v_full[C::STAGES], v_empty[C::STAGES];

  CUTE_DEVICE void init_barriers() {
    for (int i = 0; i < C::GROUPS; ++i) {
      Full::init(&q_full[i], 1);
      Empty::init(&q_empty[i], kThreads);  // each has read the number
    }
    for (int i = 0; i < C::STAGES; ++i) {
      Full::init(&k_full[i], 1);
      Full::init(&v_full[i], 1);
      Empty::init(&k_empty[i], C::GROUPS * kWarps);
      Empty::init(&v_empty[i], C::GROUPS * kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
};

// A place in a ring of stages, in one register.
template <int STAGES>
struct Ring {
  static_assert((STAGES & (STAGES - 1)) == 0, "a power of two");
  uint32_t count = 0;
  CUTE_DEVICE int stage() const { return count % STAGES; }
  CUTE_DEVICE uint32_t phase() const { return count / STAGES & 1; }
  CUTE_DEVICE void next() { ++count; }
};

template <class C, class TmaQ, class TmaK, class TmaV>
struct Loader {
  using E = typename C::E;
  TmaQ const& tma_q;
  TmaK const& tma_k;
  TmaV const& tma_v;
  typename C::Params const& p;
  Shared<C>& s;
  Ring<C::STAGES> k_ring, v_ring;
  Ring<1> q_ring;

  template <class Tma, class Source, class Target>
  CUTE_DEVICE static void load(Tma const& tma, TMA::CacheHintSm90 hint, uint64_t& full, Source const& source,
                               Target&& target) {
    constexpr uint32_t kBytes = decltype(size(target.layout()))::value * sizeof(E);
    Full::arrive_and_expect_tx(&full, kBytes);
    copy(tma.with(full, 0, hint), source, target);
  }

  CUTE_DEVICE void run(Scheduler const& scheduler) {
    Tensor mQ = tma_q.get_tma_tensor(make_shape(p.query_rows, p.D, p.H, p.B));
    Tensor mK = tma_k.get_tma_tensor(make_shape(p.key_rows, p.D, p.Hkv, p.B));
    Tensor mV = tma_v.get_tma_tensor(make_shape(p.Dv, p.key_rows, p.Hkv, p.B));
    auto slice_q = tma_q.get_slice(_0{});
    auto slice_k = tma_k.get_slice(_0{});
    auto slice_v = tma_v.get_slice(_0{});
    Tensor sQ = slice_q.partition_D(make_tensor(make_smem_ptr(s.q.data()), typename C::LayoutQ{}));
    Tensor sK = slice_k.partition_D(make_tensor(make_smem_ptr(s.k.data()), typename C::LayoutK{}));
    Tensor sV = slice_v.partition_D(make_tensor(make_smem_ptr(s.v.data()), typename C::LayoutV{}));
    for (int number = blockIdx.x, after; number < scheduler.all; number = after) {
      after = scheduler.next(number, p.counter);  // long before it is needed
      Work const w = scheduler.locate(number);
      Rows const queries = C::Seen::queries(p, w.batch), keys = C::Seen::keys(p, w.batch);
      if (C::PACKED && w.block * C::BM >= queries.count) continue;
      typename C::Seen const mask(p, w.batch);
      Blocks const blocks = mask.blocks(w.block * C::BM, cute::min(p.M, (w.block + 1) * C::BM));
      int const first = keys.first - mask.pad;
      Tensor gQ = local_tile(domain_offset(make_coord(queries.first, _0{}), mQ(_, _, w.head, queries.batch)),
                             Shape<Int<kRows>, Int<C::D>>{}, make_coord(_, _0{}));
      Tensor gK = local_tile(domain_offset(make_coord(first, _0{}), mK(_, _, w.kv_head, keys.batch)),
                             Shape<Int<C::BN>, Int<C::D>>{}, make_coord(_, _0{}));
      Tensor gV = local_tile(domain_offset(make_coord(_0{}, first), mV(_, _, w.kv_head, keys.batch)),
                             Shape<Int<C::DV>, Int<C::BN>>{}, make_coord(_0{}, _));
      Tensor tQ = slice_q.partition_S(gQ);
      Tensor tK = slice_k.partition_S(gK);
      Tensor tV = slice_v.partition_S(gV);
      // Keys and values are read again by other tiles of the head.
      auto const keep = TMA::CacheHintSm90::EVICT_LAST;
      auto load_k = [&](int n) {
        int const i = k_ring.stage();
        Empty::wait(&s.k_empty[i], k_ring.phase() ^ 1);
        load(tma_k, keep, s.k_full[i], tK(_, _, _, n), sK(_, _, _, i));
        k_ring.next();
      };
      auto load_v = [&](int n) {
        int const i = v_ring.stage();
        Empty::wait(&s.v_empty[i], v_ring.phase() ^ 1);
        load(tma_v, keep, s.v_full[i], tV(_, _, _, n), sV(_, _, _, i));
        v_ring.next();
      };
      constexpr int kStep = C::Seen::ASCENDS ? 1 : -1;
      int n = C::Seen::ASCENDS ? blocks.begin : blocks.end - 1;
      int const last = C::Seen::ASCENDS ? blocks.end - 1 : blocks.begin;
      load_k(n);
#pragma unroll 1
      for (int g = 0; g < C::GROUPS; ++g) {
        Empty::wait(&s.q_empty[g], q_ring.phase() ^ 1);
        say(g, number);
        load(tma_q, TMA::CacheHintSm90::EVICT_FIRST, s.q_full[g], tQ(_, _, _, w.block * C::GROUPS + g), sQ(_, _, _, g));
      }
      q_ring.next();
      // four loads at once take more than the loader's registers
#pragma unroll 1
      for (; n != last; n += kStep) {
        load_k(n + kStep);
        load_v(n);
      }
      load_v(n);
    }
#pragma unroll 1
    for (int g = 0; g < C::GROUPS; ++g) {
      Empty::wait(&s.q_empty[g], q_ring.phase() ^ 1);
      say(g, kNoBlock);
      Full::arrive(&s.q_full[g]);
    }
  }

  // Before the arrival that lets the group read it: volatile, so that the compiler keeps the order.
  CUTE_DEVICE void say(int group, int number) { *static_cast<int volatile*>(&s.number[group]) = number; }
};

// The accumulator ((2, 2, n), 1, 1) as (2 rows, (2, n) columns).
template <class L>
CUTE_DEVICE auto rows_of(L const& l) {
  return make_layout(make_layout(get<0, 1>(l)), make_layout(get<0, 0>(l), get<0, 2>(l)));
}

// The accumulator ((2, 2, n), 1, 1) as the operand ((2, 2, 2), 1, n / 2) of the next product, in the same registers.
template <class L>
CUTE_DEVICE auto operand_of(L const& l) {
  auto pairs = logical_divide(get<0, 2>(l), Layout<_2>{});
  return make_layout(make_layout(get<0, 0>(l), get<0, 1>(l), get<0>(pairs)), get<1>(l), get<1>(pairs));
}

// Issues a product; ZERO: it does not add to what is there.
template <bool ZERO, class Mma, class A, class B, class Acc>
CUTE_DEVICE void issue(Mma& mma, A const& a, B const& b, Acc& acc) {
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

template <class Target, class Source>
CUTE_DEVICE void convert(Source const& source, Target& target) {
  constexpr int kCount = decltype(size(source))::value;
  using From = cutlass::Array<float, kCount>;
  using To = cutlass::Array<typename Target::value_type, kCount>;
  cutlass::NumericArrayConverter<typename Target::value_type, float, kCount> cast;
  *reinterpret_cast<To*>(target.data()) = cast(*reinterpret_cast<From const*>(source.data()));
}

// ptxas moves the wait for the second product above all exponentials unless something that may have an effect, and that
// depends on their sum, stands between: sums are not negative, so the barrier is never met.
CUTE_DEVICE void hold_until(float sum) {
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p bar.sync %1, %2; }" ::"f"(sum), "n"(kNeverBarrier),
               "n"(kThreads)
               : "memory");
}

// Groups issue their products in turns: a group may when the one before it has.
template <class C>
struct Turns {
  int group;
  static constexpr bool ON = C::TILE.turns;
  static_assert(!ON || C::GROUPS == 2);
  CUTE_DEVICE void begin() const {
    if (ON && group == C::GROUPS - 1) cutlass::arch::NamedBarrier::arrive(2 * kThreads, kTurnBarrier);
  }
  CUTE_DEVICE void take() const {
    if (ON) cutlass::arch::NamedBarrier::sync(2 * kThreads, kTurnBarrier + group);
  }
  CUTE_DEVICE void pass() const {
    if (ON) cutlass::arch::NamedBarrier::arrive(2 * kThreads, kTurnBarrier + (group + 1) % C::GROUPS);
  }
  CUTE_DEVICE void end() const {  // the last arrival is for nobody
    if (ON && group == 0) cutlass::arch::NamedBarrier::sync(2 * kThreads, kTurnBarrier);
  }
};

// Writes rows of a quad, which holds them in pairs of columns: transposed among its lanes, each has 16 bytes of its
// own.
template <int D, class E>
CUTE_DEVICE void store_rows(uint32_t const* words, E* out, int64_t stride, int row, int rows, int columns, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int b = 0; b < D / 32; ++b) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = words[(4 * b + j) * 2 + i];
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
      int const column = 32 * b + 8 * lane;
      if (row + 8 * i < rows && column < columns)
        *reinterpret_cast<uint4*>(out + (row + 8 * i) * stride + column) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

// scores / scale become softcap * tanh(score / softcap) / scale. What cancels near 0 is 1e-7 of the softcap: of large
// ones the catalog knows that this kernel does not take them.
template <class Scores>
CUTE_DEVICE void cap(Scores& scores, FlashParams const& p) {
  float const inside = 2.f * float(M_LOG2E) * p.scale / p.softcap, outside = p.softcap / p.scale;
#pragma unroll
  for (int i = 0; i < size(scores); ++i)
    scores(i) = outside - __fdividef(2.f * outside, 1.f + exp2f(scores(i) * inside));
}

// 0, and a log-sum-exp of -inf, in rows behind the last packed sequence, of which every group takes its part.
template <class C>
CUTE_DEVICE void clear_behind(FlashParams const& p, int group, int thread) {
  int const begin = p.cu_q[p.B], chunks = p.Dv / 8, parts = (p.query_rows - begin + kRows - 1) / kRows;
  for (int part = blockIdx.x * C::GROUPS + group; part < parts * p.H; part += gridDim.x * C::GROUPS) {
    int const head = part / parts, first = begin + part % parts * kRows;
    int const rows = cute::min(int(kRows), p.query_rows - first);
    auto* const out = static_cast<typename C::E*>(p.out.data) + head * p.out.head + int64_t(first) * p.out.row;
    for (int i = thread; i < rows * chunks; i += kThreads)
      *reinterpret_cast<uint4*>(out + i / chunks * p.out.row + i % chunks * 8) = make_uint4(0, 0, 0, 0);
    if (thread < rows) p.lse[int64_t(head) * p.query_rows + first + thread] = -INFINITY;
  }
}

// 0 in the values before a packed sequence's first, which are another's: NaN times an exponential of 0 would be NaN.
// Every group writes these zeros for itself.
template <class C>
CUTE_DEVICE void clear_values(Shared<C>& s, int stage, int count, int group, int thread) {
  Tensor values = make_tensor(make_smem_ptr(s.v.data()), typename C::LayoutV{});
  constexpr int kChunks = C::DV / 8;  // of 16 bytes, which the swizzle leaves together
  for (int i = thread; i < count * kChunks; i += kThreads)
    *reinterpret_cast<uint4*>(&values(i % kChunks * 8, i / kChunks, stage)) = make_uint4(0, 0, 0, 0);
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(kThreads, kClearBarrier + group);
}

template <class C>
CUTE_DEVICE void attend(typename C::Params const& p, Shared<C>& s, Scheduler const& scheduler, int group) {
  using E = typename C::E;
  int const thread = threadIdx.x % kThreads;
  bool const signals = thread % 32 == 0;
  typename C::MmaS mma_s;
  typename C::MmaO mma_o;
  auto slice_s = mma_s.get_slice(thread);
  auto slice_o = mma_o.get_slice(thread);
  Tensor sQ = make_tensor(make_smem_ptr(s.q.data()), typename C::LayoutQ{});
  Tensor q = slice_s.make_fragment_A(slice_s.partition_A(sQ(_, _, group)));
  Tensor k =
      slice_s.make_fragment_B(slice_s.partition_B(make_tensor(make_smem_ptr(s.k.data()), typename C::LayoutK{})));
  Tensor v =
      slice_o.make_fragment_B(slice_o.partition_B(make_tensor(make_smem_ptr(s.v.data()), typename C::LayoutV{})));
  Tensor scores = partition_fragment_C(mma_s, Shape<Int<kRows>, Int<C::BN>>{});
  Tensor out = partition_fragment_C(mma_o, Shape<Int<kRows>, Int<C::DV>>{});
  Tensor exponentials = make_tensor<E>(operand_of(scores.layout()));
  Tensor score_rows = make_tensor(scores.data(), rows_of(scores.layout()));
  Tensor out_rows = make_tensor(out.data(), rows_of(out.layout()));
  Tensor place_of = slice_s.partition_C(make_identity_tensor(Shape<Int<kRows>, Int<C::BN>>{}));
  Tensor place = make_tensor(place_of.data(), rows_of(place_of.layout()));

  Ring<C::STAGES> k_ring, v_ring;
  Ring<1> q_ring;
  Turns<C> const turns{group};
  if (C::PACKED && p.cu_q) clear_behind<C>(p, group, thread);
  turns.begin();
  for (;; q_ring.next()) {
    Full::wait(&s.q_full[group], q_ring.phase());
    int number = *static_cast<int volatile*>(&s.number[group]);  // not before the wait
    // Of one lane, or each lane's own: that changes nothing but what ptxas makes of the loop, by 3 % either way.
    if (!C::CUT) number = __shfl_sync(0xffffffff, number, 0);
    if (number == kNoBlock) break;
    Work const at = scheduler.locate(number);
    int const row0 = at.block * C::BM + group * kRows;
    typename C::Seen const mask(p, at.batch);
    Blocks const all = mask.blocks(at.block * C::BM, cute::min(p.M, (at.block + 1) * C::BM));
    Blocks const own = mask.blocks_of_group(all, row0, p.M);
    int n = all.end - 1;
    Softmax softmax(p.scale * float(M_LOG2E));
    if (C::PACKED && p.sinks) softmax.begin_with(p.sinks[at.head] / p.scale, thread % 4 == 0);
    clear(out);
    auto free_keys = [&] {
      if (signals) Empty::arrive(&s.k_empty[k_ring.stage()]);
      if (n == own.begin) Empty::arrive(&s.q_empty[group]);  // the next block's number and queries may come
      k_ring.next();
    };
    auto free_values = [&] {
      if (signals) Empty::arrive(&s.v_empty[v_ring.stage()]);
      v_ring.next();
    };
    // Blocks that other groups need, and this one not.
    auto pass_over = [&](int begin) {
#pragma unroll 1
      for (; n >= begin; --n) {
        Full::wait(&s.k_full[k_ring.stage()], k_ring.phase());
        turns.take();
        turns.pass();
        free_keys();
        Full::wait(&s.v_full[v_ring.stage()], v_ring.phase());
        free_values();
      }
    };
    // The scores of block n beside the product of block n + 1 with its values.
    auto absorb = [&](auto cut) __attribute__((always_inline)) {
      Full::wait(&s.k_full[k_ring.stage()], k_ring.phase());
      turns.take();
      issue<true>(mma_s, q, k(_, _, _, k_ring.stage()), scores);
      Full::wait(&s.v_full[v_ring.stage()], v_ring.phase());
      issue<false>(mma_o, exponentials, v(_, _, _, v_ring.stage()), out);
      turns.pass();
      warpgroup_wait<1>();
      warpgroup_fence_operand(scores);
      free_keys();
      if (C::BAND && p.softcap > 0.f) cap(scores, p);
      if (cut.value != Cut::kNone) mask.template hide<cut.value>(score_rows, place, row0, mask.key_of(n));
      softmax.absorb(score_rows);
      hold_until(softmax.row_sum[0] + softmax.row_sum[1]);
      warpgroup_wait<0>();
      warpgroup_fence_operand(out);
      free_values();
      softmax.rescale(out_rows);
      convert(scores, exponentials);
    };
    if (C::CUT) pass_over(own.end);
    Full::wait(&s.k_full[k_ring.stage()], k_ring.phase());
    turns.take();
    issue<true>(mma_s, q, k(_, _, _, k_ring.stage()), scores);
    turns.pass();
    warpgroup_wait<0>();
    warpgroup_fence_operand(scores);
    free_keys();
    if (C::BAND && p.softcap > 0.f) cap(scores, p);
    if (C::CUT ? n >= mask.whole(row0) || n < mask.reached(row0) : mask.pad > 0)
      mask.template hide<Cut::kBoth>(score_rows, place, row0, mask.key_of(n));
    softmax.absorb(score_rows);
    convert(scores, exponentials);
    --n;
    if (C::CUT) {
#pragma unroll 1
      for (int const end = cute::max(own.begin, mask.whole(anew(row0))); n >= end; --n) absorb(CutBy<Cut::kBoth>{});
    }
#pragma unroll 1
    for (int const end = cute::max(own.begin, mask.reached(anew(row0))); n >= end; --n) absorb(CutBy<Cut::kNone>{});
    if (C::BAND) {
#pragma unroll 1
      for (; n >= own.begin; --n) absorb(CutBy<Cut::kLeft>{});
    }
    Full::wait(&s.v_full[v_ring.stage()], v_ring.phase());
    if (C::PACKED && p.cu_k && own.begin == 0) clear_values<C>(s, v_ring.stage(), mask.pad, group, thread);
    issue<false>(mma_o, exponentials, v(_, _, _, v_ring.stage()), out);
    warpgroup_wait<0>();
    warpgroup_fence_operand(out);
    free_values();
    pass_over(all.begin);
    Work const w = scheduler.locate(anew(number));
    Rows const own_rows = C::Seen::queries(p, w.batch);
    int const row = w.block * C::BM + group * kRows + int(get<0>(place(0, 0)));
    float* const lse = p.lse + (int64_t(own_rows.batch) * p.H + w.head) * p.query_rows + own_rows.first;
    float inverse[2];
    bool dead[2];  // of segments: there the mask does not know
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total;
      if (C::SEGMENTS)
        total = softmax.finish_with(i, p.sinks ? p.sinks[w.head] / p.scale : -INFINITY, inverse[i], dead[i]);
      else
        total = softmax.finish(i, inverse[i]);
      if (thread % 4 == 0 && row + 8 * i < own_rows.count) lse[row + 8 * i] = total;
    }
    Softmax::multiply(out_rows, inverse);
    typename C::Seen const seen(p, w.batch);
#pragma unroll
    for (int i = 0; i < 2; ++i)  // a hidden value may be NaN, and NaN times an exponential of 0 is none
      if (C::SEGMENTS ? dead[i] : !seen.sees_any(row + 8 * i)) {
#pragma unroll
        for (int j = 0; j < size<1>(out_rows); ++j) out_rows(i, j) = 0.f;
      }
    Tensor rounded = make_tensor<E>(out.layout());
    convert(out, rounded);
    E* const target = static_cast<E*>(p.out.data) + own_rows.batch * p.out.batch + w.head * p.out.head +
                      int64_t(own_rows.first) * p.out.row;
    store_rows<C::DV>(reinterpret_cast<uint32_t const*>(rounded.data()), target, p.out.row, row, own_rows.count, p.Dv,
                      thread % 4);
  }
  turns.end();
}

template <class C, class TmaQ, class TmaK, class TmaV>
__global__ void __launch_bounds__(C::THREADS, 1)
    flash_forward(__grid_constant__ TmaQ const tma_q, __grid_constant__ TmaK const tma_k,
                  __grid_constant__ TmaV const tma_v, __grid_constant__ typename C::Params const p,
                  __grid_constant__ Scheduler const scheduler) {
  extern __shared__ char raw[];
  auto& s = *reinterpret_cast<Shared<C>*>((reinterpret_cast<uintptr_t>(raw) + kSwizzleBytes - 1) / kSwizzleBytes *
                                          kSwizzleBytes);
  int const role = __shfl_sync(0xffffffff, threadIdx.x / kThreads, 0);
  if (threadIdx.x == 0) {
    s.init_barriers();
    prefetch_tma_descriptor(tma_q.get_tma_descriptor());
    prefetch_tma_descriptor(tma_k.get_tma_descriptor());
    prefetch_tma_descriptor(tma_v.get_tma_descriptor());
  }
  __syncthreads();
  if (role == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::LOADER_REGISTERS>();
    if (threadIdx.x / 32 == 0 && elect_one_sync())
      Loader<C, TmaQ, TmaK, TmaV>{tma_q, tma_k, tma_v, p, s}.run(scheduler);
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::GROUP_REGISTERS>();
    attend<C>(p, s, scheduler, role - 1);
  }
}

template <class E>
auto rows_tensor(View const& t, int rows, int D, int heads, int batch) {
  return make_tensor(make_gmem_ptr(static_cast<E const*>(t.data)), make_shape(rows, D, heads, batch),
                     make_stride(t.row, _1{}, t.head, t.batch));
}

template <class E>
auto columns_tensor(View const& t, int rows, int D, int heads, int batch) {
  return make_tensor(make_gmem_ptr(static_cast<E const*>(t.data)), make_shape(D, rows, heads, batch),
                     make_stride(_1{}, t.row, t.head, t.batch));
}

template <class C>
int launch(FlashParams const& given, cudaStream_t stream) {
  using E = typename C::E;
  auto const& p = static_cast<typename C::Params const&>(given);
  int const batch = p.cu_q ? 1 : p.B;  // entries in memory
  auto tma_q = make_tma_copy(SM90_TMA_LOAD{}, rows_tensor<E>(p.q, p.query_rows, p.D, p.H, batch),
                             take<0, 2>(typename C::LayoutQ{}), Shape<Int<kRows>, Int<C::D>>{}, _1{});
  auto tma_k = make_tma_copy(SM90_TMA_LOAD{}, rows_tensor<E>(p.k, p.key_rows, p.D, p.Hkv, batch),
                             take<0, 2>(typename C::LayoutK{}), Shape<Int<C::BN>, Int<C::D>>{}, _1{});
  auto tma_v = make_tma_copy(SM90_TMA_LOAD{}, columns_tensor<E>(p.v, p.key_rows, p.Dv, p.Hkv, batch),
                             take<0, 2>(typename C::LayoutV{}), Shape<Int<C::DV>, Int<C::BN>>{}, _1{});
  auto kernel = flash_forward<C, decltype(tma_q), decltype(tma_k), decltype(tma_v)>;
  int const bytes = sizeof(Shared<C>) + kSwizzleBytes;
  static std::atomic<uint64_t> allowed{0};  // a bit for each device that was told how much memory the kernel takes
  uint64_t const bit = p.device < kMaxDevices ? uint64_t{1} << p.device : 0;
  if (!(allowed.load(std::memory_order_relaxed) & bit)) {
    cudaError_t const refused = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (refused != cudaSuccess) return refused;
    allowed.fetch_or(bit, std::memory_order_relaxed);
  }
  Scheduler const scheduler(p, C::BM, grows(C::MASK, p));
  if constexpr (C::SEGMENTS) {
    cudaError_t const refused = launch_find_spans<C::BN, kRows>(p, stream);
    if (refused != cudaSuccess) return refused;  // the kernel would follow what is in that memory
  }
  kernel<<<scheduler.grid, C::THREADS, bytes, stream>>>(tma_q, tma_k, tma_v, p, scheduler);
  return cudaGetLastError();
}

}  // namespace sdpa_cuda
