// The weights exp(score - lse) as a tensor, after dropout, of each head or averaged over heads. A threadgroup has
// BLOCK_M queries and BLOCK_N keys.

[[max_total_threads_per_threadgroup(THREADS)]] kernel void weights(
    COMMON_BUFFERS, device const float* lse [[buffer(OWN + 0)]], device ELEMENT* out [[buffer(OWN + 1)]],
    device const float* inverse [[buffer(OWN + 2)]], uint3 group [[threadgroup_position_in_grid]],
    uint simd_index [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup ELEMENT q_tile[BLOCK_M * LD_D];
  threadgroup ELEMENT k_tile[BLOCK_N * LD_D];
  const Call call = CALL;
  const Place spot = place_of(call, group);
  const int H = int(n[I_H]), G = int(n[I_G]), own = spot.z % H;
  const Entry e = entry_of(call, AVERAGED ? spot.z : spot.z / H);
  const int begin = spot.x * BLOCK_N, keys = min(BLOCK_N, e.keys - begin);
  float2 sums[BLOCK_N / 8];  // [8, BLOCK_N]
  UNROLL
  for (int b = 0; b < BLOCK_N / 8; ++b) sums[b] = float2(0.0f);
  Rows rows;
  for (int head = AVERAGED ? 0 : own; head < (AVERAGED ? H : own + 1); ++head) {
    rows = rows_of(call, e, head, spot.y, int(8 * simd_index), lane);
    const Range seen = visited_keys(call, e, rows.low, rows.high);
    if (begin >= seen.end || begin + keys <= seen.begin) continue;
    const int count = min(keys, seen.end - begin);
    const bool cut = is_cut(call, e, rows.low, rows.high, begin, BLOCK_N);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the tiles of the head before are no longer read
    load_tile<BLOCK_M, HEAD_D, LD_D>(q_tile, call.q + first_query(call, e, I_Q) + head * n[I_Q + 1],
                                     query_rows(call, rows, I_Q), rows.count, index);
    load_tile<BLOCK_N, HEAD_D, LD_D>(k_tile, call.k + first_key(call, e, I_K) + head / G * n[I_K + 1],
                                     key_rows(call, e, I_K, begin), count, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float2 s[BLOCK_N / 8];
    multiply_transposed<BLOCK_D, LD_D, BLOCK_N / 8>(q_tile + 8 * simd_index * LD_D, k_tile, rows.at, s);
    const RowBase base = row_base_of(lse, inverse, e.batch * n[I_LSE] + head * n[I_LSE + 1] + rows.query);
    UNROLL
    for (int b = 0; b < BLOCK_N / 8; ++b)
      for (int i = 0; i < 2; ++i) {
        float slope;
        const int key = begin + 8 * b + rows.at.col + i;
        const float p = probability(base, masked_score(call, e, head, rows.query, key, cut, s[b][i], slope));
        sums[b][i] += DROPOUT ? p * kept(call, e, head, rows.query, key) : p;
      }
  }
  if (rows.number >= rows.end) return;
  const float factor = AVERAGED ? 1.0f / float(H) : 1.0f;
  device ELEMENT* to = out + e.batch * n[I_OUT] + (AVERAGED ? 0 : own) * n[I_OUT + 1] + rows.query * n[I_OUT + 2];
  UNROLL
  for (int b = 0; b < BLOCK_N / 8; ++b)
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * b + rows.at.col + i;
      if (column < keys) to[begin + column] = ELEMENT(sums[b][i] * factor);
    }
}
