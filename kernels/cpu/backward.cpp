// The backward attention loop, which computes the probabilities again from the log-sum-exp, block by block. A task has
// a key/value head with its query heads, or a fixed split of its keys. So every sum has one writer, and the same number
// of threads gives the same bits twice.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "pairs.h"
#include "tasks.h"
#include "terms.h"

namespace sdpa_cpu {
namespace {

// Of a block: queries in whole register tiles, which have 6 rows, or of pairs 16; under a causal mask few are better.
// Scores and their gradients stay within the second cache.
template <typename Operand>
constexpr int64_t kBlockM = kDepth<Operand> == 1 ? 48 : 64;
template <typename Operand>
constexpr int64_t kBlockN = kDepth<Operand> == 1 ? 64 : 96;
constexpr double kParallelFlops = 1e6;  // computing so many takes about as long as waking threads
constexpr int64_t kBlocksOfSplit = 4;   // beside so many key blocks, packing the queries again costs little
constexpr int64_t kLseRounding = 8192;  // rounding lse may change a probability by one in so many

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// A length in blocks, which begin at multiples of `block`. What is left and not more than `rest` is no block, but a
// part of the last one.
struct Blocks {
  int64_t length, block, rest;
  int64_t largest() const { return block + rest; }
  bool begins(int64_t at) const { return at < length - (at > 0 ? rest : 0); }
  int64_t count(int64_t begin) const { return length - begin <= largest() ? length - begin : block; }
  int64_t last() const { return std::max<int64_t>(0, (length - rest - 1) / block * block); }
};

template <typename T>
constexpr Dtype dtype_of() {
  return sizeof(T) == sizeof(double) ? Dtype::kFloat64 : Dtype::kFloat32;
}

// A block of queries against a block of keys.
struct Block {
  RowGroup rows;
  int64_t begin, count;  // keys
  Cover structured, dense;
  bool exact;  // something masked may be NaN: it must not be multiplied, not even by 0
};

template <typename T, typename Operand>
class Backward {
 public:
  Backward(const AttentionParams& params, const Primitives<T, Operand>& prim, const BackwardTensors& tensors)
      : p_(params), t_(tensors), prim_(prim), terms_(params, prim), sink_sums_(params.sinks ? p_.B * p_.H : 0) {
    q_ld_ = round_up(p_.D, prim.lanes);
    v_ld_ = round_up(p_.Dv, prim.lanes);
    const int64_t block_m = p_.block_m > 0 ? round_up(p_.block_m, kPack) : kBlockM<Operand>;
    const int64_t block_n = p_.block_n > 0 ? round_up(p_.block_n, kMaxLanes) : kBlockN<Operand>;
    queries_ = {p_.M, block_m, block_m / 8};  // few more, because of causal masks
    keys_ = {p_.N, block_n, block_n / 2};
    ld_ = round_up(keys_.largest(), kMaxLanes);
    choose_splits();
  }

  void run() {
    const int64_t tasks = batches_ * heads_ * splits_;
    const int64_t threads = std::min(threads_, tasks);
    Carver sizes(nullptr);
    carve(sizes);
    const Scratch scratch(threads, sizes.used());
    run_tasks(tasks, threads, prim_.setup, [&](int64_t task, int64_t thread) {
      Carver carver(scratch.of(thread));
      const Buffers buffers = carve(carver);
      const int64_t split = task % splits_, first = task / splits_;
      for (int64_t batch = first / heads_; batch < p_.B; batch += batches_)
        for (int64_t head = first % heads_; head < p_.Hkv; head += heads_)
          Task(*this, buffers, batch, head, split).run();
    });
    if (splits_ > 1) reduce_dq(threads, scratch);
    if (t_.dsinks) reduce_sinks();
  }

 private:
  static constexpr int64_t kPack = kDepth<Operand>;

  // The leading dimension of scores as a left operand.
  int64_t left_ld() const { return ld_ * int64_t{sizeof(T)} / int64_t{sizeof(Operand)}; }

  struct Buffers {
    Operand *q, *grad_out;                             // all queries of a head, as left operands
    Operand *q_steps, *grad_out_steps;                 // and as right ones
    T *dq, *dk, *dv;                                   // all queries and keys of a head
    T *lse, *delta, *scales;                           // [M], [M], [max(M, N)]
    T* inverse;                                        // [M], see normalise_again
    T *row_max, *alpha;                                // of a block of queries
    Operand *key_columns, *key_steps, *value_columns;  // of a block of keys
    T *s, *dp, *slope, *weights;                       // of a pair of blocks [rows, ld]
    Operand* transposed;                               // s or dp, where it cannot stay in its place
  };

  Buffers carve(Carver& carver) const {
    Buffers b;
    const int64_t steps = (p_.M + kPack - 1) / kPack;
    const int64_t rows = round_up(p_.M, kInterleave<Operand>);
    b.q = carver.take<Operand>(rows * q_ld_ / kPack);
    b.grad_out = carver.take<Operand>(rows * v_ld_ / kPack);
    b.q_steps = kPack == 1 ? b.q : carver.take<Operand>(steps * q_ld_);
    b.grad_out_steps = kPack == 1 ? b.grad_out : carver.take<Operand>(steps * v_ld_);
    b.dq = carver.take<T>(splits_ > 1 ? 0 : p_.M * q_ld_);
    b.dk = carver.take<T>(p_.N * q_ld_);
    b.dv = carver.take<T>(p_.N * v_ld_);
    b.lse = carver.take<T>(p_.M);
    b.delta = carver.take<T>(p_.M);
    b.scales = carver.take<T>(std::max(p_.M, p_.N));
    b.inverse = carver.take<T>(p_.M);
    const int64_t most = queries_.largest();
    b.row_max = carver.take<T>(most);
    b.alpha = carver.take<T>(most);
    b.key_columns = carver.take<Operand>((p_.D + kPack - 1) / kPack * ld_);
    b.key_steps = carver.take<Operand>(ld_ / kPack * q_ld_);
    b.value_columns = carver.take<Operand>((p_.Dv + kPack - 1) / kPack * ld_);
    b.s = carver.take<T>(most * ld_);
    b.dp = carver.take<T>(most * ld_);
    b.transposed = carver.take<Operand>(kInterleave<Operand> == 1 ? 0 : most * left_ld());
    b.slope = carver.take<T>(p_.softcap != 0.0 ? most * ld_ : 0);
    b.weights = carver.take<T>(p_.dropout_p > 0.0 ? most * ld_ : 0);
    return b;
  }

  // Heads that add to the same gradient of a broadcast bias are one task; where batch entries do, a thread takes all
  // its heads of one after the other, because they may lie side by side in memory. Where there are more threads than
  // tasks, the key blocks of a head are divided into splits, each with a dq of its own.
  void choose_splits() {
    const double flops = 2.0 * p_.B * p_.H * p_.M * p_.N * (3 * p_.D + 2 * p_.Dv);
    threads_ = flops < kParallelFlops ? 1 : p_.threads;
    batches_ = t_.dbias && t_.dbias.stride[0] == 0 ? 1 : p_.B;
    heads_ = t_.dbias && t_.dbias.stride[1] == 0 ? 1 : batches_ < p_.B ? std::min(p_.Hkv, threads_) : p_.Hkv;
    const bool one_column = t_.dbias && t_.dbias.stride[3] == 0;
    const int64_t most = one_column ? 1 : p_.N / (kBlocksOfSplit * keys_.block);
    splits_ = std::clamp<int64_t>(threads_ / std::max<int64_t>(batches_ * heads_, 1), 1, std::max<int64_t>(most, 1));
    if (splits_ > 1) dq_splits_.emplace(splits_ * p_.B * p_.H, p_.M * q_ld_ * static_cast<int64_t>(sizeof(T)));
  }

  T* dq_split(int64_t split, int64_t batch, int64_t head) const {
    return static_cast<T*>(dq_splits_->of((split * p_.B + batch) * p_.H + head));
  }

  void reduce_dq(int64_t threads, const Scratch& scratch) const {
    run_tasks(p_.B * p_.H, threads, nullptr, [&](int64_t task, int64_t thread) {
      Carver carver(scratch.of(thread));
      T* scales = carve(carver).scales;
      std::fill_n(scales, p_.M, static_cast<T>(p_.scale));
      const int64_t batch = task / p_.H, head = task % p_.H;
      T* sum = dq_split(0, batch, head);
      for (int64_t split = 1; split < splits_; ++split) {
        const T* more = dq_split(split, batch, head);
        for (int64_t i = 0; i < p_.M * q_ld_; ++i) sum[i] += more[i];
      }
      prim_.store_rows(sum, q_ld_, scales, p_.M, p_.D, t_.dq.at(batch, head), t_.dq.dtype, t_.dq.stride[2]);
    });
  }

  // Operands in rows of `ld`. A row of a right operand has kDepth rows of values.
  struct Matrix {
    const Operand* data;
    int64_t ld;
    const Operand* row(int64_t row) const { return data + row * ld; }
  };

  class Task {
   public:
    Task(const Backward& backward, const Buffers& buffers, int64_t batch, int64_t kv_head, int64_t split)
        : f_(backward),
          p_(backward.p_),
          b_(buffers),
          prim_(backward.prim_),
          batch_(batch),
          kv_head_(kv_head),
          split_(split),
          mask_(p_, batch) {}

    void run() {
      std::fill_n(b_.scales, std::max(p_.M, p_.N), static_cast<T>(p_.scale));
      std::fill_n(b_.dk, p_.N * f_.q_ld_, T(0));
      std::fill_n(b_.dv, p_.N * f_.v_ld_, T(0));
      const int64_t first = split_ * f_.keys_.block, step = f_.splits_ * f_.keys_.block;
      for (int64_t head = kv_head_ * p_.G(); head < (kv_head_ + 1) * p_.G(); ++head) {
        dq_ = f_.splits_ > 1 ? f_.dq_split(split_, batch_, head) : b_.dq;
        load_head(head);
        for (int64_t begin = first; f_.keys_.begins(begin); begin += step) visit_keys(head, begin);
        if (f_.splits_ == 1) store(dq_, f_.q_ld_, b_.scales, 0, p_.M, p_.D, f_.t_.dq, head);
      }
      for (int64_t begin = first; f_.keys_.begins(begin); begin += step) {
        const int64_t count = f_.keys_.count(begin);
        store(b_.dk, f_.q_ld_, b_.scales, begin, count, p_.D, f_.t_.dk, kv_head_);
        store(b_.dv, f_.v_ld_, nullptr, begin, count, p_.Dv, f_.t_.dv, kv_head_);
      }
    }

   private:
    static constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

    void store(const T* gradient, int64_t ld, const T* factor, int64_t first, int64_t rows, int64_t width,
               const View& to, int64_t head) const {
      prim_.store_rows(gradient + first * ld, ld, factor, rows, width, to.at(batch_, head, first), to.dtype,
                       to.stride[2]);
    }

    void load_head(int64_t head) {
      load_rows(head);
      q_ = left(p_.q, head, p_.D, b_.q, f_.q_ld_);
      grad_out_ = left(f_.t_.grad_out, head, p_.Dv, b_.grad_out, f_.v_ld_);
      if (kPack > 1) {
        prim_.pack_steps(p_.q.rows(batch_, head, 0), p_.M, p_.D, b_.q_steps, f_.q_ld_);
        prim_.pack_steps(f_.t_.grad_out.rows(batch_, head, 0), p_.M, p_.Dv, b_.grad_out_steps, f_.v_ld_);
      }
      // Where operands are single values, left and right operands are the same.
      q_steps_ = kPack == 1 ? q_ : Matrix{b_.q_steps, f_.q_ld_};
      grad_out_steps_ = kPack == 1 ? grad_out_ : Matrix{b_.grad_out_steps, f_.v_ld_};
      std::fill_n(dq_, p_.M * f_.q_ld_, T(0));
      if (has_empty_) forget_empty_rows();
      normalise_again(head);
      if (p_.sinks && split_ == 0) f_.sink_sums_[batch_ * p_.H + head] = sink_gradient(head);
    }

    // All queries of a head, or their gradients, as a left operand: as they lie in memory, or packed. Rows that see
    // nothing are cleared among the packed ones.
    Matrix left(const View& view, int64_t head, int64_t width, Operand* packed, int64_t ld) const {
      if (in_place(view, width, prim_, p_.N) && !has_empty_) return in_memory(view, head, 0);
      prim_.pack_left(view.rows(batch_, head, 0), p_.M, width, packed, ld);
      return {packed, ld / kPack};
    }

    Matrix in_memory(const View& view, int64_t head, int64_t first) const {
      return {reinterpret_cast<const Operand*>(view.at(batch_, head, first)), view.stride[2]};
    }

    // Loads lse, with +inf for a row that sees nothing, so that its probabilities are 0. Computes
    // delta = rowsum(out * grad_out) - grad_lse.
    void load_rows(int64_t head) {
      has_empty_ = coarse_ = false;
      prim_.row_products(f_.t_.out.rows(batch_, head, 0), f_.t_.grad_out.rows(batch_, head, 0), p_.M, p_.Dv, b_.delta);
      for (int64_t i = 0; i < p_.M; ++i) {
        const T lse = *reinterpret_cast<const T*>(f_.t_.lse.at(batch_, head, i));
        const bool empty = lse == -std::numeric_limits<T>::infinity();
        b_.lse[i] = empty ? -lse : lse;
        has_empty_ |= empty;
        coarse_ |= is_coarse(lse);
        if (f_.t_.grad_lse && !empty) b_.delta[i] -= *reinterpret_cast<const T*>(f_.t_.grad_lse.at(batch_, head, i));
      }
    }

    // Whether a row sees no key, by its lse as load_rows leaves it.
    static bool is_empty(T lse) { return lse == std::numeric_limits<T>::infinity(); }

    // A row that sees nothing adds nothing to gradients, whatever its query and its upstream gradient hold: its
    // probabilities are 0, but 0 times NaN is not.
    void forget_empty_rows() const {
      for (int64_t i = 0; i < p_.M; ++i) {
        if (!is_empty(b_.lse[i])) continue;
        clear_row(b_.q_steps, i, f_.q_ld_);
        clear_row(b_.grad_out_steps, i, f_.v_ld_);
      }
    }

    // Clears a row of a right operand whose depth is the rows.
    static void clear_row(Operand* steps, int64_t row, int64_t ld) {
      using Value = std::conditional_t<kPack == 1, Operand, uint16_t>;
      Value* values = reinterpret_cast<Value*>(steps + row / kPack * ld) + row % kPack;
      for (int64_t i = 0; i < ld; ++i) values[i * kPack] = Value(0);
    }

    void hide_empty_rows(const Block& block) const {
      for (int64_t r = 0; r < block.rows.count; ++r)
        if (is_empty(b_.lse[block.rows.query + r])) std::fill_n(b_.dp + r * f_.ld_, block.count, T(0));
    }

    static bool is_coarse(T lse) {
      constexpr T kCoarse = T(1) / (kLseRounding * std::numeric_limits<T>::epsilon());
      return std::abs(lse) > kCoarse && !std::isinf(lse);
    }

    // A large lse is too coarse to tell sums of exponentials apart, for example in a row whose every score has a bias
    // of -1e9. There the row's maximum replaces lse, and `inverse` is one over the row's sum.
    void normalise_again(int64_t head) const {
      if (!coarse_) return;
      std::fill_n(b_.inverse, p_.M, T(1));
      for (int64_t query = 0; f_.queries_.begins(query); query += f_.queries_.block) {
        const RowGroup rows{head, query, f_.queries_.count(query), false};
        if (std::any_of(b_.lse + query, b_.lse + query + rows.count, is_coarse)) normalise_again(rows);
      }
    }

    void normalise_again(const RowGroup& rows) const {
      T* row_sum = b_.dp;  // [rows, kMaxLanes]
      const T sink = p_.sinks ? static_cast<T>(read_number(p_.sinks.at(rows.head), p_.sinks.dtype)) : kMinusInfinity;
      std::fill_n(b_.row_max, rows.count, sink);
      std::fill_n(row_sum, rows.count * kMaxLanes, T(0));
      for (int64_t r = 0; sink != kMinusInfinity && r < rows.count; ++r) row_sum[r * kMaxLanes] = T(1);
      for (int64_t begin = 0; f_.keys_.begins(begin); begin += f_.keys_.block) {
        Block block = make_block(rows, begin);
        if (block.structured == Cover::kNone || block.dense == Cover::kNone) continue;
        load_keys(begin);
        score(block, nullptr);
        prim_.softmax_step(rows.count, block.count, b_.s, f_.ld_, b_.row_max, row_sum, b_.alpha);
      }
      for (int64_t r = 0; r < rows.count; ++r) {
        const int64_t i = rows.query + r;
        if (!is_coarse(b_.lse[i])) continue;
        b_.lse[i] = b_.row_max[r];
        b_.inverse[i] = T(1) / std::accumulate(row_sum + r * kMaxLanes, row_sum + (r + 1) * kMaxLanes, T(0));
      }
    }

    // The sink's probability times (0 - delta), summed over the queries that see any key.
    double sink_gradient(int64_t head) const {
      const double sink = read_number(p_.sinks.at(head), p_.sinks.dtype);
      double sum = 0.0;
      for (int64_t i = 0; i < p_.M; ++i)
        if (!std::isinf(b_.lse[i])) sum -= std::exp(sink - b_.lse[i]) * (coarse_ ? b_.inverse[i] : T(1)) * b_.delta[i];
      return sum;
    }

    void visit_keys(int64_t head, int64_t begin) const {
      for (int64_t query = f_.queries_.last(); query >= 0; query -= f_.queries_.block) {
        Block block = make_block({head, query, f_.queries_.count(query), false}, begin);
        if (block.structured == Cover::kNone || block.dense == Cover::kNone) continue;
        load_keys(begin);
        if constexpr (kPack == 1) block.exact = block.structured == Cover::kPartial && !finite(block);
        visit_block(block);
      }
    }

    // The keys from `begin` on that any of the rows may see.
    Block make_block(const RowGroup& rows, int64_t begin) const {
      Block block{rows, begin, f_.keys_.count(begin), Cover::kFull, Cover::kFull, false};
      block.structured = mask_.structured(rows.query, rows.last_query(), begin, block.count);
      if (block.structured == Cover::kNone) return block;
      block.dense = mask_.dense(rows, begin, block.count);
      if (block.structured == Cover::kPartial)
        block.count = std::min(block.count, mask_.keys(rows.query, rows.last_query()).end - begin);
      return block;
    }

    // The next head, and the next block of queries, may find the block of keys there.
    void load_keys(int64_t begin) const {
      if (std::exchange(loaded_, begin) == begin) return;
      finite_ = 0;
      const int64_t count = f_.keys_.count(begin);
      const Source k = p_.k.rows(batch_, kv_head_, begin), v = p_.v.rows(batch_, kv_head_, begin);
      prim_.pack_columns(k, count, p_.D, b_.key_columns, f_.ld_);
      const bool near = in_place(p_.k, p_.D, prim_, p_.M);
      key_steps_ = near ? in_memory(p_.k, kv_head_, begin) : Matrix{b_.key_steps, f_.q_ld_};
      if (!near) prim_.pack_steps(k, count, p_.D, b_.key_steps, f_.q_ld_);
      prim_.pack_columns(v, count, p_.Dv, b_.value_columns, f_.ld_);
    }

    bool finite(const Block& block) const {
      const int64_t first = block.rows.query, rows = block.rows.count;
      return finite_keys(block.count) && prim_.finite(q_.row(first), rows, p_.D, q_.ld) &&
             prim_.finite(grad_out_.row(first), rows, p_.Dv, grad_out_.ld) &&
             prim_.finite(b_.delta + first, 1, rows, rows);
    }

    // Whether the first keys and values of the packed block are finite, which several blocks of queries ask.
    bool finite_keys(int64_t count) const {
      if (count <= finite_) return true;
      const bool finite = prim_.finite(key_steps_.data, count, p_.D, key_steps_.ld) &&
                          prim_.finite(b_.value_columns, p_.Dv, count, f_.ld_);
      if (finite) finite_ = count;
      return finite;
    }

    // Computes the masked scores. slope (null: not wanted) becomes the softcap's derivative.
    void score(const Block& block, T* slope) const {
      const RowGroup& rows = block.rows;
      const int64_t ld = f_.ld_;
      prim_.scores(rows.count, block.count, p_.D, q_.row(rows.query), q_.ld, b_.key_columns, ld,
                   static_cast<T>(p_.scale), b_.s, ld);
      if (f_.terms_.present()) f_.terms_.apply(mask_, batch_, rows, block.begin, block.count, b_.s, slope, ld);
      if (block.structured == Cover::kPartial || block.dense == Cover::kPartial)
        mask_.apply(prim_, rows, block.begin, block.count, b_.s, ld);
    }

    void visit_block(const Block& block) const {
      const RowGroup& rows = block.rows;
      const int64_t ld = f_.ld_, first = rows.query, count = block.count;
      T* slope = p_.softcap != 0.0 ? b_.slope : nullptr;
      score(block, slope);
      prim_.probabilities(rows.count, count, b_.s, ld, b_.lse + first);
      if (coarse_) scale_rows(b_.s, b_.inverse + first, rows.count, count);
      prim_.scores(rows.count, count, p_.Dv, grad_out_.row(first), grad_out_.ld, b_.value_columns, ld, T(1), b_.dp, ld);
      T* dropped = p_.dropout_p > 0.0 ? b_.weights : nullptr;
      if (dropped) {
        const int64_t whole = round_up(count, kMaxLanes);
        for (int64_t r = 0; r < rows.count; ++r) std::copy_n(b_.s + r * ld, whole, dropped + r * ld);
        apply_dropout<T>(p_, prim_, batch_, rows, block.begin, count, dropped, ld);
      }
      prim_.score_gradient(rows.count, count, b_.s, dropped, b_.dp, ld, b_.delta + first);
      if (block.exact) hide(block);
      if (has_empty_) hide_empty_rows(block);
      if (f_.t_.dbias) add_bias_gradient(block);
      if (slope) multiply(b_.dp, slope, rows.count, count);
      add(block, dropped ? dropped : b_.s);
    }

    static Source right(const Operand* data, int64_t ld) { return {data, dtype_of<T>(), ld, 1}; }

    // Adds to dv, dq and dk. After dv the scores are no longer needed, so their memory serves as the operand of dq.
    void add(const Block& block, T* weights) const {
      if constexpr (kPack == 1) {
        if (block.exact) return add_visible(block, weights);
      }
      const int64_t ld = f_.ld_, first = block.rows.query, rows = block.rows.count, count = block.count;
      add_transposed(block, weights, grad_out_steps_, b_.dv, f_.v_ld_);
      const Operand* left = prim_.as_left(rows, count, b_.dp, reinterpret_cast<Operand*>(b_.s), ld);
      prim_.accumulate(rows, f_.q_ld_, count, left, f_.left_ld(), kInterleave<Operand>,
                       right(key_steps_.data, key_steps_.ld), dq_ + first * f_.q_ld_, f_.q_ld_, nullptr);
      add_transposed(block, b_.dp, q_steps_, b_.dk, f_.q_ld_);
    }

    // gradient += x^T steps, summed from the last row to the first. Under a causal mask early rows contribute most, and
    // small terms should be summed before large ones.
    void add_transposed(const Block& block, T* x, const Matrix& steps, T* gradient, int64_t width) const {
      const int64_t rows = block.rows.count, stride = f_.left_ld() * kPack, last = (rows - 1) / kPack;
      const Operand* left = prim_.as_left_transposed(rows, block.count, x, b_.transposed, f_.ld_);
      const Operand* from = steps.row(block.rows.query / kPack + last);
      prim_.accumulate(block.count, width, rows, left + last * stride, 1, -stride, right(from, -steps.ld),
                       gradient + block.begin * width, width, nullptr);
    }

    // Adds pair by pair of query and key, without reading what a structured mask hides.
    void add_visible(const Block& block, const T* weights) const {
      for (int64_t r = 0; r < block.rows.count; ++r)
        for (int64_t j = 0; j < block.count; ++j)
          if (mask_.visible(block.rows.query + r, block.begin + j)) add_pair(block, weights, r, j);
    }

    void add_pair(const Block& block, const T* weights, int64_t r, int64_t j) const {
      const int64_t ld = f_.ld_, query = block.rows.query + r, key = block.begin + j, at = r * ld + j;
      prim_.accumulate(1, f_.v_ld_, 1, weights + at, ld, 1, right(grad_out_.row(query), grad_out_.ld),
                       b_.dv + key * f_.v_ld_, f_.v_ld_, nullptr);
      prim_.accumulate(1, f_.q_ld_, 1, b_.dp + at, ld, 1, right(q_.row(query), q_.ld), b_.dk + key * f_.q_ld_, f_.q_ld_,
                       nullptr);
      prim_.accumulate(1, f_.q_ld_, 1, b_.dp + at, ld, 1, right(key_steps_.row(j), key_steps_.ld),
                       dq_ + query * f_.q_ld_, f_.q_ld_, nullptr);
    }

    void hide(const Block& block) const {
      for (int64_t r = 0; r < block.rows.count; ++r)
        for (int64_t j = 0; j < block.count; ++j)
          if (!mask_.visible(block.rows.query + r, block.begin + j)) b_.dp[r * f_.ld_ + j] = T(0);
    }

    void scale_rows(T* x, const T* by, int64_t rows, int64_t count) const {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = 0; j < count; ++j) x[r * f_.ld_ + j] *= by[r];
    }

    void multiply(T* x, const T* by, int64_t rows, int64_t count) const {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = 0; j < count; ++j) x[r * f_.ld_ + j] *= by[r * f_.ld_ + j];
    }

    // dbias += dp, summed over the block first along the dimensions in which the bias is broadcast.
    void add_bias_gradient(const Block& block) const {
      const View& dbias = f_.t_.dbias;
      const int64_t first = block.rows.query;
      const bool one_row = dbias.stride[2] == 0, one_column = dbias.stride[3] == 0;
      if (!one_column) {
        T* to = reinterpret_cast<T*>(dbias.at(batch_, block.rows.head, first, block.begin));
        return prim_.add_rows(block.rows.count, block.count, b_.dp, f_.ld_, to, dbias.stride[2]);
      }
      T total = 0;
      for (int64_t r = 0; r < block.rows.count; ++r) {
        const T* line = b_.dp + r * f_.ld_;
        T sum = 0;
        for (int64_t j = 0; j < block.count; ++j) sum += line[j];
        if (one_row)
          total += sum;
        else
          *reinterpret_cast<T*>(dbias.at(batch_, block.rows.head, first + r)) += sum;
      }
      if (one_row) *reinterpret_cast<T*>(dbias.at(batch_, block.rows.head)) += total;
    }

    const Backward& f_;
    const AttentionParams& p_;
    const Buffers& b_;
    const Primitives<T, Operand>& prim_;
    const int64_t batch_, kv_head_, split_;
    Matrix q_, grad_out_, q_steps_, grad_out_steps_;  // of the present head
    mutable Matrix key_steps_;                        // of the block of keys that is loaded
    T* dq_ = nullptr;                                 // of the present head
    const Mask mask_;
    bool coarse_ = false;          // whether any row of the head has an `inverse`
    bool has_empty_ = false;       // whether any sees no key
    mutable int64_t loaded_ = -1;  // the first key of the block that is packed
    mutable int64_t finite_ = 0;   // so many of its keys and values are known to be finite
  };

  void reduce_sinks() const {
    T* dsinks = static_cast<T*>(t_.dsinks);
    for (int64_t head = 0; head < p_.H; ++head) {
      double sum = 0.0;
      for (int64_t batch = 0; batch < p_.B; ++batch) sum += sink_sums_[batch * p_.H + head];
      dsinks[head] = static_cast<T>(sum);
    }
  }

  const AttentionParams& p_;
  const BackwardTensors& t_;
  const Primitives<T, Operand>& prim_;
  const ScoreTerms<T> terms_;
  mutable std::vector<double> sink_sums_;
  int64_t q_ld_, v_ld_;
  int64_t ld_;  // of scores, and of packed keys and values
  Blocks queries_, keys_;
  int64_t threads_, batches_, heads_, splits_;
  std::optional<Scratch> dq_splits_;
};

}  // namespace

template <typename T>
void attention_backward(const AttentionParams& params, const Toolbox<T>& tools, const BackwardTensors& tensors) {
  const auto operands = {&params.q, &params.k, &params.v, &tensors.grad_out, &tensors.out};
  if (tools.pairs && pairs_are_exact(params, operands))
    Backward<T, Narrow>(params, *tools.pairs, tensors).run();
  else
    Backward<T, T>(params, tools.plain, tensors).run();
}

template void attention_backward(const AttentionParams&, const Toolbox<float>&, const BackwardTensors&);
template void attention_backward(const AttentionParams&, const Toolbox<double>&, const BackwardTensors&);

}  // namespace sdpa_cpu
