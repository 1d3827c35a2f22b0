// The producer of the backward by pairs of thread blocks (flash_backward_pair.cuh), what the thread blocks share, and
// their tiles: halves of 64 rows or keys and of half of the columns.
#pragma once
#include "flash_backward.cuh"

namespace sdpa_cuda {

constexpr int kPair = 2;             // thread blocks of a cluster
constexpr uint16_t kBothBlocks = 3;  // a bit for each

template <class C>
struct PairConfig : C {
  using E = typename C::E;
  static constexpr int HALF = C::D / 2, HALF_V = C::DV / 2;
  static_assert(C::BLOCK_M == kRows && C::BLOCK_N == kPair * kRows && C::SPLIT_D);
  static constexpr bool FULL = C::D + C::DV > 384;  // whether consumers take all registers and shared memory there are
  static constexpr int PRODUCER_REGISTERS = FULL ? 24 : 56, CONSUMER_REGISTERS = FULL ? 240 : 224;
  static constexpr int DO_HALVES =
      FULL ? 3 : 4;  // a ring: where D and DV are 256, there is no room for two blocks of rows
  static constexpr int EXCHANGES = FULL ? 1 : 2;  // stages of the weights, and of dS
  template <int COLUMNS, int COUNT>
  using Halves = typename C::template RowsLayout<kRows, COLUMNS, COUNT>;  // [64, COLUMNS, COUNT]
  template <int COLUMNS, int COUNT>
  using HalvesT = typename C::template Transposed<Halves<COLUMNS, COUNT>, kRows, COLUMNS, COUNT>;
  using LayoutK = Halves<HALF, 3>;  // the last one is the other thread block's keys, and this one's half of the columns
  using LayoutKt = HalvesT<HALF, 3>;
  using LayoutV = Halves<HALF_V, 2>;
  using LayoutQ = Halves<HALF, 2 * C::STAGES>;
  using LayoutQt = HalvesT<HALF, 2 * C::STAGES>;
  using LayoutDO = Halves<HALF_V, DO_HALVES>;
  using LayoutDOt = HalvesT<HALF_V, DO_HALVES>;
  using LayoutDS = typename C::template RowsLayout<C::BLOCK_M, C::BLOCK_N, EXCHANGES>;
  using LayoutDSt = typename C::template Transposed<LayoutDS, C::BLOCK_M, C::BLOCK_N, EXCHANGES>;
  using MmaS =
      decltype(make_tiled_mma(GMMA::ss_op_selector<E, E, float, Shape<Int<kRows>, Int<C::BLOCK_M>, Int<HALF>>>()));
  using MmaDP =
      decltype(make_tiled_mma(GMMA::ss_op_selector<E, E, float, Shape<Int<kRows>, Int<C::BLOCK_M>, Int<HALF_V>>>()));
  template <int COLUMNS>
  using MmaOfKeys =
      decltype(make_tiled_mma(GMMA::rs_op_selector<E, E, float, Shape<Int<kRows>, Int<COLUMNS>, Int<C::BLOCK_M>>,
                                                   GMMA::Major::K, GMMA::Major::MN>()));
  using MmaDV = MmaOfKeys<HALF_V>;
  using MmaDK = MmaOfKeys<HALF>;
  using MmaDQ = decltype(make_tiled_mma(
      GMMA::ss_op_selector<E, E, float, Shape<Int<kRows>, Int<HALF>, Int<kRows>>, GMMA::Major::K, GMMA::Major::MN>()));
};

template <class C>
struct PairStorage {
  using E = typename C::E;
  template <class L>
  using Tile = array_aligned<E, cosize_v<L>>;
  alignas(kSwizzleBytes) Tile<typename C::LayoutK> k;
  alignas(kSwizzleBytes) Tile<typename C::LayoutV> v;
  alignas(kSwizzleBytes) Tile<typename C::LayoutQ> q;
  alignas(kSwizzleBytes) Tile<typename C::LayoutDO> grad_out;
  alignas(kSwizzleBytes) Tile<typename C::LayoutDS> ds;
  alignas(128) float4 weights[C::EXCHANGES][C::BLOCK_M * kRows / (4 * kThreads)][kThreads];  // as registers hold them
  alignas(128) float base2[C::STAGES][C::BLOCK_M];
  alignas(128) float delta[C::STAGES][C::BLOCK_M];
  float slopes[C::BAND ? C::STAGES : 1];  // of ALiBi: of the head that a stage's rows are of
  IdsOfTile<C> ids;
  WorkTileOfKeys tile;   // whose keys are in k
  WorkTileOfKeys drawn;  // of the producer
  // What the producer remembers, because its registers are few: the index of its next work tile, how many times it
  // asked for one, how many it took, the count of steps after the present one's last one, its head of queries and its
  // batch entry, and its position in grad_out.
  int after, head, batch;
  uint32_t asked, taken, end, ring;
  uint32_t next;  // the index that the first thread block draws for the second one
  uint64_t k_full, v_full, kv_empty, next_full, next_empty;
  uint64_t weights_full[C::EXCHANGES], weights_empty[C::EXCHANGES];
  uint64_t own_ds_full[C::EXCHANGES], other_ds_full[C::EXCHANGES], ds_empty[C::EXCHANGES];
  uint64_t q_full[C::STAGES], q_empty[C::STAGES], do_full[C::DO_HALVES], do_empty[C::DO_HALVES];

  CUTE_DEVICE void init_barriers() {
    Full::init(&k_full, 1), Full::init(&v_full, 1);
    Empty::init(&kv_empty, C::CONSUMERS * kThreads);  // every thread reads the index, and arrives
    Full::init(&next_full, 1), Empty::init(&next_empty, 1);
    for (int i = 0; i < C::EXCHANGES; ++i) {  // one thread of each warp arrives, or one of all
      Empty::init(&weights_full[i], kWarps), Empty::init(&weights_empty[i], kWarps);
      Empty::init(&own_ds_full[i], 1), Full::init(&other_ds_full[i], 1);
      Empty::init(&ds_empty[i], kPair * kWarps);
    }
    for (int i = 0; i < C::STAGES; ++i) Full::init(&q_full[i], 1), Empty::init(&q_empty[i], kPair * 2 * kWarps);
    for (int i = 0; i < C::DO_HALVES; ++i) Full::init(&do_full[i], 1), Empty::init(&do_empty[i], kPair * 2 * kWarps);
    cutlass::arch::fence_barrier_init();
  }
};

// A position in the ring of halves of grad_out, in one register: the stage, and HALVES more in every second round.
template <int HALVES>
struct Ring {
  uint32_t at = 0;
  CUTE_DEVICE int stage() const { return at < HALVES ? at : at - HALVES; }
  CUTE_DEVICE uint32_t phase() const { return at >= HALVES; }
  CUTE_DEVICE Ring next() const { return {at == 2 * HALVES - 1 ? 0 : at + 1}; }
};

// Copies bytes to the same place in the other thread block's shared memory, and arrives with them at its `full`.
CUTE_DEVICE void copy_to_other(void const* source, int bytes, uint64_t const& full, uint32_t other) {
  uint32_t const from = cast_smem_ptr_to_uint(source);
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   set_block_rank(from, other)),
               "r"(from), "r"(bytes), "r"(set_block_rank(cast_smem_ptr_to_uint(&full), other))
               : "memory");
}

// The producer warp, of which one elected thread runs.
template <class C, class TmaQ, class TmaK, class TmaV, class TmaDO>
struct PairProducer {
  TmaQ const& tma_q;
  TmaK const& tma_k;
  TmaV const& tma_v;
  TmaDO const& tma_do;
  BackwardParams const& p;
  PairStorage<C>& s;
  PipelineState<C::STAGES> q_state;  // it counts steps

  static constexpr uint32_t kHalfBytes = kRows * C::HALF * sizeof(typename C::E);  // of q or k
  static constexpr uint32_t kHalfBytesV = kRows * C::HALF_V * sizeof(typename C::E);
  static constexpr uint32_t kNumbers = C::BLOCK_M * sizeof(float);

  using Half = Shape<Int<kRows>, Int<C::HALF>>;
  using HalfV = Shape<Int<kRows>, Int<C::HALF_V>>;

  // The keys and values of this thread block, and the half of the other one's keys.
  template <class SliceK, class SliceV, class K, class V>
  CUTE_DEVICE void load_keys(SliceK const& slice_k, SliceV const& slice_v, K const& k, V const& v, int first,
                             int block) {
    Tensor sK = slice_k.partition_D(make_tensor(make_smem_ptr(s.k.data()), typename C::LayoutK{}));
    Tensor sV = slice_v.partition_D(make_tensor(make_smem_ptr(s.v.data()), typename C::LayoutV{}));
    auto const from = make_coord(first, _0{});
    Tensor tK =
        slice_k.partition_S(local_tile(domain_offset(from, k), Half{}, make_coord(_, _)));  // [.., blocks, halves]
    Tensor tV = slice_v.partition_S(local_tile(domain_offset(from, v), HalfV{}, make_coord(_, _)));
    int const own = block * kPair + rank();  // of 64 keys
    Full::arrive_and_expect_tx(&s.k_full, 3 * kHalfBytes);
    Full::arrive_and_expect_tx(&s.v_full, 2 * kHalfBytesV);
    auto const k_to = tma_k.with(s.k_full, 0, TMA::CacheHintSm90::EVICT_FIRST);
    auto const v_to = tma_v.with(s.v_full, 0, TMA::CacheHintSm90::EVICT_FIRST);
    copy(k_to, tK(_, _, _, own, 0), sK(_, _, _, 0));
    copy(k_to, tK(_, _, _, own, 1), sK(_, _, _, 1));
    copy(k_to, tK(_, _, _, own ^ 1, int(rank())), sK(_, _, _, 2));
    copy(v_to, tV(_, _, _, own, 0), sV(_, _, _, 0));
    copy(v_to, tV(_, _, _, own, 1), sV(_, _, _, 1));
  }

  CUTE_DEVICE static uint32_t rank() { return block_rank_in_cluster(); }  // not kept in a register

  // The first thread block draws for both.
  CUTE_DEVICE int next(KeyScheduler const& scheduler, int index) {
    if (!p.counter) return scheduler.next(index, nullptr);
    uint32_t const phase = s.asked & 1;
    ++s.asked;
    if (rank() == 0) {
      int const after = scheduler.next(index, p.counter);
      Empty::wait(&s.next_empty, phase ^ 1);
      store_shared_remote(after, cast_smem_ptr_to_uint(&s.next), cast_smem_ptr_to_uint(&s.next_full), 1);
      return after;
    }
    Full::arrive_and_expect_tx(&s.next_full, sizeof(s.next));
    Full::wait(&s.next_full, phase);
    int const after = *const_cast<uint32_t const volatile*>(&s.next);
    Empty::arrive(&s.next_empty, 0, 1);
    return after;
  }

  CUTE_DEVICE void run(KeyScheduler const& scheduler) {
    Tensor mQ = tma_q.get_tma_tensor(make_shape(p.query_rows, p.D, p.H, p.B));
    Tensor mK = tma_k.get_tma_tensor(make_shape(p.key_rows, p.D, p.Hkv, p.B));
    Tensor mV = tma_v.get_tma_tensor(make_shape(p.key_rows, p.Dv, p.Hkv, p.B));
    Tensor mDO = tma_do.get_tma_tensor(make_shape(p.query_rows, p.Dv, p.H, p.B));
    auto slice_q = tma_q.get_slice(rank());
    auto slice_k = tma_k.get_slice(_0{});
    auto slice_v = tma_v.get_slice(_0{});
    auto slice_do = tma_do.get_slice(rank());
    Tensor sQ = slice_q.partition_D(make_tensor(make_smem_ptr(s.q.data()), typename C::LayoutQ{}));
    Tensor sDO = slice_do.partition_D(make_tensor(make_smem_ptr(s.grad_out.data()), typename C::LayoutDO{}));
    auto volatile& work = *const_cast<WorkTileOfKeys volatile*>(&s.drawn);
    auto volatile& end = *const_cast<uint32_t volatile*>(&s.end);
    s.asked = s.taken = s.ring = end = 0;
    auto volatile& after = *const_cast<int volatile*>(&s.after);
    for (int index = blockIdx.x / kPair; index < scheduler.tiles; index = after) {
      after = next(scheduler, index);
      WorkTile const w = scheduler.work_tile(index);
      Rows const queries = C::MaskPolicy::queries(p, w.batch), keys = C::MaskPolicy::keys(p, w.batch);
      if (C::BAND && w.block * C::BLOCK_N >= keys.count) continue;
      auto const from = make_coord(queries.first, _0{}, _0{});
      Tensor tQ = slice_q.partition_S(local_tile(domain_offset(from, mQ(_, _, _, queries.batch)), Half{},
                                                 make_coord(_, _)));  // [.., blocks, halves, heads]
      Tensor tDO =
          slice_do.partition_S(local_tile(domain_offset(from, mDO(_, _, _, queries.batch)), HalfV{}, make_coord(_, _)));
      int m;
      auto volatile& head = *const_cast<int volatile*>(&s.head);
      head = w.head;
      auto volatile& batch = *const_cast<int volatile*>(&s.batch);
      if (C::BAND) batch = w.batch;
      auto const block = [&] { return int64_t(work.head_block + m) * C::BLOCK_M; };
      auto const load_q = [&] {
        int const i = q_state.stage();
        Empty::wait(&s.q_empty[i], q_state.phase() ^ 1);
        load_row_ids<C, Full, SM90_BULK_COPY_G2S>(p, batch, m, s.ids, i, s.q_full[i]);
        if (C::BAND && p.slopes) const_cast<float volatile&>(s.slopes[i]) = p.slopes[batch * p.slopes_batch + head];
        Full::arrive_and_expect_tx(&s.q_full[i], 2 * kHalfBytes + kNumbers);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          copy(tma_q.with(s.q_full[i], uint16_t{kBothBlocks}, TMA::CacheHintSm90::EVICT_LAST),
               tQ(_, _, _, m, half, int(head)), sQ(_, _, _, 2 * i + half));
        SM90_BULK_COPY_G2S::copy(p.base2 + block(), &s.q_full[i], s.base2[i], kNumbers);
      };
      auto const load_do = [&] {
        Ring<C::DO_HALVES> ring{s.ring};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int const i = ring.stage();
          Empty::wait(&s.do_empty[i], ring.phase() ^ 1);
          Full::arrive_and_expect_tx(&s.do_full[i], kHalfBytesV + (half ? 0 : kNumbers));
          copy(tma_do.with(s.do_full[i], uint16_t{kBothBlocks}, TMA::CacheHintSm90::EVICT_LAST),
               tDO(_, _, _, m, half, int(head)), sDO(_, _, _, i));
          if (half == 0) SM90_BULK_COPY_G2S::copy(p.delta + block(), &s.do_full[i], s.delta[q_state.stage()], kNumbers);
          ring = ring.next();
        }
        s.ring = ring.at;
        q_state.advance();
        m = m + 1 == work.end ? work.begin : m + 1;
        if (m == work.start) head = head + 1, work.head_block = work.head_block + p.row_blocks;
      };
      {
        typename C::MaskPolicy const mask(p, w.batch);
        Blocks const rows = rows_of_tile<C>(p, mask, w);
        m = C::SEGMENTS ? rows.begin : mask.start(rows, w.block);  // beside ids it would spill
        end = q_state.count + p.tile_heads * (rows.end - rows.begin);
        publish(s.drawn, {index, (w.block * kPair + int(rank())) * kRows, rows.begin, rows.end, m,
                          first_block_of<C>(p, w.batch, head), end + C::FIRST_STEP ^ (s.taken & 1 ? kOddTile : 0),
                          mask.N, mask.rows, mask.shift});
      }
      if (q_state.count != end) load_q();  // before there is room for the keys
      Empty::wait(&s.kv_empty, s.taken & 1 ^ 1);
      publish(s.tile, work);
      load_key_ids<C, Full, SM90_BULK_COPY_G2S>(p, batch, w.block * kPair + rank(), 1, s.ids, s.k_full);
      load_keys(slice_k, slice_v, mK(_, _, w.kv_head, keys.batch), mV(_, _, w.kv_head, keys.batch), keys.first,
                w.block);
      ++s.taken;
      if (q_state.count != end) load_do();
#pragma unroll 1
      while (q_state.count != end) load_q(), load_do();
    }
    Empty::wait(&s.kv_empty, s.taken & 1 ^ 1);
    publish(s.tile, WorkTileOfKeys{kNoTile});
    Full::arrive(&s.k_full);
  }
};

}  // namespace sdpa_cuda
