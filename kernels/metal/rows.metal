// Which rows a lane and its threadgroup have, and where rows of queries and keys lie in memory.

// The rows of a threadgroup that has BLOCK_M of them, and the lane's own.
struct Rows {
  Lane at;
  int kv_head, first_head;  // of the first row
  int first, count;         // the group's rows: of a head's queries, or with GROUPED of all heads of a group
  int end;                  // one behind the last row of all groups
  int queries;              // in memory, of one head
  int low, high;            // the first and the last query among the group's rows
  int number, head, query;  // the lane's row; behind the end the head and the query of one before
};

inline Rows rows_of(thread const Call& call, thread const Entry& e, int group_head, int block, int simdgroup_row,
                    uint lane) {
  Rows r;
  const int G = int(call.n[I_G]);
  r.at = lane_of(lane);
  r.kv_head = GROUPED ? group_head : group_head / G;
  r.first_head = GROUPED ? group_head * G : group_head;
  r.queries = e.rows;
  r.end = GROUPED ? G * e.rows : e.rows;
  r.first = block * BLOCK_M;
  r.count = min(BLOCK_M, r.end - r.first);
  r.number = r.first + simdgroup_row + r.at.row;
  const int inside = min(r.number, max(r.end, 1) - 1);
  r.head = r.first_head + (GROUPED ? inside / max(e.rows, 1) : 0);
  r.query = GROUPED ? inside % max(e.rows, 1) : inside;
  r.low = GROUPED ? 0 : r.first;
  r.high = GROUPED ? e.rows - 1 : r.first + r.count - 1;
  return r;
}

// Where the group's rows lie in a tensor whose strides are at `place`.
inline QueryRows query_rows(thread const Call& call, thread const Rows& rows, int place) {
  QueryRows q;
  q.head = call.n[place + 1];
  q.query = call.n[place + 2];
  q.first = rows.first;
  q.queries = rows.queries;
  return q;
}

// The offset of an entry's first query in a tensor whose strides are at `place`, and of its first key.
inline long first_query(thread const Call& call, thread const Entry& e, int place) {
  return PACKED ? e.q_first * call.n[place + 2] : e.batch * call.n[place];
}
inline long first_key(thread const Call& call, thread const Entry& e, int place) {
  if (PAGED) return 0;
  return PACKED ? e.k_first * call.n[place + 2] : e.batch * call.n[place];
}

inline KeyRows key_rows(thread const Call& call, thread const Entry& e, int place, int first) {
  KeyRows k;
  k.page = call.n[place];
  k.key = call.n[place + 2];
  k.first = first;
  k.table = call.block_table + (PAGED ? e.batch * call.n[I_BLOCK_TABLE] : 0);
  k.page_size = int(call.n[I_PAGE_SIZE]);
  return k;
}

// The ids of the group's rows; without segments none are read.
inline Ids ids_of_rows(thread const Call& call, thread const Entry& e, thread const Rows& rows, uint lane) {
  if (SEGMENTS)
    return ids_of(call.q_segments + e.batch * call.n[I_Q_SEGMENTS], rows.low, rows.high - rows.low + 1, lane);
  Ids none;
  none.low = none.high = 0;
  return none;
}
