"""What a reader is told of a passage."""

from dataclasses import asdict, replace

from schemas.records import Passage, Retrieved
from schemas.rules.citations import citation, probe_notice
from tests.schemas.examples import example


def test_a_citation_says_all_but_the_tokens() -> None:
    passage = example("trivium.Passage")
    assert isinstance(passage, Passage)
    found = asdict(citation(passage, 16, 2))
    assert (found.pop("seq"), found.pop("probe")) == (16, 2)
    assert found == {name: value for name, value in asdict(passage).items() if name != "tokens"}
    assert (citation(passage).seq, citation(passage).probe) == (0, 0)


def test_a_reader_hears_of_a_probe_where_it_was_put_in_and_how_much() -> None:
    record = example("trivium.Retrieved")
    assert isinstance(record, Retrieved)
    record = replace(record, probe=2, seq=16, tokens=bytes(12), missing=(1, 3))
    told = probe_notice(record, "handbook")
    assert (told.request_id, told.collection) == (record.request_id, "handbook")
    assert (told.probe, told.seq, told.tokens, told.missing_shards) == (2, 16, 3, 2)
    assert told.citations == tuple(citation(each, 16, 2) for each in record.passages)
    assert told.error is None
