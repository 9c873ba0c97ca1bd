"""What is kept of searches during an answer: a fold over their records, within bounds."""

from typing import Any

import pytest

from schemas.records import Request, Retrieved
from schemas.rules.sizes import PROBED_BYTES_MAX, PROBES_MAX
from streams.core.requests.probe_results import ProbeResult, probes_of, with_probe
from tests.streams.builders import passage, probing, request, retrieval, retrieved


def asked(**changes: Any) -> Request:
    return request("r1", retrieval=retrieval(probing=probing(**changes)))


def record(attempt: int, probe: int, tokens: bytes = b"", **changes: Any) -> Retrieved:
    where = {"attempt": attempt, "probe": probe, "seq": 8 * probe, "tokens": tokens}
    return retrieved("r1", **{**where, **changes})


def kept(*records: Retrieved, **changes: Any) -> tuple[ProbeResult, ...]:
    found: tuple[ProbeResult, ...] = ()
    for each in records:
        found = with_probe(found, asked(**changes), each)
    return found


@pytest.mark.parametrize(
    ("said", "attempts"),
    [
        ([(1, 1), (1, 2)], [1, 1]),
        ([(1, 1), (1, 1)], [1]),
        ([(1, 2)], []),  # a gap
        ([(1, 1), (1, 3)], [1]),
        ([(1, 0)], []),
        ([(1, 1), (1, 2), (2, 3)], [1, 1, 2]),  # it was told of both
        ([(1, 1), (1, 2), (1, 3), (2, 2)], [1, 2]),  # it was told of one
        ([(1, 1), (2, 1), (1, 2)], [2]),  # the first attempt goes on unheard
        ([(1, 1), (2, 2), (1, 1), (1, 2), (1, 3)], [1, 2]),
    ],
)
def test_the_first_of_each_probe_counts_and_a_later_attempt_goes_on_from_what_it_knew(
    said: list[tuple[int, int]], attempts: list[int]
) -> None:
    found = kept(*(record(attempt, probe) for attempt, probe in said))
    assert [each.attempt for each in found] == attempts
    assert [each.seq for each in found] == [8 * (place + 1) for place in range(len(found))]


def test_a_second_record_of_a_probe_changes_nothing() -> None:
    assert kept(record(1, 1, b"aaaa"), record(1, 1, b"bbbb")) == kept(record(1, 1, b"aaaa"))


def test_no_more_are_kept_than_the_request_may_have() -> None:
    records = [record(1, number) for number in range(1, PROBES_MAX + 9)]
    assert len(kept(*records, probes_max=3)) == 3
    assert len(kept(*records, probes_max=10_000)) == PROBES_MAX
    assert not with_probe((), request("r1", retrieval=retrieval()), record(1, 1))
    assert not with_probe((), request("r1"), record(1, 1))


@pytest.mark.parametrize("large", ["tokens", "text"])
def test_no_more_bytes_are_kept_than_the_bound_and_nothing_after_that(large: str) -> None:
    """A later attempt asks for what is not kept itself."""
    if large == "tokens":
        big = record(1, 2, bytes(PROBED_BYTES_MAX))
    else:
        big = record(1, 2, b"aaaa", passages=(passage(1, text="x" * PROBED_BYTES_MAX),))
    found = kept(record(1, 1, b"aaaa"), big, record(1, 3))
    assert len(found) == 1 and kept(big, record(1, 1)) == kept(record(1, 1))


def test_what_was_put_in_is_handed_on_and_not_found_again() -> None:
    passages = passage(7), passage(8)
    found = kept(record(1, 1, b"aaaabbbb", passages=passages), record(1, 2))
    probes = probes_of(asked(), ("d1#0",), found)
    assert probes is not None and probes.retrieval == asked().retrieval
    # that nothing was put in tells from where the next probe's place counts
    assert [(each.at, each.tokens) for each in probes.inserts] == [(8, b"aaaabbbb"), (16, b"")]
    assert probes.known_passages == ("d1#0", "d7#0", "d8#0") and probes.decided == 2
    told = found[0].notice
    assert told is not None and (told.probe, told.seq, told.tokens) == (1, 8, 2)
    assert [(each.probe, each.seq) for each in told.citations] == [(1, 8), (1, 8)]
    assert probes_of(request("r1", retrieval=retrieval()), (), ()) is None
    assert probes_of(request("r1"), (), ()) is None
