"""Which orchestrations are pairs."""

from schemas.records import Orchestration
from schemas.rules.pairs import is_paired


def test_decode_has_its_blocks_before_prefill_ends_in_a_pair() -> None:
    paired = {each for each in Orchestration if is_paired(each)}
    assert paired == {Orchestration.DECODE_FIRST, Orchestration.CONCURRENT}
