"""Column numbers of a slot's row and of a feed's row, for kernels on both backends.

All columns are int64. An address is that of an array of the given type; the caller that fills in
the row keeps the array alive until the slot has ended. On a CUDA device addresses are the device's.
`index/plans.py` fills in rows, `steps.py` and `cuda/walk.cu` read and write them.
"""

# Columns of `SlotRows.fields`.
(
    STATUS,  # one of the values below
    TOP_M,  # entries of the routing list
    WIDTH,  # entries expanded per extend
    K,  # hits asked for
    PATIENCE,  # extends without change that end the walk; 0: when no entry is left to expand
    ENTRIES,  # entry points that the walk begins at
    HASH_MASK,  # places of the visited table, minus 1
    # progress; `_clear` in steps.py sets NEXT to LOOSE_DONE to 0
    NEXT,  # place in the routing list before which all entries are expanded
    STABLE,  # extends since the routing list changed
    EXTENDS,  # extends of this search
    DISTANCES,  # rows measured, or dropped by their codes
    LIST_DONE,  # rows of LIST that were measured; the next three count WARM, REPS and loose rows
    WARM_DONE,
    REPS_DONE,
    LOOSE_DONE,
    TASKS,  # rows that this extend measures; -1: it does not walk
    PLACE,  # after the last entry that it expanded
    # the index, from `IndexView.template`
    VECTORS,  # address, float32 or float16 (rows, LENGTH)
    ROW_BYTES,  # stride of VECTORS
    LENGTH,  # padded dim, a multiple of 16
    METRIC,  # SQUARED_L2 or INNER_PRODUCT
    STORED,  # SINGLE or HALF
    GRAPH,  # address, uint32 (linked rows, DEGREE)
    DEGREE,  # edges of a row
    CHAIN,  # address, uint32 (linked rows,): from each row to the next equal one; 0: none
    ALIVE,  # address of a bit set, uint32: rows that are not deleted; 0: all
    LOOSE_FIRST,  # rows from here to LOOSE_LAST have no edges, and are scanned
    LOOSE_LAST,
    REPS,  # address, int64: the rows that are entry points
    REPS_COUNT,  # number of entry points; 0: no walk
    REPS_PANELS,  # address, float32: the entry points' vectors in panels; 0: see REPS_VECTORS
    REPS_DIMS,  # dimensions of a panel
    REPS_VECTORS,  # address, typed as VECTORS: the entry points' vectors, contiguous
    REPS_CODES,  # address, uint8: the entry points' codes; 0: none
    REPS_OUTLIERS,  # address of a bit set, uint32: entry points that always pass; 0: none
    WHOLE,  # 1 if all nodes are entry points: no walk
    CODES,  # address, uint8 (linked rows, CODE_BYTES); 0: none
    OUTLIERS,  # address of a bit set, uint32: rows that always pass, for any code; 0: none
    CODE_BYTES,  # size of a row's code; 0: none
    QUANTIZER,  # address, float32: the quantizer of the codes (`codes.py`)
    # the request
    QUERY,  # address, float32 (LENGTH,)
    ALLOWED,  # address of a bit set, uint32: rows that the filter allows; 0: all
    LIST,  # address, int64: the only rows to scan
    LIST_COUNT,  # length of LIST; 0: no list
    WARM,  # address, int64: rows to begin at besides entry points
    WARM_COUNT,
    SCREENED,  # 1 if a walk fills `hit_keys`: rows are scanned, or some rows may not be returned.
    # With a CHAIN and without this, `hit_keys` is made from the routing list at the end
    FEED,  # address of a feed's row; 0: one search
    FEED_PLACE,  # number of the query in the feed
    NEEDED,  # hits that must be nearer than the routing list's end, else all hits are dropped
    WANTED,  # hits; a walk that finds fewer is repeated as a scan
) = range(51)
COUNT = 51

# Columns of a feed: queries that slots take one after the other.
(
    FEED_NEXT,  # the next query to be taken
    FEED_LAST,  # after the last query
    FEED_QUERIES,  # address, float32 (queries, padded dim)
    FEED_QUERY_BYTES,  # stride of the queries
    FEED_ROWS,  # address, int64 (queries, k): output of hits
    FEED_DISTANCES,  # address, float32 (queries, k)
    FEED_EXTENDS,  # extends, summed over its queries
    FEED_COMPUTED,  # distances computed, summed over its queries
) = range(8)
FEED_COUNT = 8

# Values of STATUS; `slots.py` explains them.
FREE, FRESH, SEEDING, WALKING, DONE = range(5)
