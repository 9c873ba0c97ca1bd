"""What is kept of searches during an answer: a fold over their records, within bounds."""

from typing import Any

import pytest

from schemas.records import Request, Retrieved
from schemas.rules.sizes import PROBED_BYTES_MAX, PROBES_MAX
from streams.core.requests.probe_results import ProbeResult, probes_of, with_probe
from tests.streams.builders import passage, probing, request, retrieval, retrieved


def probing_request(**changes: Any) -> Request:
    return request("r1", retrieval=retrieval(probing=probing(**changes)))


def record(attempt: int, probe: int, tokens: bytes = b"", **changes: Any) -> Retrieved:
    where = {"attempt": attempt, "probe": probe, "seq": 8 * probe, "tokens": tokens}
    return retrieved("r1", **{**where, **changes})


def results_of(*records: Retrieved, **changes: Any) -> tuple[ProbeResult, ...]:
    results: tuple[ProbeResult, ...] = ()
    for retrieved_record in records:
        results = with_probe(results, probing_request(**changes), retrieved_record)
    return results


@pytest.mark.parametrize(
    ("probes", "attempts"),
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
def test_with_probe_keeps_first_record_of_each_probe_over_attempts(
    probes: list[tuple[int, int]], attempts: list[int]
) -> None:
    results = results_of(*(record(attempt, probe) for attempt, probe in probes))
    assert [result.attempt for result in results] == attempts
    assert [result.seq for result in results] == [8 * (place + 1) for place in range(len(results))]


def test_with_probe_ignores_second_record_of_probe() -> None:
    assert results_of(record(1, 1, b"aaaa"), record(1, 1, b"bbbb")) == results_of(
        record(1, 1, b"aaaa")
    )


def test_with_probe_keeps_no_more_than_request_allows() -> None:
    records = [record(1, number) for number in range(1, PROBES_MAX + 9)]
    assert len(results_of(*records, probes_max=3)) == 3
    assert len(results_of(*records, probes_max=10_000)) == PROBES_MAX
    assert not with_probe((), request("r1", retrieval=retrieval()), record(1, 1))
    assert not with_probe((), request("r1"), record(1, 1))


@pytest.mark.parametrize("large", ["tokens", "text"])
def test_with_probe_keeps_nothing_after_byte_bound(large: str) -> None:
    """A later attempt searches again for what is not kept."""
    if large == "tokens":
        big = record(1, 2, bytes(PROBED_BYTES_MAX))
    else:
        big = record(1, 2, b"aaaa", passages=(passage(1, text="x" * PROBED_BYTES_MAX),))
    results = results_of(record(1, 1, b"aaaa"), big, record(1, 3))
    assert len(results) == 1 and results_of(big, record(1, 1)) == results_of(record(1, 1))


def test_probes_of_hands_on_inserts_and_known_passages() -> None:
    passages = passage(7), passage(8)
    results = results_of(record(1, 1, b"aaaabbbb", passages=passages), record(1, 2))
    probes = probes_of(probing_request(), ("d1#0",), results)
    assert probes is not None and probes.retrieval == probing_request().retrieval
    # that nothing was put in tells from where the next probe's place counts
    assert [(insert.at, insert.tokens) for insert in probes.inserts] == [
        (8, b"aaaabbbb"),
        (16, b""),
    ]
    assert probes.known_passages == ("d1#0", "d7#0", "d8#0") and probes.decided == 2
    notice = results[0].notice
    assert notice is not None and (notice.probe, notice.seq, notice.tokens) == (1, 8, 2)
    assert [(citation.probe, citation.seq) for citation in notice.citations] == [(1, 8), (1, 8)]
    assert probes_of(request("r1", retrieval=retrieval()), (), ()) is None
    assert probes_of(request("r1"), (), ()) is None
