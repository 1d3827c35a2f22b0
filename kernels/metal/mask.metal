// The mask as a policy, which all kernels share: which keys are worth visiting, whether a block needs masking, and
// which key a query sees. No other file knows.

// A batch entry or document: where its rows begin in memory, how many it has, and how its diagonal is moved.
struct Entry {
  int batch;
  int q_first, k_first;
  int rows, keys;          // in memory
  int q_length, k_length;  // of these, how many count
  int shift;               // keys by which the diagonal lies to the right
  int prefix;              // keys that every query sees
};

inline Entry entry_of(thread const Call& call, int batch) {
  Entry e;
  e.batch = batch;
  e.q_first = PACKED ? call.cu_q[batch] : 0;
  e.k_first = PACKED ? call.cu_k[batch] : 0;
  e.rows = PACKED ? call.cu_q[batch + 1] - e.q_first : int(call.n[I_M]);
  e.q_length = e.rows;
  e.keys = PACKED ? call.cu_k[batch + 1] - e.k_first : int(call.n[I_N]);
  e.k_length = e.keys;
  if (Q_LENGTHS) e.q_length = clamp(call.q_lengths[batch], 0, e.q_length);
  if (K_LENGTHS) e.k_length = clamp(call.k_lengths[batch], 0, e.k_length);
  e.shift = BOTTOM_RIGHT ? e.k_length - e.q_length : 0;
  e.prefix = PREFIX ? clamp(call.prefix[batch], 0, e.k_length) : 0;
  return e;
}

struct Range {
  int begin, end;
};

// An empty range ends at 0, before every block.
inline Range range_of(int begin, int end) {
  Range found;
  found.begin = begin < end ? begin : 0;
  found.end = begin < end ? end : 0;
  return found;
}

// The keys that any of the queries first .. last may see, but for segments and dense masks.
inline Range visited_keys(thread const Call& call, thread const Entry& e, int first, int last) {
  last = min(last, e.q_length - 1);
  if (first > last) return range_of(0, 0);
  int begin = 0, end = e.k_length;
  if (LEFT) begin = max(0, first + e.shift - int(call.n[I_LEFT]));
  if (RIGHT) end = min(end, last + e.shift + int(call.n[I_RIGHT]) + 1);
  if (PREFIX && e.prefix > 0) begin = 0;
  return range_of(begin, max(end, e.prefix));
}

// The queries that may see any of the keys first .. last.
inline Range visited_queries(thread const Call& call, thread const Entry& e, int first, int last) {
  last = min(last, e.k_length - 1);
  if (first > last) return range_of(0, 0);
  int begin = 0, end = e.q_length;
  if (PREFIX && first < e.prefix) return range_of(begin, end);
  if (RIGHT) begin = max(0, first - e.shift - int(call.n[I_RIGHT]));
  if (LEFT) end = min(end, last - e.shift + int(call.n[I_LEFT]) + 1);
  return range_of(begin, end);
}

// Whether some of the queries first .. last may not see some of the `count` keys from `begin` on.
inline bool is_cut(thread const Call& call, thread const Entry& e, int first, int last, int begin, int count) {
  if (SEGMENTS || ALLOWED) return true;
  if (last >= e.q_length || begin + count > e.k_length) return true;
  if (LEFT && begin < last + e.shift - int(call.n[I_LEFT])) return true;
  return RIGHT && begin + count - 1 > first + e.shift + int(call.n[I_RIGHT]);
}

// Whether a query sees a key.
inline bool is_visible(thread const Call& call, thread const Entry& e, int head, int query, int key) {
  if (query >= e.q_length || key >= e.k_length) return false;
  const int distance = key - query - e.shift;
  bool inside = true;
  if (LEFT) inside = distance >= -int(call.n[I_LEFT]);
  if (RIGHT) inside = inside && distance <= int(call.n[I_RIGHT]);
  if (PREFIX) inside = inside || key < e.prefix;
  if (SEGMENTS && inside)
    inside = call.q_segments[e.batch * call.n[I_Q_SEGMENTS] + query] ==
             call.k_segments[e.batch * call.n[I_K_SEGMENTS] + key];
  if (ALLOWED && inside) {
    constant long* stride = call.n + I_ALLOWED;
    inside = call.allowed[e.batch * stride[0] + head * stride[1] + query * stride[2] + key * stride[3]] != 0;
  }
  return inside;
}

// The ids of up to 32 positions from `first` on. Every lane of the simdgroup gets the same.
struct Ids {
  int low, high;
};

inline Ids ids_of(device const int* segments, int first, int count, uint lane) {
  Ids ids;
  const int id = segments[first + min(int(lane), count - 1)];
  ids.low = simd_min(id);
  ids.high = simd_max(id);
  return ids;
}

// Whether a block of keys is hidden from all rows by their segments, or by a dense mask of one row for all queries.
// Every thread of the group gets the same answer. count is at most 32.
inline bool is_hidden(thread const Call& call, thread const Entry& e, int head, Ids queries, int begin, int count,
                      uint lane) {
  if (SEGMENTS) {
    const Ids keys = ids_of(call.k_segments + e.batch * call.n[I_K_SEGMENTS], begin, count, lane);
    if (queries.high < keys.low || keys.high < queries.low) return true;
  }
  if (ALLOWED && !ALLOWED_ROWS && !GROUPED) {
    constant long* stride = call.n + I_ALLOWED;
    const long key = begin + min(int(lane), count - 1);
    return !simd_any(call.allowed[e.batch * stride[0] + head * stride[1] + key * stride[3]] != 0);
  }
  return false;
}
