// The forward: a threadgroup has BLOCK_M rows, 8 for each simdgroup, and visits keys BLOCK_N at a time with the online
// softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
//
// Scores, weights and the accumulator stay in registers: the fragments in which a product leaves the scores are those
// in which the next product takes the weights. Keys and values use the same threadgroup memory one after the other.
// Keys are transposed there, so that a lane reads the two neighbours of a fragment at once, as in MLX.
//
// With GROUPED the rows are those of all query heads of a key/value head, so that its keys and values are read once.
// With SPLIT_KV a threadgroup has a part of the keys, and `combine` puts the parts together.

inline float log_sum_exp(RowState state) {
  return state.row_sum == 0.0f ? -INFINITY : state.row_max + log(state.row_sum);
}

// The keys of one of several splits, in whole blocks.
inline Range split_of(Range keys, int split, int splits) {
  const int blocks = (keys.end - keys.begin + BLOCK_N - 1) / BLOCK_N, share = (blocks + splits - 1) / splits * BLOCK_N;
  const int begin = min(keys.end, keys.begin + split * share);
  return range_of(begin, min(keys.end, begin + share));
}

[[max_total_threads_per_threadgroup(THREADS)]] kernel void forward(
    COMMON_BUFFERS, device OUT_ELEMENT* out [[buffer(OWN + 0)]], device float* lse [[buffer(OWN + 1)]],
    uint3 group [[threadgroup_position_in_grid]], uint simd_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint index [[thread_index_in_threadgroup]]) {
  threadgroup ELEMENT q_tile[BLOCK_M * LD_D];
  threadgroup ELEMENT kv_tile[KV_ELEMENTS];  // keys as [D, BLOCK_N], then values [BLOCK_N, Dv]
  const Call call = CALL;
  const Place spot = place_of(call, group);
  const int splits = SPLIT_KV ? int(n[I_SPLITS]) : 1, split = spot.x % splits;
  const Entry e = entry_of(call, spot.z);
  const Rows rows = rows_of(call, e, spot.y, spot.x / splits, int(8 * simd_index), lane);
  if (rows.count <= 0) return;

  const QueryRows q_rows = query_rows(call, rows, I_Q);
  load_tile<BLOCK_M, HEAD_D, LD_D>(q_tile, call.q + first_query(call, e, I_Q) + rows.first_head * n[I_Q + 1], q_rows,
                                   rows.count, index);
  const Ids ids = ids_of_rows(call, e, rows, lane);
  RowState state;
  state.row_max = split == 0 ? sink_of(call, rows.head) : -INFINITY;
  state.row_sum = state.row_max == -INFINITY ? 0.0f : 1.0f;
  float2 acc[BLOCK_DV / 8];  // [8, Dv]
  UNROLL
  for (int d = 0; d < BLOCK_DV / 8; ++d) acc[d] = float2(0.0f);

  const Range keys = split_of(visited_keys(call, e, rows.low, rows.high), split, splits);
  for (int begin = keys.begin; begin < keys.end; begin += BLOCK_N) {
    const int count = min(BLOCK_N, keys.end - begin);
    if (is_hidden(call, e, rows.head, ids, begin, count, lane)) continue;
    const bool cut = is_cut(call, e, rows.low, rows.high, begin, BLOCK_N);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the values of the block before are no
                                                      // longer read
    load_tile<BLOCK_N, HEAD_D, 1, LD_N>(kv_tile, call.k + first_key(call, e, I_K) + rows.kv_head * n[I_K + 1],
                                        key_rows(call, e, I_K, begin), count, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float2 s[BLOCK_N / 8];  // [8, BLOCK_N]
    multiply_transposed<BLOCK_D, LD_D, BLOCK_N / 8, 1, LD_N>(q_tile + 8 * simd_index * LD_D, kv_tile, rows.at, s);
    float slope;
    UNROLL
    for (int b = 0; b < BLOCK_N / 8; ++b)
      for (int i = 0; i < 2; ++i)
        s[b][i] = masked_score(call, e, rows.head, rows.query, begin + 8 * b + rows.at.col + i, cut, s[b][i], slope);
    const float alpha = softmax_step<BLOCK_N / 8>(state, s);
    UNROLL
    for (int d = 0; d < BLOCK_DV / 8; ++d) acc[d] *= alpha;
    if (DROPOUT) {
      UNROLL
      for (int b = 0; b < BLOCK_N / 8; ++b)
        for (int i = 0; i < 2; ++i) s[b][i] *= kept(call, e, rows.head, rows.query, begin + 8 * b + rows.at.col + i);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the keys are no longer read
    load_tile<BLOCK_N, HEAD_DV, LD_DV>(kv_tile, call.v + first_key(call, e, I_V) + rows.kv_head * n[I_V + 1],
                                       key_rows(call, e, I_V, begin), count, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_rows<LD_DV, BLOCK_N / 8, BLOCK_DV / 8>(s, kv_tile, rows.at, acc);
  }

  if (rows.number >= rows.end) return;
  const long row = e.q_first + rows.query;
  store_row<HEAD_DV, BLOCK_DV / 8>(
      acc, state.row_sum == 0.0f ? 0.0f : 1.0f / state.row_sum,
      out + split * n[I_OUT_SPLIT] + (PACKED ? 0 : e.batch) * n[I_OUT] + rows.head * n[I_OUT + 1] + row * n[I_OUT + 2],
      rows.at);
  if (rows.at.col != 0) return;
  const long place = (PACKED ? 0 : e.batch) * n[I_LSE] + rows.head * n[I_LSE + 1] + row;
  if (SPLIT_KV) {
    lse[2 * (split * n[I_LSE_SPLIT] + place)] = state.row_max;
    lse[2 * (split * n[I_LSE_SPLIT] + place) + 1] = state.row_sum;
  } else if (WITH_LSE) {
    lse[place] = log_sum_exp(state);
  }
}

// The sum of a part's exponentials, relative to the largest maximum: 0 for a part that saw no key.
inline float part_of(device const float* state, float top) {
  return state[1] == 0.0f ? 0.0f : state[1] * exponential(state[0] - top);
}

// The parts of a forward with SPLIT_KV as one result. A simdgroup has a row. A part keeps its maximum and its sum,
// since one number would lose the sum beside a maximum as large as that of a row hidden by the lowest number.
kernel void combine(COMMON_BUFFERS, device ELEMENT* out [[buffer(OWN + 0)]], device float* lse [[buffer(OWN + 1)]],
                    device const float* parts [[buffer(OWN + 2)]], device const float* part_state [[buffer(OWN + 3)]],
                    uint3 group [[threadgroup_position_in_grid]], uint simd_index [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
  const long row = long(group.x) * ROWS_OF_COMBINE + simd_index, head = group.y, batch = group.z;
  if (row >= n[I_ROWS]) return;
  const int splits = int(n[I_SPLITS]);
  const long place = batch * n[I_LSE] + head * n[I_LSE + 1] + row;
  device const float* states = part_state + 2 * place;
  const long step = 2 * n[I_LSE_SPLIT];
  RowState all;
  all.row_max = -INFINITY;
  for (int split = 0; split < splits; ++split) all.row_max = max(all.row_max, states[split * step]);
  all.row_sum = 0.0f;
  for (int split = 0; split < splits; ++split) all.row_sum += part_of(states + split * step, all.row_max);
  device ELEMENT* to = out + batch * n[I_OUT] + head * n[I_OUT + 1] + row * n[I_OUT + 2];
  for (int d = lane; d < HEAD_DV; d += 32) {
    float value = 0.0f;
    for (int split = 0; split < splits; ++split) {
      const float part = part_of(states + split * step, all.row_max);
      if (part != 0.0f)  // NaN goes on
        value += part * parts[split * n[I_OUT_SPLIT] + place * HEAD_DV + d];
    }
    to[d] = ELEMENT(all.row_sum == 0.0f ? 0.0f : value / all.row_sum);
  }
  if (WITH_LSE && lane == 0) lse[place] = log_sum_exp(all);
}
