"""How often other prompts interrupt an answer, at batch 8."""

from infra.research.studies.interruptions import BATCH, measure_interruptions, runs


def test_interruptions_confirm_neuron_guide() -> None:
    """Others of a batch interrupt a replica's answer, its transfer alone a pair's."""
    replica, pair = (measure_interruptions(pools, answers=48) for pools in ("1R", "1P1D"))
    assert BATCH - 2 <= replica.per_answer <= BATCH
    assert pair.per_answer <= 1
    assert pair.itl_p99 < replica.itl_p99


def test_runs_count_consecutive_gaps_once() -> None:
    assert runs([]) == runs([False]) == 0
    assert runs([True, True, False, True]) == 2
