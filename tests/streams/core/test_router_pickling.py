"""A router from bytes of another, as `streams/journal` keeps them in snapshots."""

import pickle

from schemas.prefix import chain, pack
from schemas.records import KvEvents
from streams.core.events import KvEventsArrived
from tests.streams.core.router_harness import PARTITION
from tests.streams.core.router_setups import split, to_decoding


def test_router_continues_from_its_pickled_bytes() -> None:
    on = split()
    decode = to_decoding(on)
    stored = pack(chain(range(32), 16))
    kv_events = KvEvents(
        worker_id="d0", epoch=1, seq=0, at_ms=0, block_size=16, snapshot=True, stored=stored
    )
    on.apply(KvEventsArrived(kv_events, 0))
    copy = pickle.loads(pickle.dumps(on.router))
    assert copy.rebuilt == on.router.rebuilt == {PARTITION}
    assert copy.view() == on.router.view()
    on.twin = copy  # which has to do the same from here on
    on.request("r2")
    on.outcome(decode)
    on.pass_ms(1_000)
    assert not copy.is_live("r1") and copy.is_live("r2")
