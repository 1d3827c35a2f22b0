// The first part of the backward: delta, and the gradient of the queries. A threadgroup of `backward_q` has BLOCK_M
// queries, as in the forward, and visits keys BLOCK_N at a time. Every gradient has one writer, so that the same call
// gives the same bits.

// delta = rowsum(out * grad_out) - grad_lse. A simdgroup has a row.
kernel void row_delta(COMMON_BUFFERS, device const ELEMENT* out [[buffer(OWN + 0)]],
                      device const float* grad_lse [[buffer(OWN + 1)]],
                      device const ELEMENT* grad_out [[buffer(OWN + 2)]], device float* delta [[buffer(OWN + 3)]],
                      uint3 group [[threadgroup_position_in_grid]], uint simd_index [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
  const long row = long(group.x) * ROWS_OF_COMBINE + simd_index, head = group.y, batch = group.z;
  if (row >= n[I_ROWS]) return;
  device const ELEMENT* a = out + batch * n[I_OUT] + head * n[I_OUT + 1] + row * n[I_OUT + 2];
  device const ELEMENT* b = grad_out + batch * n[I_GRAD_OUT] + head * n[I_GRAD_OUT + 1] + row * n[I_GRAD_OUT + 2];
  float sum = 0.0f;
  for (int d = lane; d < HEAD_DV; d += 32) sum += float(a[d]) * float(b[d]);
  sum = simd_sum(sum);
  const long place = batch * n[I_LSE] + head * n[I_LSE + 1] + row;
  if (lane == 0) delta[place] = sum - (GRAD_LSE ? grad_lse[place] : 0.0f);
}

[[max_total_threads_per_threadgroup(THREADS)]] kernel void backward_q(
    COMMON_BUFFERS, device const float* lse [[buffer(OWN + 0)]], device const float* delta [[buffer(OWN + 1)]],
    device const ELEMENT* grad_out [[buffer(OWN + 2)]], device ELEMENT* dq [[buffer(OWN + 3)]],
    device const float* inverse [[buffer(OWN + 4)]], uint3 group [[threadgroup_position_in_grid]],
    uint simd_index [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup ELEMENT q_tile[BLOCK_M * LD_D];
  threadgroup ELEMENT grad_tile[BLOCK_M * LD_DV];
  threadgroup ELEMENT kv_tile[BLOCK_N * LD_LARGER];  // values, then keys
  const Call call = CALL;
  const Place spot = place_of(call, group);
  const Entry e = entry_of(call, spot.z);
  const Rows rows = rows_of(call, e, spot.y, spot.x, int(8 * simd_index), lane);
  if (rows.count <= 0) return;

  const int learning = min(rows.count, e.q_length - rows.first);
  load_tile<BLOCK_M, HEAD_D, LD_D>(q_tile, call.q + first_query(call, e, I_Q) + rows.head * n[I_Q + 1],
                                   query_rows(call, rows, I_Q), learning, index);
  load_tile<BLOCK_M, HEAD_DV, LD_DV>(grad_tile,
                                     grad_out + first_query(call, e, I_GRAD_OUT) + rows.head * n[I_GRAD_OUT + 1],
                                     query_rows(call, rows, I_GRAD_OUT), learning, index);
  const long place = (PACKED ? 0 : e.batch) * n[I_LSE] + rows.head * n[I_LSE + 1] + e.q_first + rows.query;
  const RowBase base = row_base_of(lse, inverse, place);
  const float shift = rows.query < e.q_length ? delta[place] : 0.0f;
  const Ids ids = ids_of_rows(call, e, rows, lane);
  float2 acc[BLOCK_D / 8];  // [8, D]
  UNROLL
  for (int d = 0; d < BLOCK_D / 8; ++d) acc[d] = float2(0.0f);

  const Range keys = visited_keys(call, e, rows.low, rows.high);
  for (int begin = keys.begin; begin < keys.end; begin += BLOCK_N) {
    const int count = min(BLOCK_N, keys.end - begin);
    if (is_hidden(call, e, rows.head, ids, begin, count, lane)) continue;
    const bool cut = is_cut(call, e, rows.low, rows.high, begin, BLOCK_N);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the keys of the block before are no longer read
    load_tile<BLOCK_N, HEAD_DV, LD_DV>(kv_tile, call.v + first_key(call, e, I_V) + rows.kv_head * n[I_V + 1],
                                       key_rows(call, e, I_V, begin), count, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float2 dp[BLOCK_N / 8], s[BLOCK_N / 8];  // [8, BLOCK_N]
    multiply_transposed<BLOCK_DV, LD_DV, BLOCK_N / 8>(grad_tile + 8 * simd_index * LD_DV, kv_tile, rows.at, dp);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the values are no longer read
    load_tile<BLOCK_N, HEAD_D, LD_D>(kv_tile, call.k + first_key(call, e, I_K) + rows.kv_head * n[I_K + 1],
                                     key_rows(call, e, I_K, begin), count, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_transposed<BLOCK_D, LD_D, BLOCK_N / 8>(q_tile + 8 * simd_index * LD_D, kv_tile, rows.at, s);
    UNROLL
    for (int b = 0; b < BLOCK_N / 8; ++b)
      for (int i = 0; i < 2; ++i) {
        const int key = begin + 8 * b + rows.at.col + i;
        float slope;
        const float score = masked_score(call, e, rows.head, rows.query, key, cut, s[b][i], slope);
        const float grad = DROPOUT ? dp[b][i] * kept(call, e, rows.head, rows.query, key) : dp[b][i];
        s[b][i] = probability(base, score) * (grad - shift) * slope;
      }
    multiply_rows<LD_D, BLOCK_N / 8, BLOCK_D / 8>(s, kv_tile, rows.at, acc);
  }

  if (rows.number >= rows.end) return;
  store_row<HEAD_D, BLOCK_D / 8>(acc, call.x[X_SCALE],
                                 dq + first_query(call, e, I_DQ) + rows.head * n[I_DQ + 1] + rows.query * n[I_DQ + 2],
                                 rows.at);
}
