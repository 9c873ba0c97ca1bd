"""Which handles the simulated engine's other side takes; plain calls."""

from dataclasses import replace

import pytest

from schemas.errors import KvUnavailable, StaleEpoch
from tests.workers.fakes import handle
from tests.workers.llm.engines import answered, job, prompt, start_sim
from tests.workers.llm.worker_in_memory import PREFILL
from workers.llm.sim.handles import HandleRules

TARGET = replace(handle(1_000), tokens=32, block_size=32, block_ids=(3, 4))


@pytest.mark.parametrize("blocks", [(3, 4), ()])
def test_handle_rules_reject_invalid_token_count_of_target(blocks: tuple[int, ...]) -> None:
    """The check covers allocated blocks and promised ones."""
    rules = HandleRules(32)
    for tokens in (-32, -1, 65):
        wrong = replace(TARGET, tokens=tokens, block_ids=blocks)
        assert isinstance(rules.use_target(wrong, 64, 0), KvUnavailable)
    assert rules.use_target(replace(TARGET, block_ids=blocks), 64, 0) is None


async def test_new_epoch_keeps_blocks_of_earlier_handles() -> None:
    """A peer may still read the blocks, which would hold another prompt if freed."""
    engine = await start_sim()
    try:
        epochs = []
        for epoch in (0, 77):
            if epoch:
                engine.begin_epoch(epoch)
            kv = (await answered(engine, job(prompt(40, epoch), PREFILL))).last.kv
            assert kv is not None
            epochs.append(kv.worker_epoch)
        assert epochs[1] == 77 != epochs[0]
        assert engine.load().kv_handles_held == 2
    finally:
        await engine.close()


def test_handle_rules_report_new_epoch_of_same_engine() -> None:
    """A new epoch ends what the engine was doing, although its id stays the same."""
    rules, worker = HandleRules(32), TARGET.worker_id
    assert rules.observe_epoch(worker, TARGET.worker_epoch, "engine") == ""
    assert rules.observe_epoch(worker, TARGET.worker_epoch, "engine") is None
    assert rules.observe_epoch(worker, TARGET.worker_epoch + 1, "engine") == "engine"
    assert isinstance(rules.use_target(TARGET, 64, 0), StaleEpoch)
