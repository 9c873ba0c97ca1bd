"""Constants and structures that host and device code of the CUDA backend share, and the source.

The kernels' source begins with definitions that this file writes, so that a column or a structure
has one definition. All members of a structure are int64, addresses too, so that the host writes a
structure as an array of int64.
"""

from importlib.resources import files

from workers.vector.graph.knn import SAMPLE
from workers.vector.kernels.keys import EMPTY, FLAG, LIMIT, NOWHERE
from workers.vector.traversal import fields

MACHINE = (  # all state of one batch; the first members are addresses in device memory
    "fields",  # int64 [slots, fields.COUNT]
    "top",  # uint64 [slots, top_m_max]
    "found",  # uint64 [slots, k_max]
    "visited",  # uint32 [slots, visited_places]
    "queries",  # float32 [slots, dim_max]
    "warm",  # int64 [slots, top_m_max]
    "rows",  # uint32 [slots, tasks_max]: a slot's tasks
    "distances",  # float32 [slots, tasks_max]: of its tasks
    "pending",  # int32 [slots]: number of its tasks; -1: not written yet
    "serials",  # int64 [slots]
    "tasks",  # uint64: number of tasks of all slots in this turn
    "active",  # uint32 [slots]
    "active_count",  # uint32
    "ended_count",  # uint32
    "turn",  # int64
    "ring_in",  # host memory from here on: [ring_depth, ring_in_words] of int64
    "ring_out",  # [ring_depth, ring_out_words] of int64
    "host_top",  # [slots] rows of host_top_bytes
    "host_found",  # [slots] rows of host_found_bytes
    "host_counts",  # int64 [slots, 2]: extends, distances
    "slots",  # sizes from here on
    "top_m_max",
    "k_max",
    "dim_max",
    "visited_places",
    "tasks_max",
    "list_places",
    "merge_max",
    "seed_rows",
    "ring_depth",
    "ring_in_words",
    "ring_out_words",
    "record_words",
    "host_top_bytes",
    "host_found_bytes",
)
LISTS = (  # neighbour lists while an index is built
    "vectors",
    "row_bytes",
    "length",
    "metric",
    "stored",
    "keys",  # uint64 [rows, list_size]
    "after",  # lists of the next round; equals `keys` if each row reads its own list only
    "reverse",  # uint64 [rows, SAMPLE]
    "order",  # uint32 [rows]
    "spans",  # uint32 [rows, 2]: places of `order`
    "changed",  # uint64
    "list_size",
)
CHANGES = (  # rows of a graph that differ in a new version
    "graph",  # uint32 [any, width]
    "rows",  # uint32 [count]: their numbers
    "words",  # uint32 [count, width]: their new values
    "count",
    "width",
)
TILE = 256  # candidates of a row that are measured and merged together
GATHERED = 4 * SAMPLE * SAMPLE  # candidates of a row in a round, at most
MET = 4_096  # places of a round's table: more than a list and GATHERED rows
KERNELS = (
    "turn_begin",
    "walk",
    "turn_end",
    "join",
    "descend",
    "scatter",
)
_KEYS = {"EMPTY": EMPTY, "FLAG": FLAG, "LIMIT": LIMIT}
_COLUMNS = [name for name, value in vars(fields).items() if name.isupper() and type(value) is int]


def source() -> str:
    """Return the source of all kernels, CUDA C++."""
    parts = [
        "typedef long long i64;",
        *(f"enum {{ {name} = {getattr(fields, name)} }};" for name in _COLUMNS),
        f"enum {{ SAMPLE = {SAMPLE}, TILE = {TILE}, MET = {MET} }};",
        *(f"#define {name} {int(key):#x}ull" for name, key in _KEYS.items()),
        f"#define NOWHERE {int(NOWHERE):#x}u",
        _structure("Machine", MACHINE),
        _structure("Lists", LISTS),
        _structure("Changes", CHANGES),
    ]
    folder = files("workers.vector.cuda")
    texts = [
        folder.joinpath(f"{name}.cu").read_text() for name in ("common", "walk", "knn", "scatter")
    ]
    return "\n".join([*parts, *texts])


def _structure(name: str, members: tuple[str, ...]) -> str:
    return f"struct {name} {{ i64 {', '.join(members)}; }};"
