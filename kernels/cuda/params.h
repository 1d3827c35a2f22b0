// What a launch is told, and the instances there are to launch. No header of CUDA or torch: bindings and kernels share
// it.
#pragma once
#include <cstdint>

namespace sdpa_cuda {

// (B, H, rows, D) whose last stride is 1; the others in elements.
struct View {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
};

constexpr int kMaxDevices = 64;      // of which something is remembered, by a bit of 64 for some
constexpr int kGroupRows = 64;       // of queries that a warpgroup multiplies
constexpr int kUnlimited = 1 << 29;  // a side of the band that has no limit; two may be added

struct FlashParams {
  View q, k, v, out;
  float* lse = nullptr;  // (B, H, M), contiguous
  int B = 0, H = 0, Hkv = 0, M = 0, N = 0, D = 0, Dv = 0;
  float scale = 1.f;
  bool bottom_right = false;
  int shift = 0;    // where causal, row i sees the keys up to i + shift
  int section = 1;  // heads (of all B * H) that run side by side, so that their keys and values stay in the L2 cache
  int device = 0;   // its index
  int cores = 1;    // multiprocessors of the device
  // From which thread blocks draw what they take next; 0 before a launch, and again after it. Without one each takes
  // every gridDim.x-th block of queries.
  int32_t* counter = nullptr;

  // Of instances of MaskKind::kBand: row i sees the keys from i + shift - left to i + shift + right, where `shift` is 0
  // or, with `bottom_right`, each batch entry's key length minus its query length.
  int left = kUnlimited, right = kUnlimited;
  const int32_t *k_lengths = nullptr, *q_lengths = nullptr;  // (B,); keys' also of MaskKind::kNone
  const float* sinks = nullptr;                              // (H,): one more key's score, without a value
  float softcap = 0.f;                                       // scores become softcap * tanh(score / softcap); 0: none
  // (B + 1,) where sequences are packed: (1, heads, rows, D) in memory, of which entry b has rows cu[b] .. cu[b + 1] -
  // 1, at most M queries and N keys. The log-sum-exp is (H, query_rows).
  const int32_t *cu_q = nullptr, *cu_k = nullptr;
  int query_rows = 0, key_rows = 0;  // in memory of one head
};

// Rows of one number per position, a batch entry's `batch` numbers after the one before; 0 where all share one row.
struct Ids {
  const int32_t* data = nullptr;
  int64_t batch = 0;
};

// The smallest and the largest id of a block of keys, or of a group of queries.
struct alignas(8) Extent {
  int32_t least, most;
};

// The blocks of keys from begin to end - 1 have all that a group of queries sees; end is 0 where it sees nothing. Those
// from whole_begin to whole_end - 1 are seen whole by all of its rows.
struct alignas(16) Span {
  int begin, end, whole_begin, whole_end;
};

// Of instances of MaskKind::kSegments: a row sees, of what a band leaves, the keys of its own id.
struct SegmentParams : FlashParams {
  Ids q_ids, k_ids;  // (B, M), (B, N): any numbers in any order
  // What is found before the kernel begins. Keys of a batch entry are laid out as its mask does it, in `blocks` blocks.
  int groups = 0, blocks = 0;
  Span* spans = nullptr;          // (B, groups)
  Extent* extents = nullptr;      // (B, blocks)
  int32_t* laid_k_ids = nullptr;  // (B, blocks * keys of a block)
};

enum class Element { kBFloat16, kFloat16 };

enum class MaskKind { kNone, kCausal, kBand, kSegments };

struct Instance {
  Element element;
  int D, Dv;  // the largest head sizes; smaller ones are filled up with zeros on their way into shared memory
  MaskKind mask;
  int rows;                                         // of queries that a thread block takes at a time
  int keys;                                         // of a block
  float speed;                                      // beside the other instances of that size and mask
  int (*launch)(const FlashParams&, void* stream);  // a cudaError_t; kSegments: of SegmentParams
};

#define INSTANCE(name, element, D, Dv, mask, groups, speed) int launch_##name(const FlashParams&, void* stream);
#include "instances.def"
#undef INSTANCE

// Rows further down see more keys.
inline bool grows(MaskKind mask, const FlashParams& p) {
  return mask == MaskKind::kCausal || (mask == MaskKind::kBand && p.left == kUnlimited && p.right < kUnlimited);
}

inline int blocks_of(const FlashParams& p, int rows) { return (p.M + rows - 1) / rows; }

// The fastest instance for `p`, or null where no head size is large enough.
const Instance* find_instance(Element element, MaskKind mask, const FlashParams& p);

}  // namespace sdpa_cuda
