// The gradient of a bias: the gradients of the scores, summed along the dimensions in which the bias is broadcast. A
// threadgroup has a tile of the bias and visits, one after the other, all blocks of scores that the tile is added to.
// Of a bias that repeats along queries or keys, which has few tiles, each head has a sum of its own instead.

#if BIAS_PARTS
#define DBIAS_ELEMENT float
#else
#define DBIAS_ELEMENT BIAS_ELEMENT
#endif

// The blocks along one dimension that a threadgroup visits: its own where the bias has that dimension, else all.
inline Range own_or_all(bool own, int number, int count) {
  return own ? range_of(number, number + 1) : range_of(0, count);
}

// Writes `value` of the simdgroup's 8 rows and BLOCK_N columns, summed where the bias is broadcast.
inline void store_tile(thread const float2* sums, threadgroup float* shared, device DBIAS_ELEMENT* to, int rows,
                       int columns, long row_stride, Lane at, uint simd_index) {
  constexpr int kSimdgroups = BLOCK_M / 8;
  const int row = 8 * int(simd_index) + at.row;
  float2 folded[BLOCK_N / 8];
  float total = 0.0f;
  UNROLL
  for (int b = 0; b < BLOCK_N / 8; ++b) {
    folded[b] = sums[b];
    if (!BIAS_ROWS) folded[b] = float2(sum_of_column(sums[b].x), sum_of_column(sums[b].y));
    total += folded[b].x + folded[b].y;
  }
  if (!BIAS_COLUMNS) total = sum_of_row(total);
  if (BIAS_ROWS && BIAS_COLUMNS) {
    UNROLL
    for (int b = 0; b < BLOCK_N / 8; ++b)
      for (int i = 0; i < 2; ++i)
        if (row < rows && 8 * b + at.col + i < columns)
          to[row * row_stride + 8 * b + at.col + i] = DBIAS_ELEMENT(folded[b][i]);
    return;
  }
  if (BIAS_ROWS) {
    if (row < rows && at.col == 0) to[row * row_stride] = DBIAS_ELEMENT(total);
    return;
  }
  // One row: the sums of the simdgroups, in their order.
  UNROLL
  for (int b = 0; b < BLOCK_N / 8; ++b)
    for (int i = 0; i < 2; ++i)
      if (at.row == 0) shared[int(simd_index) * BLOCK_N + 8 * b + at.col + i] = BIAS_COLUMNS ? folded[b][i] : total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd_index != 0 || at.row != 0) return;
  UNROLL
  for (int b = 0; b < BLOCK_N / 8; ++b)
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * b + at.col + i;
      float sum = 0.0f;
      for (int part = 0; part < kSimdgroups; ++part) sum += shared[part * BLOCK_N + column];
      if (column < columns) to[column] = DBIAS_ELEMENT(sum);
    }
}

[[max_total_threads_per_threadgroup(THREADS)]] kernel void bias_grad(
    COMMON_BUFFERS, device const float* lse [[buffer(OWN + 0)]], device const float* delta [[buffer(OWN + 1)]],
    device const ELEMENT* grad_out [[buffer(OWN + 2)]], device DBIAS_ELEMENT* dbias [[buffer(OWN + 3)]],
    device const float* inverse [[buffer(OWN + 4)]], uint3 group [[threadgroup_position_in_grid]],
    uint simd_index [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup ELEMENT left_tile[BLOCK_M * LD_LARGER];   // queries, then gradients of the output
  threadgroup ELEMENT right_tile[BLOCK_N * LD_LARGER];  // keys, then values
  threadgroup float shared[BLOCK_M / 8 * BLOCK_N];
  const Call call = CALL;
  const int B = int(n[I_B]), H = int(n[I_H]), G = int(n[I_G]), M = int(n[I_M]), N = int(n[I_N]);
  const int column_tiles = BIAS_COLUMNS ? (N + BLOCK_N - 1) / BLOCK_N : 1;
  const int row_tiles = BIAS_ROWS ? (M + BLOCK_M - 1) / BLOCK_M : 1, bias_heads = BIAS_HEADS ? H : 1;
  const int tile = place_of(call, group).x;
  const int column_tile = tile % column_tiles, row_tile = tile / column_tiles % row_tiles;
  const int entry = tile / column_tiles / row_tiles, own_head = entry % bias_heads, own_batch = entry / bias_heads;
  const Range batches = own_or_all(BIAS_BATCHES, own_batch, B), heads = own_or_all(BIAS_HEADS, own_head, H);
  const Range row_blocks = own_or_all(BIAS_ROWS, row_tile, (M + BLOCK_M - 1) / BLOCK_M);
  const Range key_blocks = own_or_all(BIAS_COLUMNS, column_tile, (N + BLOCK_N - 1) / BLOCK_N);
  const Lane at = lane_of(lane);
  float2 sums[BLOCK_N / 8];  // [8, BLOCK_N]
  UNROLL
  for (int b = 0; b < BLOCK_N / 8; ++b) sums[b] = float2(0.0f);

  for (int batch = batches.begin; batch < batches.end; ++batch) {
    const Entry e = entry_of(call, batch);
    for (int head = heads.begin; head < heads.end; ++head)
      for (int row_block = row_blocks.begin; row_block < row_blocks.end; ++row_block) {
        const Rows rows = rows_of(call, e, head, row_block, int(8 * simd_index), lane);
        const int learning = min(rows.count, e.q_length - rows.first);
        if (learning <= 0) continue;
        const Range seen = visited_keys(call, e, rows.low, rows.high);
        const long place = batch * n[I_LSE] + head * n[I_LSE + 1] + rows.query;  // packed rows have no bias
        const RowBase base = row_base_of(lse, inverse, place);
        const float shift = rows.query < e.q_length ? delta[place] : 0.0f;
        for (int block = key_blocks.begin; block < key_blocks.end; ++block) {
          const int begin = block * BLOCK_N, count = min(BLOCK_N, seen.end - begin);
          if (count <= 0 || begin + BLOCK_N <= seen.begin) continue;
          const bool cut = is_cut(call, e, rows.low, rows.high, begin, BLOCK_N);
          threadgroup_barrier(mem_flags::mem_threadgroup);  // the tiles of the block before are no longer read
          load_tile<BLOCK_M, HEAD_D, LD_D>(left_tile, call.q + first_query(call, e, I_Q) + head * n[I_Q + 1],
                                           query_rows(call, rows, I_Q), learning, index);
          load_tile<BLOCK_N, HEAD_D, LD_D>(right_tile, call.k + first_key(call, e, I_K) + head / G * n[I_K + 1],
                                           key_rows(call, e, I_K, begin), count, index);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          float2 s[BLOCK_N / 8], dp[BLOCK_N / 8];
          multiply_transposed<BLOCK_D, LD_D, BLOCK_N / 8>(left_tile + 8 * simd_index * LD_D, right_tile, at, s);
          threadgroup_barrier(mem_flags::mem_threadgroup);  // queries and keys are no longer read
          load_tile<BLOCK_M, HEAD_DV, LD_DV>(left_tile,
                                             grad_out + first_query(call, e, I_GRAD_OUT) + head * n[I_GRAD_OUT + 1],
                                             query_rows(call, rows, I_GRAD_OUT), learning, index);
          load_tile<BLOCK_N, HEAD_DV, LD_DV>(right_tile, call.v + first_key(call, e, I_V) + head / G * n[I_V + 1],
                                             key_rows(call, e, I_V, begin), count, index);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          multiply_transposed<BLOCK_DV, LD_DV, BLOCK_N / 8>(left_tile + 8 * simd_index * LD_DV, right_tile, at, dp);
          UNROLL
          for (int b = 0; b < BLOCK_N / 8; ++b)
            for (int i = 0; i < 2; ++i) {
              const int key = begin + 8 * b + at.col + i;
              float slope;
              const float score = masked_score(call, e, head, rows.query, key, cut, s[b][i], slope);
              const float grad = DROPOUT ? dp[b][i] * kept(call, e, head, rows.query, key) : dp[b][i];
              if (rows.number < rows.end) sums[b][i] += probability(base, score) * (grad - shift);
            }
        }
      }
  }
  device DBIAS_ELEMENT* to = dbias + own_batch * n[I_DBIAS] + own_head * n[I_DBIAS + 1] +
                             row_tile * BLOCK_M * n[I_DBIAS + 2] + column_tile * BLOCK_N;
  const int columns = BIAS_COLUMNS ? N - column_tile * BLOCK_N : 1;
  store_tile(sums, shared, to, M - row_tile * BLOCK_M, columns, n[I_DBIAS + 2], at, simd_index);
}
