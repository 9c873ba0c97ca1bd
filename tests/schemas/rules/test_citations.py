"""What a reader is told of a passage."""

from dataclasses import asdict, replace

from schemas.records import Passage, Retrieved
from schemas.rules.citations import citation, probe_notice
from tests.schemas.examples import example


def test_citation_has_all_passage_fields_but_tokens() -> None:
    passage = example("trivium.Passage")
    assert isinstance(passage, Passage)
    fields = asdict(citation(passage, 16, 2))
    assert (fields.pop("seq"), fields.pop("probe")) == (16, 2)
    assert fields == {name: value for name, value in asdict(passage).items() if name != "tokens"}
    assert (citation(passage).seq, citation(passage).probe) == (0, 0)


def test_probe_notice_states_position_size_and_citations() -> None:
    record = example("trivium.Retrieved")
    assert isinstance(record, Retrieved)
    record = replace(record, probe=2, seq=16, tokens=bytes(12), missing=(1, 3))
    notice = probe_notice(record, "handbook")
    assert (notice.request_id, notice.collection) == (record.request_id, "handbook")
    assert (notice.probe, notice.seq, notice.tokens, notice.missing_shards) == (2, 16, 3, 2)
    assert notice.citations == tuple(citation(passage, 16, 2) for passage in record.passages)
    assert notice.error is None
