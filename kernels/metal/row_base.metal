// What rows' probabilities are computed from again, where a bias may be as large as a number that hides.
//
// A large log-sum-exp is too coarse to tell sums of exponentials apart, for example in a row whose every score has a
// bias of -1e9. There the row's maximum stands in its place, beside one over the row's sum. Such rows are visited once
// more.

// From here on the rounding of a log-sum-exp changes a probability by more than one in 8192.
constant constexpr float kCoarse = 1024.0f;

// Whether the threadgroup has a row with a coarse log-sum-exp. Every thread gets the same answer.
inline bool is_any(bool coarse, threadgroup int* shared, uint simd_index, uint lane) {
  const bool here = simd_any(coarse);
  if (lane == 0) shared[simd_index] = here ? 1 : 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int found = 0;
  for (int i = 0; i < BLOCK_M / 8; ++i) found += shared[i];
  return found > 0;
}

[[max_total_threads_per_threadgroup(THREADS)]] kernel void row_base(
    COMMON_BUFFERS, device const float* lse [[buffer(OWN + 0)]], device float* base [[buffer(OWN + 1)]],
    device float* inverse [[buffer(OWN + 2)]], uint3 group [[threadgroup_position_in_grid]],
    uint simd_index [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup ELEMENT q_tile[BLOCK_M * LD_D];
  threadgroup ELEMENT k_tile[BLOCK_N * LD_D];
  threadgroup int shared[BLOCK_M / 8];
  const Call call = CALL;
  const Place spot = place_of(call, group);
  const Entry e = entry_of(call, spot.z);
  const Rows rows = rows_of(call, e, spot.y, spot.x, int(8 * simd_index), lane);
  if (rows.count <= 0) return;

  const long place = (PACKED ? 0 : e.batch) * n[I_LSE] + rows.head * n[I_LSE + 1] + e.q_first + rows.query;
  const float given = lse[place];
  const bool coarse = fabs(given) > kCoarse && fabs(given) != INFINITY;
  RowState state;
  state.row_max = sink_of(call, rows.head);
  state.row_sum = state.row_max == -INFINITY ? 0.0f : 1.0f;
  if (is_any(coarse, shared, simd_index, lane)) {
    load_tile<BLOCK_M, HEAD_D, LD_D>(q_tile, call.q + first_query(call, e, I_Q) + rows.head * n[I_Q + 1],
                                     query_rows(call, rows, I_Q), rows.count, index);
    const Range keys = visited_keys(call, e, rows.low, rows.high);
    for (int begin = keys.begin; begin < keys.end; begin += BLOCK_N) {
      const int count = min(BLOCK_N, keys.end - begin);
      const bool cut = is_cut(call, e, rows.low, rows.high, begin, BLOCK_N);
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the keys of the block before are no longer read
      load_tile<BLOCK_N, HEAD_D, LD_D>(k_tile, call.k + first_key(call, e, I_K) + rows.kv_head * n[I_K + 1],
                                       key_rows(call, e, I_K, begin), count, index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float2 s[BLOCK_N / 8];  // [8, BLOCK_N]
      multiply_transposed<BLOCK_D, LD_D, BLOCK_N / 8>(q_tile + 8 * simd_index * LD_D, k_tile, rows.at, s);
      float slope;
      UNROLL
      for (int b = 0; b < BLOCK_N / 8; ++b)
        for (int i = 0; i < 2; ++i)
          s[b][i] = masked_score(call, e, rows.head, rows.query, begin + 8 * b + rows.at.col + i, cut, s[b][i], slope);
      softmax_step<BLOCK_N / 8>(state, s);
    }
  }
  if (rows.number >= rows.end || rows.at.col != 0) return;
  base[place] = coarse ? state.row_max : given;
  inverse[place] = coarse ? 1.0f / state.row_sum : 1.0f;
}
