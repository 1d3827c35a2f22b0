// Flash attention backward for sm_90a: one persistent, warp-specialised pass over blocks of keys, of one producer warp,
// two consumer warpgroups, and a thread that adds gradients of q where they are to have the same bits each time.
//
// A thread block owns BLOCK_N = 128 keys, and visits all blocks of rows of queries that see some of them. Each consumer
// has 64 keys, whose gradients stay in its registers. Scores and dP are computed transposed, keys by rows, so that the
// weights and dS are register operands of the gradients of v and k (FlashAttention-3, Shah et al., arXiv 2407.08608).
// The gradient of q needs the dS of both consumers, and so goes through shared memory: each consumer computes half of
// it, and adds it to float32 sums in global memory by a bulk reduction of each warp.
//
//   scores^T [64 keys, BLOCK_M] = k q^T         weights = exp2(scores * scale - base2)  (1)
//   dP^T     [64 keys, BLOCK_M] = v grad_out^T  dS = weights * (dP - delta)  (1)
//   grad_v   [64 keys, DV] += weights grad_out
//   grad_k   [64 keys, D]  += dS q
//   grad_q   [BLOCK_M, D]  += dS^T k            of all 128 keys
//
// The schedule of a consumer. Time runs to the right; S, P, V, K and Q are the WGMMAs of scores, dP, grad_v, grad_k and
// grad_q of a block of rows, and "ds" computes weights and dS, and writes dS to shared memory. Above head size 64:
//
//   WGMMA    S0 P0             V0 Q- K0 S1 P1             V1 Q0 K1 S2 P2             V2 Q1 K2 S3 ...
//   threads         [ ds0   ]       [add]    [ ds1   ]         [add 0]   [ ds2   ]         [add 1]
//
// There grad_q is written to shared memory beside the WGMMA of grad_k, which has one of its operands in registers:
// beside that of scores, which reads both, either waits for the other one. Up to head size 64 the order is V K Q S P,
// which is faster there (docs/log/hopper-backward.md).
//
// Where several work tiles have the same keys, for heads that share these or for parts of the rows, the epilogue adds
// grad_k and grad_v to float32 sums likewise.
//
// (1) Shared memory answers late while WGMMAs read from it. So above head size 64 the accumulators of scores and dP
// begin with -base2 / scale and -delta, which are read a while before the WGMMAs are issued. Up to head size 64 that is
// slower. There, without a band, dropout or a bias, half of k stays in registers, which spares shared memory a part of
// the reads. With dropout only the scores begin so, and weights are dropped before they become operands, as dP is
// before delta is subtracted. With a bias only dP begins so.
//
// TMA writes a step's block of the bias into the stage of dS that the step will write. Consumers read it from the
// addresses to which they will write dS.
//
// grad_q is one block of rows behind, so that a consumer need not wait for the other one's dS. Before the first block,
// a grad_q is computed that nobody adds, because a loop with its first step taken out would spill.
#pragma once
#include "../scheduler.cuh"
#include "backward_config.cuh"
#include "backward_rows.cuh"
#include "backward_softmax.cuh"

namespace sdpa_cuda {

struct NoBias {};  // in the place of a bias's TMA

// The producer warp, of which one elected thread runs.
template <class C, class TmaQ, class TmaK, class TmaV, class TmaDO, class TmaBias>
struct BackwardProducer {
  using E = typename C::E;
  TmaQ const& tma_q;
  TmaK const& tma_k;
  TmaV const& tma_v;
  TmaDO const& tma_do;
  TmaBias const& tma_bias;
  BackwardParams const& p;
  BackwardStorage<C>& s;
  PipelineState<C::STAGES> q_state, do_state;
  PipelineState<1> kv_state;

  // A block of rows of q or grad_out, and the numbers of its rows.
  template <class Tma, class Source, class Target>
  CUTE_DEVICE void load(Tma const& tma, Source const& source, Target&& target, float const* numbers, float* numbers_to,
                        uint64_t& full) {
    constexpr uint32_t kBytes = decltype(size(target.layout()))::value * sizeof(E),
                       kNumbers = C::BLOCK_M * sizeof(float);
    Full::arrive_and_expect_tx(&full, kBytes + kNumbers);
    copy(tma.with(full, 0, TMA::CacheHintSm90::EVICT_LAST), source, target);
    SM90_BULK_COPY_G2S::copy(numbers, &full, numbers_to, kNumbers);
  }

  template <class Tma, class Source, class Target>
  CUTE_DEVICE void load_keys(Tma const& tma, Source const& source, Target&& target, uint64_t& full) {
    Full::arrive_and_expect_tx(&full, decltype(size(target.layout()))::value * sizeof(E));
    copy(tma.with(full, 0, TMA::CacheHintSm90::EVICT_FIRST), source, target);
  }

  // The bias of a step, of block m of a head's rows and a block of keys.
  CUTE_DEVICE void load_bias(uint32_t step, WorkTile const& w, int head, int m) const {
    if constexpr (C::BIAS) {
      constexpr uint32_t kBytes = C::BLOCK_M * C::BLOCK_N * sizeof(E);
      int const i = step % C::DS_STAGES;
      Empty::wait(&s.ds_empty[i], step / C::DS_STAGES & 1 ^ 1);
      Full::arrive_and_expect_tx(&s.bias_full[i], kBytes);
      bool const heads = p.bias.head != 0, entries = p.bias.batch != 0;
      Tensor bias = tma_bias.get_tma_tensor(make_shape(p.M, p.N, heads ? p.H : 1, entries ? p.B : 1));
      Tensor block = local_tile(bias(_, _, heads ? head : 0, entries ? w.batch : 0),
                                Shape<Int<C::BLOCK_M>, Int<C::BLOCK_N>>{}, make_coord(m, w.block));
      auto const slice = tma_bias.get_slice(_0{});
      Tensor target = slice.partition_D(make_tensor(make_smem_ptr(s.ds.data()), typename C::LayoutDS{}));
      copy(tma_bias.with(s.bias_full[i]), slice.partition_S(block), target(_, _, _, i));
    }
  }

  // Of block m of rows and a block of keys.
  CUTE_DEVICE int flags_of(typename C::MaskPolicy const& mask, int m, int key_block) const {
    int const row0 = m * C::BLOCK_M;
    bool const end = C::BAND && (p.cu_q || p.q_lengths) && mask.rows < row0 + C::BLOCK_M;
    int flags = end ? kRowsEnd : 0;
#pragma unroll
    for (int i = 0; i < C::CONSUMERS; ++i) flags |= mask.needs_mask(row0, key_block * C::BLOCK_N + i * kRows) << i;
    return flags;
  }

  CUTE_DEVICE void run(KeyScheduler const& scheduler) {
    Tensor mQ = tma_q.get_tma_tensor(make_shape(p.query_rows, p.D, p.H, p.B));
    Tensor mK = tma_k.get_tma_tensor(make_shape(p.key_rows, p.D, p.Hkv, p.B));
    Tensor mV = tma_v.get_tma_tensor(make_shape(p.key_rows, p.Dv, p.Hkv, p.B));
    Tensor mDO = tma_do.get_tma_tensor(make_shape(p.query_rows, p.Dv, p.H, p.B));
    auto slice_q = tma_q.get_slice(_0{});
    auto slice_k = tma_k.get_slice(_0{});
    auto slice_v = tma_v.get_slice(_0{});
    auto slice_do = tma_do.get_slice(_0{});
    Tensor sQ = slice_q.partition_D(make_tensor(make_smem_ptr(s.q.data()), typename C::LayoutQ{}));
    Tensor sK = slice_k.partition_D(make_tensor(make_smem_ptr(s.k.data()), typename C::LayoutK{}));
    Tensor sV = slice_v.partition_D(make_tensor(make_smem_ptr(s.v.data()), typename C::LayoutV{}));
    Tensor sDO = slice_do.partition_D(make_tensor(make_smem_ptr(s.grad_out.data()), typename C::LayoutDO{}));
    uint32_t end_step = C::FIRST_STEP;
    // A work tile is drawn long before it is needed, unless others may wait for it.
    int after = 0;
    for (int index = scheduler.first(blockIdx.x, p.counter); index < scheduler.tiles;
         index = p.semaphores ? scheduler.next(index, p.counter) : after) {
      if (!p.semaphores) after = scheduler.next(index, p.counter);
      WorkTile const w = scheduler.work_tile(index);
      Rows const queries = C::MaskPolicy::queries(p, w.batch), keys = C::MaskPolicy::keys(p, w.batch);
      if (C::BAND && w.block * C::BLOCK_N >= keys.count) continue;
      typename C::MaskPolicy const mask(p, w.batch);
      Blocks const rows = rows_of_tile<C>(p, mask, w);
      int const count = rows.end - rows.begin, start = mask.start(rows, w.block, p.semaphores);
      auto const after_row = [&](int m) { return m + 1 == rows.end ? rows.begin : m + 1; };
      auto const from = make_coord(queries.first, _0{}, _0{});
      Tensor tQ =
          slice_q.partition_S(local_tile(domain_offset(from, mQ(_, _, _, queries.batch)),  // [.., blocks, heads]
                                         Shape<Int<C::BLOCK_M>, Int<C::D>>{}, make_coord(_, _0{})));
      Tensor tDO = slice_do.partition_S(local_tile(domain_offset(from, mDO(_, _, _, queries.batch)),
                                                   Shape<Int<C::BLOCK_M>, Int<C::DV>>{}, make_coord(_, _0{})));
      auto const from_key = make_coord(keys.first, _0{});
      Tensor tK = slice_k.partition_S(local_tile(domain_offset(from_key, mK(_, _, w.kv_head, keys.batch)),
                                                 Shape<Int<C::BLOCK_N>, Int<C::D>>{}, make_coord(w.block, _0{})));
      Tensor tV = slice_v.partition_S(local_tile(domain_offset(from_key, mV(_, _, w.kv_head, keys.batch)),
                                                 Shape<Int<C::BLOCK_N>, Int<C::DV>>{}, make_coord(w.block, _0{})));
      int head = w.head;
      int const end_head = head + p.tile_heads;
      auto load_q = [&](int m) {
        int const i = q_state.stage();
        Empty::wait(&s.q_empty[i], q_state.phase() ^ 1);
        load_row_ids<C, Full, SM90_BULK_COPY_G2S>(p, w.batch, m, s.ids, i, s.q_full[i]);
        if (C::BAND && p.slopes) const_cast<float volatile&>(s.slopes[i]) = p.slopes[w.batch * p.slopes_batch + head];
        int const block = first_block_of<C>(p, w.batch, head) + m;
        auto volatile& rows = *const_cast<RowsOfStep volatile*>(&s.steps[q_state.count % (2 * C::STAGES)]);
        rows.m = m, rows.block = block, rows.flags = flags_of(mask, m, w.block);
        if (C::DROPOUT) rows.stream = stream_of(p, w.batch, head);
        load(tma_q, tQ(_, _, _, m, head), sQ(_, _, _, i), p.base2 + int64_t(block) * C::BLOCK_M, s.base2[i],
             s.q_full[i]);
        q_state.advance();
      };
      auto load_do = [&](int m) {
        int const i = do_state.stage();
        Empty::wait(&s.do_empty[i], do_state.phase() ^ 1);
        load(tma_do, tDO(_, _, _, m, head), sDO(_, _, _, i),
             p.delta + int64_t(first_block_of<C>(p, w.batch, head) + m) * C::BLOCK_M, s.delta[i], s.do_full[i]);
        load_bias(do_state.count, w, head, m);
        do_state.advance();
      };
      bool const any = count > 0;
      if (any) load_q(start);  // before there is room for the keys
      Empty::wait(&s.kv_empty, kv_state.phase() ^ 1);
      end_step += p.tile_heads * count;
      publish(s.tile, {index, w.block * C::BLOCK_N, rows.begin, rows.end, start, first_block_of<C>(p, w.batch, head),
                       end_step ^ (kv_state.phase() ? kOddTile : 0), mask.N, mask.rows, mask.shift});
      load_key_ids<C, Full, SM90_BULK_COPY_G2S>(p, w.batch, 2 * w.block, 2, s.ids, s.k_full);
      load_keys(tma_k, tK, sK(_, _, _, _0{}), s.k_full);
      if (any) load_do(start);
      load_keys(tma_v, tV, sV(_, _, _, _0{}), s.v_full);
      kv_state.advance();
      for (int done = 1; any && head < end_head; ++head, done = 0) {
        int m = done ? after_row(start) : start;
#pragma unroll 1
        for (; done < count; ++done, m = after_row(m)) {
          load_q(m);
          load_do(m);
        }
      }
    }
    Empty::wait(&s.kv_empty, kv_state.phase() ^ 1);
    publish(s.tile, {kNoTile});
    Full::arrive(&s.k_full);
  }
};

// The gradients of a consumer's keys and values, from registers to memory.
template <class C, class GradK, class GradV>
CUTE_DEVICE void store_gradients(BackwardParams const& p, WorkTile const& at, GradK& grad_k, GradV& grad_v,
                                 int consumer, int thread) {
  using E = typename C::E;
  Rows const keys = C::MaskPolicy::keys(p, at.batch);
  int const key = at.block * C::BLOCK_N + consumer * kRows + thread / 32 * 16 + thread % 32 / 4;  // of a WGMMA's layout
#pragma unroll
  for (int i = 0; i < size(grad_k); ++i) grad_k(i) *= C::DROPOUT ? p.scale * p.kept : p.scale;
  if (C::DROPOUT) {
#pragma unroll
    for (int i = 0; i < size(grad_v); ++i) grad_v(i) *= p.kept;
  }
  Tensor rounded_k = make_tensor<E>(grad_k.layout());
  Tensor rounded_v = make_tensor<E>(grad_v.layout());
  convert(grad_k, rounded_k);
  convert(grad_v, rounded_v);
  auto const head_of = [&](View const& t) {
    return static_cast<E*>(t.data) + keys.batch * t.batch + at.kv_head * t.head + int64_t(keys.first) * t.row;
  };
  store_rows<C::D>(reinterpret_cast<uint32_t const*>(rounded_k.data()), head_of(p.grad_k), p.grad_k.row, key,
                   keys.count, p.D, thread % 4);
  store_rows<C::DV>(reinterpret_cast<uint32_t const*>(rounded_v.data()), head_of(p.grad_v), p.grad_v.row, key,
                    keys.count, p.Dv, thread % 4);
}

// Adds a warp's gradients of keys to the sums of all heads that share these, in parts that `staged` has room for.
template <class C, class Acc>
CUTE_DEVICE void add_gradients(BackwardParams const& p, WorkTile const& at, Acc const& grad_k, Acc const& grad_v,
                               BackwardStorage<C>& s, float* staged) {
  int64_t const place = first_key_block_of<C>(p, at.batch, at.kv_head) + at.block;
  int64_t const warp = (staged - s.grad_q[0]) * (C::BLOCK_N / C::BLOCK_M);
  auto const add = [&](auto const& acc, float* sums) {
    constexpr int kPart = C::BLOCK_M * C::D / (C::CONSUMERS * kThreads);  // numbers of a thread that are staged at once
    static_assert(C::D == C::DV && decltype(size(acc))::value % kPart == 0);
#pragma unroll
    for (int i = 0; i < size(acc); i += kPart)
      stage_and_add(make_tensor(acc.data() + i, Shape<Int<kPart>>{}), staged, sums + 32 * i);
  };
  add(grad_k, p.grad_k_acc + place * C::BLOCK_N * C::D + warp);
  add(grad_v, p.grad_v_acc + place * C::BLOCK_N * C::DV + warp);
}

// The epilogue of a work tile.
template <class C, class GradK, class GradV>
CUTE_DEVICE void finish_tile(BackwardParams const& p, WorkTile const& at, GradK& grad_k, GradV& grad_v,
                             BackwardStorage<C>& s, float* staged, int consumer) {
  if (p.grad_k_acc)
    add_gradients<C>(p, at, grad_k, grad_v, s, staged);
  else
    store_gradients<C>(p, at, grad_k, grad_v, consumer, threadIdx.x % kThreads);
}

// The thread that adds gradients of q where they are to have the same bits each time. Blocks of keys add to a block of
// rows from the last one to the first, and consumers need not wait for their turn.
template <class C>
CUTE_DEVICE void add_staged(BackwardParams const& p, BackwardStorage<C>& s) {
  constexpr int kSums = C::BLOCK_M * C::D;  // of a block of rows
  if (!p.semaphores) return;
  for (uint32_t phase = 0;; phase ^= 1) {
    Empty::wait(&s.grad_q_full, phase);
    int const target = *const_cast<int const volatile*>(&s.target), key0 = *const_cast<int const volatile*>(&s.key0);
    if (target == kNoTile) break;
    wait_for_turn(p.semaphores + target, key0 / C::BLOCK_N);
    add_later(p.grad_q_acc + int64_t(target) * kSums, s.grad_q[0], kSums * sizeof(float));
    wait_until_read();
    Empty::arrive(&s.grad_q_empty);
    wait_until_added();
    pass_turn(p.semaphores + target);
  }
}

// Of consumers: grad_q, which `write` writes to shared memory, for that thread; with kNoTile its end.
template <class C, class Write>
CUTE_DEVICE void hand_over(BackwardStorage<C>& s, uint32_t step, int target, int key0, Write const& write) {
  Empty::wait(&s.grad_q_empty, step & 1 ^ 1);
  write();
  if (threadIdx.x == kThreads)
    *const_cast<int volatile*>(&s.target) = target, *const_cast<int volatile*>(&s.key0) = key0;
  if (threadIdx.x % 32 == 0) Empty::arrive(&s.grad_q_full);
}

// The weights that a step drops. They depend on no data and are found beside WGMMAs, which they do not wait for.
template <class C>
CUTE_DEVICE Dropped next_dropped(BackwardParams const& p, BackwardStorage<C>& s, uint32_t step, int consumer,
                                 int thread) {
  if (!C::DROPOUT) return {};
  Full::wait(&s.q_full[step % C::STAGES], step / C::STAGES & 1);
  int const key0 = *const_cast<int const volatile*>(&s.tile.key0);
  return find_dropped<C>(p, s.rows_of(step), key0 + consumer * kRows, thread);
}

// Scores become weights, with a bias once its block is there. Returns where this thread will write the step's dS, which
// is where it reads that block; `ds_first` is where in the first stage.
template <class C, class Scores>
CUTE_DEVICE uint32_t find_weights(Scores& scores, BackwardParams const& p, BackwardStorage<C>& s, uint32_t step,
                                  uint32_t ds_first, float const* base2) {
  uint32_t const own_ds = ds_first + step % C::DS_STAGES * uint32_t(sizeof(s.ds) / C::DS_STAGES);
  if constexpr (C::BIAS) {
    Full::wait(&s.bias_full[step % C::DS_STAGES], step / C::DS_STAGES & 1);
    exponentiate_biased<C>(scores, own_ds, base2, p.scale);
  } else {
    exponentiate<C>(scores, base2, p);
  }
  return own_ds;
}

// A fragment that a consumer's loop does not change. Where registers are full, they have no room for its descriptors.
template <class C, class Fragment>
CUTE_DEVICE auto in_loop(Fragment const& fragment) {
  if constexpr (C::WIDE)
    return anew(fragment);
  else
    return fragment;
}

// A consumer warpgroup: all of its work tiles, one after the other.
template <class C>
CUTE_DEVICE void consume_backward(BackwardParams const& p, BackwardStorage<C>& s, KeyScheduler const& scheduler,
                                  int consumer) {
  using E = typename C::E;
  int const thread = threadIdx.x % kThreads;
  bool const signals = thread % 32 == 0;
  typename C::MmaS mma_s;
  typename C::MmaHeld mma_k;
  typename C::MmaDP mma_dp;
  typename C::MmaDV mma_dv;
  typename C::MmaDK mma_dk;
  typename C::MmaDQ mma_dq;
  auto const tile = [](auto& memory, auto layout) { return make_tensor(make_smem_ptr(memory.data()), layout); };
  Tensor sK = tile(s.k, typename C::LayoutK{});           // [BLOCK_N, D, 1]
  Tensor sV = tile(s.v, typename C::LayoutV{});           // [BLOCK_N, DV, 1]
  Tensor sQ = tile(s.q, typename C::LayoutQ{});           // [BLOCK_M, D, stages]
  Tensor sDO = tile(s.grad_out, typename C::LayoutDO{});  // [BLOCK_M, DV, stages]
  auto const own_keys = make_coord(consumer, _0{});
  Tensor own_k = local_tile(sK(_, _, _0{}), Shape<Int<kRows>, Int<C::D>>{}, own_keys);
  Tensor own_v = local_tile(sV(_, _, _0{}), Shape<Int<kRows>, Int<C::DV>>{}, own_keys);
  Tensor held_columns = local_tile(own_k, Shape<Int<kRows>, Int<C::HELD ? C::HELD : 16>>{}, make_coord(_0{}, _0{}));
  Tensor k = operand_a(mma_s, own_k, thread);                                                // [64, D]
  Tensor held = mma_k.get_slice(thread).partition_fragment_A(held_columns);                  // [64, HELD]
  Tensor v = operand_a(mma_dp, own_v, thread);                                               // [64, DV]
  Tensor q = operand_b(mma_s, sQ, thread), grad_out = operand_b(mma_dp, sDO, thread);        // [BLOCK_M, .., stages]
  Tensor q_t = operand_b(mma_dk, tile(s.q, typename C::LayoutQt{}), thread);                 // [D, BLOCK_M, stages]
  Tensor grad_out_t = operand_b(mma_dv, tile(s.grad_out, typename C::LayoutDOt{}), thread);  // [DV, BLOCK_M, stages]
  Tensor all_ds = local_tile(tile(s.ds, typename C::LayoutDS{}), Shape<Int<kRows>, Int<C::BLOCK_N>>{},
                             make_coord(C::SPLIT_D ? 0 : consumer, _0{}, _));
  Tensor all_k_t = local_tile(tile(s.k, typename C::LayoutKt{}), Shape<Int<C::DQ_COLUMNS>, Int<C::BLOCK_N>>{},
                              make_coord(C::SPLIT_D ? consumer : 0, _0{}, _0{}));
  Tensor ds_rows = operand_a(mma_dq, all_ds, thread);                                     // [64, BLOCK_N, stages]
  Tensor k_t = operand_b(mma_dq, all_k_t, thread);                                        // [DQ_COLUMNS, BLOCK_N]
  Tensor scores = partition_fragment_C(mma_s, Shape<Int<kRows>, Int<C::BLOCK_M>>{});      // [64 keys, BLOCK_M]
  Tensor dp = partition_fragment_C(mma_dp, Shape<Int<kRows>, Int<C::BLOCK_M>>{});         // [64 keys, BLOCK_M]
  Tensor grad_v = partition_fragment_C(mma_dv, Shape<Int<kRows>, Int<C::DV>>{});          // [64 keys, DV]
  Tensor grad_k = partition_fragment_C(mma_dk, Shape<Int<kRows>, Int<C::D>>{});           // [64 keys, D]
  Tensor grad_q = partition_fragment_C(mma_dq, Shape<Int<kRows>, Int<C::DQ_COLUMNS>>{});  // [64, DQ_COLUMNS]
  Tensor weights = make_tensor<E>(operand_of(scores.layout()));                           // [64 keys, BLOCK_M]
  Tensor ds = make_tensor<E>(operand_of(dp.layout()));                                    // [64 keys, BLOCK_M]
  Tensor score_rows = make_tensor(scores.data(), rows_of(scores.layout()));  // [2 keys, rows of this thread]
  Tensor dp_rows = make_tensor(dp.data(), rows_of(dp.layout()));             // [2 keys, rows of this thread]
  Tensor all_coords = mma_s.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kRows>, Int<C::BLOCK_M>>{}));
  Tensor coords = make_tensor(all_coords.data(), rows_of(all_coords.layout()));  // of score_rows
  Tensor ds_target = local_tile(tile(s.ds, typename C::LayoutDSt{}), Shape<Int<kRows>, Int<C::BLOCK_M>>{},
                                make_coord(consumer, _0{}, _0{}));
  uint32_t const ds_first = first_of_transposed(mma_s, ds_target, thread);  // in the first stage

  float* const staged = s.grad_q[consumer * kWarps + thread / 32];
  int const pair = thread % 4 * 2;  // the first of this thread's rows of queries among eight
  auto const volatile& work = *const_cast<WorkTileOfKeys const volatile*>(&s.tile);
  uint32_t step = C::FIRST_STEP;
  Dropped dropped;  // of the weights that are computed next
  for (;; step ^= kOddTile) {
    Full::wait(&s.k_full, step / kOddTile);
    if (__shfl_sync(0xffffffff, work.index, 0) == kNoTile) break;
    int target = -1;  // the block of rows whose grad_q is added next; the first one is nobody's
    clear(grad_k), clear(grad_v);
    bool const keys_end = C::BAND && (p.cu_k || p.k_lengths);
    auto const clear_rows_behind = [&](uint32_t step, auto const& rows) {
      if (C::BAND && s.rows_of(step).flags & kRowsEnd)
        clear_from<C::BLOCK_M>(rows(_, _, step % C::STAGES), work.rows - s.rows_of(step).m * C::BLOCK_M);
    };
    // Memory that WGMMAs read answers late: numbers of rows are read a while before the accumulators are needed.
    auto begin_scores = [&](uint32_t step) {
      Full::wait(&s.q_full[step % C::STAGES], step / C::STAGES & 1);
      if constexpr (C::BEGINS_S) begin_with(score_rows, s.base2[step % C::STAGES] + pair);
      clear_rows_behind(step, sQ);
    };
    auto begin_dp = [&](uint32_t step) {
      Full::wait(&s.do_full[step % C::STAGES], step / C::STAGES & 1);
      if constexpr (C::BEGINS_DP) begin_with(dp_rows, s.delta[step % C::STAGES] + pair);
      clear_rows_behind(step, sDO);
    };
    auto issue_scores = [&](uint32_t step) {
      if constexpr (!C::BEGINS_S) forget(scores);
      issue_wgmma<!C::BEGINS_S, C::HELD / 16>(mma_s, in_loop<C>(k), q(_, _, _, step % C::STAGES), scores, mma_k, held);
    };
    auto issue_dp = [&](uint32_t step) {
      if constexpr (!C::BEGINS_DP) forget(dp);
      issue_wgmma<!C::BEGINS_DP>(mma_dp, in_loop<C>(v), grad_out(_, _, _, step % C::STAGES), dp);
    };
    // From scores and dP to weights, and to dS in registers and in shared memory.
    auto make_ds = [&]() __attribute__((always_inline)) {
      float const* const base2 = s.base2[step % C::STAGES] + pair;
      warpgroup_wait<1>();  // scores are done, dP may not be
      warpgroup_fence_operand(scores);
      if (C::BAND && (p.softcap > 0.f || p.slopes))
        adjust<C>(score_rows, coords, base2, p, s.slopes[step % C::STAGES],
                  s.rows_of(step).m * C::BLOCK_M + work.shift - work.key0 - consumer * kRows);
      uint32_t const own_ds = find_weights<C>(score_rows, p, s, step, ds_first, base2);
      int const key0 = work.key0 + consumer * kRows;
      if (C::MASK == MaskKind::kNone ? key0 + kRows > p.N : s.rows_of(step).flags >> consumer & 1)
        typename C::MaskPolicy(p, work.N, work.rows, work.shift)
            .apply(score_rows, coords, s.rows_of(step).m * C::BLOCK_M, key0);
      uint32_t const counted = opaque(step);  // as an int it would be negative in every second work tile
      part_segments<C>(score_rows, coords, s.ids, counted % C::STAGES, opaque(threadIdx.x) / kThreads - 1);
      warpgroup_wait<0>();  // dP is done
      warpgroup_fence_operand(dp);
      differentiate<C>(dp_rows, score_rows, s.delta[step % C::STAGES] + pair, dropped);
      if (C::BAND && p.softcap > 0.f) uncap<C>(dp_rows, score_rows, base2, p);
      drop<C>(score_rows, dropped);
      // Weights first, because ds has registers that scores had.
      if (C::WIDE) convert(scores, weights);
      convert(dp, ds);
      if (C::DS_EMPTY && !C::BIAS) Empty::wait(&s.ds_empty[step % C::DS_STAGES], step / C::DS_STAGES & 1 ^ 1);
      store_transposed(ds, own_ds);
      cutlass::arch::fence_view_async_shared();
      if (!C::WIDE) convert(scores, weights);
      __syncwarp();
      if (signals) Empty::arrive(&s.ds_full[step % C::DS_STAGES]);
    };
    auto begin_grad_q = [&](uint32_t step) {
      Empty::wait(&s.ds_full[step % C::DS_STAGES], step / C::DS_STAGES & 1);
      forget(grad_q);
      issue_wgmma<true>(mma_dq, ds_rows(_, _, _, step % C::DS_STAGES), in_loop<C>(k_t), grad_q);
    };
    auto add_grad_q = [&](uint32_t step) {
      warpgroup_fence_operand(grad_q);
      if (target < 0) return;
      if (C::DS_EMPTY && signals) Empty::arrive(&s.ds_empty[step % C::DS_STAGES]);
      if (p.semaphores)
        hand_over(s, step, target, work.key0, [&] { stage(grad_q, staged); });
      else
        stage_and_add(grad_q, staged, p.grad_q_acc + int64_t(target) * C::BLOCK_M * C::D + (staged - s.grad_q[0]));
    };
    // The WGMMAs with weights and dS, beside the next block's scores and dP.
    auto use_ds = [&](auto more) __attribute__((always_inline)) {
      auto const release_q = [&] {
        warpgroup_fence_operand(grad_k);
        if (signals) Empty::arrive(&s.q_empty[step % C::STAGES]);
      };
      issue_wgmma<false>(mma_dv, weights, grad_out_t(_, _, _, step % C::STAGES), grad_v);
      if constexpr (C::WIDE) begin_grad_q(step - 1);
      issue_wgmma<false>(mma_dk, ds, q_t(_, _, _, step % C::STAGES), grad_k);
      if constexpr (!C::WIDE) begin_grad_q(step - 1);
      if constexpr (more.value) dropped = next_dropped(p, s, step + 1, consumer, thread);
      warpgroup_wait<1>();  // all but the last one are done
      warpgroup_fence_operand(grad_v);
      if (signals) Empty::arrive(&s.do_empty[step % C::STAGES]);
      if constexpr (more.value) begin_scores(step + 1);
      C::WIDE ? add_grad_q(step - 1) : release_q();
      if constexpr (more.value) issue_scores(step + 1), begin_dp(step + 1);
      warpgroup_wait<more.value ? 1 : 0>();  // the last one is done
      C::WIDE ? release_q() : add_grad_q(step - 1);
      if constexpr (more.value) issue_dp(step + 1);
      target = s.rows_of(step).block;
      ++step;
    };
    if (step != work.end_step) {
      if (C::BAND) clear_behind<C::BLOCK_N>(sK(_, _, _0{}), work.N - work.key0, keys_end);
      if constexpr (C::HELD > 0) read_operand(mma_k, held_columns, held, thread);
      begin_scores(step), issue_scores(step);
      Full::wait(&s.v_full, step / kOddTile);
      if (C::BAND) clear_behind<C::BLOCK_N>(sV(_, _, _0{}), work.N - work.key0, keys_end);
      if (C::WIDE) warpgroup_wait<0>();  // else ptxas waits here and warns
      begin_dp(step), issue_dp(step);
      dropped = next_dropped(p, s, step, consumer, thread);
      make_ds();
#pragma unroll 1
      while (step + 1 != work.end_step) {
        use_ds(std::true_type{});
        make_ds();
      }
      use_ds(std::false_type{});
      begin_grad_q(step - 1);
      warpgroup_wait<0>();
      add_grad_q(step - 1);
    } else {
      Full::wait(&s.v_full, step / kOddTile);
    }
    // The work tile is computed again, because nothing of it stayed in registers.
    WorkTile const done = scheduler.work_tile(__shfl_sync(0xffffffff, work.index, 0));
    Empty::arrive(&s.kv_empty);
    finish_tile<C>(p, done, grad_k, grad_v, s, staged, consumer);
  }
  if (p.semaphores) hand_over(s, step, kNoTile, 0, [] {});
  // The additions have to have been read from shared memory before the thread block ends.
  if (signals) wait_until_read();
}

template <class C, class TmaQ, class TmaK, class TmaV, class TmaDO, class TmaBias>
__global__ void __launch_bounds__(C::THREADS, 1)
    flash_backward(__grid_constant__ TmaQ const tma_q, __grid_constant__ TmaK const tma_k,
                   __grid_constant__ TmaV const tma_v, __grid_constant__ TmaDO const tma_do,
                   __grid_constant__ TmaBias const tma_bias, __grid_constant__ BackwardParams const p,
                   __grid_constant__ KeyScheduler const scheduler) {
  extern __shared__ __align__(kSwizzleBytes) char aligned_raw[];
  auto& s = *reinterpret_cast<BackwardStorage<C>*>(aligned_raw);
  int const warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kThreads, 0);
  if (threadIdx.x == 0) {
    s.init_barriers();
    prefetch_tma_descriptor(tma_q.get_tma_descriptor());
    prefetch_tma_descriptor(tma_k.get_tma_descriptor());
    prefetch_tma_descriptor(tma_v.get_tma_descriptor());
    prefetch_tma_descriptor(tma_do.get_tma_descriptor());
    if constexpr (C::BIAS) prefetch_tma_descriptor(tma_bias.get_tma_descriptor());
  }
  __syncthreads();
  wait_for_kernel_in_front();
  let_kernel_behind_begin();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::PRODUCER_REGISTERS>();
    // The thread ends here: in a branch beside this one, the producer would not have uniform registers.
    if (threadIdx.x == 32) return add_staged<C>(p, s);
    if (threadIdx.x / 32 == 0 && elect_one_sync())
      BackwardProducer<C, TmaQ, TmaK, TmaV, TmaDO, TmaBias>{tma_q, tma_k, tma_v, tma_do, tma_bias, p, s}.run(scheduler);
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::CONSUMER_REGISTERS>();
    consume_backward<C>(p, s, scheduler, warpgroup - 1);
  }
}

// The bias for TMA. What is shared is there once, and a dimension of one element has any stride that TMA takes.
template <class C>
auto tma_of_bias(BackwardParams const& p) {
  if constexpr (C::BIAS) {
    View const& t = p.bias;
    View const shared{t.data, t.batch ? t.batch : t.row, t.head ? t.head : t.row, t.row};
    return make_tma_copy(SM90_TMA_LOAD{},
                         rows_tensor<typename C::E>(shared, p.M, p.N, t.head ? p.H : 1, t.batch ? p.B : 1),
                         take<0, 2>(typename C::LayoutDS{}), Shape<Int<C::BLOCK_M>, Int<C::BLOCK_N>>{}, _1{});
  } else {
    return NoBias{};
  }
}

template <class C>
int launch_alone(BackwardParams const& p, cudaStream_t stream) {
  using E = typename C::E;
  int const batch = p.cu_q ? 1 : p.B;  // entries in memory
  auto tma_q = make_tma_copy(SM90_TMA_LOAD{}, rows_tensor<E>(p.q, p.query_rows, p.D, p.H, batch),
                             take<0, 2>(typename C::LayoutQ{}), Shape<Int<C::BLOCK_M>, Int<C::D>>{}, _1{});
  auto tma_k = make_tma_copy(SM90_TMA_LOAD{}, rows_tensor<E>(p.k, p.key_rows, p.D, p.Hkv, batch),
                             take<0, 2>(typename C::LayoutK{}), Shape<Int<C::BLOCK_N>, Int<C::D>>{}, _1{});
  auto tma_v = make_tma_copy(SM90_TMA_LOAD{}, rows_tensor<E>(p.v, p.key_rows, p.Dv, p.Hkv, batch),
                             take<0, 2>(typename C::LayoutV{}), Shape<Int<C::BLOCK_N>, Int<C::DV>>{}, _1{});
  auto tma_do = make_tma_copy(SM90_TMA_LOAD{}, rows_tensor<E>(p.grad_out, p.query_rows, p.Dv, p.H, batch),
                              take<0, 2>(typename C::LayoutDO{}), Shape<Int<C::BLOCK_M>, Int<C::DV>>{}, _1{});
  auto bias = tma_of_bias<C>(p);
  auto kernel = flash_backward<C, decltype(tma_q), decltype(tma_k), decltype(tma_v), decltype(tma_do), decltype(bias)>;
  constexpr int bytes = sizeof(BackwardStorage<C>);
  static_assert(bytes <= kSharedBytes);
  cudaError_t const refused = allow_shared_memory<C>(kernel, bytes, p.device);
  if (refused != cudaSuccess) return refused;
  KeyScheduler const scheduler(p, C::BLOCK_N);
  if constexpr (C::SEGMENTS) launch_find_row_spans<C>(p, stream);
  launch_prepare_rows<C>(p, stream);
  launch_early(kernel, scheduler.grid, C::THREADS, bytes, stream, tma_q, tma_k, tma_v, tma_do, bias, p, scheduler);
  launch_finish_rows<C>(p, stream);
  if (p.grad_k_acc) launch_finish_keys<C>(p, stream);
  return cudaGetLastError();
}

}  // namespace sdpa_cuda
