// The forward attention loop. A task has a block of BLOCK_M queries of heads that share keys, and visits blocks of
// BLOCK_N keys.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "pairs.h"
#include "tasks.h"
#include "terms.h"

namespace sdpa_cpu {
namespace {

constexpr int64_t kSkippedKeys = 64;         // runs of so many masked keys are skipped beside visible ones
constexpr int64_t kDirectScores = 8192;      // of a block whose keys are read in place: only its scores need memory
constexpr int64_t kPartialKeys = 256;        // of such a block where some keys are masked: a second read hits a cache
constexpr int64_t kFewestKeysOfSplit = 512;  // for a task of one row; for one of eight and more rows an eighth of it
constexpr int64_t kManyRows = 128;           // so many rows of all splits are combined by several threads
constexpr int64_t kFewestInParts = 4096;     // values of queries that share keys; for fewer, parts of keys do not pay
constexpr int64_t kFewestRowsInParts = 16;   // as a tile has
constexpr int64_t kFewestKeysInParts = 64;   // for fewer, parts of queries do not pay
constexpr int64_t kWide = 512;               // operands in a row of both keys and values; of wider ones, half as many
                                             // make a block, so that it stays in the second cache
constexpr double kParallelFlops = 1e6;       // computing so many takes about as long as waking threads

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
int64_t blocks_of(int64_t x, int64_t block) { return (x + block - 1) / block; }

struct Plan {
  int64_t rows, block_m, block_n;
  int64_t ld;     // of scores and of packed keys
  int64_t heads;  // per task, of one key/value head
  int64_t query_blocks, head_blocks, tasks, threads;
  int64_t splits;  // split-KV: threads share the keys of a task, each a split of them
  bool direct;     // keys and values are read in place
};

bool reads_in_place(const AttentionParams& p) { return p.M * p.G() <= kDirectRows && unit_stride(p.k); }

int64_t direct_block(const AttentionParams& p) { return round_up(kDirectScores / (p.M * p.G()), kMaxLanes); }

// Of the numbers of splits with which the threads end soonest, the smallest; at most the number of threads.
int64_t splits_of(int64_t tasks, int64_t threads, int64_t keys, int64_t rows) {
  const int64_t most = std::min(threads, keys * std::min<int64_t>(rows, 8) / kFewestKeysOfSplit);
  int64_t best = 1;
  const auto rounds = [=](int64_t splits) { return blocks_of(tasks * splits, threads); };
  for (int64_t splits = 2; splits <= most; ++splits)
    if (rounds(splits) * best < rounds(best) * splits) best = splits;
  return best;
}

// `depth`: how many values an operand packs.
Plan make_plan(const AttentionParams& p, const Blocking& blocking, int64_t depth) {
  Plan plan;
  const double flops = 2.0 * p.B * p.H * p.M * p.N * (p.D + p.Dv);
  plan.threads = flops < kParallelFlops ? 1 : p.threads;
  plan.direct = reads_in_place(p);
  plan.rows = blocking.rows;
  const int64_t parts = (p.D + p.Dv) / depth > kWide ? 2 : 1;
  plan.block_m = p.block_m > 0 ? p.block_m : blocking.block_m / parts;
  const auto enough = [&] { return p.B * p.H * blocks_of(p.M, plan.block_m) >= 2 * plan.threads; };
  while (p.block_m <= 0 && plan.threads > 1 && plan.block_m > blocking.least_m && !enough()) plan.block_m /= 2;
  if (p.block_m <= 0 && plan.threads > 1)  // blocks of equal size, so that no thread waits for a longer one
    plan.block_m = round_up(blocks_of(p.M, blocks_of(p.M, plan.block_m)), plan.rows);
  plan.block_m = std::min(plan.block_m, p.M);
  plan.block_n = p.block_n > 0 ? round_up(p.block_n, kMaxLanes)
                 : plan.direct ? direct_block(p)
                               : blocking.block_n / parts;
  plan.block_n = std::min(plan.block_n, round_up(p.N, kMaxLanes));
  // Not a power of two, which would map the rows of a tile to few sets of a cache.
  plan.ld = plan.block_n | kMaxLanes;
  plan.query_blocks = blocks_of(p.M, plan.block_m);
  const int64_t most = std::clamp<int64_t>(blocking.block_m / plan.block_m, 1, p.G());
  plan.heads = blocks_of(p.G(), blocks_of(p.G(), most));
  const auto few = [&] { return p.B * p.Hkv * blocks_of(p.G(), plan.heads) * plan.query_blocks < 2 * plan.threads; };
  // Keys that are read in place stay shared: sharing them is free, and reading them from memory twice is not.
  const auto too_many = [&] { return !plan.direct && plan.heads > 1 && plan.heads * plan.block_m > blocking.least_m; };
  while (plan.threads > 1 && too_many() && few()) plan.heads = blocks_of(plan.heads, 2);
  plan.head_blocks = blocks_of(p.G(), plan.heads);
  plan.tasks = p.B * p.Hkv * plan.head_blocks * plan.query_blocks;
  const bool band = p.left != kUnlimited && p.right != kUnlimited;
  const int64_t seen = band ? std::min(p.left, p.N) + std::min(p.right, p.N) + plan.block_m : p.N;
  const int64_t keys = std::min(seen, p.N), rows = plan.heads * plan.block_m;
  plan.splits = plan.tasks < plan.threads ? splits_of(plan.tasks, plan.threads, keys, rows) : 1;
  plan.threads = std::min(plan.threads, plan.tasks * plan.splits);
  return plan;
}

// A block of keys and values, packed or in place, for all row groups of a task.
struct KeyBlock {
  int64_t begin, count;
  Source keys, values;
  int64_t packed = 0;  // the position of its first key among the packed keys
  bool exact = false;  // some masked values may be NaN: they must not be multiplied, not even by 0
};

template <typename T, typename Operand>
class Forward {
 public:
  Forward(const AttentionParams& params, const Primitives<T, Operand>& prim, const ForwardResults& results)
      : p_(params),
        prim_(prim),
        results_(results),
        plan_(make_plan(params, prim.blocking, kPack)),
        terms_(params, prim) {
    q_ld_ = round_up(p_.D, prim.lanes);
    v_ld_ = round_up(p_.Dv, prim.lanes);
    values_in_place_ = plan_.direct ? whole_vectors(p_.v, p_.Dv, prim.lanes)
                                    : in_place(p_.v, p_.Dv, prim, plan_.heads * plan_.block_m);
    queries_in_place_ = in_place(p_.q, p_.D, prim, p_.N);
  }

  void run() {
    if (plan_.splits > 1) return run_split_kv();
    Carver sizes(nullptr);
    carve(sizes);
    carve_state(sizes);
    const Scratch scratch(plan_.threads, sizes.used());
    run_tasks(plan_.tasks, plan_.threads, prim_.setup, [&](int64_t number, int64_t thread) {
      Carver carver(scratch.of(thread));
      const Buffers buffers = carve(carver);
      Task task(*this, number, buffers, carve_state(carver));
      task.run_split(0);
      for (int64_t h = 0; h < plan_.heads; ++h) task.finish_rows(h);
    });
  }

 private:
  // Split-KV: threads share the keys of a task. Then the states of its splits are combined.
  void run_split_kv() {
    Carver sizes(nullptr), state_sizes(nullptr);
    carve(sizes);
    carve_state(state_sizes);
    const Scratch scratch(plan_.threads, sizes.used()), states(plan_.tasks * plan_.splits, state_sizes.used());
    std::vector<State> state(static_cast<size_t>(plan_.tasks * plan_.splits));
    for (size_t i = 0; i < state.size(); ++i) {
      Carver carver(states.of(static_cast<int64_t>(i)));
      state[i] = carve_state(carver);
    }
    const auto task_of = [&](int64_t number, int64_t thread, int64_t split) {
      Carver carver(scratch.of(thread));
      return Task(*this, number, carve(carver), state[static_cast<size_t>(number * plan_.splits + split)]);
    };
    run_tasks(plan_.tasks * plan_.splits, plan_.threads, prim_.setup, [&](int64_t number, int64_t thread) {
      const int64_t split = number % plan_.splits;
      task_of(number / plan_.splits, thread, split).run_split(split);
    });
    const int64_t threads = plan_.tasks * plan_.splits * most_rows() < kManyRows ? 1 : plan_.threads;
    run_tasks(plan_.tasks * plan_.heads, threads, nullptr, [&](int64_t number, int64_t thread) {
      const int64_t h = number % plan_.heads;
      const Task task = task_of(number / plan_.heads, thread, 0);
      for (int64_t split = 1; split < plan_.splits; ++split)
        task.combine(h, task_of(number / plan_.heads, thread, split));
      task.finish_rows(h);
    });
  }

  static constexpr int64_t kPack = kDepth<Operand>;
  static constexpr Dtype kOwnDtype = sizeof(T) == sizeof(double) ? Dtype::kFloat64 : Dtype::kFloat32;

  // The leading dimension of scores as a left operand.
  int64_t left_ld() const {
    if (std::is_same_v<Operand, Split>) return round_up(plan_.ld, prim_.lanes) / kPack;
    return plan_.ld * int64_t{sizeof(T)} / int64_t{sizeof(Operand)};
  }

  struct Buffers {
    Operand* q;       // [rows of the task, D], a left operand
    Operand* keys;    // [D, ld], a right operand; not used where keys are read in place
    Operand* values;  // [BLOCK_N, Dv], a right operand; not used where values are read in place
    Operand* left;    // [rows, ld]: the weights as a left operand, where that is no T
    T* s;             // [rows, ld]: scores, then weights
    T* alpha;         // [rows]
  };

  // The online softmax of a task's rows: acc [rows, Dv], row_max [rows], row_sum [rows, kMaxLanes].
  struct State {
    T *acc, *row_max, *row_sum;
  };

  int64_t most_rows() const { return plan_.heads * round_up(plan_.block_m, kRoom<Operand>); }

  State carve_state(Carver& carver) const {
    State state;
    state.acc = carver.take<T>(most_rows() * v_ld_);
    state.row_max = carver.take<T>(most_rows());
    state.row_sum = carver.take<T>(most_rows() * kMaxLanes);
    return state;
  }

  Buffers carve(Carver& carver) const {
    Buffers b;
    b.q = carver.take<Operand>(most_rows() * q_ld_ / kPack);
    b.keys = carver.take<Operand>(plan_.direct ? 0 : q_ld_ / kPack * plan_.ld);
    b.values =
        carver.take<Operand>(values_in_place_ ? 0 : round_up(plan_.block_n + kMaxLanes, prim_.lanes) / kPack * v_ld_);
    b.left = carver.take<Operand>(kPack == 1 ? 0 : plan_.rows * left_ld());
    b.s = carver.take<T>(plan_.rows * plan_.ld);
    b.alpha = carver.take<T>(plan_.rows);
    return b;
  }

  class Task {
   public:
    // Tasks are counted from the last block of queries to the first: under a causal mask the longest come first.
    Task(const Forward& forward, int64_t task, const Buffers& buffers, const State& state)
        : f_(forward), p_(forward.p_), b_(buffers), state_(state), batch_(batch_of(forward, task)), mask_(p_, batch_) {
      const Plan& plan = f_.plan_;
      const int64_t heads = plan.head_blocks * p_.Hkv;
      const int64_t block = plan.query_blocks - 1 - task / (p_.B * heads);
      const int64_t head_block = task % heads;
      kv_head_ = head_block / plan.head_blocks;
      const int64_t first = head_block % plan.head_blocks * plan.heads;
      heads_ = std::min(plan.heads, p_.G() - first);
      head_ = kv_head_ * p_.G() + first;
      query_ = block * plan.block_m;
      queries_ = std::min(plan.block_m, p_.M - query_);
      across_ = queries_ == 1;
      rows_ = across_ ? 1 : round_up(queries_, kRoom<Operand>);
    }

    void run_split(int64_t split) {
      begin_rows(split == 0);
      const KeyRange range = keys_of(split);
      const int64_t last = query_ + queries_ - 1, block_n = f_.plan_.block_n;
      // Blocks of keys are the same for all queries, but where there are so few that these read keys in place.
      const auto to_end_of_block = [&](int64_t at) { return f_.plan_.direct ? block_n : block_n - at % block_n; };
      int64_t cut = range.begin;  // the end of a partly masked block that is visited in smaller ones
      for (int64_t begin = range.begin, count; begin < range.end; begin += count) {
        count = begin < cut ? kPartialKeys : to_end_of_block(begin);
        count = std::min({count, range.end - begin, in_one_piece(begin)});
        Cover cover = mask_.structured(query_, last, begin, count);
        if (cover == Cover::kPartial && f_.plan_.direct && count > kPartialKeys) {
          cut = begin + count;
          count = kPartialKeys;
          cover = mask_.structured(query_, last, begin, count);
        }
        if (cover != Cover::kNone) visit_keys(begin, count, cover);
      }
    }

    // Combines the state of a head's rows with that of another split.
    void combine(int64_t h, const Task& task) const {
      if (h >= heads_) return;
      const int64_t ld = f_.v_ld_;
      const State& other = task.state_;
      for (int64_t row = h * rows_; row < h * rows_ + queries_; ++row) {
        const T ours = state_.row_max[row], theirs = other.row_max[row], top = ours > theirs ? ours : theirs;
        const T alpha = ours == top ? T(1) : std::exp(ours - top), add = theirs == top ? T(1) : std::exp(theirs - top);
        const Source sums = {other.acc + row * ld, kOwnDtype, ld, 1};
        f_.prim_.accumulate_direct(1, ld, 1, &add, 1, sums, state_.acc + row * ld, ld, &alpha);
        T *to = state_.row_sum + row * kMaxLanes, *from = other.row_sum + row * kMaxLanes;
        for (int64_t lane = 0; lane < kMaxLanes; ++lane) to[lane] = alpha * to[lane] + add * from[lane];
        state_.row_max[row] = top;
      }
    }

    void finish_rows(int64_t h) const {
      if (h >= heads_) return;
      const int64_t row = h * rows_;
      T* lse = static_cast<T*>(f_.results_.lse);
      if (lse) lse += (batch_ * p_.H + head_ + h) * p_.M + query_;
      for (int64_t i = 0; i < queries_; ++i) state_.row_max[row + i] = finish_row(row + i, lse ? lse + i : nullptr);
      f_.prim_.store_rows(state_.acc + row * f_.v_ld_, f_.v_ld_, state_.row_max + row, queries_, p_.Dv,
                          f_.results_.out.at(batch_, head_ + h, query_), p_.q.dtype, f_.results_.out.stride[2]);
    }

   private:
    static int64_t batch_of(const Forward& f, int64_t task) {
      const int64_t heads = f.plan_.head_blocks * f.p_.Hkv;
      return task / heads % f.p_.B;
    }

    // They begin at a multiple of kMaxLanes: which lane sums a weight depends on its key alone. Few queries begin where
    // they see.
    KeyRange keys_of(int64_t split) const {
      const KeyRange all = mask_.keys(query_, query_ + queries_ - 1);
      const int64_t first = f_.plan_.direct ? all.begin : all.begin / kMaxLanes * kMaxLanes;
      const int64_t seen = std::max<int64_t>(all.end - first, 0);
      const int64_t keys = round_up(blocks_of(seen, f_.plan_.splits), kMaxLanes), begin = first + split * keys;
      return {begin, std::min(begin + keys, all.end)};
    }

    // Packs the queries where they are no operands in memory, and sets the state to an empty one, or to the state after
    // a sink.
    void begin_rows(bool sees_sink) {
      if (across_) {
        Source rows = p_.q.rows(batch_, head_, query_);
        rows.row_stride = p_.q.stride[1];
        f_.prim_.pack_left(rows, heads_, p_.D, b_.q, f_.q_ld_);
      }
      for (int64_t h = 0; h < heads_; ++h) {
        if (!across_ && !f_.queries_in_place_)
          f_.prim_.pack_left(p_.q.rows(batch_, head_ + h, query_), queries_, p_.D, queries_of(h * rows_), f_.q_ld_);
        T top = -std::numeric_limits<T>::infinity();
        if (p_.sinks && sees_sink) top = static_cast<T>(read_number(p_.sinks.at(head_ + h), p_.sinks.dtype));
        const T sum = top == -std::numeric_limits<T>::infinity() ? T(0) : T(1);
        for (int64_t row = h * rows_; row < h * rows_ + queries_; ++row) {
          state_.row_max[row] = top;
          std::fill_n(state_.row_sum + row * kMaxLanes, kMaxLanes, T(0));
          state_.row_sum[row * kMaxLanes] = sum;
        }
      }
      std::fill_n(state_.acc, heads_ * rows_ * f_.v_ld_, T(0));
    }

    Operand* queries_of(int64_t row) const { return b_.q + row * f_.q_ld_ / kPack; }

    void visit_keys(int64_t begin, int64_t count, Cover cover) {
      KeyBlock block;
      bool loaded = false;
      const int64_t groups_of = across_ ? heads_ : queries_, step = f_.plan_.rows;
      for (int64_t h = 0; h < (across_ ? 1 : heads_); ++h)
        for (int64_t first = 0; first < groups_of; first += step) {
          const int64_t rows = std::min(step, groups_of - first);
          const RowGroup group =
              across_ ? RowGroup{head_ + first, query_, rows, true} : RowGroup{head_ + h, query_ + first, rows, false};
          const Cover structured =
              cover == Cover::kFull ? cover : mask_.structured(group.query, group.last_query(), begin, count);
          if (structured == Cover::kNone) continue;
          const Cover dense = mask_.dense(group, begin, count);
          if (dense == Cover::kNone) continue;
          if (!loaded) block = load(begin, count, cover);
          loaded = true;
          const int64_t row = h * rows_ + first;
          if (structured == Cover::kFull && dense == Cover::kFull)
            add_block(group, row, block, structured, dense);
          else
            add_visible_runs(group, row, block, structured, dense);
        }
    }

    // Adds only the runs of keys that some of these rows may see.
    void add_visible_runs(const RowGroup& group, int64_t row, const KeyBlock& block, Cover structured,
                          Cover dense) const {
      const int64_t end = block.begin + block.count;
      const KeyRange range = mask_.keys(group.query, group.last_query());
      for (KeyRange run = next_run(group, block.begin, end); run.begin < end; run = next_run(group, run.end, end)) {
        const int64_t first = std::max(run.begin, range.begin) - block.begin, last = std::min(run.end, range.end);
        add_block(group, row, slice(block, first / kMaxLanes * kMaxLanes, last), structured, dense);
      }
    }

    KeyRange next_run(const RowGroup& group, int64_t from, int64_t end) const {
      const auto hidden = [&](int64_t at) {
        const int64_t count = std::min(kSkippedKeys, end - at);
        return mask_.structured(group.query, group.last_query(), at, count) == Cover::kNone ||
               mask_.dense(group, at, count) == Cover::kNone;
      };
      while (from < end && hidden(from)) from += kSkippedKeys;
      int64_t to = from;
      while (to < end && !hidden(to)) to += kSkippedKeys;
      return {from, std::min(to, end)};
    }

    // The block without its first `first` keys, and without those from key `end` on. `first` is a multiple of
    // kMaxLanes, and so of what an operand packs.
    KeyBlock slice(KeyBlock block, int64_t first, int64_t end) const {
      assert(first % kMaxLanes == 0 && block.begin + first < end && end <= block.begin + block.count);
      const Source& v = block.values;
      const int64_t skipped = f_.values_in_place_ ? first * v.row_stride * static_cast<int64_t>(size_of(v.dtype))
                                                  : first / kPack * v.row_stride * int64_t{sizeof(Operand)};
      block.values.data = static_cast<const char*>(v.data) + skipped;
      block.keys.data = static_cast<const char*>(block.keys.data) + first * block.keys.row_stride * p_.k.element;
      block.packed += first;
      block.begin += first;
      block.count = end - block.begin;
      return block;
    }

    // The page of a sequence, by its place in the table; a number of no page is that of the nearest one.
    int64_t page_of(int64_t place) const {
      return std::clamp<int64_t>(*reinterpret_cast<const int32_t*>(p_.block_table.at(batch_, place)), 0, p_.pages - 1);
    }

    // How many keys from `begin` on lie one after the other: those of a page, and of pages that follow it in memory.
    int64_t in_one_piece(int64_t begin) const {
      if (!p_.block_table) return p_.N;
      const int64_t size = p_.page_size, places = p_.N / size;
      int64_t place = begin / size, count = size - begin % size;
      const bool follow = p_.k.stride[0] == size * p_.k.stride[2] && p_.v.stride[0] == size * p_.v.stride[2];
      for (; follow && count < f_.plan_.block_n && place + 1 < places; ++place, count += size)
        if (page_of(place + 1) != page_of(place) + 1) break;
      return count;
    }

    Source rows_of(const View& view, int64_t begin) const {
      if (!p_.block_table) return view.rows(batch_, kv_head_, begin);
      return view.rows(page_of(begin / p_.page_size), kv_head_, begin % p_.page_size);
    }

    KeyBlock load(int64_t begin, int64_t count, Cover cover) const {
      KeyBlock block{begin, count, rows_of(p_.k, begin), rows_of(p_.v, begin)};
      if (!f_.plan_.direct) f_.prim_.pack_columns(block.keys, count, p_.D, b_.keys, f_.plan_.ld);
      if (!f_.values_in_place_) {
        f_.prim_.pack_steps(block.values, count, p_.Dv, b_.values, f_.v_ld_);
        block.values = {b_.values, kOwnDtype, f_.v_ld_, 1};
      }
      if ((kPack == 1 || f_.plan_.direct) && cover == Cover::kPartial) block.exact = !finite_values(block);
      return block;
    }

    bool finite_values(const KeyBlock& block) const {
      if (block.values.dtype == Dtype::kFloat32 || block.values.dtype == Dtype::kFloat64)
        return f_.prim_.finite(static_cast<const T*>(block.values.data), block.count, p_.Dv, block.values.row_stride);
      return finite_halves(block.values, block.count, p_.Dv);
    }

    void add_block(const RowGroup& group, int64_t row, const KeyBlock& block, Cover structured, Cover dense) const {
      const int64_t ld = f_.plan_.ld;
      const int64_t count = block.count;
      score(group, row, block, count);
      if (f_.terms_.present()) f_.terms_.apply(mask_, batch_, group, block.begin, count, b_.s, nullptr, ld);
      if (structured == Cover::kPartial || dense == Cover::kPartial)
        mask_.apply(f_.prim_, group, block.begin, count, b_.s, ld);
      T* acc = state_.acc + row * f_.v_ld_;
      const bool visible_only = block.exact && structured == Cover::kPartial;
      if (!visible_only && p_.dropout_p == 0.0)
        return accumulate(group, count, softmax_left(group, row, count), block, acc);
      f_.prim_.softmax_step(group.count, count, b_.s, ld, state_.row_max + row, state_.row_sum + row * kMaxLanes,
                            b_.alpha);
      if (p_.dropout_p > 0.0) apply_dropout<T>(p_, f_.prim_, batch_, group, block.begin, count, b_.s, ld);
      if (visible_only)
        accumulate_visible(group, block, count, acc);
      else
        accumulate(group, count, f_.prim_.as_left(group.count, count, b_.s, b_.left, ld), block, acc);
    }

    const Operand* softmax_left(const RowGroup& group, int64_t row, int64_t count) const {
      return f_.prim_.softmax_left(group.count, count, b_.s, f_.plan_.ld, state_.row_max + row,
                                   state_.row_sum + row * kMaxLanes, b_.alpha, b_.left);
    }

    // Chains end at multiples of kValueChain, counted from the first key of all, so that a row has the same bits in
    // whichever group of rows it is, and in a call of some rows and the keys that they see.
    void accumulate(const RowGroup& group, int64_t count, const Operand* weights, const KeyBlock& block, T* acc) const {
      const auto add = [&](int64_t depth, const Operand* left, Source values, const T* alpha) {
        f_.prim_.accumulate(group.count, f_.v_ld_, depth, left, f_.left_ld(), kInterleave<Operand>, values, acc,
                            f_.v_ld_, alpha);
      };
      if constexpr (kPack == 1) {
        const int64_t before = round_up(block.begin, kValueChain) - block.begin;
        if (before > 0 && before < count && !f_.plan_.direct) {
          Source values = block.values;
          values.data = static_cast<const char*>(values.data) + before * values.row_stride * size_of(values.dtype);
          add(before, weights, block.values, b_.alpha);
          return add(count - before, weights + before * kInterleave<Operand>, values, nullptr);
        }
      }
      add(count, weights, block.values, b_.alpha);
    }

    void score(const RowGroup& group, int64_t row, const KeyBlock& block, int64_t count) const {
      const int64_t ld = f_.plan_.ld;
      const T factor = static_cast<T>(p_.scale);
      const Operand* queries = queries_of(row);
      int64_t q_ld = f_.q_ld_ / kPack;
      if (f_.queries_in_place_ && !across_) {
        queries = reinterpret_cast<const Operand*>(p_.q.at(batch_, group.head, group.query));
        q_ld = p_.q.stride[2];
      }
      if (f_.plan_.direct)
        f_.prim_.scores_direct(group.count, count, p_.D, queries, q_ld, block.keys, factor, b_.s, ld);
      else
        f_.prim_.scores(group.count, count, p_.D, queries, q_ld, b_.keys + block.packed, ld, factor, b_.s, ld);
    }

    // Adds key by key, without reading the values of keys that a structured mask hides.
    void accumulate_visible(const RowGroup& group, const KeyBlock& block, int64_t count, T* acc) const {
      const int64_t ld = f_.plan_.ld, width = f_.v_ld_;
      f_.prim_.accumulate_direct(group.count, width, 0, b_.s, ld, block.values, acc, width, b_.alpha);
      for (int64_t r = 0; r < group.count; ++r)
        for (int64_t j = 0; j < count; ++j) {
          if (!mask_.visible(group.query_of(r), block.begin + j)) continue;
          Source value = block.values;
          value.data = static_cast<const char*>(value.data) + j * value.row_stride * size_of(value.dtype);
          f_.prim_.accumulate_direct(1, width, 1, b_.s + r * ld + j, ld, value, acc + r * width, width, nullptr);
        }
    }

    // Writes the log-sum-exp of a row where it is wanted, and returns the factor that makes its output of acc.
    T finish_row(int64_t row, T* lse) const {
      const T* lanes = state_.row_sum + row * kMaxLanes;
      T partial[4] = {};  // short chains of additions, because small calls feel their latency
      for (int64_t lane = 0; lane < kMaxLanes; ++lane) partial[lane % 4] += lanes[lane];
      const T sum = (partial[0] + partial[1]) + (partial[2] + partial[3]);
      if (sum == T(0)) {
        if (lse) *lse = -std::numeric_limits<T>::infinity();
        std::fill_n(state_.acc + row * f_.v_ld_, f_.v_ld_, T(0));
        return T(0);
      }
      if (lse) *lse = state_.row_max[row] + std::log(sum);
      return T(1) / sum;
    }

    const Forward& f_;
    const AttentionParams& p_;
    const Buffers b_;
    const State state_;
    const int64_t batch_;
    const Mask mask_;
    int64_t kv_head_, head_, heads_, query_, queries_;
    bool across_;   // one query per head: the rows are the heads
    int64_t rows_;  // the distance from one head's first row to the next head's
  };

  const AttentionParams& p_;
  const Primitives<T, Operand>& prim_;
  const ForwardResults& results_;
  const Plan plan_;
  const ScoreTerms<T> terms_;
  int64_t q_ld_, v_ld_;
  bool queries_in_place_, values_in_place_;
};

// Whether float16 is multiplied in two parts of bfloat16. It pays where each number of a key is multiplied often
// enough. A part of what is not finite would be NaN.
bool in_parts(const AttentionParams& p) {
  const int64_t values = p.M * p.G() * p.D;  // of the queries that a head of keys is multiplied with
  return p.M >= kFewestRowsInParts && values >= kFewestInParts && p.N >= kFewestKeysInParts &&
         all_finite(p, {&p.q, &p.k, &p.v});
}

}  // namespace

template <typename T>
void attention_forward(const AttentionParams& params, const Toolbox<T>& tools, const ForwardResults& results) {
  if (params.B * params.H * params.M == 0) return;
  if constexpr (sizeof(T) == sizeof(float))
    if (tools.split && !params.block_table && in_parts(params))
      return Forward<T, Split>(params, *tools.split, results).run();
  const bool direct = reads_in_place(params);
  const bool pairs =
      tools.pairs && (direct ? tools.pairs->scores_direct && whole_vectors(params.v, params.Dv, tools.pairs->lanes)
                             : pairs_are_exact(params, {&params.v}));
  if (pairs)
    Forward<T, Narrow>(params, *tools.pairs, results).run();
  else
    Forward<T, T>(params, tools.plain, results).run();
}

template void attention_forward(const AttentionParams&, const Toolbox<float>&, const ForwardResults&);
template void attention_forward(const AttentionParams&, const Toolbox<double>&, const ForwardResults&);

}  // namespace sdpa_cpu
