// The parameters of a launch, and the instances there are to launch. Bindings and kernels share this file, so it
// includes no header of CUDA or torch.
#pragma once
#include <cstdint>

namespace sdpa_cuda {

// A tensor (B, H, rows, D) whose last stride is 1. The other strides count elements.
struct View {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
};

constexpr int kMaxDevices = 64;     // something is remembered of so many; for some of it a device is a bit of 64
constexpr int kWarpgroupRows = 64;  // rows of queries of one consumer warpgroup: the M of a WGMMA
constexpr int kBackwardKeys = 2 * kWarpgroupRows;  // keys of a block of the backward
constexpr int kRangeNumbers = 4;                   // a range of ids, and what makes 16 bytes full
constexpr int kUnlimited = 1 << 29;  // a side of the band without a limit; the sum of two still fits in an int

struct FlashParams {
  View q, k, v, out;
  float* lse = nullptr;  // (B, H, M), contiguous
  int B = 0, H = 0, Hkv = 0, M = 0, N = 0, D = 0, Dv = 0;
  float scale = 1.f;
  bool bottom_right = false;
  int shift = 0;     // a causal row i sees the keys up to i + shift
  int section = 1;   // heads (of all B * H) whose work tiles run side by side: L2 keeps their keys and values
  int device = 0;    // its index
  int sm_count = 1;  // multiprocessors of the device
  // The persistent thread blocks draw the indices of their next work tiles from this counter. It is 0 before a launch,
  // and again after it. Where it is null, each thread block takes every gridDim.x-th work tile.
  int32_t* counter = nullptr;

  // The following are read by instances of MaskKind::kBand, and by those of other kinds where it is said so.
  // Row i sees the keys from i + shift - left to i + shift + right. Here `shift` is 0 or, with `bottom_right`, each
  // batch entry's key length minus its query length.
  int left = kUnlimited, right = kUnlimited;
  const int32_t *k_lengths = nullptr, *q_lengths = nullptr;  // (B,); MaskKind::kNone reads k_lengths, too
  const float* sinks = nullptr;                              // (H,): the score of one more key, which has no value
  float softcap = 0.f;                                       // scores become softcap * tanh(score / softcap); 0: none
  // (B + 1,) where sequences are packed. The tensors are then (1, heads, rows, D), and entry b has the rows cu[b] ..
  // cu[b + 1] - 1, which are at most M queries and N keys. The log-sum-exp is (H, query_rows).
  const int32_t *cu_q = nullptr, *cu_k = nullptr;
  int query_rows = 0, key_rows = 0;  // in memory of one head

  // Of instances of MaskKind::kDropout, which also read `right`, as those of kBias do: 0 or without a limit.
  const int64_t* rng = nullptr;  // the key and the offset of Philox, and of a part of a call which part it is
  bool has_part = false;         // the numbers of dropout are those of a part of a call
  uint32_t dropped = 0;          // a weight whose random number of 16 bits, times 2^16, is less is dropped
  float kept = 1.f;              // the factor of the others
};

// Ids, one per position. The row of a batch entry begins `batch` numbers after the row before; `batch` is 0 where all
// entries share one row.
struct Ids {
  const int32_t* data = nullptr;
  int64_t batch = 0;
};

// The smallest and the largest id of a block of keys, or of one consumer's rows.
struct alignas(8) IdRange {
  int32_t least, most;
};

// The blocks of keys from begin to end - 1 hold all keys that one consumer's rows see; end is 0 where they see none.
// The blocks from unmasked_begin to unmasked_end - 1 need no mask, because every one of the rows sees all of their
// keys.
struct alignas(16) Span {
  int begin, end, unmasked_begin, unmasked_end;
};

// The blocks of rows from begin to end - 1 have all rows that see a key of a block of the backward.
struct alignas(8) RowSpan {
  int begin, end;
};

// Of instances of MaskKind::kSegments: a row sees, of the keys inside its band, those of its own id.
struct SegmentParams : FlashParams {
  Ids q_ids, k_ids;  // (B, M), (B, N): any numbers in any order
  // The kernel find_spans fills what follows before the attention kernel begins. The ids of a batch entry's keys are
  // padded at their front as the mask pads its blocks.
  int groups = 0, blocks = 0;       // groups of kWarpgroupRows rows; blocks of BLOCK_N keys
  Span* spans = nullptr;            // (B, groups)
  IdRange* id_ranges = nullptr;     // (B, blocks)
  int32_t* padded_k_ids = nullptr;  // (B, blocks * BLOCK_N)
};

// The smallest scale in an exponent: scores times less than that are 0 beside lse, and lse / scale could be infinite.
constexpr float kLeastScale = 1e-30f;

// Of a backward. `out` and `lse` are the forward's results; the gradients of q, k and v have the shapes of these.
// A sequence's rows are padded to whole blocks in what the kernels keep for themselves: row_blocks of one head, which
// are padded_rows = row_blocks * BLOCK_M rows. Keys are padded likewise, to key_blocks of kBackwardKeys.
struct BackwardParams : FlashParams {
  View grad_out, grad_q, grad_k, grad_v;
  const float* grad_lse = nullptr;  // as lse; null where no gradient arrives there
  // (B, H, padded_rows): lse * log2(e), or +inf where a row sees no key; and the sum of grad_out * out, less grad_lse.
  // Above head size 64 they are what accumulators begin with instead: base2 / -scale_log2, or -FLT_MAX; and -delta.
  // With dropout delta keeps its sign, and is divided by `kept`. With a bias base2 is lse, or +inf.
  float *base2 = nullptr, *delta = nullptr;
  float* grad_q_acc = nullptr;  // (B, H, row_blocks, BLOCK_M * D): sums in the order of a WGMMA's registers
  // (B, Hkv, key_blocks, kBackwardKeys * D or Dv), likewise, with the instance's head sizes; null where one work tile
  // has all rows of all heads that share its keys (tile_heads == group, parts == 1)
  float *grad_k_acc = nullptr, *grad_v_acc = nullptr;
  float* delta_rows = nullptr;  // delta as lse lies; null where nobody asks for it
  // Where gradients are to have the same bits each time: (B, H, row_blocks), the block of keys whose turn it is to add
  // to a block of rows, from the last one to the first; `counter` is behind them. Null: in any order.
  int32_t* semaphores = nullptr;
  // ALiBi: (B, H), of which one batch entry's row begins slopes_batch numbers after the row before; null: none.
  const float* slopes = nullptr;
  int slopes_batch = 0;
  // Of instances of MaskKind::kBias: (B, H, M, N), of the dtype of q. A stride of batch entries or heads is 0 where
  // they share it.
  View bias;
  // Of instances of MaskKind::kSegments. The kernel find_row_spans fills what follows the ids before the pass begins.
  // Blocks of ids are followed by their range, in kRangeNumbers.
  Ids q_ids, k_ids;              // (B, M), (B, N)
  int32_t* row_ids = nullptr;    // (B, row_blocks, BLOCK_M + kRangeNumbers)
  int32_t* key_ids = nullptr;    // (B, 2 * key_blocks, kWarpgroupRows + kRangeNumbers)
  RowSpan* row_spans = nullptr;  // (B, key_blocks)
  int row_blocks = 0, key_blocks = 0;
  int group = 1;           // heads of queries that share one of keys
  int tile_heads = 1;      // so many of them are in one work tile, one after the other
  int parts = 1;           // so many work tiles share the rows of these
  float scale_log2 = 1.f;  // scale * log2(e)
};

enum class Element { kBFloat16, kFloat16 };

// kDropout and kBias: every key or a causal mask, with dropout or with a bias, which the backward alone knows.
enum class MaskKind { kNone, kCausal, kBand, kSegments, kDropout, kBias };

struct Instance {
  Element element;
  int D, Dv;  // the largest head sizes; TMA fills smaller ones up with zeros in shared memory
  MaskKind mask;
  int BLOCK_M;  // queries of a work tile
  int BLOCK_N;  // keys of a block
  float speed;  // relative to the other instances of that size and mask
  int (*launch)(const FlashParams&,
                void* stream);  // returns a cudaError_t; an instance of kSegments takes SegmentParams
};

#define INSTANCE(name, element, D, Dv, mask, consumers, speed) int launch_##name(const FlashParams&, void* stream);
#include "instances.def"
#undef INSTANCE

struct BackwardInstance {
  Element element;
  int D, Dv;
  MaskKind mask;
  int BLOCK_M;                                         // queries of a block, to which the rows of sequences are padded
  int (*launch)(const BackwardParams&, void* stream);  // returns a cudaError_t
};

#define INSTANCE(name, element, D, Dv, mask) int launch_##name(const BackwardParams&, void* stream);
#include "backward_instances.def"
#undef INSTANCE

// Whether rows further down see more keys.
inline bool grows(MaskKind mask, const FlashParams& p) {
  if (mask == MaskKind::kBand || mask == MaskKind::kDropout || mask == MaskKind::kBias)
    return p.left == kUnlimited && p.right < kUnlimited;
  return mask == MaskKind::kCausal;
}

// Blocks of BLOCK_M queries of one head.
inline int blocks_of(const FlashParams& p, int BLOCK_M) { return (p.M + BLOCK_M - 1) / BLOCK_M; }

// The fastest instance for `p`, or null where no instance's head sizes are large enough.
const Instance* find_instance(Element element, MaskKind mask, const FlashParams& p);

// The instance for the smallest head sizes that are large enough, or null.
const BackwardInstance* find_backward_instance(Element element, MaskKind mask, const FlashParams& p);

}  // namespace sdpa_cuda
