"""The loop of a lane, its owner's commands, and the report of ended slots: kernels.

Theory of operation. A lane's thread stays in `serve`, without the interpreter's lock, until a
command closes it. Between calls of `steps.advance` it reads its owner's commands (`tell`): to run,
park, resume or end a slot. It advances at most `places` slots together, the first ones that it was
told to run; the next one takes the place of one that ends, without the owner. Ended slots are
reported in the order of their ends. The lane wakes its owner for several of them at once, a little
late while others run, unless the owner was woken and has not called `collect` yet. A lane with
nothing to run sleeps. The threads communicate through the lane's block, an array of int64. Every
slot that was run ends exactly once, whatever commands follow; until then the lane owns its row and
the memory that the row points to.
"""

from workers.vector.kernels.arrays import Array
from workers.vector.kernels.jit import kernel
from workers.vector.kernels.memory import address, get_i64, put_i64
from workers.vector.kernels.sync import exchange, load, read_clock, sleep, store, wake
from workers.vector.traversal import fields, steps
from workers.vector.traversal.slots import fill

# Columns of a block. Each side writes to cache lines of its own, 8 columns each.
COMMANDS_SENT = 0  # commands from the owner since the start
ASLEEP = 8  # 1 while the lane sleeps; the waking thread sets it to 0
BELL, OWNER_BELL = 16, 17  # file descriptors of eventfd counters
OWNER_CALLED = 18  # address of CALLED in the owner's array
ENDS_SENT, EXTENDS, PLACES_USED, BUSY_NS = 24, 25, 26, 27  # sums since the start; read by the owner
_COMMANDS_READ, _RUNNING = 28, 29  # commands executed; slots in `active`
_CLOCK, _ONE, _DRAIN = 30, 32, 33  # seconds and nanoseconds; the number 1; value of a read counter
_PENDING, _PENDING_NS = 34, 35  # ended slots since the owner was last woken; time of the first
ENDS_READ = 40  # ended slots that the owner has collected
HEAD = 48  # end of the columns; a ring of commands follows, then a ring of ended slots
_COMMANDS_PER_SLOT = 8  # a slot is run again only after its end, so more are never in flight

# Columns of the owner's array.
CALLED = 0  # 1 while the owner was woken and has not collected yet
OWN_BELL = 1  # file descriptor of its eventfd counter
NEW_EXTENDS, NEW_BUSY_NS = 2, 3  # of all lanes, between the last two calls of `collect`
_SEEN_EXTENDS, _SEEN_BUSY_NS, _DRAINED = 4, 5, 6
OWNER_SIZE = 8

# Commands for a slot.
RUN, PARK, RESUME, END, CLOSE = range(5)
_KINDS = 8
_TOGETHER, _TOGETHER_NS = 4, 50_000  # ended slots, or nanoseconds, after which the owner is woken
_EXTENDS_PENDING = 4  # most extends at a time while an ended slot waits to be reported
_AWAY, _ACTIVE, _PARKED = range(3)


def block_size(slots: int) -> int:
    """Return the number of columns of a lane's block; `slots` is a power of two."""
    return HEAD + (_COMMANDS_PER_SLOT + 1) * slots


@kernel
def serve(
    block: Array, slots: int, places: int, rows: Array, top: Array, hit_keys: Array, visited: Array,
    tasks: Array, active: Array, finished: Array, where: Array, extends_max: int, attention: Array,
) -> None:  # fmt: skip
    """Execute commands and advance slots until CLOSE: the whole run of a lane's thread.

    `block` is the lane's, int64, shape (block_size(slots),); `slots` is its number of slots. `rows`
    to `tasks` are the arrays of `CpuSlots`, of all lanes. `active`, `finished` and `where` are
    int64, shape (all slots,), and the lane's own: the slots that it runs, of which it advances the
    first `places`; the slots that just ended; and for each slot _AWAY, _ACTIVE or _PARKED. In the
    kernels below `b` is the block's address.
    """
    b = address(block)
    put_i64(b, _ONE, 1)
    while True:
        attention[0] = 0
        if _run_commands(b, slots, rows, active, where):
            return
        count, limit = min(places, get_i64(b, _RUNNING)), extends_max
        if count == 0:
            _wake_owner_for(b, 0, 0)  # report pending ends: all other slots were parked
            exchange(b, ASLEEP, 1)
            if load(b, COMMANDS_SENT) == get_i64(b, _COMMANDS_READ):
                sleep(get_i64(b, BELL), b + 8 * _DRAIN)
            store(b, ASLEEP, 0)
            continue
        if get_i64(b, _PENDING) > 0:
            limit = min(limit, _EXTENDS_PENDING)
        began_ns = _now_ns(b)
        ended_count, extends = steps.advance(
            rows, top, hit_keys, visited, active, count, tasks, finished, limit, attention
        )
        now_ns = _now_ns(b)
        put_i64(b, BUSY_NS, get_i64(b, BUSY_NS) + now_ns - began_ns)
        put_i64(b, PLACES_USED, get_i64(b, PLACES_USED) + extends * count)
        store(b, EXTENDS, get_i64(b, EXTENDS) + extends)
        for i in range(ended_count):
            _leave(b, active, where, finished[i], _AWAY)
            _report_ended(b, slots, finished[i])
        _wake_owner_for(b, ended_count, now_ns)


@kernel
def _run_commands(b: int, slots: int, rows: Array, active: Array, where: Array) -> bool:
    """Execute the commands that were not read yet; return whether one was CLOSE."""
    read_count, sent_count = get_i64(b, _COMMANDS_READ), load(b, COMMANDS_SENT)
    while read_count < sent_count:
        command = get_i64(b, HEAD + (read_count & (_COMMANDS_PER_SLOT * slots - 1)))
        slot, kind = command // _KINDS, command % _KINDS
        read_count += 1
        put_i64(b, _COMMANDS_READ, read_count)
        if kind == CLOSE:
            return True
        if kind == RUN or (kind == RESUME and where[slot] == _PARKED):
            active[get_i64(b, _RUNNING)] = slot
            put_i64(b, _RUNNING, get_i64(b, _RUNNING) + 1)
            where[slot] = _ACTIVE
        elif kind == PARK and where[slot] == _ACTIVE:
            _leave(b, active, where, slot, _PARKED)
        elif kind == END and where[slot] != _AWAY:
            if where[slot] == _ACTIVE:
                _leave(b, active, where, slot, _AWAY)
            where[slot] = _AWAY
            rows[slot, fields.STATUS] = fields.FREE
            _report_ended(b, slots, slot)
            _wake_owner(b)
    return False


@kernel
def _leave(b: int, active: Array, where: Array, slot: int, to: int) -> None:
    """Remove a slot from `active`; it is parked or away from now on."""
    where[slot] = to
    count, new_count = get_i64(b, _RUNNING), 0
    for i in range(count):
        if active[i] != slot:
            active[new_count] = active[i]
            new_count += 1
    put_i64(b, _RUNNING, new_count)


@kernel
def _report_ended(b: int, slots: int, slot: int) -> None:
    """Append a slot to the ring of ended slots."""
    ended_count = get_i64(b, ENDS_SENT)
    put_i64(b, HEAD + _COMMANDS_PER_SLOT * slots + (ended_count & (slots - 1)), slot)
    store(b, ENDS_SENT, ended_count + 1)


@kernel
def _wake_owner(b: int) -> None:
    """Wake the owner, unless it has been called already."""
    if exchange(get_i64(b, OWNER_CALLED), 0, 1) == 0:
        wake(get_i64(b, OWNER_BELL), b + 8 * _ONE)


@kernel
def _wake_owner_for(b: int, ended_count: int, now_ns: int) -> None:
    """Wake the owner for ended slots: several together, or all of them before the lane sleeps.

    Slots that it collected after another lane woke it need no call: each costs the owner 20 us.
    """
    pending = min(get_i64(b, _PENDING) + ended_count, get_i64(b, ENDS_SENT) - load(b, ENDS_READ))
    if pending <= ended_count:
        put_i64(b, _PENDING_NS, now_ns)
    if pending > 0:
        is_late = now_ns - get_i64(b, _PENDING_NS) >= _TOGETHER_NS
        if is_late or pending >= _TOGETHER or get_i64(b, _RUNNING) == 0:
            _wake_owner(b)
            pending = 0
    put_i64(b, _PENDING, pending)


@kernel
def _now_ns(b: int) -> int:
    """Return the time of the monotonic clock in nanoseconds."""
    read_clock(b + 8 * _CLOCK)
    now_ns: int = get_i64(b, _CLOCK) * 1_000_000_000 + get_i64(b, _CLOCK + 1)
    return now_ns


@kernel
def tell(place: int, kind: int) -> None:
    """Send a slot's lane the command to RUN, PARK, RESUME or END it, or to CLOSE. For its owner.

    `place` is the address of five int64: the address of the lane's block, its number of slots, the
    address of its `attention`, the slot, and the address of the slot's row.
    """
    b, slots, attention = get_i64(place, 0), get_i64(place, 1), get_i64(place, 2)
    slot, sent_count = get_i64(place, 3), get_i64(b, COMMANDS_SENT)
    put_i64(b, HEAD + (sent_count & (_COMMANDS_PER_SLOT * slots - 1)), slot * _KINDS + kind)
    exchange(b, COMMANDS_SENT, sent_count + 1)  # before the check whether the lane sleeps
    put_i64(attention, 0, 1)
    if load(b, ASLEEP) and exchange(b, ASLEEP, 0):
        wake(get_i64(b, BELL), b + 8 * _ONE)


@kernel
def start(place: int, template: int, query: Array, warm: int, warm_count: int) -> None:
    """Fill in a slot's row (`slots.fill`), and send its lane the command RUN (`tell`)."""
    fill(get_i64(place, 4), template, query, warm, warm_count)
    tell(place, RUN)


@kernel
def collect(owner: Array, blocks: Array, slots: int, ended_slots: Array) -> int:
    """Write the slots that ended since the last call to `ended_slots`; return their number.

    Called by the owner. `owner` is int64, shape (OWNER_SIZE,); its NEW_EXTENDS and NEW_BUSY_NS get
    the work of all lanes since the last call. `blocks` has shape (lanes, block_size(slots)),
    `ended_slots` shape (all slots,); both are int64.
    """
    o = address(owner)
    sleep(get_i64(o, OWN_BELL), o + 8 * _DRAINED)  # does not block: it only resets the bell
    exchange(o, CALLED, 0)  # before the slots are read, so that a slot that ends now calls again
    count, extends, busy_ns = 0, 0, 0
    for lane in range(len(blocks)):
        b = address(blocks) + lane * blocks.strides[0]
        read_count, last = get_i64(b, ENDS_READ), load(b, ENDS_SENT)
        while read_count < last:
            ended_slots[count] = get_i64(
                b, HEAD + _COMMANDS_PER_SLOT * slots + (read_count & (slots - 1))
            )
            count += 1
            read_count += 1
        put_i64(b, ENDS_READ, read_count)
        extends += get_i64(b, EXTENDS)
        busy_ns += get_i64(b, BUSY_NS)
    put_i64(o, NEW_EXTENDS, extends - get_i64(o, _SEEN_EXTENDS))
    put_i64(o, NEW_BUSY_NS, busy_ns - get_i64(o, _SEEN_BUSY_NS))
    put_i64(o, _SEEN_EXTENDS, extends)
    put_i64(o, _SEEN_BUSY_NS, busy_ns)
    return count
