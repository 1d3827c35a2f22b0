// The backward of flash_backward.cuh: its tiles, layouts and WGMMAs, and what a thread block has in shared memory.
#pragma once
#include "../key_segments.cuh"
#include "../params.h"
#include "parts.cuh"
#include "tiles.cuh"

namespace sdpa_cuda {

// A step is a block of rows of a head. A thread block counts its steps over all of its work tiles; there are fewer than
// 2^30. In every second work tile the count is higher by kOddTile, which spares a register that says whether the work
// tile's number is odd.
constexpr uint32_t kOddTile = 3u << 30;

template <class E_, int D_, int DV_, MaskKind MASK_>
struct BackwardConfig {
  using E = E_;
  static constexpr MaskKind MASK = MASK_;
  static constexpr int D = D_, DV = DV_, CONSUMERS = 2, BLOCK_N = kRows * CONSUMERS;
  static_assert(BLOCK_N == kBackwardKeys);
  static constexpr int BLOCK_M = backward_tile_of<D, MASK>().BLOCK_M, DS_STAGES = backward_tile_of<D, MASK>().ds_stages;
  static constexpr int STAGES = 2;       // of q, and of grad_out
  static constexpr int FIRST_STEP = 24;  // counting begins where all barriers are in their first phase
  static_assert(FIRST_STEP % (2 * STAGES) == 0 && FIRST_STEP % (2 * DS_STAGES) == 0);
  static_assert(kOddTile % (2 * STAGES) == 0 && kOddTile % (2 * DS_STAGES) == 0);
  // Whether grad_q is staged beside the WGMMA of grad_k, and accumulators of scores and dP begin with -lse / scale and
  // -delta. Up to head size 64 either is slower.
  static constexpr bool WIDE = D > 64;
  // Of dP that is dropped -delta is left, so that with dropout it is subtracted later. A bias may be large, and so
  // comes before lse.
  static constexpr bool DROPOUT = MASK == MaskKind::kDropout, BIAS = MASK == MaskKind::kBias;
  static constexpr bool BEGINS_S = WIDE && !BIAS, BEGINS_DP = WIDE && !DROPOUT;
  static constexpr bool DS_EMPTY = DS_STAGES < 4 || BIAS;  // whether a barrier says when a stage of dS has been read
  static constexpr bool SEGMENTS = MASK == MaskKind::kSegments, BAND = SEGMENTS || MASK == MaskKind::kBand;
  static constexpr bool SPLIT_D =
      BLOCK_M == kRows;  // a consumer's half of grad_q is one of the columns, or of the rows
  static constexpr int DQ_COLUMNS = SPLIT_D ? D / 2 : D;
  // Columns of k that consumers have in registers. More of them, or a band's numbers beside them, would spill.
  static constexpr int HELD = D <= 64 && !BAND && !DROPOUT && !BIAS ? D / 2 : 0;
  using MaskPolicy = KeyMask<MASK, BLOCK_M, BLOCK_N>;
  static constexpr int THREADS = kThreads * (CONSUMERS + 1);
  static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;  // 24 + 2 x 240 = 3 x 168

  template <GMMA::Major MAJOR, int ROWS, int COLUMNS>
  using SwizzleAtom =
      decltype(cutlass::gemm::collective::detail::ss_smem_selector<MAJOR, E, Int<ROWS>, Int<COLUMNS>>());
  template <int ROWS, int COLUMNS, int COUNT>
  using RowsLayout = decltype(tile_to_shape(SwizzleAtom<GMMA::Major::K, ROWS, COLUMNS>{},
                                            Shape<Int<ROWS>, Int<COLUMNS>, Int<COUNT>>{}));
  template <class L, int ROWS, int COLUMNS, int COUNT>
  using Transposed = decltype(composition(
      L{}, make_layout(Shape<Int<COLUMNS>, Int<ROWS>, Int<COUNT>>{}, Stride<Int<ROWS>, _1, Int<ROWS * COLUMNS>>{})));
  // A consumer's half of the columns of k has whole swizzle atoms.
  static constexpr int K_ATOM = SPLIT_D && DQ_COLUMNS % 32 != 0 ? 16 : D;
  using LayoutK =
      decltype(tile_to_shape(SwizzleAtom<GMMA::Major::K, BLOCK_N, K_ATOM>{}, Shape<Int<BLOCK_N>, Int<D>, _1>{}));
  using LayoutKt = Transposed<LayoutK, BLOCK_N, D, 1>;
  using LayoutV = RowsLayout<BLOCK_N, DV, 1>;
  using LayoutQ = RowsLayout<BLOCK_M, D, STAGES>;
  using LayoutQt = Transposed<LayoutQ, BLOCK_M, D, STAGES>;
  using LayoutDO = RowsLayout<BLOCK_M, DV, STAGES>;
  using LayoutDOt = Transposed<LayoutDO, BLOCK_M, DV, STAGES>;
  using LayoutDS = RowsLayout<BLOCK_M, BLOCK_N, DS_STAGES>;
  using LayoutDSt = Transposed<LayoutDS, BLOCK_M, BLOCK_N, DS_STAGES>;

  using MmaS = decltype(make_tiled_mma(GMMA::ss_op_selector<E, E, float, Shape<Int<kRows>, Int<BLOCK_M>, Int<D>>>()));
  using MmaHeld =
      decltype(make_tiled_mma(GMMA::rs_op_selector<E, E, float, Shape<Int<kRows>, Int<BLOCK_M>, Int<D>>>()));
  using MmaDP = decltype(make_tiled_mma(GMMA::ss_op_selector<E, E, float, Shape<Int<kRows>, Int<BLOCK_M>, Int<DV>>>()));
  using MmaDV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<E, E, float, Shape<Int<kRows>, Int<DV>, Int<BLOCK_M>>, GMMA::Major::K, GMMA::Major::MN>()));
  using MmaDK = decltype(make_tiled_mma(
      GMMA::rs_op_selector<E, E, float, Shape<Int<kRows>, Int<D>, Int<BLOCK_M>>, GMMA::Major::K, GMMA::Major::MN>()));
  using MmaDQ =
      decltype(make_tiled_mma(GMMA::ss_op_selector<E, E, float, Shape<Int<kRows>, Int<DQ_COLUMNS>, Int<BLOCK_N>>,
                                                   GMMA::Major::K, GMMA::Major::MN>()));
};

// A work tile as consumers need it. It stays in shared memory, because their registers are full.
struct WorkTileOfKeys {
  int index;              // kNoTile after the last one
  int key0;               // its first key
  int begin, end, start;  // the blocks of rows that it visits, of each of its heads: from `start` on and around
  int head_block;         // the first head's first block of rows among the blocks of all heads
  uint32_t end_step;      // the step after its last one
  int N, rows, shift;     // of its mask
};

// The block of rows of a step: its number among the blocks of its head, and among those of all heads; and what the
// producer found out about it, for which consumers would have to read all numbers of a mask: a bit for each consumer
// that has to mask, and kRowsEnd where the rows of its sequence end inside of it. It is read after the step's stage of
// q was released, so there are twice as many of these.
struct RowsOfStep {
  int m, block, flags;
  int stream;  // of dropout: the head among all
};
constexpr int kRowsEnd = 1 << 8;

template <class C>
struct BackwardStorage {
  using E = typename C::E;
  alignas(kSwizzleBytes) array_aligned<E, cosize_v<typename C::LayoutK>> k;
  alignas(kSwizzleBytes) array_aligned<E, cosize_v<typename C::LayoutV>> v;
  alignas(kSwizzleBytes) array_aligned<E, cosize_v<typename C::LayoutQ>> q;
  alignas(kSwizzleBytes) array_aligned<E, cosize_v<typename C::LayoutDO>> grad_out;
  alignas(kSwizzleBytes) array_aligned<E, cosize_v<typename C::LayoutDS>> ds;  // and before it the step's bias
  alignas(128) float grad_q[C::CONSUMERS * kWarps][C::BLOCK_M * C::D / (C::CONSUMERS * kWarps)];  // of each warp
  int target, key0;  // of grad_q: the block of rows that it is added to, or kNoTile, and the first key of its block
  alignas(128) float base2[C::STAGES][C::BLOCK_M];
  alignas(128) float delta[C::STAGES][C::BLOCK_M];
  float slopes[C::BAND ? C::STAGES : 1];  // of ALiBi: of the head that a stage's rows are of
  RowsOfStep steps[2 * C::STAGES];
  IdsOfTile<C> ids;
  WorkTileOfKeys tile;  // whose keys are in k
  uint64_t k_full, v_full, kv_empty, ds_full[C::DS_STAGES], ds_empty[C::DS_STAGES], bias_full[C::DS_STAGES];
  uint64_t q_full[C::STAGES], q_empty[C::STAGES], do_full[C::STAGES], do_empty[C::STAGES];
  uint64_t grad_q_full, grad_q_empty;

  CUTE_DEVICE RowsOfStep const volatile& rows_of(uint32_t step) const {
    return *const_cast<RowsOfStep const volatile*>(&steps[step % (2 * C::STAGES)]);
  }

  CUTE_DEVICE void init_barriers() {
    constexpr int kArrivals = C::CONSUMERS * kWarps;  // one thread of each warp arrives
    Empty::init(&grad_q_full, kArrivals), Empty::init(&grad_q_empty, 1);
    Full::init(&k_full, 1);
    Full::init(&v_full, 1);
    Empty::init(&kv_empty, C::CONSUMERS * kThreads);  // every thread reads the index, and arrives
    for (int i = 0; i < C::DS_STAGES; ++i) {
      Empty::init(&ds_full[i], kArrivals), Empty::init(&ds_empty[i], kArrivals);
      Full::init(&bias_full[i], 1);
    }
    for (int i = 0; i < C::STAGES; ++i) {
      Full::init(&q_full[i], 1), Empty::init(&q_empty[i], kArrivals);
      Full::init(&do_full[i], 1), Empty::init(&do_empty[i], kArrivals);
    }
    cutlass::arch::fence_barrier_init();
  }
};

// Writes a work tile before the arrival that lets consumers read it. Accesses are volatile, so that the compiler keeps
// this order, and reads what it needs again.
template <class Tile = WorkTileOfKeys>
CUTE_DEVICE void publish(WorkTileOfKeys& target, Tile const& tile) {
  auto volatile& to = *const_cast<WorkTileOfKeys volatile*>(&target);
  to.index = tile.index, to.end_step = tile.end_step, to.key0 = tile.key0, to.begin = tile.begin, to.end = tile.end,
  to.start = tile.start;
  to.head_block = tile.head_block, to.N = tile.N, to.rows = tile.rows, to.shift = tile.shift;
}

}  // namespace sdpa_cuda
