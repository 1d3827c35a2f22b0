"""Mutants that compute the same as the kernel, by file and description, with the reason for each."""

from __future__ import annotations

BEHIND = "the row of queries behind the last one is zeros in the tile, so that its weight multiplies zeros"
NONE = "a threadgroup without rows visits nothing and writes nothing, with one comparison more or less"
UNSEEN = "the key of a row that is not written; the mask compares it with the keys before anything is read for it"
UNREAD = "both are 0, and nothing reads them without segments"
MORE = "visits blocks that the mask hides anyway: more work, the same sums"
UNSET = "the lowest id is not set; the emulator fills what is not set with a negative number, and so visits more blocks"
EMPTY = "one more block, which has no rows: zeros are added"
TESTED = "tests the mask of a block that needs no test: more work, the same scores"
DENSE = "neither packed rows nor pages come here, and of dense tensors both are the batch entry's"
OUTSIDE = "one fragment more, whose columns lie behind the last one that is written"
AGAIN = "the maximum and the sum of rows are computed again that need it not: the same numbers"
EITHER = "a log-sum-exp of exactly that number may be taken for coarse or not"
SHARES = "splits of other sizes, which together still cover every key once"

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "backward_kv",
        (
            "bound: `<` -> `<=` in: const float p = number < count ? probability(row_base_of(saved.lse, "
            "saved.inverse, query), score) : 0.0f;"
        ),
    ): BEHIND,
    (
        "backward_kv",
        (
            "bound: `<` -> `<=` in: dp[b][i] = number < count ? p * (dp[b][i] * factor - "
            "saved.delta[query]) * slope : 0.0f;"
        ),
    ): BEHIND,
    (
        "backward_kv",
        "bound: `<=` -> `<` in: if (count <= 0) return;",
    ): NONE,
    (
        "backward_kv",
        ("one less: `- 1` -> `` in: const int key = min(first + 8 * int(simd_index) + at.row, first + count - 1);"),
    ): UNSEEN,
    (
        "backward_kv",
        "swap: `.low` -> `.high` in: ids.low = ids.high = 0;",
    ): UNREAD,
    (
        "backward_kv",
        "swap: `.high` -> `.low` in: ids.low = ids.high = 0;",
    ): UNREAD,
    (
        "backward_kv",
        ("one less: `- 1` -> `` in: const Range queries = visited_queries(call, e, first, first + count - 1);"),
    ): MORE,
    (
        "backward_kv",
        "bound: `<` -> `<=` in: for (int begin = queries.begin; begin < queries.end; begin += BLOCK_M) {",
    ): EMPTY,
    (
        "backward_kv",
        "or: `||` -> `&&` in: if (others.high < ids.low || ids.high < others.low) continue;",
    ): MORE,
    (
        "backward_kv",
        ("one less: `- 1` -> `` in: const bool cut = is_cut(call, e, begin, begin + rows - 1, first, BLOCK_N);"),
    ): TESTED,
    (
        "backward_q",
        "bound: `<=` -> `<` in: if (rows.count <= 0) return;",
    ): NONE,
    (
        "backward_q",
        "bound: `<` -> `<=` in: for (int begin = keys.begin; begin < keys.end; begin += BLOCK_N) {",
    ): EMPTY,
    (
        "bias_grad",
        (
            "one less: `- 1` -> `` in: const Range row_blocks = own_or_all(BIAS_ROWS, row_tile, (M + "
            "BLOCK_M - 1) / BLOCK_M);"
        ),
    ): EMPTY,
    (
        "bias_grad",
        (
            "one less: `- 1` -> `` in: const Range key_blocks = own_or_all(BIAS_COLUMNS, column_tile, (N + "
            "BLOCK_N - 1) / BLOCK_N);"
        ),
    ): EMPTY,
    (
        "bias_grad",
        (
            "swap: `first_query(` -> `first_key(` in: load_tile<BLOCK_M, HEAD_D, LD_D>(left_tile, call.q + "
            "first_query(call, e, I_Q) + head * n[I_Q + 1],"
        ),
    ): DENSE,
    (
        "bias_grad",
        (
            "swap: `first_key(` -> `first_query(` in: load_tile<BLOCK_N, HEAD_D, LD_D>(right_tile, call.k + "
            "first_key(call, e, I_K) + head / G * n[I_K + 1],"
        ),
    ): DENSE,
    (
        "bias_grad",
        (
            "swap: `first_query(` -> `first_key(` in: grad_out + first_query(call, e, I_GRAD_OUT) + head * "
            "n[I_GRAD_OUT + 1],"
        ),
    ): DENSE,
    (
        "bias_grad",
        (
            "swap: `first_key(` -> `first_query(` in: load_tile<BLOCK_N, HEAD_DV, LD_DV>(right_tile, call.v "
            "+ first_key(call, e, I_V) + head / G * n[I_V + 1],"
        ),
    ): DENSE,
    (
        "bias_grad",
        "bound: `<=` -> `<` in: if (learning <= 0) continue;",
    ): NONE,
    (
        "bias_grad",
        "bound: `<=` -> `<` in: if (count <= 0 || begin + BLOCK_N <= seen.begin) continue;",
    ): MORE,
    (
        "bias_grad",
        "bound: `<=` -> `<` in: if (count <= 0 || begin + BLOCK_N <= seen.begin) continue; #2",
    ): MORE,
    (
        "bias_grad",
        "or: `||` -> `&&` in: if (count <= 0 || begin + BLOCK_N <= seen.begin) continue;",
    ): MORE,
    (
        "forward",
        (
            "one less: `- 1` -> `` in: const int blocks = (keys.end - keys.begin + BLOCK_N - 1) / BLOCK_N, "
            "share = (blocks + splits - 1) / splits * BLOCK_N;"
        ),
    ): SHARES,
    (
        "forward",
        (
            "one less: `- 1` -> `` in: const int blocks = (keys.end - keys.begin + BLOCK_N - 1) / BLOCK_N, "
            "share = (blocks + splits - 1) / splits * BLOCK_N; #2"
        ),
    ): SHARES,
    (
        "forward",
        "bound: `<=` -> `<` in: if (rows.count <= 0) return;",
    ): NONE,
    (
        "mask",
        "one less: `- 1` -> `` in: last = min(last, e.q_length - 1);",
    ): MORE,
    (
        "mask",
        "bound: `<` -> `<=` in: found.begin = begin < end ? begin : 0;",
    ): "an empty range ends at 0, and no block or split of it begins before that",
    (
        "primitives",
        "bound: `<` -> `<=` in: for (int d = 0; d < WIDE; ++d)",
    ): OUTSIDE,
    (
        "row_base",
        "bound: `<=` -> `<` in: if (rows.count <= 0) return;",
    ): NONE,
    (
        "row_base",
        ("bound: `>` -> `>=` in: return found > 0;"),
    ): AGAIN,
    (
        "row_base",
        ("bound: `>` -> `>=` in: const bool coarse = fabs(given) > kCoarse && fabs(given) != INFINITY;"),
    ): EITHER,
    (
        "row_base",
        ("bound: `<` -> `<=` in: for (int begin = keys.begin; begin < keys.end; begin += BLOCK_N) {"),
    ): EMPTY,
    (
        "weights",
        ("bound: `<=` -> `<` in: if (begin >= seen.end || begin + keys <= seen.begin) continue;"),
    ): MORE,
    (
        "weights",
        ("bound: `>=` -> `>` in: if (begin >= seen.end || begin + keys <= seen.begin) continue;"),
    ): MORE,
    (
        "weights",
        ("or: `||` -> `&&` in: if (begin >= seen.end || begin + keys <= seen.begin) continue;"),
    ): MORE,
    (
        "weights",
        ("smaller: `min(` -> `max(` in: const int count = min(keys, seen.end - begin);"),
    ): MORE,
    (
        "weights",
        (
            "swap: `first_query(` -> `first_key(` in: load_tile<BLOCK_M, HEAD_D, LD_D>(q_tile, call.q + "
            "first_query(call, e, I_Q) + head * n[I_Q + 1],"
        ),
    ): DENSE,
    (
        "weights",
        (
            "swap: `first_key(` -> `first_query(` in: load_tile<BLOCK_N, HEAD_D, LD_D>(k_tile, call.k + "
            "first_key(call, e, I_K) + head / G * n[I_K + 1],"
        ),
    ): DENSE,
    (
        "weights",
        ("bound: `<` -> `<=` in: for (int b = 0; b < BLOCK_N / 8; ++b) #2"),
    ): OUTSIDE,
    (
        "mask",
        "bound: `>` -> `>=` in: if (PREFIX && e.prefix > 0) begin = 0;",
    ): MORE,
    (
        "mask",
        "and: `&&` -> `||` in: if (PREFIX && e.prefix > 0) begin = 0;",
    ): MORE,
    (
        "mask",
        "smaller: `min(` -> `max(` in: last = min(last, e.q_length - 1);",
    ): MORE,
    (
        "mask",
        "one less: `- 1` -> `` in: last = min(last, e.k_length - 1);",
    ): MORE,
    (
        "mask",
        "smaller: `min(` -> `max(` in: last = min(last, e.k_length - 1);",
    ): MORE,
    (
        "mask",
        "bound: `<` -> `<=` in: if (PREFIX && first < e.prefix) return range_of(begin, end);",
    ): MORE,
    (
        "mask",
        "and: `&&` -> `||` in: if (PREFIX && first < e.prefix) return range_of(begin, end);",
    ): MORE,
    (
        "mask",
        "swap: `RIGHT` -> `LEFT` in: if (RIGHT) begin = max(0, first - e.shift - int(call.n[I_RIGHT]));",
    ): MORE,
    (
        "rows",
        "one less: `- 1` -> `` in: r.high = GROUPED ? e.rows - 1 : r.first + r.count - 1;",
    ): MORE,
    (
        "rows",
        "swap: `.low` -> `.high` in: none.low = none.high = 0;",
    ): UNREAD,
    (
        "mask",
        "bound: `>` -> `>=` in: if (last >= e.q_length || begin + count > e.k_length) return true;",
    ): TESTED,
    (
        "mask",
        "bound: `<` -> `<=` in: if (LEFT && begin < last + e.shift - int(call.n[I_LEFT])) return true;",
    ): TESTED,
    (
        "mask",
        "and: `&&` -> `||` in: if (LEFT && begin < last + e.shift - int(call.n[I_LEFT])) return true;",
    ): TESTED,
    (
        "mask",
        "bound: `>` -> `>=` in: return RIGHT && begin + count - 1 > first + e.shift + int(call.n[I_RIGHT]);",
    ): TESTED,
    (
        "mask",
        "and: `&&` -> `||` in: return RIGHT && begin + count - 1 > first + e.shift + int(call.n[I_RIGHT]);",
    ): TESTED,
    (
        "mask",
        "one less: `- 1` -> `` in: return RIGHT && begin + count - 1 > first + e.shift + int(call.n[I_RIGHT]);",
    ): TESTED,
    (
        "mask",
        "swap: `.low` -> `.high` in: ids.low = simd_min(id);",
    ): UNSET,
    (
        "mask",
        "or: `||` -> `&&` in: if (queries.high < keys.low || keys.high < queries.low) return true;",
    ): MORE,
    (
        "rows",
        "swap: `.high` -> `.low` in: none.low = none.high = 0;",
    ): UNREAD,
}
