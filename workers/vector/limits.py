"""Bounds that more than one package of the search worker uses; each is defined only here.

It imports nothing: a command line checks its settings with these bounds without waiting for a
compiler. A bound that a single module uses stays in that module.
"""

BUILDERS = ("own", "cuvs")  # builders of the graph of an index on a CUDA device
DEVICES = ("cpu", "cuda", "auto")  # where searches run; auto takes a CUDA device if it finds one

# Bounds of one search.
K_MAX = 512  # hits
TOP_M_MAX = 2_048  # entries of the routing list, on cores
CUDA_TOP_M_MAX = 512  # entries of the routing list, on a CUDA device
TASKS_MAX = 4_096  # rows that one extend measures: width times degree at most
CORES_DIM_MAX = 2**31 - 1  # values of a vector on cores; a CUDA device has a setting for it

# Bounds of one index.
ROWS_MAX = 2**31 - 1  # a row is 31 bits of a key
DIM_MAX = 2**20  # values of a vector, in an index file
SCANNED_ROWS_MAX = 1_024  # smaller indexes are scanned whole, and need no edges
DEGREE = 32  # edges of a row, unless a caller says otherwise
CANDIDATES = 1.5  # times the degree: candidates for a row's edges
DEGREE_MAX = int(K_MAX / CANDIDATES)  # the candidates of a new row come from one search
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
SQUARES_MAX = FLOAT32_MAX / 4  # sum over a vector; below it every distance is finite

# Sizes of one core's lane.
PLACES = 2  # searches that it advances together; more would evict each other from the L1 cache
AHEAD = 12  # searches that wait in it for a place
SLOTS = 32  # searches that it holds: in places, waiting, parked
LANES_MAX = 1_024

# Sizes of one CUDA device.
CUDA_PLACES = 1_024  # searches that it advances together
CUDA_SLOTS = 2_048  # searches that it holds: in places, and parked
CUDA_SLOTS_MAX = 1 << 16
CUDA_DIM_MAX = 4_096  # values of a vector that it can search, unless a setting says otherwise
