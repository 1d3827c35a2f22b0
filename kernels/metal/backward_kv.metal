// The second part of the backward: the gradients of keys and values. A threadgroup has BLOCK_N keys, 8 for each
// simdgroup, and visits the queries of all heads of their group BLOCK_M at a time. Scores are transposed: a row is that
// of a key. Nothing is summed across threadgroups.

// The queries of one head from `begin` on.
inline QueryRows queries_from(int begin, long query_stride) {
  QueryRows q;
  q.head = 0;
  q.query = query_stride;
  q.first = begin;
  q.queries = 0x7fffffff;  // of one head
  return q;
}

// What a backward keeps of the rows of a head, by query.
struct Saved {
  device const float *lse, *inverse, *delta;
};

// Weights and gradients of scores of a block, in the place of s [8, BLOCK_M] and dp [8, BLOCK_M].
inline void weights_and_gradients(thread const Call& call, thread const Entry& e, Saved saved, int head, int key,
                                  int begin, int count, bool cut, ushort column, thread float2* s, thread float2* dp) {
  UNROLL
  for (int b = 0; b < BLOCK_M / 8; ++b)
    for (int i = 0; i < 2; ++i) {
      const int number = 8 * b + column + i, query = begin + min(number, count - 1);
      float slope;
      const float score = masked_score(call, e, head, query, key, cut, s[b][i], slope);
      const float p = number < count ? probability(row_base_of(saved.lse, saved.inverse, query), score) : 0.0f;
      const float factor = DROPOUT ? kept(call, e, head, query, key) : 1.0f;
      s[b][i] = p * factor;
      dp[b][i] = number < count ? p * (dp[b][i] * factor - saved.delta[query]) * slope : 0.0f;
    }
}

[[max_total_threads_per_threadgroup(THREADS)]] kernel void backward_kv(
    COMMON_BUFFERS, device const float* lse [[buffer(OWN + 0)]], device const float* delta [[buffer(OWN + 1)]],
    device const ELEMENT* grad_out [[buffer(OWN + 2)]], device ELEMENT* dk [[buffer(OWN + 3)]],
    device ELEMENT* dv [[buffer(OWN + 4)]], device const float* inverse [[buffer(OWN + 5)]],
    uint3 group [[threadgroup_position_in_grid]], uint simd_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint index [[thread_index_in_threadgroup]]) {
  threadgroup ELEMENT k_tile[BLOCK_N * LD_D];
  threadgroup ELEMENT v_tile[BLOCK_N * LD_DV];
  threadgroup ELEMENT q_tile[BLOCK_M * LD_D];
  threadgroup ELEMENT grad_tile[BLOCK_M * LD_DV];
  const Call call = CALL;
  const Place spot = place_of(call, group);
  const Entry e = entry_of(call, spot.z);
  const int G = int(n[I_G]), kv_head = spot.y, first = spot.x * BLOCK_N;
  const int count = min(BLOCK_N, e.keys - first), seen = min(count, e.k_length - first);
  if (count <= 0) return;

  const Lane at = lane_of(lane);
  const int key = min(first + 8 * int(simd_index) + at.row, first + count - 1);
  load_tile<BLOCK_N, HEAD_D, LD_D>(k_tile, call.k + first_key(call, e, I_K) + kv_head * n[I_K + 1],
                                   key_rows(call, e, I_K, first), seen, index);
  load_tile<BLOCK_N, HEAD_DV, LD_DV>(v_tile, call.v + first_key(call, e, I_V) + kv_head * n[I_V + 1],
                                     key_rows(call, e, I_V, first), seen, index);
  Ids ids;
  ids.low = ids.high = 0;
  if (SEGMENTS) ids = ids_of(call.k_segments + e.batch * n[I_K_SEGMENTS], first, count, lane);
  float2 dk_acc[BLOCK_D / 8], dv_acc[BLOCK_DV / 8];  // [8, D], [8, Dv]
  UNROLL
  for (int d = 0; d < BLOCK_D / 8; ++d) dk_acc[d] = float2(0.0f);
  UNROLL
  for (int d = 0; d < BLOCK_DV / 8; ++d) dv_acc[d] = float2(0.0f);

  const Range queries = visited_queries(call, e, first, first + count - 1);
  for (int head = kv_head * G; head < (kv_head + 1) * G; ++head) {
    const long place = (PACKED ? 0 : e.batch) * n[I_LSE] + head * n[I_LSE + 1] + e.q_first;
    Saved saved;
    saved.lse = lse + place;
    saved.inverse = inverse + place;
    saved.delta = delta + place;
    for (int begin = queries.begin; begin < queries.end; begin += BLOCK_M) {
      const int rows = min(BLOCK_M, queries.end - begin);
      if (SEGMENTS) {
        const Ids others = ids_of(call.q_segments + e.batch * n[I_Q_SEGMENTS], begin, rows, lane);
        if (others.high < ids.low || ids.high < others.low) continue;
      }
      const bool cut = is_cut(call, e, begin, begin + rows - 1, first, BLOCK_N);
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the queries of the block before are no longer read
      load_tile<BLOCK_M, HEAD_D, LD_D>(q_tile, call.q + first_query(call, e, I_Q) + head * n[I_Q + 1],
                                       queries_from(begin, n[I_Q + 2]), rows, index);
      load_tile<BLOCK_M, HEAD_DV, LD_DV>(grad_tile,
                                         grad_out + first_query(call, e, I_GRAD_OUT) + head * n[I_GRAD_OUT + 1],
                                         queries_from(begin, n[I_GRAD_OUT + 2]), rows, index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float2 s[BLOCK_M / 8], dp[BLOCK_M / 8];  // [8 keys, BLOCK_M]
      multiply_transposed<BLOCK_D, LD_D, BLOCK_M / 8>(k_tile + 8 * simd_index * LD_D, q_tile, at, s);
      multiply_transposed<BLOCK_DV, LD_DV, BLOCK_M / 8>(v_tile + 8 * simd_index * LD_DV, grad_tile, at, dp);
      weights_and_gradients(call, e, saved, head, key, begin, rows, cut, at.col, s, dp);
      multiply_rows<LD_DV, BLOCK_M / 8, BLOCK_DV / 8>(s, grad_tile, at, dv_acc);
      multiply_rows<LD_D, BLOCK_M / 8, BLOCK_D / 8>(dp, q_tile, at, dk_acc);
    }
  }

  if (8 * int(simd_index) + at.row >= count) return;
  store_row<HEAD_D, BLOCK_D / 8>(dk_acc, call.x[X_SCALE],
                                 dk + first_key(call, e, I_DK) + kv_head * n[I_DK + 1] + key * n[I_DK + 2], at);
  store_row<HEAD_DV, BLOCK_DV / 8>(dv_acc, 1.0f,
                                   dv + first_key(call, e, I_DV) + kv_head * n[I_DV + 1] + key * n[I_DV + 2], at);
}
