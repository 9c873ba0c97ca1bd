"""How often other prompts interrupt an answer, at batch 8."""

from infra.evaluate.studies.interruptions import BATCH, measure_interruptions, runs


def test_the_neuron_guide_is_right_about_who_interrupts_whom() -> None:
    """7 of 8 others in a continuous batch; its own transfer alone with a pair."""
    replica, pair = (measure_interruptions(pools, answers=48) for pools in ("1R", "1P1D"))
    assert BATCH - 2 <= replica.per_answer <= BATCH
    assert pair.per_answer <= 1
    assert pair.itl_p99 < replica.itl_p99


def test_long_gaps_in_a_row_are_one_interruption() -> None:
    assert runs([]) == runs([False]) == 0
    assert runs([True, True, False, True]) == 2
