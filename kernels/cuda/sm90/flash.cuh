// Flash attention forward for sm_90a: a persistent, warp-specialised kernel of one producer warp and two to four
// consumer warpgroups.
//
// The producer warp loads tiles of queries, keys and values by TMA into swizzled shared memory. Each consumer warpgroup
// multiplies 64 rows of queries by WGMMA. The design is FlashAttention-3's (Shah et al., arXiv 2407.08608): scores stay
// in registers, the weights are the register operand of the second WGMMA, and the scores of a block of keys are
// computed while the block before is multiplied by its values. Ours are heads in sections, a persistent scheduler that
// draws work tiles from a counter, and an epilogue that transposes the output among the lanes of quads: it needs no
// shared memory, which the next work tile's loads already fill.
//
// The schedule of one work tile, here with two consumers in ping-pong. Time runs to the right. K0, K1, ... are blocks
// of keys in the order they are visited, and V0, V1, ... their values. Q0 and Q1 are the consumers' rows of queries.
// QK, S and PV are the scores of a block, their softmax, and the product of its weights and values; "alpha" rescales
// acc. The last loads are the next work tile's.
//
//   producer    TMA      K0 Q0 Q1  K1 V0     K2 V1              K3 V2        ...  Vn  K0 Q0 Q1  K1 V0
//   consumer 0  WGMMA       [QK0]        [QK1][PV0]          [QK2][PV1]             ...  [PVn]
//               softmax          [S0    ]     [S1    ][alpha]     [S2    ][alpha]   ...       [epilogue]
//   consumer 1  WGMMA            [QK0]             [QK1][PV0]          [QK2][PV1]        ...  [PVn]
//               softmax               [S0    ]          [S1    ][alpha]     [S2    ][alpha]   ...  [epilogue]
//
// Two things overlap. Inside a consumer, softmax S1 runs as soon as QK1 is done, while the tensor cores still compute
// PV0. Between consumers, ping-pong lets consumer 1 issue its WGMMAs after consumer 0 has issued its own, so that one's
// softmax runs beside the other's WGMMAs. Where a tile has no ping-pong, consumers issue when they like.
//
// Two mbarriers guard each stage of a pipeline. "full": TMA has written the stage. "empty": all consumers have read it.
#pragma once
#include "../dropout.cuh"
#include "../mask.cuh"
#include "../params.h"
#include "../scheduler.cuh"
#include "../segments.cuh"
#include "../softmax.cuh"
#include "parts.cuh"
#include "tiles.cuh"

namespace sdpa_cuda {

using namespace cute;

// Named barriers, counted behind those that CUTLASS keeps for itself. Ping-pong has one for each of its two or three
// consumers. Each of up to four consumers has one of its own. Nobody ever waits at the last of the hardware's 16.
constexpr int kPingPongBarrier = 0, kPingPongs = 3, kConsumerBarrier = kPingPongs, kMaxConsumers = 4,
              kNeverBarrier = 15;
static_assert(cutlass::arch::NamedBarrier::ReservedNamedBarrierCount + kConsumerBarrier + kMaxConsumers <=
              kNeverBarrier);

template <class E_, int D_, int DV_, MaskKind MASK_, int CONSUMERS_>
struct Config {
  using E = E_;
  static constexpr MaskKind MASK = MASK_;
  static constexpr int D = D_, DV = DV_, CONSUMERS = CONSUMERS_, BLOCK_M = kRows * CONSUMERS;
  static_assert(CONSUMERS <= kMaxConsumers);
  static constexpr Tile TILE = tile_of<D, DV, MASK, CONSUMERS>();
  static constexpr int BLOCK_N = TILE.BLOCK_N, STAGES = TILE.stages;
  static constexpr bool MASKED = MASK != MaskKind::kNone, SEGMENTS = MASK == MaskKind::kSegments;
  static constexpr bool PACKED = MASK == MaskKind::kBand, BAND = PACKED || SEGMENTS,
                        DROPOUT = MASK == MaskKind::kDropout;
  using MaskPolicy = std::conditional_t<SEGMENTS, SegmentMask<BLOCK_N, kRows>, Mask<MASK, BLOCK_N, kRows>>;
  using Params = std::conditional_t<SEGMENTS, SegmentParams, FlashParams>;
  static constexpr int THREADS = kThreads * (CONSUMERS + 1);
  // Registers per thread. The launch gives every warpgroup the same number; the producer hands most of its own to the
  // consumers: 40 + 2 x 232 = 3 x 168, 32 + 3 x 160 = 4 x 128, 32 + 4 x 112 = 5 x 96.
  static constexpr int PRODUCER_REGISTERS = CONSUMERS >= 3 ? 32 : 40;
  static constexpr int CONSUMER_REGISTERS = CONSUMERS == 4 ? 112 : CONSUMERS == 3 ? 160 : 232;

  template <GMMA::Major MAJOR, int ROWS, int COLUMNS>
  using SwizzleAtom =
      decltype(cutlass::gemm::collective::detail::ss_smem_selector<MAJOR, E, Int<ROWS>, Int<COLUMNS>>());
  using LayoutQ =  // [64, D, consumers]
      decltype(tile_to_shape(SwizzleAtom<GMMA::Major::K, kRows, D>{}, Shape<Int<kRows>, Int<D>, Int<CONSUMERS>>{}));
  using LayoutK =  // [BLOCK_N, D, stages]
      decltype(tile_to_shape(SwizzleAtom<GMMA::Major::K, BLOCK_N, D>{}, Shape<Int<BLOCK_N>, Int<D>, Int<STAGES>>{}));
  using LayoutV =  // [DV, BLOCK_N, stages]: in memory values are (keys, DV), which WGMMA reads transposed
      decltype(tile_to_shape(SwizzleAtom<GMMA::Major::MN, DV, BLOCK_N>{}, Shape<Int<DV>, Int<BLOCK_N>, Int<STAGES>>{},
                             Step<_2, _1, _3>{}));
  // scores [64, BLOCK_N] = q [64, D] k^T, both operands in shared memory.
  using MmaQK = decltype(make_tiled_mma(GMMA::ss_op_selector<E, E, float, Shape<Int<kRows>, Int<BLOCK_N>, Int<D>>>()));
  // acc [64, DV] += weights [64, BLOCK_N] v, with the weights in registers.
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<E, E, float, Shape<Int<kRows>, Int<DV>, Int<BLOCK_N>>, GMMA::Major::K, GMMA::Major::MN>()));
};

template <class C>
struct SharedStorage {
  alignas(kSwizzleBytes) array_aligned<typename C::E, cosize_v<typename C::LayoutQ>> q;
  alignas(kSwizzleBytes) array_aligned<typename C::E, cosize_v<typename C::LayoutK>> k;
  alignas(kSwizzleBytes) array_aligned<typename C::E, cosize_v<typename C::LayoutV>> v;
  int tile_index[C::CONSUMERS];  // of the work tile whose queries are in q; kNoTile after the last one
  uint64_t q_full[C::CONSUMERS], q_empty[C::CONSUMERS];
  uint64_t k_full[C::STAGES], k_empty[C::STAGES], v_full[C::STAGES], v_empty[C::STAGES];

  CUTE_DEVICE void init_barriers() {
    for (int i = 0; i < C::CONSUMERS; ++i) {
      Full::init(&q_full[i], 1);
      Empty::init(&q_empty[i], kThreads);  // every thread reads the index, and arrives
    }
    for (int i = 0; i < C::STAGES; ++i) {
      Full::init(&k_full[i], 1);
      Full::init(&v_full[i], 1);
      Empty::init(&k_empty[i], C::CONSUMERS * kWarps);  // one thread of each warp arrives
      Empty::init(&v_empty[i], C::CONSUMERS * kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
};

// The producer warp, of which one elected thread runs.
template <class C, class TmaQ, class TmaK, class TmaV>
struct Producer {
  using E = typename C::E;
  TmaQ const& tma_q;
  TmaK const& tma_k;
  TmaV const& tma_v;
  typename C::Params const& p;
  SharedStorage<C>& s;
  PipelineState<C::STAGES> k_state, v_state;
  PipelineState<1> q_state;

  template <class Tma, class Source, class Target>
  CUTE_DEVICE static void load(Tma const& tma, TMA::CacheHintSm90 hint, uint64_t& full, Source const& source,
                               Target&& target) {
    constexpr uint32_t kBytes = decltype(size(target.layout()))::value * sizeof(E);
    Full::arrive_and_expect_tx(&full, kBytes);
    copy(tma.with(full, 0, hint), source, target);
  }

  CUTE_DEVICE void run(TileScheduler const& scheduler) {
    Tensor mQ = tma_q.get_tma_tensor(make_shape(p.query_rows, p.D, p.H, p.B));
    Tensor mK = tma_k.get_tma_tensor(make_shape(p.key_rows, p.D, p.Hkv, p.B));
    Tensor mV = tma_v.get_tma_tensor(make_shape(p.Dv, p.key_rows, p.Hkv, p.B));
    auto slice_q = tma_q.get_slice(_0{});
    auto slice_k = tma_k.get_slice(_0{});
    auto slice_v = tma_v.get_slice(_0{});
    Tensor sQ = slice_q.partition_D(make_tensor(make_smem_ptr(s.q.data()), typename C::LayoutQ{}));
    Tensor sK = slice_k.partition_D(make_tensor(make_smem_ptr(s.k.data()), typename C::LayoutK{}));
    Tensor sV = slice_v.partition_D(make_tensor(make_smem_ptr(s.v.data()), typename C::LayoutV{}));
    for (int index = blockIdx.x, after; index < scheduler.tiles; index = after) {
      after = scheduler.next(index, p.counter);  // drawn long before it is needed
      WorkTile const w = scheduler.work_tile(index);
      Rows const queries = C::MaskPolicy::queries(p, w.batch), keys = C::MaskPolicy::keys(p, w.batch);
      if (C::PACKED && w.block * C::BLOCK_M >= queries.count) continue;
      typename C::MaskPolicy const mask(p, w.batch);
      Blocks const blocks = mask.blocks(w.block * C::BLOCK_M, cute::min(p.M, (w.block + 1) * C::BLOCK_M));
      int const first = keys.first - mask.pad;
      Tensor gQ =  // [64, D, tiles of rows]
          local_tile(domain_offset(make_coord(queries.first, _0{}), mQ(_, _, w.head, queries.batch)),
                     Shape<Int<kRows>, Int<C::D>>{}, make_coord(_, _0{}));
      Tensor gK =  // [BLOCK_N, D, blocks]
          local_tile(domain_offset(make_coord(first, _0{}), mK(_, _, w.kv_head, keys.batch)),
                     Shape<Int<C::BLOCK_N>, Int<C::D>>{}, make_coord(_, _0{}));
      Tensor gV =  // [DV, BLOCK_N, blocks]
          local_tile(domain_offset(make_coord(_0{}, first), mV(_, _, w.kv_head, keys.batch)),
                     Shape<Int<C::DV>, Int<C::BLOCK_N>>{}, make_coord(_0{}, _));
      Tensor tQ = slice_q.partition_S(gQ);
      Tensor tK = slice_k.partition_S(gK);
      Tensor tV = slice_v.partition_S(gV);
      // Other work tiles of the head read keys and values again.
      auto const keep = TMA::CacheHintSm90::EVICT_LAST;
      auto load_k = [&](int n) {
        int const i = k_state.stage();
        Empty::wait(&s.k_empty[i], k_state.phase() ^ 1);
        load(tma_k, keep, s.k_full[i], tK(_, _, _, n), sK(_, _, _, i));
        k_state.advance();
      };
      auto load_v = [&](int n) {
        int const i = v_state.stage();
        Empty::wait(&s.v_empty[i], v_state.phase() ^ 1);
        load(tma_v, keep, s.v_full[i], tV(_, _, _, n), sV(_, _, _, i));
        v_state.advance();
      };
      constexpr int kStep = C::MaskPolicy::ASCENDS ? 1 : -1;
      int n = C::MaskPolicy::ASCENDS ? blocks.begin : blocks.end - 1;
      int const last = C::MaskPolicy::ASCENDS ? blocks.end - 1 : blocks.begin;
      load_k(n);
#pragma unroll 1
      for (int g = 0; g < C::CONSUMERS; ++g) {
        Empty::wait(&s.q_empty[g], q_state.phase() ^ 1);
        publish(g, index);
        load(tma_q, TMA::CacheHintSm90::EVICT_FIRST, s.q_full[g], tQ(_, _, _, w.block * C::CONSUMERS + g),
             sQ(_, _, _, g));
      }
      q_state.advance();
      // An unrolled loop would take more registers than the producer keeps.
#pragma unroll 1
      for (; n != last; n += kStep) {
        load_k(n + kStep);
        load_v(n);
      }
      load_v(n);
    }
#pragma unroll 1
    for (int g = 0; g < C::CONSUMERS; ++g) {
      Empty::wait(&s.q_empty[g], q_state.phase() ^ 1);
      publish(g, kNoTile);
      Full::arrive(&s.q_full[g]);
    }
  }

  // Writes a consumer's work tile index before the arrival that lets the consumer read it. The access is volatile, so
  // that the compiler keeps this order.
  CUTE_DEVICE void publish(int consumer, int index) { *static_cast<int volatile*>(&s.tile_index[consumer]) = index; }
};

// Keeps the softmax before the wait for PV. Otherwise ptxas moves that wait above all exponentials. What stops it is an
// instruction that may have an effect and depends on the sum of the weights. Sums are not negative, so nobody ever
// waits at that barrier.
CUTE_DEVICE void fence_softmax(float sum) {
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p bar.sync %1, %2; }" ::"f"(sum), "n"(kNeverBarrier),
               "n"(kThreads)
               : "memory");
}

// The ping-pong of consumers by named barriers: each issues its WGMMAs only after the one before it has issued its own.
template <class C>
struct PingPong {
  int consumer;
  static constexpr bool ON = C::TILE.ping_pong;
  static_assert(!ON || C::CONSUMERS <= kPingPongs);
  CUTE_DEVICE void begin() const {  // the last consumer lets the first one go ahead
    if (ON && consumer == C::CONSUMERS - 1) cutlass::arch::NamedBarrier::arrive(2 * kThreads, kPingPongBarrier);
  }
  CUTE_DEVICE void wait() const {
    if (ON) cutlass::arch::NamedBarrier::sync(2 * kThreads, kPingPongBarrier + consumer);
  }
  CUTE_DEVICE void arrive() const {
    if (ON) cutlass::arch::NamedBarrier::arrive(2 * kThreads, kPingPongBarrier + (consumer + 1) % C::CONSUMERS);
  }
  CUTE_DEVICE void end() const {  // the first consumer takes the last arrival, which is for no WGMMA
    if (ON && consumer == 0) cutlass::arch::NamedBarrier::sync(2 * kThreads, kPingPongBarrier);
  }
};

// Writes an output of 0 and a log-sum-exp of -inf to the rows behind the last packed sequence. Each consumer takes its
// share.
template <class C>
CUTE_DEVICE void clear_unused_rows(FlashParams const& p, int consumer, int thread) {
  int const begin = p.cu_q[p.B], chunks = p.Dv / 8, parts = (p.query_rows - begin + kRows - 1) / kRows;
  for (int part = blockIdx.x * C::CONSUMERS + consumer; part < parts * p.H; part += gridDim.x * C::CONSUMERS) {
    int const head = part / parts, first = begin + part % parts * kRows;
    int const rows = cute::min(int(kRows), p.query_rows - first);
    auto* const out = static_cast<typename C::E*>(p.out.data) + head * p.out.head + int64_t(first) * p.out.row;
    for (int i = thread; i < rows * chunks; i += kThreads)
      *reinterpret_cast<uint4*>(out + i / chunks * p.out.row + i % chunks * 8) = make_uint4(0, 0, 0, 0);
    if (thread < rows) p.lse[int64_t(head) * p.query_rows + first + thread] = -INFINITY;
  }
}

// Sets the values in the pad before a packed sequence to 0. They belong to the sequence before, and a NaN among them
// times a weight of 0 would be NaN. Every consumer writes these zeros for itself.
template <class C>
CUTE_DEVICE void clear_pad(SharedStorage<C>& s, int stage, int count, int consumer, int thread) {
  Tensor values = make_tensor(make_smem_ptr(s.v.data()), typename C::LayoutV{});  // [DV, BLOCK_N, stages]
  constexpr int kChunks = C::DV / 8;  // of 16 bytes, which the swizzle leaves together
  for (int i = thread; i < count * kChunks; i += kThreads)
    *reinterpret_cast<uint4*>(&values(i % kChunks * 8, i / kChunks, stage)) = make_uint4(0, 0, 0, 0);
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(kThreads, kConsumerBarrier + consumer);
}

// A consumer warpgroup: all of its work tiles, one after the other.
template <class C>
CUTE_DEVICE void consume(typename C::Params const& p, SharedStorage<C>& s, TileScheduler const& scheduler,
                         int consumer) {
  using E = typename C::E;
  int const thread = threadIdx.x % kThreads;
  bool const signals = thread % 32 == 0;
  typename C::MmaQK mma_qk;
  typename C::MmaPV mma_pv;
  auto slice_qk = mma_qk.get_slice(thread);
  auto slice_pv = mma_pv.get_slice(thread);
  Tensor sQ = make_tensor(make_smem_ptr(s.q.data()), typename C::LayoutQ{});
  Tensor q = slice_qk.make_fragment_A(slice_qk.partition_A(sQ(_, _, consumer)));  // [64, D]
  Tensor k =                                                                      // [BLOCK_N, D, stages]
      slice_qk.make_fragment_B(slice_qk.partition_B(make_tensor(make_smem_ptr(s.k.data()), typename C::LayoutK{})));
  Tensor v =  // [DV, BLOCK_N, stages]
      slice_pv.make_fragment_B(slice_pv.partition_B(make_tensor(make_smem_ptr(s.v.data()), typename C::LayoutV{})));
  Tensor scores = partition_fragment_C(mma_qk, Shape<Int<kRows>, Int<C::BLOCK_N>>{});  // [64, BLOCK_N]
  Tensor acc = partition_fragment_C(mma_pv, Shape<Int<kRows>, Int<C::DV>>{});          // [64, DV]
  Tensor weights = make_tensor<E>(operand_of(scores.layout()));                        // [64, BLOCK_N]
  Tensor score_rows = make_tensor(scores.data(), rows_of(scores.layout()));            // [2, columns of this thread]
  Tensor acc_rows = make_tensor(acc.data(), rows_of(acc.layout()));                    // [2, columns of this thread]
  Tensor all_coords = slice_qk.partition_C(make_identity_tensor(Shape<Int<kRows>, Int<C::BLOCK_N>>{}));
  Tensor coords = make_tensor(all_coords.data(), rows_of(all_coords.layout()));  // of score_rows

  PipelineState<C::STAGES> k_state, v_state;
  PipelineState<1> q_state;
  PingPong<C> const ping_pong{consumer};
  if (C::PACKED && p.cu_q) clear_unused_rows<C>(p, consumer, thread);
  ping_pong.begin();
  for (;; q_state.advance()) {
    Full::wait(&s.q_full[consumer], q_state.phase());
    int index = *static_cast<int volatile*>(&s.tile_index[consumer]);  // volatile: not before the wait
    // The index could be one lane's for all, or each lane's own. Only ptxas' loop differs, by 3 % either way.
    if (!C::MASKED) index = __shfl_sync(0xffffffff, index, 0);
    if (index == kNoTile) break;
    WorkTile const at = scheduler.work_tile(index);
    int const row0 = at.block * C::BLOCK_M + consumer * kRows;
    typename C::MaskPolicy const mask(p, at.batch);
    Blocks const loaded = mask.blocks(at.block * C::BLOCK_M, cute::min(p.M, (at.block + 1) * C::BLOCK_M));
    Blocks const own = mask.blocks_of_consumer(loaded, row0, p.M);
    int n = loaded.end - 1;
    auto const drop_weights = [&, stream = C::DROPOUT ? stream_of(p, at.batch, at.head) : 0] {
      if constexpr (C::DROPOUT) drop(score_rows, Philox(p, std::true_type{}), p, stream, row0, mask.key_of(n), thread);
    };
    Softmax softmax(p.scale * float(M_LOG2E));
    if (C::PACKED && p.sinks) softmax.add_sink(p.sinks[at.head] / p.scale, thread % 4 == 0);
    clear(acc);
    auto release_k = [&] {
      if (signals) Empty::arrive(&s.k_empty[k_state.stage()]);
      if (n == own.begin) Empty::arrive(&s.q_empty[consumer]);  // the next work tile's index and queries may come
      k_state.advance();
    };
    auto release_v = [&] {
      if (signals) Empty::arrive(&s.v_empty[v_state.stage()]);
      v_state.advance();
    };
    // Releases blocks that other consumers need, and this one does not.
    auto skip_blocks = [&](int begin) {
#pragma unroll 1
      for (; n >= begin; --n) {
        Full::wait(&s.k_full[k_state.stage()], k_state.phase());
        ping_pong.wait();
        ping_pong.arrive();
        release_k();
        Full::wait(&s.v_full[v_state.stage()], v_state.phase());
        release_v();
      }
    };
    // One step of the main loop: QK and softmax of block n, beside PV of block n + 1.
    auto step = [&](auto masking) __attribute__((always_inline)) {
      Full::wait(&s.k_full[k_state.stage()], k_state.phase());
      ping_pong.wait();
      issue_wgmma<true>(mma_qk, q, k(_, _, _, k_state.stage()), scores);
      Full::wait(&s.v_full[v_state.stage()], v_state.phase());
      issue_wgmma<false>(mma_pv, weights, v(_, _, _, v_state.stage()), acc);
      ping_pong.arrive();
      warpgroup_wait<1>();  // QK is done, PV may not be
      warpgroup_fence_operand(scores);
      release_k();
      if (C::BAND && p.softcap > 0.f) cap(scores, p);
      if (masking.value != Masking::kNone) mask.template apply<masking.value>(score_rows, coords, row0, mask.key_of(n));
      softmax.update(score_rows);
      drop_weights();
      fence_softmax(softmax.row_sum[0] + softmax.row_sum[1]);
      warpgroup_wait<0>();  // PV is done
      warpgroup_fence_operand(acc);
      release_v();
      softmax.rescale(acc_rows);
      convert(scores, weights);
    };
    if (C::MASKED) skip_blocks(own.end);
    // The first block has no PV to run beside.
    Full::wait(&s.k_full[k_state.stage()], k_state.phase());
    ping_pong.wait();
    issue_wgmma<true>(mma_qk, q, k(_, _, _, k_state.stage()), scores);
    ping_pong.arrive();
    warpgroup_wait<0>();
    warpgroup_fence_operand(scores);
    release_k();
    if (C::BAND && p.softcap > 0.f) cap(scores, p);
    if (C::MASKED ? n >= mask.unmasked_end(row0) || n < mask.unmasked_begin(row0) : mask.pad > 0)
      mask.template apply<Masking::kBoth>(score_rows, coords, row0, mask.key_of(n));
    softmax.update(score_rows);
    drop_weights();
    convert(scores, weights);
    --n;
    // The main loop: blocks to mask on both sides, then blocks without a mask, then blocks to mask on the left.
    if (C::MASKED) {
#pragma unroll 1
      for (int const end = cute::max(own.begin, mask.unmasked_end(opaque(row0))); n >= end; --n)
        step(MaskingTag<Masking::kBoth>{});
    }
#pragma unroll 1
    for (int const end = cute::max(own.begin, mask.unmasked_begin(opaque(row0))); n >= end; --n)
      step(MaskingTag<Masking::kNone>{});
    if (C::BAND) {
#pragma unroll 1
      for (; n >= own.begin; --n) step(MaskingTag<Masking::kLeft>{});
    }
    // The last block's PV.
    Full::wait(&s.v_full[v_state.stage()], v_state.phase());
    if (C::PACKED && p.cu_k && own.begin == 0) clear_pad<C>(s, v_state.stage(), mask.pad, consumer, thread);
    issue_wgmma<false>(mma_pv, weights, v(_, _, _, v_state.stage()), acc);
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    release_v();
    skip_blocks(loaded.begin);
    // The epilogue: the log-sum-exp, and acc divided by row_sum, from registers to memory. The work tile is computed
    // again, because nothing of it stayed in registers.
    WorkTile const w = scheduler.work_tile(opaque(index));
    Rows const own_rows = C::MaskPolicy::queries(p, w.batch);
    int const row = w.block * C::BLOCK_M + consumer * kRows + int(get<0>(coords(0, 0)));
    float* const lse = p.lse + (int64_t(own_rows.batch) * p.H + w.head) * p.query_rows + own_rows.first;
    float inverse[2];
    bool dead[2];  // rows that saw no key, under segments: there the mask does not know
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total;
      if (C::SEGMENTS)
        total = softmax.finish_with_sink(i, p.sinks ? p.sinks[w.head] / p.scale : -INFINITY, inverse[i], dead[i]);
      else
        total = softmax.finish(i, inverse[i]);
      if (thread % 4 == 0 && row + 8 * i < own_rows.count) lse[row + 8 * i] = total;
    }
    if (C::DROPOUT) inverse[0] *= p.kept, inverse[1] *= p.kept;
    Softmax::multiply(acc_rows, inverse);
    typename C::MaskPolicy const mask_again(p, w.batch);
#pragma unroll
    for (int i = 0; i < 2; ++i)  // a masked value may be NaN, and NaN times a weight of 0 is not 0
      if (C::SEGMENTS ? dead[i] : !mask_again.sees_any(row + 8 * i)) {
#pragma unroll
        for (int j = 0; j < size<1>(acc_rows); ++j) acc_rows(i, j) = 0.f;
      }
    Tensor rounded = make_tensor<E>(acc.layout());  // [64, DV]
    convert(acc, rounded);
    E* const target = static_cast<E*>(p.out.data) + own_rows.batch * p.out.batch + w.head * p.out.head +
                      int64_t(own_rows.first) * p.out.row;
    store_rows<C::DV>(reinterpret_cast<uint32_t const*>(rounded.data()), target, p.out.row, row, own_rows.count, p.Dv,
                      thread % 4);
  }
  ping_pong.end();
}

// Warpgroup 0 is the producer, the others are consumers.
template <class C, class TmaQ, class TmaK, class TmaV>
__global__ void __launch_bounds__(C::THREADS, 1)
    flash_forward(__grid_constant__ TmaQ const tma_q, __grid_constant__ TmaK const tma_k,
                  __grid_constant__ TmaV const tma_v, __grid_constant__ typename C::Params const p,
                  __grid_constant__ TileScheduler const scheduler) {
  extern __shared__ char raw[];
  auto& s = *reinterpret_cast<SharedStorage<C>*>((reinterpret_cast<uintptr_t>(raw) + kSwizzleBytes - 1) /
                                                 kSwizzleBytes * kSwizzleBytes);
  int const warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kThreads, 0);
  if (threadIdx.x == 0) {
    s.init_barriers();
    prefetch_tma_descriptor(tma_q.get_tma_descriptor());
    prefetch_tma_descriptor(tma_k.get_tma_descriptor());
    prefetch_tma_descriptor(tma_v.get_tma_descriptor());
  }
  __syncthreads();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::PRODUCER_REGISTERS>();
    if (threadIdx.x / 32 == 0 && elect_one_sync())
      Producer<C, TmaQ, TmaK, TmaV>{tma_q, tma_k, tma_v, p, s}.run(scheduler);
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::CONSUMER_REGISTERS>();
    consume<C>(p, s, scheduler, warpgroup - 1);
  }
}

template <class C>
int launch(FlashParams const& given, cudaStream_t stream) {
  using E = typename C::E;
  auto const& p = static_cast<typename C::Params const&>(given);
  int const batch = p.cu_q ? 1 : p.B;  // entries in memory
  auto tma_q = make_tma_copy(SM90_TMA_LOAD{}, rows_tensor<E>(p.q, p.query_rows, p.D, p.H, batch),
                             take<0, 2>(typename C::LayoutQ{}), Shape<Int<kRows>, Int<C::D>>{}, _1{});
  auto tma_k = make_tma_copy(SM90_TMA_LOAD{}, rows_tensor<E>(p.k, p.key_rows, p.D, p.Hkv, batch),
                             take<0, 2>(typename C::LayoutK{}), Shape<Int<C::BLOCK_N>, Int<C::D>>{}, _1{});
  auto tma_v = make_tma_copy(SM90_TMA_LOAD{}, columns_tensor<E>(p.v, p.key_rows, p.Dv, p.Hkv, batch),
                             take<0, 2>(typename C::LayoutV{}), Shape<Int<C::DV>, Int<C::BLOCK_N>>{}, _1{});
  auto kernel = flash_forward<C, decltype(tma_q), decltype(tma_k), decltype(tma_v)>;
  int const bytes = sizeof(SharedStorage<C>) + kSwizzleBytes;
  cudaError_t const refused = allow_shared_memory<C>(kernel, bytes, p.device);
  if (refused != cudaSuccess) return refused;
  TileScheduler const scheduler(p, C::BLOCK_M, grows(C::MASK, p));
  if constexpr (C::SEGMENTS) {
    cudaError_t const failed = launch_find_spans<C::BLOCK_N, kRows>(p, stream);
    if (failed != cudaSuccess) return failed;  // the attention kernel would follow indices that nobody wrote
  }
  kernel<<<scheduler.grid, C::THREADS, bytes, stream>>>(tma_q, tma_k, tma_v, p, scheduler);
  return cudaGetLastError();
}

}  // namespace sdpa_cuda
