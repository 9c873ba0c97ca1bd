"""The retrieval benchmark's runs of the control loop: what heartbeats tell it, what is missed."""

from dataclasses import replace

from infra.bench.retrieval.control import Seen
from workers.search.index.kinds import Kind


def test_heartbeats_tell_what_probes_stalled_and_what_moved() -> None:
    seen = Seen()
    seen.add(Kind.PREFILL, 10.0, late=False)
    seen.add(Kind.PREFILL, 90.0, late=True)
    seen.add(Kind.DECODE, 280.0, late=True)
    load = seen.beat(1, Seen()).load
    assert load.stalled_share == 0.5 and load.kv_bytes_received == 1 << 20
    assert seen.beat(2, replace(seen)).load.stalled_share is None, "no probe since"
    told = seen.figures()
    assert (told["searches"], told["missed"]) == (3, {"prefill": 1, "decode": 1})
    assert Seen().figures()["missed_share"] is None
