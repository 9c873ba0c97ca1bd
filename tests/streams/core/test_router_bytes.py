"""A router from bytes of another, as `streams/journal` keeps them in snapshots."""

import pickle

from schemas.prefix import chain, pack
from schemas.records import KvEvents
from streams.core.events import KvEventsArrived
from tests.streams.core.router_harness import PARTITION
from tests.streams.core.router_setups import split, to_decoding


def test_a_router_goes_on_from_its_own_bytes() -> None:
    on = split()
    decode = to_decoding(on)
    stored = pack(chain(range(32), 16))
    held = KvEvents(
        worker_id="d0", epoch=1, seq=0, at_ms=0, block_size=16, snapshot=True, stored=stored
    )
    on.apply(KvEventsArrived(held, 0))
    again = pickle.loads(pickle.dumps(on.router))
    assert again.rebuilt == on.router.rebuilt == {PARTITION}
    assert again.view() == on.router.view()
    on.twin = again  # which has to do the same from here on
    on.request("r2")
    on.outcome(decode)
    on.pass_ms(1_000)
    assert not again.is_live("r1") and again.is_live("r2")
