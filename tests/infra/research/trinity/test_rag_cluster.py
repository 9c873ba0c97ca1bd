"""Small runs of a placement on the real router and search scheduler, to the last token."""

from dataclasses import asdict, replace

import pytest

from infra.planning.pools import ProbeSettings
from infra.research.trinity import rag_cluster, study
from infra.research.trinity.placements import COUPLED, IN_PLACE, POOL, WITH_PREFILL, PlacementKind
from infra.research.trinity.rag_cluster import TrinityCase, TrinityResult


def case(
    kind: PlacementKind, probing: ProbeSettings | None = None, *, per_s: float = 20.0
) -> TrinityCase:
    """Six GPUs, half a second of arrivals."""
    base = study.base(gpus=6, duration_ms=500.0)
    traffic = replace(base.traffic, per_s=per_s, probing=probing or ProbeSettings())
    return replace(base, kind=kind, traffic=traffic)


def run(kind: PlacementKind, probing: ProbeSettings | None = None) -> TrinityResult:
    return rag_cluster.run(case(kind, probing))


@pytest.mark.parametrize("kind", [COUPLED, IN_PLACE, WITH_PREFILL, POOL], ids=lambda k: k.name)
def test_cluster_answers_requests_with_their_passages(kind: PlacementKind) -> None:
    result = run(kind)
    assert result.requests > 5
    assert (result.failed, result.without) == (0, 0)
    assert result.ttft_p50 > 58, "the passages are part of the prompt that is computed"


def test_cluster_repeats_figures_by_seed() -> None:
    assert asdict(run(POOL)) == asdict(run(POOL))


def test_near_index_saves_two_log_hops() -> None:
    near, far = run(WITH_PREFILL), run(POOL)
    saved = far.ttft_p50 - near.ttft_p50
    assert saved == pytest.approx(2 * (3.0 - 0.05), abs=1.01), "the log's stamps are whole ms"


def test_lookahead_prevents_stalls_of_probes() -> None:
    ahead, behind = run(POOL, ProbeSettings(lookahead=8)), run(POOL, ProbeSettings(lookahead=0))
    assert ahead.stalled_share == 0
    assert behind.stalled_share > 0.005
    assert behind.tpot_p50 > ahead.tpot_p50
    assert behind.probe_p50 == pytest.approx(ahead.probe_p50, abs=0.1)


def test_cluster_limits_stall_of_late_probe() -> None:
    slow = replace(case(POOL, ProbeSettings(lookahead=0, stall_ms=5.0)), hop_ms=40.0)
    result = rag_cluster.run(slow)
    assert result.failed == 0
    assert 0 < result.stalled_share < 0.02


def test_probes_slow_decoding_without_loss_of_requests() -> None:
    """Inserted passages are computed beside the batch, which slows decoding only."""
    plain, probed = (
        run(POOL, ProbeSettings(every=0)),
        run(POOL, ProbeSettings(every=16, new_share=1.0)),
    )
    assert plain.requests == probed.requests
    assert probed.tpot_p50 > plain.tpot_p50
    assert probed.probe_p50 > 0 == plain.probe_p50


def test_index_in_worker_memory_slows_worker_only_when_searched() -> None:
    idle = rag_cluster.run(replace(case(IN_PLACE, ProbeSettings(every=0)), hop_ms=0.0))
    pool = rag_cluster.run(replace(case(POOL, ProbeSettings(every=0)), hop_ms=0.0))
    assert idle.tpot_p50 == pytest.approx(pool.tpot_p50, rel=0.2)
    assert idle.index_gb == 6 * pool.index_gb
