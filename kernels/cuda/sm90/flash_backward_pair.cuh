// Flash attention backward for sm_90a and head sizes above 128: one persistent, warp-specialised pass over blocks of
// 128 keys by pairs of thread blocks, each of one producer warp and two consumer warpgroups.
//
// The gradients of k and v of 64 keys take 256 registers of a warpgroup's threads at D = 256, so each consumer has one
// of them, and a thread block has 64 keys. The consumer of values computes the scores, and hands the weights over
// through shared memory. The consumer of keys computes dP and dS. The sums of grad_q, which all thread blocks add to,
// would then be the limit: L2 adds no more than so many numbers in a second. So the thread blocks of a cluster of two
// have neighbouring blocks of keys, and visit the same blocks of rows at the same time. Each hands its dS to the other
// one, and computes one half of the columns of grad_q for the keys of both, which halves what is added. Each loads one
// half of q and grad_out into the shared memory of both (multicast), which halves what is read.
//
//   values   scores^T [64 keys, BLOCK_M] = k q^T         weights = exp2(scores * scale - base2)  (1)
//            grad_v   [64 keys, DV] += weights grad_out
//            grad_q   [BLOCK_M, D / 2] = dS^T k          of all 128 keys, and half of the columns
//   keys     dP^T     [64 keys, BLOCK_M] = v grad_out^T  dS = weights * (dP - delta)  (1)
//            grad_k   [64 keys, D] += dS q
//
// (1) The accumulators of scores and dP begin with -base2 / scale and -delta, as in flash_backward.cuh.
//
// The schedule of a block of rows. Time runs to the right; S, P, V, K and Q are the WGMMAs of scores, dP, grad_v,
// grad_k and grad_q, and S+ and P+ those of the next block of rows. "add" adds grad_q to its sums.
//
//   values   V Q [add] S+ [weights]  V Q [add] S+ ..
//   keys     K P+             [ds]   K P+ ..
//
// S+ before "add" would need 32 registers more than there are at D = 256: ptxas then runs all products one after the
// other. Without PairConfig::FULL, S+ comes first, and grad_q is one block of rows behind (Q-):
//
//   values   V S+ Q- [weights] [add]  V S+ Q- ..
//   keys     K P+              [ds]   K P+ ..
#pragma once
#include "pair_producer.cuh"

namespace sdpa_cuda {

// Adds a thread's registers of an accumulator to sums, in the order that write_sums reads.
template <class Acc>
CUTE_DEVICE void add_from_registers(Acc const& acc, float* sums) {
  float* const own = sums + threadIdx.x % 32 * 4;
#pragma unroll
  for (int j = 0; j < size(acc) / 4; ++j)
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(own + j * 128), "f"(acc(4 * j)),
                 "f"(acc(4 * j + 1)), "f"(acc(4 * j + 2)), "f"(acc(4 * j + 3))
                 : "memory");
}

// What both consumers do alike: the way through the steps of a work tile.
template <class C>
struct PairConsumer {
  using E = typename C::E;
  using Mask = typename C::MaskPolicy;
  BackwardParams const& p;
  PairStorage<C>& s;
  int const thread = threadIdx.x % kThreads, lane = threadIdx.x % 32, pair = thread % 4 * 2;
  uint32_t step = C::FIRST_STEP;
  int m = 0, head_block = 0;
  using Ring = sdpa_cuda::Ring<C::DO_HALVES>;
  Ring ring;

  static_assert(C::FIRST_STEP % (2 * C::STAGES) == 0 && kOddTile % (2 * C::STAGES) == 0 && C::EXCHANGES <= C::STAGES);
  CUTE_DEVICE static int stage_of(uint32_t step) { return step % C::STAGES; }
  CUTE_DEVICE static uint32_t phase_of(uint32_t step) { return step / C::STAGES & 1; }
  CUTE_DEVICE static int exchange_of(uint32_t step) { return step % C::EXCHANGES; }  // the stage of weights and dS
  CUTE_DEVICE static uint32_t exchange_phase_of(uint32_t step) { return step / C::EXCHANGES & 1; }

  CUTE_DEVICE WorkTileOfKeys const volatile& work() const {
    return *const_cast<WorkTileOfKeys const volatile*>(&s.tile);
  }

  // Whether there is one more work tile, which begins here.
  CUTE_DEVICE bool begin() {
    Full::wait(&s.k_full, step / kOddTile);
    if (__shfl_sync(0xffffffff, work().index, 0) == kNoTile) return false;
    m = work().start, head_block = work().head_block;
    return true;
  }

  // Of this thread block in its pair. Read where it is needed, because it would keep a register.
  CUTE_DEVICE static uint32_t rank() { return block_rank_in_cluster(); }

  CUTE_DEVICE int after(int m) const { return m + 1 == work().end ? work().begin : m + 1; }

  CUTE_DEVICE void advance() {
    ++step;
    m = after(m);
    if (m == work().start) head_block += p.row_blocks;  // the next head of the group
  }

  // Both thread blocks may fill this again.
  CUTE_DEVICE void release(uint64_t const& empty) const {
    if (lane < kPair) Empty::arrive(&empty, lane, 1);
  }

  template <class Tile>
  CUTE_DEVICE void clear_rows(Tile const& tile, int m) const {
    int const first = work().rows - m * C::BLOCK_M;
    if (C::BAND && first < C::BLOCK_M && (p.cu_q || p.q_lengths)) clear_from<C::BLOCK_M>(tile, first);
  }

  template <class Tile>
  CUTE_DEVICE void clear_keys(Tile const& tile, int key0) const {
    int const first = work().N - key0;
    if (C::BAND && first < kRows && (p.cu_k || p.k_lengths)) clear_from<kRows>(tile, first);
  }

  // A gradient of the tile's keys, from registers to the sums of all heads that share these.
  template <class Acc>
  CUTE_DEVICE void add(Acc const& acc, float* sums, WorkTile const& at) const {
    int64_t const place = first_key_block_of<C>(p, at.batch, at.kv_head) + at.block;
    add_from_registers(acc, sums + (place * kPair * kWarps + rank() * kWarps + thread / 32) * 32 * int(size(acc)));
  }

  // The same to memory.
  template <int COLUMNS, class Acc>
  CUTE_DEVICE void store(Acc const& acc, View const& t, WorkTile const& at, int columns) const {
    Rows const keys = Mask::keys(p, at.batch);
    int const key = at.block * C::BLOCK_N + rank() * kRows + thread / 32 * 16 + thread % 32 / 4;  // of a WGMMA's layout
    Tensor rounded = make_tensor<E>(acc.layout());
    convert(acc, rounded);
    E* const head = static_cast<E*>(t.data) + keys.batch * t.batch + at.kv_head * t.head + int64_t(keys.first) * t.row;
    store_rows<COLUMNS>(reinterpret_cast<uint32_t const*>(rounded.data()), head, t.row, key, keys.count, columns,
                        thread % 4);
  }
};

template <class C>
CUTE_DEVICE void consume_values(BackwardParams const& p, PairStorage<C>& s, KeyScheduler const& scheduler) {
  using E = typename C::E;
  PairConsumer<C> c{p, s};
  typename C::MmaS mma_s;
  typename C::MmaDV mma_dv;
  typename C::MmaDQ mma_dq;
  auto slice_s = mma_s.get_slice(c.thread);
  auto slice_dv = mma_dv.get_slice(c.thread);
  auto slice_dq = mma_dq.get_slice(c.thread);
  Tensor sK = make_tensor(make_smem_ptr(s.k.data()), typename C::LayoutK{});
  Tensor sKt = make_tensor(make_smem_ptr(s.k.data()), typename C::LayoutKt{});
  Tensor sQ = make_tensor(make_smem_ptr(s.q.data()), typename C::LayoutQ{});
  Tensor sDO = make_tensor(make_smem_ptr(s.grad_out.data()), typename C::LayoutDO{});
  Tensor sDOt = make_tensor(make_smem_ptr(s.grad_out.data()), typename C::LayoutDOt{});
  Tensor sDS = make_tensor(make_smem_ptr(s.ds.data()), typename C::LayoutDS{});
  Tensor k = slice_s.make_fragment_A(slice_s.partition_A(sK));               // [64, D / 2, halves]
  Tensor q = slice_s.make_fragment_B(slice_s.partition_B(sQ));               // [BLOCK_M, D / 2, stages and halves]
  Tensor grad_out_t = slice_dv.make_fragment_B(slice_dv.partition_B(sDOt));  // [DV / 2, BLOCK_M, ring]
  Tensor k_t = slice_dq.make_fragment_B(slice_dq.partition_B(sKt));          // [D / 2, 64, halves]
  auto const ds_rows = [&](int stage, uint32_t block) {                      // [BLOCK_M, 64 keys]
    return slice_dq.make_fragment_A(slice_dq.partition_A(
        local_tile(sDS(_, _, stage), Shape<Int<C::BLOCK_M>, Int<kRows>>{}, make_coord(_0{}, block))));
  };
  Tensor scores = partition_fragment_C(mma_s, Shape<Int<kRows>, Int<C::BLOCK_M>>{});
  Tensor grad_v = partition_fragment_C(mma_dv, Shape<Int<kRows>, Int<C::DV>>{});  // [64 keys, DV]: two halves
  Tensor grad_q = partition_fragment_C(mma_dq, Shape<Int<C::BLOCK_M>, Int<C::HALF>>{});
  auto const half_layout = partition_shape_C(mma_dv, Shape<Int<kRows>, Int<C::HALF_V>>{});
  constexpr int kHalf = decltype(size(grad_v))::value / 2;
  auto const grad_v_half = [&](auto half) {
    return make_tensor(grad_v.data() + Int<half.value * kHalf>{}, make_layout(half_layout));
  };
  Tensor weights = make_tensor<E>(operand_of(scores.layout()));
  Tensor score_rows = make_tensor(scores.data(), rows_of(scores.layout()));
  Tensor all_coords = slice_s.partition_C(make_identity_tensor(Shape<Int<kRows>, Int<C::BLOCK_M>>{}));
  Tensor coords = make_tensor(all_coords.data(), rows_of(all_coords.layout()));

  auto const issue_scores = [&](uint32_t step, int m) {
    int const i = c.stage_of(step);
    Full::wait(&s.q_full[i], c.phase_of(step));
    c.clear_rows(sQ(_, _, 2 * i), m), c.clear_rows(sQ(_, _, 2 * i + 1), m);
    begin_with(score_rows, s.base2[i] + c.pair);
    issue_wgmma<false>(mma_s, k(_, _, _, _0{}), q(_, _, _, 2 * i), scores);
    issue_wgmma<false>(mma_s, k(_, _, _, _1{}), q(_, _, _, 2 * i + 1), scores);
  };
  auto const make_weights = [&]() __attribute__((always_inline)) {
    int const i = c.stage_of(c.step), x = c.exchange_of(c.step);
    warpgroup_fence_operand(scores);
    if (C::BAND && (p.softcap > 0.f || p.slopes)) {
      int const between = c.m * C::BLOCK_M + c.work().shift - c.work().key0;
      adjust<C>(score_rows, coords, s.base2[i] + c.pair, p, s.slopes[i], between);
    }
    exponentiate<C>(score_rows, s.base2[i] + c.pair, p);
    typename C::MaskPolicy const mask(p, c.work().N, c.work().rows, c.work().shift);
    int const row0 = c.m * C::BLOCK_M, key0 = c.work().key0;
    if (mask.needs_mask(row0, key0)) mask.apply(score_rows, coords, row0, key0);
    part_segments<C>(score_rows, coords, s.ids, i, 0);
    __syncwarp();  // other lanes have read what the stage holds beside q, too
    c.release(s.q_empty[i]);
    Empty::wait(&s.weights_empty[x], c.exchange_phase_of(c.step) ^ 1);
#pragma unroll
    for (int j = 0; j < size(scores) / 4; ++j)
      s.weights[x][j][c.thread] = make_float4(scores(4 * j), scores(4 * j + 1), scores(4 * j + 2), scores(4 * j + 3));
    __syncwarp();
    if (c.lane == 0) Empty::arrive(&s.weights_full[x]);
    convert(scores, weights);
  };
  auto const issue_grad_v = [&](auto half, typename PairConsumer<C>::Ring ring) {
    Full::wait(&s.do_full[ring.stage()], ring.phase());
    c.clear_rows(sDO(_, _, ring.stage()), c.m);
    Tensor acc = grad_v_half(half);
    issue_wgmma<false>(mma_dv, weights, grad_out_t(_, _, _, ring.stage()), acc);
  };
  auto const issue_grad_q = [&](uint32_t step, bool there) {
    int const x = c.exchange_of(step);
    if (there) Empty::wait(&s.own_ds_full[x], c.exchange_phase_of(step));
    forget(grad_q);
    issue_wgmma<true>(mma_dq, ds_rows(x, c.rank()), k_t(_, _, _, int(c.rank())), grad_q);
    if (there) Full::wait(&s.other_ds_full[x], c.exchange_phase_of(step));
    issue_wgmma<false>(mma_dq, ds_rows(x, c.rank() ^ 1), k_t(_, _, _, _2{}), grad_q);
  };
  auto const add_grad_q = [&](uint32_t step, int block) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(grad_q);
    if (block < 0) return;
    c.release(s.ds_empty[c.exchange_of(step)]);
    add_from_registers(grad_q, p.grad_q_acc + int64_t(block) * C::BLOCK_M * C::D +
                                   (c.rank() * kWarps + c.thread / 32) * 32 * int(size(grad_q)));
  };
  // grad_q right after its dS.
  auto const use_weights = [&](auto more) __attribute__((always_inline)) {
    auto const first = c.ring, second = first.next();
    issue_grad_v(_0{}, first);
    issue_grad_v(_1{}, second);
    warpgroup_wait<1>();  // the first half of grad_v is done
    c.release(s.do_empty[first.stage()]);
    issue_grad_q(c.step, true);
    warpgroup_wait<2>();  // the second half of grad_v is done
    warpgroup_fence_operand(grad_v);
    c.release(s.do_empty[second.stage()]);
    c.ring = second.next();
    add_grad_q(c.step, c.head_block + c.m);
    c.advance();
    if constexpr (more.value) {
      issue_scores(c.step, c.m);
      warpgroup_wait<0>();
      make_weights();
    }
  };
  // grad_q one block of rows behind, because its dS comes late; before the first block, one that nobody adds.
  int behind = -1;
  auto const use_weights_behind = [&](auto more) __attribute__((always_inline)) {
    auto const first = c.ring, second = first.next();
    uint32_t const step = c.step - 1;
    int const block = behind;
    behind = c.head_block + c.m;
    issue_grad_v(_0{}, first);
    issue_grad_v(_1{}, second);
    if constexpr (more.value) issue_scores(c.step + 1, c.after(c.m));
    issue_grad_q(step, block >= 0);
    warpgroup_wait<more.value ? 4 : 2>();  // grad_v is done
    warpgroup_fence_operand(grad_v);
    c.release(s.do_empty[first.stage()]);
    c.release(s.do_empty[second.stage()]);
    c.ring = second.next();
    c.advance();
    if constexpr (more.value) {
      warpgroup_wait<2>();  // the scores are done
      make_weights();
    }
    add_grad_q(step, block);
  };
  for (; c.begin(); c.step ^= kOddTile) {
    clear(grad_v);
    bool const any = c.work().begin < c.work().end;
    if (any) {
      int const key0 = c.work().key0;
      c.clear_keys(sK(_, _, _0{}), key0), c.clear_keys(sK(_, _, _1{}), key0);
      c.clear_keys(sK(_, _, _2{}), key0 ^ kRows);
      issue_scores(c.step, c.m);
      warpgroup_wait<0>();
      make_weights();
      if constexpr (C::FULL) {
#pragma unroll 1
        while (c.step + 1 != c.work().end_step) use_weights(std::true_type{});
        use_weights(std::false_type{});
      } else {
        behind = -1;
#pragma unroll 1
        while (c.step + 1 != c.work().end_step) use_weights_behind(std::true_type{});
        use_weights_behind(std::false_type{});
        issue_grad_q(c.step - 1, true);
        add_grad_q(c.step - 1, behind);
      }
    }
    WorkTile const done = scheduler.work_tile(__shfl_sync(0xffffffff, c.work().index, 0));
    Empty::arrive(&s.kv_empty);
    if (!p.grad_v_acc)
      c.template store<C::DV>(grad_v, p.grad_v, done, p.Dv);
    else if (any)
      c.add(grad_v, p.grad_v_acc, done);
  }
}

template <class C>
CUTE_DEVICE void consume_keys(BackwardParams const& p, PairStorage<C>& s, KeyScheduler const& scheduler) {
  using E = typename C::E;
  PairConsumer<C> c{p, s};
  typename C::MmaDP mma_dp;
  typename C::MmaDK mma_dk;
  auto slice_dp = mma_dp.get_slice(c.thread);
  auto slice_dk = mma_dk.get_slice(c.thread);
  Tensor sV = make_tensor(make_smem_ptr(s.v.data()), typename C::LayoutV{});
  Tensor sQ = make_tensor(make_smem_ptr(s.q.data()), typename C::LayoutQ{});
  Tensor sQt = make_tensor(make_smem_ptr(s.q.data()), typename C::LayoutQt{});
  Tensor sDO = make_tensor(make_smem_ptr(s.grad_out.data()), typename C::LayoutDO{});
  Tensor sDSt = make_tensor(make_smem_ptr(s.ds.data()), typename C::LayoutDSt{});
  Tensor v = slice_dp.make_fragment_A(slice_dp.partition_A(sV));          // [64, DV / 2, halves]
  Tensor grad_out = slice_dp.make_fragment_B(slice_dp.partition_B(sDO));  // [BLOCK_M, DV / 2, ring]
  Tensor q_t = slice_dk.make_fragment_B(slice_dk.partition_B(sQt));       // [D / 2, BLOCK_M, stages and halves]
  Tensor dp = partition_fragment_C(mma_dp, Shape<Int<kRows>, Int<C::BLOCK_M>>{});
  Tensor grad_k = partition_fragment_C(mma_dk, Shape<Int<kRows>, Int<C::D>>{});  // [64 keys, D]: two halves
  auto const half_layout = partition_shape_C(mma_dk, Shape<Int<kRows>, Int<C::HALF>>{});
  constexpr int kHalf = decltype(size(grad_k))::value / 2;
  auto const grad_k_half = [&](auto half) {
    return make_tensor(grad_k.data() + Int<half.value * kHalf>{}, make_layout(half_layout));
  };
  Tensor ds = make_tensor<E>(operand_of(dp.layout()));
  Tensor weights = make_tensor<float>(dp.layout());
  Tensor dp_rows = make_tensor(dp.data(), rows_of(dp.layout()));
  Tensor weight_rows = make_tensor(weights.data(), rows_of(dp.layout()));
  auto const copy_ds = make_tiled_copy_C(Copy_Atom<SM90_U16x8_STSM_T, E>{}, mma_dp);
  auto slice_ds = copy_ds.get_slice(c.thread);
  Tensor ds_source = slice_ds.retile_S(make_tensor(ds.data(), dp.layout()));
  Tensor own_ds = local_tile(sDSt, Shape<Int<kRows>, Int<C::BLOCK_M>>{}, make_coord(c.rank(), _0{}, _));
  Tensor ds_target = slice_ds.partition_D(own_ds);  // [.., .., .., stages]
  constexpr int kBytes = kRows * C::BLOCK_M * sizeof(E);

  auto const issue_half_dp = [&](auto half, typename PairConsumer<C>::Ring ring, uint32_t step, int m) {
    Full::wait(&s.do_full[ring.stage()], ring.phase());
    c.clear_rows(sDO(_, _, ring.stage()), m);
    if constexpr (half.value == 0) begin_with(dp_rows, s.delta[c.stage_of(step)] + c.pair);
    issue_wgmma<false>(mma_dp, v(_, _, _, half), grad_out(_, _, _, ring.stage()), dp);
  };
  auto const make_ds = [&]() __attribute__((always_inline)) {
    int const i = c.stage_of(c.step);
    int const x = c.exchange_of(c.step);
    auto const first = c.ring, second = first.next();
    Empty::wait(&s.weights_full[x], c.exchange_phase_of(c.step));
#pragma unroll
    for (int j = 0; j < size(weights) / 4; ++j) {
      float4 const four = s.weights[x][j][c.thread];
      weights(4 * j) = four.x, weights(4 * j + 1) = four.y, weights(4 * j + 2) = four.z, weights(4 * j + 3) = four.w;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(dp);
    if constexpr (C::FULL) c.release(s.do_empty[first.stage()]);
    differentiate<C>(dp_rows, weight_rows, s.delta[i] + c.pair);
    __syncwarp();
    if (c.lane == 0) Empty::arrive(&s.weights_empty[x]);
    Full::wait(&s.q_full[i], c.phase_of(c.step));
    if (C::BAND && p.softcap > 0.f) uncap<C>(dp_rows, weight_rows, s.base2[i] + c.pair, p);
    convert(dp, ds);
    Empty::wait(&s.ds_empty[x], c.exchange_phase_of(c.step) ^ 1);
    copy(copy_ds, ds_source, ds_target(_, _, _, x));
    cutlass::arch::fence_view_async_shared();
    if constexpr (!C::FULL) c.release(s.do_empty[first.stage()]);
    c.release(s.do_empty[second.stage()]);
    c.ring = second.next();
    cutlass::arch::NamedBarrier::sync(kThreads, opaque(threadIdx.x) / kThreads);
    if (c.thread == 0) {
      Empty::arrive(&s.own_ds_full[x]);
      Full::arrive_and_expect_tx(&s.other_ds_full[x], kBytes);
      copy_to_other(s.ds.data() + (x * kPair + c.rank()) * kRows * C::BLOCK_M, kBytes, s.other_ds_full[x],
                    c.rank() ^ 1);
    }
  };
  auto const use_ds = [&](auto more) __attribute__((always_inline)) {
    int const i = c.stage_of(c.step);
    c.clear_rows(sQ(_, _, 2 * i), c.m), c.clear_rows(sQ(_, _, 2 * i + 1), c.m);
    Tensor low = grad_k_half(_0{}), high = grad_k_half(_1{});
    issue_wgmma<false>(mma_dk, ds, q_t(_, _, _, 2 * i), low);
    issue_wgmma<false>(mma_dk, ds, q_t(_, _, _, 2 * i + 1), high);
    if constexpr (more.value) issue_half_dp(_0{}, c.ring, c.step + 1, c.after(c.m));
    warpgroup_wait<more.value ? 1 : 0>();  // grad_k is done
    warpgroup_fence_operand(grad_k);
    c.release(s.q_empty[i]);
    if constexpr (more.value) issue_half_dp(_1{}, c.ring.next(), c.step + 1, c.after(c.m));
    c.advance();
  };
  for (; c.begin(); c.step ^= kOddTile) {
    clear(grad_k);
    bool const any = c.work().begin < c.work().end;
    Full::wait(&s.v_full, c.step / kOddTile);
    if (any) {
      c.clear_keys(sV(_, _, _0{}), c.work().key0), c.clear_keys(sV(_, _, _1{}), c.work().key0);
      issue_half_dp(_0{}, c.ring, c.step, c.m);
      issue_half_dp(_1{}, c.ring.next(), c.step, c.m);
      make_ds();
#pragma unroll 1
      while (c.step + 1 != c.work().end_step) {
        use_ds(std::true_type{});
        make_ds();
      }
      use_ds(std::false_type{});
    }
    WorkTile const done = scheduler.work_tile(__shfl_sync(0xffffffff, c.work().index, 0));
    Empty::arrive(&s.kv_empty);
    if (p.grad_k_acc) {
      if (any) c.add(grad_k, p.grad_k_acc, done);
    } else {
#pragma unroll
      for (int i = 0; i < size(grad_k); ++i) grad_k(i) *= p.scale;
      c.template store<C::D>(grad_k, p.grad_k, done, p.D);
    }
  }
}

template <class C, class TmaQ, class TmaK, class TmaV, class TmaDO>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(C::THREADS, 1)
    flash_backward_pair(__grid_constant__ TmaQ const tma_q, __grid_constant__ TmaK const tma_k,
                        __grid_constant__ TmaV const tma_v, __grid_constant__ TmaDO const tma_do,
                        __grid_constant__ BackwardParams const p, __grid_constant__ KeyScheduler const scheduler) {
  extern __shared__ __align__(kSwizzleBytes) char aligned_raw[];
  auto& s = *reinterpret_cast<PairStorage<C>*>(aligned_raw);
  int const warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kThreads, 0);
  if (threadIdx.x == 0) {
    s.init_barriers();
    prefetch_tma_descriptor(tma_q.get_tma_descriptor());
    prefetch_tma_descriptor(tma_k.get_tma_descriptor());
    prefetch_tma_descriptor(tma_v.get_tma_descriptor());
    prefetch_tma_descriptor(tma_do.get_tma_descriptor());
  }
  cluster_sync();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::PRODUCER_REGISTERS>();
    if (threadIdx.x / 32 == 0 && elect_one_sync())
      PairProducer<C, TmaQ, TmaK, TmaV, TmaDO>{tma_q, tma_k, tma_v, tma_do, p, s}.run(scheduler);
    __syncwarp();
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::CONSUMER_REGISTERS>();
    if (warpgroup == 1)
      consume_values<C>(p, s, scheduler);
    else
      consume_keys<C>(p, s, scheduler);
  }
  cluster_sync();  // the other thread block may still arrive here
}

template <class Config>
int launch_pairs(BackwardParams const& p, cudaStream_t stream) {
  using C = PairConfig<Config>;
  using E = typename C::E;
  int const batch = p.cu_q ? 1 : p.B;  // entries in memory
  // A copy of halves of a tensor's columns, as they lie in shared memory: to this thread block, or to both.
  auto const halves = [](auto operation, auto columns, auto blocks, auto const& t) {
    typename C::template Halves<decltype(columns)::value, 1> const layout{};
    return make_tma_copy(operation, t, layout(_, _, _0{}), Shape<Int<kRows>, decltype(columns)>{}, blocks);
  };
  SM90_TMA_LOAD const one;
  SM90_TMA_LOAD_MULTICAST const both;
  Int<C::HALF> const columns;
  Int<C::HALF_V> const columns_v;
  Int<kPair> const pair;
  auto tma_q = halves(both, columns, pair, rows_tensor<E>(p.q, p.query_rows, p.D, p.H, batch));
  auto tma_k = halves(one, columns, _1{}, rows_tensor<E>(p.k, p.key_rows, p.D, p.Hkv, batch));
  auto tma_v = halves(one, columns_v, _1{}, rows_tensor<E>(p.v, p.key_rows, p.Dv, p.Hkv, batch));
  auto tma_do = halves(both, columns_v, pair, rows_tensor<E>(p.grad_out, p.query_rows, p.Dv, p.H, batch));
  auto kernel = flash_backward_pair<C, decltype(tma_q), decltype(tma_k), decltype(tma_v), decltype(tma_do)>;
  constexpr int bytes = sizeof(PairStorage<C>);
  static_assert(bytes <= kSharedBytes);
  cudaError_t const refused = allow_shared_memory<C>(kernel, bytes, p.device);
  if (refused != cudaSuccess) return refused;
  KeyScheduler const scheduler(p, C::BLOCK_N, kPair);
  if constexpr (C::SEGMENTS) launch_find_row_spans<C>(p, stream);
  launch_prepare_rows<C>(p, stream);
  kernel<<<kPair * scheduler.grid, C::THREADS, bytes, stream>>>(tma_q, tma_k, tma_v, tma_do, p, scheduler);
  launch_finish_rows<C>(p, stream);
  if (p.grad_k_acc) launch_finish_keys<C>(p, stream);
  return cudaGetLastError();
}

template <class C>
int launch_backward(BackwardParams const& p, cudaStream_t stream) {
  if constexpr (C::D > 128)
    return launch_pairs<C>(p, stream);
  else
    return launch_alone<C>(p, stream);
}

}  // namespace sdpa_cuda
