"""What stands in the columns of a slot's row and of a feed's row: plain integers, for kernels.

`steps.py` reads and writes them; `index/ways.py` fills them in.
"""

# Columns of `Slots.fields`, int64.
(
    STATUS,
    TOP_M,  # entries of the routing list
    WIDTH,  # entries expanded per extend
    K,
    PATIENCE,  # 0: stop when no entry is left to expand
    ENTRIES,  # how many representatives the walk begins at
    HASH_MASK,
    # progress
    NEXT,  # no entry before this one is left to expand
    STABLE,  # extends since the routing list changed
    EXTENDS,
    DISTANCES,
    LIST_DONE,
    WARM_DONE,
    REPS_DONE,
    LOOSE_DONE,
    TASKS,  # rows that this extend measures; -1: it does not walk
    PLACE,  # after the last entry that it expanded
    # the index
    VECTORS,
    ROW_BYTES,
    LENGTH,
    METRIC,
    STORED,
    GRAPH,
    DEGREE,
    ALIVE,  # bit set of rows that may be returned; 0: all
    LOOSE_FIRST,  # rows that are scanned, because they have no edges
    LOOSE_LAST,
    REPS,
    REPS_COUNT,
    REPS_VECTORS,  # their vectors, side by side
    REPS_CODES,  # and their codes
    CODES,  # of the rows that have edges; 0: none
    CODE_BYTES,
    RULER,  # what codes stand for
    # the request
    QUERY,
    ALLOWED,  # bit set; 0: all
    LIST,  # scan these rows and nothing else
    LIST_COUNT,
    WARM,
    WARM_COUNT,
    SCREENED,  # whether `found` is kept: rows are scanned, or not every one may be returned
    FEED,  # address of a feed; 0: one search
    FEED_PLACE,  # which of its queries this is
    NEEDED,  # hits that must be nearer than the routing list's end, else the walk was in vain
) = range(44)
COUNT = 44

# Columns of a feed: queries that slots take one after the other, int64.
(
    FEED_NEXT,
    FEED_LAST,
    FEED_QUERIES,
    FEED_QUERY_BYTES,
    FEED_ROWS,  # where results go: rows, int64, k of each query
    FEED_DISTANCES,  # float32, k of each query
    FEED_EXTENDS,  # sums over all its queries
    FEED_COMPUTED,
) = range(8)
FEED_COUNT = 8

# Values of STATUS.
FREE, FRESH, SEEDING, WALKING, DONE = range(5)
