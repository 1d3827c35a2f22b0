// The operators that torch sees: they check tensors, choose an instance and launch it. No arithmetic of attention is
// here.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <tuple>
#include <type_traits>

#include "recorded.h"
#include "workspace.h"

namespace sdpa_cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The share of the L2 cache for keys and values. The rest is for queries and outputs that pass through.
constexpr double kKeysCacheShare = 0.4;
// The share for what a backward reads and adds to of its queries, and the most heads of work tiles that it works on at
// a time: more are slower even where they fit (docs/log/hopper-backward.md). Where blocks of keys see different numbers
// of rows it works on kFewestGrowing at least, so that the longest blocks of all of these come first.
constexpr double kRowsCacheShare = 0.6;
constexpr int64_t kMostHeads = 16, kFewestGrowing = 8;
// Heads that share keys have work tiles of their own in any case where rows of queries times (G - 1) are at least this,
// under masks by which later rows see more keys.
constexpr int64_t kRowsToSum = 3000;
// In the time of a block of rows, fitted to docs/log/dropout-and-windows.md:
constexpr double kTileBlocks = 5;         // what a work tile of the backward takes beside its blocks
constexpr double kSumBlocks = 2;          // the launches that clear and write sums of the gradients of k and v
constexpr double kSummedNumbers = 170e3;  // so many numbers are cleared, added to and written in that time
// Parts of a work tile's rows have so many blocks at least. Of more waves of work tiles no other cut is tried.
constexpr int64_t kFewestBlocks = 4, kMostWaves = 4;
// The largest head size of the instances that add in one order and are of single thread blocks, not of pairs; and the
// fewest rows of a block of prepare_rows.
constexpr int kLargestInOrder = 128, kFewestRows = 8;
// What TMA reads begins, and has its rows, at multiples of so many bytes.
constexpr int kTmaBytes = 16;

struct Device {
  int cache = 0;                 // bytes of the L2 cache
  std::atomic<int> sm_count{0};  // set last
};

// The driver is asked once for each device: an answer takes it a microsecond.
const Device& device_of(int index) {
  static std::array<Device, kMaxDevices> known;
  Device& device = known[index % kMaxDevices];
  if (device.sm_count.load(std::memory_order_acquire) == 0) {
    int sm_count = 0;
    cudaDeviceGetAttribute(&device.cache, cudaDevAttrL2CacheSize, index);
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, index);
    device.sm_count.store(sm_count, std::memory_order_release);
  }
  return device;
}

// (B, H, M, D), in the memory order (B, M, H, D) when `like` has it.
Tensor new_like(const Tensor& like, int64_t D, int32_t dtype, const Need& need) {
  const int64_t B = like.size(0), H = like.size(1), M = like.size(2);
  const bool rows_outside = H > 1 && M > 1 && 0 < like.stride(1) && like.stride(1) < like.stride(2);
  const std::vector<int64_t> strides =
      rows_outside ? std::vector<int64_t>{M * H * D, D, H * D, 1} : std::vector<int64_t>{H * M * D, M * D, D, 1};
  return new_tensor({B, H, M, D}, strides, dtype, need);
}

// A number of each row (B, H, M); none where they are not wanted.
Tensor new_rows(const Tensor& q, bool wanted, const Need& need) {
  const int64_t B = q.size(0), H = q.size(1), M = q.size(2);
  const std::vector<int64_t> sizes = wanted ? std::vector<int64_t>{B, H, M} : std::vector<int64_t>{0};
  const std::vector<int64_t> strides = wanted ? std::vector<int64_t>{H * M, M, 1} : std::vector<int64_t>{1};
  return new_tensor(sizes, strides, aoti_torch_dtype_float32(), need);
}

// A dimension of size 1 needs no true stride, and TMA refuses some strides.
View view_of(const Tensor& t) {
  const auto stride = [&](int i) { return t.size(i) == 1 ? t.size(3) : t.stride(i); };
  return {t.data_ptr(), stride(0), stride(1), stride(2)};
}

// Whether TMA reads rows (.., D) of 16-bit numbers where they lie.
bool is_readable(const Tensor& t) {
  const auto whole = [&](int i) { return t.size(i) == 1 || t.stride(i) * 2 % kTmaBytes == 0; };
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % kTmaBytes == 0 && t.stride(3) == 1 && whole(0) && whole(1) &&
         whole(2);
}

void check_tensors(const Tensor& q, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "cuda_flash: expected q, k and v of 4 dimensions");
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                  "cuda_flash: expected q, k and v of one dtype");
  STD_TORCH_CHECK(
      k.size(0) == q.size(0) && v.size(0) == q.size(0) && v.size(1) == k.size(1) && v.size(2) == k.size(2) &&
          k.size(3) == q.size(3),
      "cuda_flash: expected k and v of as many rows and heads, and the batch of q and head size of q and k");
  STD_TORCH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                  "cuda_flash: expected the heads of q to be a multiple of "
                  "those of k, but got ",
                  q.size(1), " and ", k.size(1));
  STD_TORCH_CHECK(q.numel() > 0 && k.numel() > 0, "cuda_flash: expected queries and keys, but got none");
  STD_TORCH_CHECK(q.size(2) < kUnlimited && k.size(2) < kUnlimited, "cuda_flash takes fewer than ", kUnlimited,
                  " queries and keys, but got ", q.size(2), " and ", k.size(2));
  for (const Tensor& t : {q, k, v})
    STD_TORCH_CHECK(is_readable(t), "cuda_flash cannot read addresses and rows that are no multiples of ", kTmaBytes,
                    " bytes");
}

void set_sizes(FlashParams& p, const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!p.cu_q) p.B = q.size(0), p.M = q.size(2), p.N = k.size(2);
  p.H = q.size(1), p.Hkv = k.size(1), p.D = q.size(3), p.Dv = v.size(3);
  p.query_rows = q.size(2), p.key_rows = k.size(2);
  p.shift = p.bottom_right ? p.N - p.M : 0;
  p.device = q.get_device();
}

// What find_spans finds out about the ids of segments: spans, ranges of ids, and padded ids of keys. The parts come in
// the order of their alignment, the strictest first.
void plan_segments(ForwardPlan& plan) {
  SegmentParams& p = plan.p;
  const Instance& instance = *plan.instance;
  p.groups = blocks_of(p, instance.BLOCK_M) * (instance.BLOCK_M / kWarpgroupRows);
  p.blocks = (p.N + instance.BLOCK_N - 1) / instance.BLOCK_N;
  const int64_t B = p.B;
  plan.spans = B * p.groups * int64_t{sizeof(Span)};
  plan.id_ranges = B * p.blocks * int64_t{sizeof(IdRange)};
  plan.ids = B * p.blocks * instance.BLOCK_N * int64_t{sizeof(int32_t)};
}

void check_status(cudaError_t status, const char* what, const FlashParams& p) {
  STD_TORCH_CHECK(status == cudaSuccess, "cuda_flash: ", cudaGetErrorString(status), " in ", what, " B = ", p.B,
                  ", H = ", p.H, ", M = ", p.M, ", N = ", p.N, ", D = ", p.D, ", Dv = ", p.Dv);
}

// The part that the operators share: `p` brings the options in which they differ.
std::tuple<Tensor, Tensor> launch_flash(const Tensor& q, const Tensor& k, const Tensor& v, MaskKind mask,
                                        SegmentParams p) {
  check_tensors(q, k, v);
  const bool bf16 = q.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(bf16 || q.scalar_type() == ScalarType::Half, "cuda_flash: expected bfloat16 or float16");
  const int64_t H = q.size(1), D = q.size(3), Dv = v.size(3), Hkv = k.size(1);
  set_sizes(p, q, k, v);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const Device& device = device_of(q.get_device());
  p.sm_count = device.sm_count;
  STD_TORCH_CHECK((int64_t{p.M} / kWarpgroupRows + 1) * p.B * H < INT32_MAX - p.sm_count, "cuda_flash: ", p.B,
                  " sequences of up to ", p.M, " queries in ", H, " heads are more blocks than it counts");
  const double resident_heads =
      kKeysCacheShare * device.cache / (2.0 * p.N * (D + Dv));  // heads whose keys and values stay in the cache
  p.section = static_cast<int>(std::clamp<int64_t>(static_cast<int64_t>(resident_heads) * (H / Hkv), 1, p.B * H));
  const Instance* instance = find_instance(bf16 ? Element::kBFloat16 : Element::kFloat16, mask, p);
  STD_TORCH_CHECK(instance, "cuda_flash: no instance for head sizes ", D, " and ", Dv);
  ForwardPlan plan{p, instance};
  if (mask == MaskKind::kSegments) plan_segments(plan);
  plan.need = {p.device, q.size(0) * H * q.size(2) * (2 * Dv + 4) + plan.bytes()};
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(q.get(), &dtype));
  const Tensor out = new_like(q, Dv, dtype, plan.need);
  const Tensor lse = new_rows(q, true, plan.need);
  plan.p.q = view_of(q), plan.p.k = view_of(k), plan.p.v = view_of(v), plan.p.out = view_of(out);
  plan.p.lse = static_cast<float*>(lse.data_ptr());
  plan.draws = int64_t{blocks_of(p, instance->BLOCK_M)} * p.B * p.H > p.sm_count;
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(q.get_device(), &stream));
  check_status(launched(plan, stream), "the forward for", p);
  record(plan);
  return {out, lse};
}

std::tuple<Tensor, Tensor> flash_forward(Tensor q, Tensor k, Tensor v, double scale, bool causal, bool bottom_right) {
  SegmentParams p;
  p.scale = static_cast<float>(scale);
  p.bottom_right = bottom_right;
  return launch_flash(q, k, v, causal ? MaskKind::kCausal : MaskKind::kNone, p);
}

// The options of dropout: `threshold` of 2^16 random numbers drop a weight (sdpa/philox.py).
void set_dropout(FlashParams& p, const Tensor& rng, int64_t threshold, const Tensor& q) {
  STD_TORCH_CHECK(rng.scalar_type() == ScalarType::Long && rng.dim() == 1 && (rng.size(0) == 2 || rng.size(0) == 4) &&
                      rng.is_contiguous() && rng.get_device() == q.get_device(),
                  "cuda_flash: expected rng as two or four int64 numbers side by side on the device of q, but got ",
                  rng.numel(), " in ", rng.dim(), " dimensions, of another dtype, device or stride perhaps");
  STD_TORCH_CHECK(0 <= threshold && threshold < 1 << 16, "cuda_flash: expected a threshold from 0 to 65535, got ",
                  threshold);
  p.rng = static_cast<const int64_t*>(rng.data_ptr());
  p.has_part = rng.size(0) == 4;
  p.dropped = static_cast<uint32_t>(threshold) << 16;
  p.kept = 65536.f / (65536 - threshold);
}

std::tuple<Tensor, Tensor> flash_forward_dropout(Tensor q, Tensor k, Tensor v, double scale, bool causal,
                                                 bool bottom_right, Tensor rng, int64_t threshold) {
  SegmentParams p;
  p.scale = static_cast<float>(scale);
  p.right = causal ? 0 : kUnlimited;
  p.bottom_right = bottom_right;
  set_dropout(p, rng, threshold, q);
  return launch_flash(q, k, v, MaskKind::kDropout, p);
}

// The address of a tensor with one number per batch entry or head; null where the tensor is absent.
template <class T>
const T* numbers_of(const char* name, const std::optional<Tensor>& t, int64_t count, const Tensor& q) {
  if (!t.has_value()) return nullptr;
  constexpr bool kFloats = std::is_same_v<T, float>;
  STD_TORCH_CHECK(t->scalar_type() == (kFloats ? ScalarType::Float : ScalarType::Int) && t->dim() == 1 &&
                      t->size(0) == count && t->is_contiguous() && t->get_device() == q.get_device(),
                  "cuda_flash: expected ", name, " as ", count, kFloats ? " float32" : " int32",
                  " numbers side by side on the device of q, but got ", t->numel(), " in ", t->dim(),
                  " dimensions, of another dtype, device or stride perhaps");
  return static_cast<const T*>(t->data_ptr());
}

// A side of a band as kernels want it. A negative side has no limit.
int side_of(int64_t given) { return given < 0 ? kUnlimited : static_cast<int>(std::min<int64_t>(given, kUnlimited)); }

// The options of a band and of lengths, or of packed sequences.
void set_options(FlashParams& p, const Tensor& q, const Tensor& k, double scale, int64_t left, int64_t right,
                 bool bottom_right, const std::optional<Tensor>& k_lengths, const std::optional<Tensor>& q_lengths,
                 double softcap, const std::optional<Tensor>& cu_q, const std::optional<Tensor>& cu_k, int64_t max_q,
                 int64_t max_k) {
  p.scale = static_cast<float>(scale);
  p.left = side_of(left), p.right = side_of(right);
  p.bottom_right = bottom_right;
  p.softcap = static_cast<float>(softcap);
  STD_TORCH_CHECK(cu_q.has_value() == cu_k.has_value(), "cuda_flash: expected cu_q and cu_k, or neither");
  int64_t entries = q.size(0);
  if (cu_q.has_value()) {
    STD_TORCH_CHECK(entries == 1 && cu_q->numel() > 1, "cuda_flash: expected packed sequences in one batch entry");
    entries = cu_q->numel() - 1;
    p.cu_q = numbers_of<int32_t>("cu_q", cu_q, entries + 1, q);
    p.cu_k = numbers_of<int32_t>("cu_k", cu_k, entries + 1, q);
    p.B = entries, p.M = std::min(max_q, q.size(2)), p.N = std::min(max_k, k.size(2));
    STD_TORCH_CHECK(p.M > 0 && p.N > 0, "cuda_flash: expected sequences of at least one query and one key");
  }
  p.k_lengths = numbers_of<int32_t>("k_lengths", k_lengths, entries, q);
  p.q_lengths = numbers_of<int32_t>("q_lengths", q_lengths, entries, q);
}

std::tuple<Tensor, Tensor> flash_forward_band(Tensor q, Tensor k, Tensor v, double scale, int64_t left, int64_t right,
                                              bool bottom_right, std::optional<Tensor> k_lengths,
                                              std::optional<Tensor> q_lengths, std::optional<Tensor> sinks,
                                              double softcap, std::optional<Tensor> cu_q, std::optional<Tensor> cu_k,
                                              int64_t max_q, int64_t max_k) {
  SegmentParams p;
  set_options(p, q, k, scale, left, right, bottom_right, k_lengths, q_lengths, softcap, cu_q, cu_k, max_q, max_k);
  p.sinks = numbers_of<float>("sinks", sinks, q.size(1), q);
  // Lengths of keys alone need no band: MaskKind::kNone, too, lets the last block of keys end where the keys end.
  const bool unlimited = p.left == kUnlimited && p.right == kUnlimited;
  const bool plain = unlimited && !p.cu_q && !p.q_lengths && !p.sinks && p.softcap == 0.f;
  return launch_flash(q, k, v, plain ? MaskKind::kNone : MaskKind::kBand, p);
}

// Ids (B, count), or (1, count) for all batch entries.
Ids ids_of(const char* name, const Tensor& t, int64_t count, const Tensor& q) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == 2 && (t.size(0) == 1 || t.size(0) == q.size(0)) &&
                      t.size(1) == count && (count == 1 || t.stride(1) == 1) && t.get_device() == q.get_device(),
                  "cuda_flash: expected ", name, " as ", count, " int32 numbers side by side, for each of ", q.size(0),
                  " batch entries or for all, on the device of q, but got ", t.numel(), " in ", t.dim(),
                  " dimensions, of another dtype, device or stride perhaps");
  return {static_cast<const int32_t*>(t.data_ptr()), t.size(0) == 1 ? 0 : t.stride(0)};
}

std::tuple<Tensor, Tensor> flash_forward_segments(Tensor q, Tensor k, Tensor v, double scale, int64_t left,
                                                  int64_t right, bool bottom_right, Tensor q_segments,
                                                  Tensor k_segments, std::optional<Tensor> k_lengths,
                                                  std::optional<Tensor> q_lengths, std::optional<Tensor> sinks,
                                                  double softcap) {
  SegmentParams p;
  p.scale = static_cast<float>(scale);
  p.left = side_of(left), p.right = side_of(right);
  p.bottom_right = bottom_right;
  p.softcap = static_cast<float>(softcap);
  p.q_ids = ids_of("q_segments", q_segments, q.size(2), q);
  p.k_ids = ids_of("k_segments", k_segments, k.size(2), q);
  p.k_lengths = numbers_of<int32_t>("k_lengths", k_lengths, q.size(0), q);
  p.q_lengths = numbers_of<int32_t>("q_lengths", q_lengths, q.size(0), q);
  p.sinks = numbers_of<float>("sinks", sinks, q.size(1), q);
  return launch_flash(q, k, v, MaskKind::kSegments, p);
}

void check_like(const char* name, const Tensor& t, const Tensor& q, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == q.size(0) && t.size(1) == q.size(1) && t.size(2) == rows &&
                      t.size(3) == columns && t.scalar_type() == q.scalar_type() && t.get_device() == q.get_device() &&
                      is_readable(t),
                  "cuda_flash: expected ", name,
                  " of the dtype, device and sizes of the output, in rows that begin at ", "multiples of 16 bytes");
}

const float* lse_of(const char* name, const Tensor& t, const Tensor& q) {
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == q.size(0) && t.size(1) == q.size(1) && t.size(2) == q.size(2) &&
                      t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.get_device() == q.get_device(),
                  "cuda_flash: expected ", name, " as (B, H, M) contiguous float32 numbers on the device of q");
  return static_cast<const float*>(t.data_ptr());
}

// Whether each head of a group adds to sums of the gradients of k and v in any case. If one work tile visits all, these
// gradients stay in registers. But where blocks of keys see different numbers of rows, thread blocks then leave a head
// at different times, and all heads' rows together are more than the cache holds. Of fewer rows cut_of decides.
bool sums_groups(MaskKind mask, const BackwardParams& p) {
  return p.group > 1 && grows(mask, p) && (p.group - 1) * int64_t{p.M} >= kRowsToSum;
}

// What a work tile has of the rows that see a block of keys: of so many heads that share these, one of so many parts.
struct Cut {
  int heads, parts;
};

// The cut that takes the least time: few work tiles leave multiprocessors idle, several for a block of keys need sums.
Cut cut_of(const BackwardParams& p, const BackwardInstance& instance, MaskKind mask, int at_once) {
  const int64_t blocks = (int64_t{p.N} + kBackwardKeys - 1) / kBackwardKeys * p.B;
  const int64_t rows = std::min(int64_t{p.M}, int64_t{p.left} + p.right + kBackwardKeys);
  const int64_t longest = (rows + instance.BLOCK_M - 1) / instance.BLOCK_M;
  const auto tiles = [&](Cut cut) { return blocks * (p.H / cut.heads) * cut.parts; };
  const double numbers = double(p.B) * p.Hkv * p.N * (p.D + p.Dv);
  const auto time = [&](Cut cut) {
    const double most = double((longest + cut.parts - 1) / cut.parts * cut.heads) + kTileBlocks;
    const double sums = cut.heads < p.group || cut.parts > 1 ? kSumBlocks + numbers / kSummedNumbers : 0;
    if (!grows(mask, p)) return double((tiles(cut) + at_once - 1) / at_once) * most + sums;
    const double mean = double(longest * cut.heads) / cut.parts / 2 + kTileBlocks;
    return std::max(most, double(tiles(cut)) / at_once * mean) + sums;
  };
  // Blocks of keys of segments see few rows.
  const int64_t most_parts = mask == MaskKind::kSegments ? 1 : std::max(longest / kFewestBlocks, int64_t{1});
  Cut best{sums_groups(mask, p) ? 1 : p.group, 1};
  double least = time(best);
  for (int heads = best.heads; heads > 0; --heads) {
    if (p.group % heads != 0) continue;
    for (int parts = 1; parts <= most_parts && tiles({heads, parts}) <= kMostWaves * at_once; ++parts) {
      const double taken = time({heads, parts});
      if (taken < least) least = taken, best = {heads, parts};
    }
  }
  return best;
}

// One kernel has a thread block for each kFewestRows rows of each sequence, as if all had the rows of the longest.
void check_counts(const BackwardParams& p) {
  const int64_t blocks = (int64_t{p.M} + kFewestRows - 1) / kFewestRows * p.H * (int64_t{p.B} + 1);
  STD_TORCH_CHECK(blocks < INT32_MAX, "cuda_flash: expected fewer blocks of ", kFewestRows, " queries than ", INT32_MAX,
                  " in the backward, counting the longest of B = ", p.B, " sequences B times, but got ", blocks);
}

Kept kept_of(BackwardParams& p, const BackwardInstance& instance, bool deterministic) {
  const int64_t block = instance.BLOCK_M;
  const int64_t blocks = p.cu_q ? p.query_rows / block + p.B : (p.M + block - 1) / block;
  const int64_t heads = p.cu_q ? p.H : int64_t{p.B} * p.H, rows = heads * blocks * block;
  STD_TORCH_CHECK(heads * blocks < INT32_MAX / 8 && blocks * block < INT32_MAX, "cuda_flash: ", heads * blocks,
                  " blocks of queries are more than the backward counts");
  p.row_blocks = static_cast<int>(blocks);
  const int64_t key_blocks = p.cu_k ? p.key_rows / kBackwardKeys + p.B : (p.N + kBackwardKeys - 1) / kBackwardKeys;
  p.key_blocks = static_cast<int>(key_blocks);
  const int64_t keys =
      p.tile_heads < p.group || p.parts > 1 ? (p.cu_k ? p.Hkv : int64_t{p.B} * p.Hkv) * key_blocks * kBackwardKeys : 0;
  const int64_t entries = p.q_ids.data ? p.B : 0;  // with segments
  Kept kept;
  kept.rows = rows;
  kept.grad_q = rows * instance.D, kept.grad_k = keys * instance.D, kept.grad_v = keys * instance.Dv;
  kept.row_ids = entries * blocks * (block + kRangeNumbers);
  kept.key_ids = entries * key_blocks * 2 * (kWarpgroupRows + kRangeNumbers);
  kept.spans = entries * key_blocks;
  kept.semaphores = deterministic ? heads * blocks + 1 : 0;  // and the counter of work tiles
  return kept;
}

// Which instances of the backward take `p`, whose ids of segments are set.
MaskKind backward_mask(BackwardParams& p, const Tensor& q, const Tensor& k, const std::optional<Tensor>& q_segments,
                       const std::optional<Tensor>& k_segments, bool deterministic) {
  if (q_segments.has_value() || k_segments.has_value()) {
    const bool alone = !p.cu_q && !deterministic && !p.rng && !p.bias.data;
    STD_TORCH_CHECK(
        q_segments.has_value() && k_segments.has_value() && alone,
        "cuda_flash: expected q_segments and k_segments, not packed, deterministic, with dropout or a bias");
    p.q_ids = ids_of("q_segments", *q_segments, q.size(2), q);
    p.k_ids = ids_of("k_segments", *k_segments, k.size(2), q);
    return MaskKind::kSegments;
  }
  const bool unlimited = p.left == kUnlimited && p.right == kUnlimited;
  const bool plain = !p.cu_q && !p.k_lengths && !p.q_lengths && p.softcap == 0.f && !p.slopes;
  const bool causal = p.left == kUnlimited && p.right == 0;
  if (p.rng || p.bias.data) {
    STD_TORCH_CHECK(plain && (unlimited || causal) && !(p.rng && p.bias.data),
                    "cuda_flash: expected dropout or a bias without a mask or under a causal one");
    return p.rng ? MaskKind::kDropout : MaskKind::kBias;
  }
  return plain && unlimited ? MaskKind::kNone : plain && causal ? MaskKind::kCausal : MaskKind::kBand;
}

// Slopes of ALiBi, (B, H) or (1, H) for all batch entries.
void set_slopes(BackwardParams& p, const Tensor& t, const Tensor& q) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 2 && (t.size(0) == 1 || t.size(0) == p.B) &&
                      t.size(1) == p.H && (p.H == 1 || t.stride(1) == 1) && t.get_device() == q.get_device(),
                  "cuda_flash: expected alibi as ", p.H, " float32 numbers side by side, for each of ", p.B,
                  " sequences or for all, on the device of q, but got ", t.numel(), " in ", t.dim(),
                  " dimensions, of another dtype, device or stride perhaps");
  STD_TORCH_CHECK(p.softcap == 0.f, "cuda_flash: expected alibi or a softcap, got both");
  STD_TORCH_CHECK(t.size(0) == 1 || t.stride(0) * p.B < INT32_MAX, "cuda_flash: expected alibi in fewer than ",
                  INT32_MAX, " numbers of memory");
  p.slopes = static_cast<const float*>(t.data_ptr());
  p.slopes_batch = t.size(0) == 1 ? 0 : static_cast<int>(t.stride(0));
}

// A bias (B, H, M, N). Batch entries or heads share it where there is one, or where it is expanded.
void set_bias(BackwardParams& p, const Tensor& t, const Tensor& q) {
  const auto is_shared = [&](int i) { return t.size(i) == 1 || t.stride(i) == 0; };
  const auto fits = [&](int i, int64_t count) { return t.size(i) == count || t.size(i) == 1; };
  STD_TORCH_CHECK(t.scalar_type() == q.scalar_type() && t.get_device() == q.get_device() && t.dim() == 4 &&
                      fits(0, p.B) && fits(1, p.H) && t.size(2) == p.M && t.size(3) == p.N,
                  "cuda_flash: expected a bias of the dtype and device of q, for each of ", p.B, " batch entries and ",
                  p.H, " heads or for all, of ", p.M, " rows and ", p.N, " columns");
  const auto whole = [&](int i) { return is_shared(i) || t.stride(i) * 2 % kTmaBytes == 0; };
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % kTmaBytes == 0 && (p.N == 1 || t.stride(3) == 1) &&
                      whole(0) && whole(1) && (p.M == 1 || (t.stride(2) > 0 && whole(2))),
                  "cuda_flash cannot read a bias whose address or rows are no multiples of ", kTmaBytes, " bytes");
  const int64_t row = p.M == 1 ? (p.N + 7) / 8 * 8 : t.stride(2);
  p.bias = {t.data_ptr(), is_shared(0) ? 0 : t.stride(0), is_shared(1) ? 0 : t.stride(1), row};
}

// What a call of the backward asks for beside its mask.
void set_terms(BackwardParams& p, const Tensor& q, const std::optional<Tensor>& alibi, const std::optional<Tensor>& rng,
               int64_t threshold, const std::optional<Tensor>& bias) {
  if (alibi.has_value()) set_slopes(p, *alibi, q);
  if (bias.has_value()) set_bias(p, *bias, q);
  if (rng.has_value()) set_dropout(p, *rng, threshold, q);
}

// Queries and upstream gradients of so many heads of work tiles, and the sums that are added to, stay in the cache.
int section_of(const BackwardParams& p, const BackwardInstance& instance, MaskKind mask, bool deterministic) {
  const double bytes = double(p.tile_heads) * p.M * (2.0 * (p.D + p.Dv) + 4.0 * instance.D);
  const int64_t fitting = static_cast<int64_t>(kRowsCacheShare * device_of(p.device).cache / bytes);
  const int64_t heads = std::clamp(fitting, !deterministic && grows(mask, p) ? kFewestGrowing : 1, kMostHeads);
  return static_cast<int>(std::min(heads, int64_t{p.B} * (p.H / p.tile_heads)));
}

// The gradients of q, k and v, and with `delta_wanted` the delta of each row, of which the gradient of sinks is made.
std::tuple<Tensor, Tensor, Tensor, Tensor> flash_backward(
    Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, std::optional<Tensor> grad_lse, double scale,
    int64_t left, int64_t right, bool bottom_right, std::optional<Tensor> k_lengths, std::optional<Tensor> q_lengths,
    double softcap, std::optional<Tensor> cu_q, std::optional<Tensor> cu_k, int64_t max_q, int64_t max_k,
    bool delta_wanted, bool deterministic, std::optional<Tensor> q_segments, std::optional<Tensor> k_segments,
    std::optional<Tensor> alibi, std::optional<Tensor> rng, int64_t threshold, std::optional<Tensor> bias) {
  check_tensors(q, k, v);
  const bool bf16 = q.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(bf16 || q.scalar_type() == ScalarType::Half, "cuda_flash: expected bfloat16 or float16");
  check_like("out", out, q, q.size(2), v.size(3));
  check_like("grad_out", grad_out, q, q.size(2), v.size(3));
  BackwardParams p;
  p.lse = const_cast<float*>(lse_of("lse", lse, q));
  p.grad_lse = grad_lse.has_value() ? lse_of("grad_lse", *grad_lse, q) : nullptr;
  set_options(p, q, k, scale, left, right, bottom_right, k_lengths, q_lengths, softcap, cu_q, cu_k, max_q, max_k);
  set_sizes(p, q, k, v);
  check_counts(p);
  STD_TORCH_CHECK(scale > 0, "cuda_flash: expected a positive scale, got ", scale);
  STD_TORCH_CHECK(!deterministic || std::max(p.D, p.Dv) <= kLargestInOrder, "cuda_flash: expected head sizes up to ",
                  kLargestInOrder, " for a deterministic backward, got ", p.D, " and ", p.Dv);
  set_terms(p, q, alibi, rng, threshold, bias);
  const MaskKind mask = backward_mask(p, q, k, q_segments, k_segments, deterministic);
  const BackwardInstance* instance = find_backward_instance(bf16 ? Element::kBFloat16 : Element::kFloat16, mask, p);
  STD_TORCH_CHECK(instance, "cuda_flash: no instance of the backward for head sizes ", p.D, " and ", p.Dv);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  p.sm_count = device_of(p.device).sm_count, p.group = p.H / p.Hkv;
  const int at_once = std::max(p.D, p.Dv) > kLargestInOrder ? p.sm_count / 2 : p.sm_count;  // pairs, or thread blocks
  const Cut cut = deterministic ? Cut{p.group, 1} : cut_of(p, *instance, mask, at_once);
  p.tile_heads = cut.heads, p.parts = cut.parts;
  const Kept kept = kept_of(p, *instance, deterministic);
  const Need need{p.device,
                  2 * (q.numel() + k.numel() + v.numel()) + 4 * (kept.all() + (delta_wanted ? lse.numel() : 0))};
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(q.get(), &dtype));
  const Tensor grad_q = new_like(q, p.D, dtype, need), grad_k = new_like(k, p.D, dtype, need),
               grad_v = new_like(v, p.Dv, dtype, need);
  const Tensor delta = new_rows(q, delta_wanted, need);
  p.q = view_of(q), p.k = view_of(k), p.v = view_of(v), p.out = view_of(out), p.grad_out = view_of(grad_out);
  p.grad_q = view_of(grad_q), p.grad_k = view_of(grad_k), p.grad_v = view_of(grad_v);
  p.scale_log2 = std::max(p.scale, kLeastScale) * 1.44269504f;
  p.section = section_of(p, *instance, mask, deterministic);
  if (delta_wanted) p.delta_rows = static_cast<float*>(delta.data_ptr());
  const int64_t tiles = (int64_t{p.N} + kBackwardKeys - 1) / kBackwardKeys * p.parts * p.B * (p.H / p.tile_heads);
  STD_TORCH_CHECK(tiles < INT32_MAX - p.sm_count, "cuda_flash: ", tiles, " blocks of keys are more than it counts");
  const BackwardPlan plan{p, instance, kept, need, lse.numel(), tiles > at_once && !deterministic};
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(q.get_device(), &stream));
  check_status(launched(plan, stream), "the backward for", p);
  record(plan);
  return {grad_q, grad_k, grad_v, delta};
}

}  // namespace

STABLE_TORCH_LIBRARY(sdpa_cuda, library) {
  library.def(
      "flash_forward(Tensor q, Tensor k, Tensor v, float scale, bool causal, bool bottom_right) -> (Tensor, Tensor)");
  library.def(
      "flash_forward_band(Tensor q, Tensor k, Tensor v, float scale, int left, int right, bool bottom_right, "
      "Tensor? k_lengths, Tensor? q_lengths, Tensor? sinks, float softcap, Tensor? cu_q, Tensor? cu_k, int max_q, "
      "int max_k) -> (Tensor, Tensor)");
  library.def(
      "flash_forward_segments(Tensor q, Tensor k, Tensor v, float scale, int left, int right, bool bottom_right, "
      "Tensor q_segments, Tensor k_segments, Tensor? k_lengths, Tensor? q_lengths, Tensor? sinks, float softcap) -> "
      "(Tensor, Tensor)");
  library.def(
      "flash_forward_dropout(Tensor q, Tensor k, Tensor v, float scale, bool causal, bool bottom_right, Tensor rng, "
      "int threshold) -> (Tensor, Tensor)");
  library.def(
      "flash_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? grad_lse, float "
      "scale, int left, int right, bool bottom_right, Tensor? k_lengths, Tensor? q_lengths, float softcap, Tensor? "
      "cu_q, Tensor? cu_k, int max_q, int max_k, bool delta_wanted, bool deterministic=False, Tensor? q_segments=None, "
      "Tensor? k_segments=None, Tensor? alibi=None, Tensor? rng=None, int threshold=0, Tensor? bias=None) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sdpa_cuda, CUDA, library) {
  library.impl("flash_forward", TORCH_BOX(&flash_forward));
  library.impl("flash_forward_band", TORCH_BOX(&flash_forward_band));
  library.impl("flash_forward_segments", TORCH_BOX(&flash_forward_segments));
  library.impl("flash_forward_dropout", TORCH_BOX(&flash_forward_dropout));
  library.impl("flash_backward", TORCH_BOX(&flash_backward));
}

}  // namespace sdpa_cuda
