"""The serving benchmark's peers answer alike."""

import asyncio
from pathlib import Path

from infra.bench.serving.cells import TOKENS, make_bodies
from infra.bench.serving.contenders import DIRECT, SIM, _baselines
from infra.bench.serving.load_generator import OfferedLoad, measure
from infra.bench.serving.proxies import prefill_body
from tests.waits import START_S
from workers.models.sim import make_sim_model


def test_prefill_body_requests_one_token() -> None:
    body = {"max_tokens": 64, "stream": True, "stream_options": {}, "max_completion_tokens": 64}
    first = prefill_body(body)
    assert (first["max_tokens"], first["max_completion_tokens"], first["stream"]) == (1, 1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] and "stream_options" not in first
    assert body["max_tokens"] == 64


def test_direct_engine_and_proxies_return_same_texts(tmp_path: Path) -> None:
    async def main() -> None:
        model = make_sim_model(tmp_path / "model")
        async with asyncio.timeout(START_S), _baselines(tmp_path, model) as peers:
            expected: list[str] = []
            for name in (DIRECT, "httpx", "aiohttp"):
                figures = await measure(
                    OfferedLoad(
                        host="127.0.0.1",
                        port=peers[name].port,
                        bodies=make_bodies(1)[:8],
                        expected=expected,
                        tokens=TOKENS,
                        streams=8,
                        requests_max=8,
                    )
                )
                assert figures.errors == {} and figures.requests >= 8, name
                expected = expected or figures.texts
            assert all(peers["httpx"].pids().values())

    asyncio.run(main())
    assert SIM["prefill_base_ms"] == 20 and SIM["decode_step_ms"] == 5
