"""Which orchestrations are pairs."""

from schemas.records import Orchestration
from schemas.rules.pairs import is_paired


def test_only_decode_first_and_concurrent_are_paired() -> None:
    paired = {orchestration for orchestration in Orchestration if is_paired(orchestration)}
    assert paired == {Orchestration.DECODE_FIRST, Orchestration.CONCURRENT}
