"""What stands in a slot's row and in a feed's row: column numbers, for kernels on both backends.

All columns are int64. An address is where an array of the given type begins; whoever fills in the
row keeps the array alive until the slot has ended. On a CUDA device addresses are the device's.
`index/plans.py` fills in rows, `steps.py` and `cuda/walk.cu` read and write them.
"""

# Columns of `SlotRows.fields`.
(
    STATUS,  # one of the values below
    TOP_M,  # entries of the routing list
    WIDTH,  # entries expanded per extend
    K,  # hits asked for
    PATIENCE,  # extends without change that end the walk; 0: when no entry is left to expand
    ENTRIES,  # how many representatives the walk begins at
    HASH_MASK,  # places of the visited table, minus 1
    # progress; `_clear` in steps.py sets NEXT to LOOSE_DONE to 0
    NEXT,  # place in the routing list before which no entry is left to expand
    STABLE,  # extends since the routing list changed
    EXTENDS,  # extends of this search
    DISTANCES,  # rows measured or left out by their codes
    LIST_DONE,  # rows of LIST that were measured; likewise the next three
    WARM_DONE,
    REPS_DONE,
    LOOSE_DONE,
    TASKS,  # rows that this extend measures; -1: it does not walk
    PLACE,  # after the last entry that it expanded
    # the index, from `IndexView.template`
    VECTORS,  # address, float32 or float16 (rows, LENGTH)
    ROW_BYTES,  # from one row of VECTORS to the next
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
    REPS_COUNT,  # how many; 0: nothing is walked
    REPS_PANELS,  # address, float32: the entry points' vectors in panels; 0: in the last three
    REPS_DIMS,  # dimensions of a panel
    REPS_VECTORS,  # address, as VECTORS: the entry points' vectors, side by side
    REPS_CODES,  # address, uint8: and their codes; 0: none
    REPS_OUTLIERS,  # address of a bit set, uint32: which pass whatever their code says; 0: none
    WHOLE,  # 1 where all rows that others have edges to are entry points: nothing is walked
    CODES,  # address, uint8 (linked rows, CODE_BYTES); 0: none
    OUTLIERS,  # address of a bit set, uint32: rows that pass whatever their code says; 0: none
    CODE_BYTES,  # of a row's code; 0: none
    QUANTIZER,  # address, float32: what codes stand for (`codes.py`)
    # the request
    QUERY,  # address, float32 (LENGTH,)
    ALLOWED,  # address of a bit set, uint32: rows that the filter allows; 0: all
    LIST,  # address, int64: scan these rows and nothing else
    LIST_COUNT,  # how many; 0: no list
    WARM,  # address, int64: rows to begin at besides entry points
    WARM_COUNT,
    SCREENED,  # 1 where `found` is kept: rows are scanned, or not every row may be returned. With
    # a CHAIN and without this, it is made of the routing list at the end
    FEED,  # address of a feed's row; 0: one search
    FEED_PLACE,  # which of the feed's queries this is
    NEEDED,  # hits that must be nearer than the routing list's end, else the walk was in vain
    WANTED,  # hits; a walk that finds fewer is to be done again, as a scan
) = range(51)
COUNT = 51

# Columns of a feed: queries that slots take one after the other.
(
    FEED_NEXT,  # the next query to be taken
    FEED_LAST,  # after the last query
    FEED_QUERIES,  # address, float32 (queries, padded dim)
    FEED_QUERY_BYTES,  # from one query to the next
    FEED_ROWS,  # address, int64 (queries, k): where hits go
    FEED_DISTANCES,  # address, float32 (queries, k)
    FEED_EXTENDS,  # summed over its queries
    FEED_COMPUTED,  # distances, summed likewise
) = range(8)
FEED_COUNT = 8

# Values of STATUS; `slots.py` says what they mean.
FREE, FRESH, SEEDING, WALKING, DONE = range(5)
