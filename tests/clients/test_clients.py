"""Stock clients and benchmarks, unchanged, from an environment of their own, call a stack of
simulated engines. What each is asked stands in `calls/`; `infra/docs/integrate.md` lists them.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from infra.stack.launcher import Stack
from tests.conftest import _fresh_topics
from tests.e2e.harness import sim_settings, stack
from tests.streams.gateway.in_process import http_client
from tests.waits import until
from workers.models.sim import make_sim_model

ROOT = Path(__file__).parents[2]
CALLS, BUILT = Path(__file__).parent / "calls", ROOT / "build" / "clients"
BIN = BUILT / "venv" / "bin"
pytestmark = [pytest.mark.clients, pytest.mark.kafka, pytest.mark.timeout(1_200)]
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OPENAI_API_KEY": "x",
    "ANONYMIZED_TELEMETRY": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="module")
async def running(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One replica, and the retrieval pool; a context that a long prompt does not fit. Answers end
    at their limit, or with their form: one that is drawn to be empty would tell nothing.
    """
    settings = sim_settings(await _fresh_topics(bootstrap), end_every_tokens=0)
    settings = replace(settings, model=replace(settings.model, max_model_len=2_048))
    folder = tmp_path_factory.mktemp("clients")
    async with stack(settings, folder, replica=1, retrieval=1, embedding=1) as running_stack:
        async with http_client(running_stack.gateway_urls[0]) as http:

            async def embeds() -> bool:
                models = (await http.get("/v1/models")).json()["data"]
                return any(model["id"] == "hash" for model in models)

            await until(embeds)
        yield running_stack


@pytest.fixture(scope="module")
async def parsing(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One replica, which answers what the prompt says, and parses it with vLLM's parsers."""
    settings = sim_settings(await _fresh_topics(bootstrap), scripted=True)
    model = replace(
        settings.model, tool_parser="hermes", reasoning_parser="qwen3", max_model_len=8_192
    )
    settings = replace(settings, model=model)
    async with stack(settings, tmp_path_factory.mktemp("parsing"), replica=1) as running_stack:
        yield running_stack


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with which a benchmark counts tokens."""
    return str(make_sim_model(tmp_path_factory.mktemp("models") / "sim"))


async def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What a client prints; it has to end well."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        env={**os.environ, **QUIET, **(env or {})},
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = printed.decode(errors="replace")
    assert process.returncode == 0, text[-4_000:]
    return text


@pytest.mark.parametrize(
    "name",
    ["openai_python", "litellm_client", "langchain_client", "pydantic_ai_client"]
    + ["instructor_client"],
)
async def test_python_client_calls_gateway(running: Stack, name: str) -> None:
    await run(BIN / "python", CALLS / f"{name}.py", running.gateway_urls[0])


@pytest.mark.parametrize(
    "name",
    ["openai_agents_client", "langgraph_agents", "llamaindex_agents", "pydantic_ai_agents"]
    + ["instructor_tools", "litellm_tools"],
)
async def test_python_agent_calls_tools(parsing: Stack, name: str) -> None:
    await run(BIN / "python", CALLS / f"{name}.py", parsing.gateway_urls[0])


@pytest.mark.parametrize("name", ["openai_node", "vercel_ai"])
async def test_node_client_calls_gateway(running: Stack, name: str) -> None:
    await run_node(name, running.gateway_urls[0])


@pytest.mark.parametrize("name", ["openai_node_tools", "vercel_ai_tools"])
async def test_node_agent_calls_tools(parsing: Stack, name: str) -> None:
    await run_node(name, parsing.gateway_urls[0])


async def run_node(name: str, url: str) -> None:
    """Run a script beside its packages, where Node looks for them."""
    for file in ("loops.mjs", f"{name}.mjs"):
        (BUILT / file).write_text((CALLS / file).read_text())
    await run("node", BUILT / f"{name}.mjs", url)


async def test_java_client_calls_gateway(running: Stack) -> None:
    source = CALLS / "OpenAiJava.java"
    words = ("java", "-Xmx256m", "-cp", f"{BUILT / 'libs'}/*", source)
    await run(*words, running.gateway_urls[0])


async def test_locust_reports_no_failures(running: Stack) -> None:
    url = running.gateway_urls[0]
    words = ("--headless", "--users", "2", "--run-time", "5s", "--host", url, "--only-summary")
    env = {"OPENAI_BASE_URL": url + "/v1"}
    printed = await run(BIN / "locust", "-f", CALLS / "locustfile.py", *words, env=env)
    assert "/v1/embeddings" in printed and "0(0.00%)" in printed


async def test_vllm_bench_serve_completes_requests(running: Stack, tokenizer: str) -> None:
    """`vllm bench serve` of the environment's own vLLM, whose command asks for a package of
    another name than the CPU's.
    """
    url, bench = running.gateway_urls[0], (sys.executable, "-c", BENCH)
    shape = ("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8")
    for backend, path in (("openai", "completions"), ("openai-chat", "chat/completions")):
        words = ("--backend", backend, "--base-url", url, "--endpoint", f"/v1/{path}")
        model_args = ("--model", "sim", "--tokenizer", tokenizer, "--num-prompts", "4")
        printed = await run(*bench, *words, *model_args, *shape, "--ignore-eos")
        (line,) = (line for line in printed.splitlines() if "Successful requests" in line)
        assert line.split()[-1] == "4"


async def test_guidellm_completes_requests(running: Stack, tokenizer: str, tmp_path: Path) -> None:
    words = [
        f"--backend=kind=openai_http,target={running.gateway_urls[0]},model=sim",
        "--profile=kind=synchronous",
        "--constraint=kind=max_requests,count=4",
        f"--tokenizer=kind=hf_auto,model={tokenizer}",
        "--data=kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        f"--output=kind=json,path={tmp_path / 'report.json'}",
        "--disable-console-interactive",
    ]
    await run(BIN / "guidellm", "run", *words, cwd=tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == 4


async def test_aiperf_completes_requests(running: Stack, tokenizer: str, tmp_path: Path) -> None:
    words = ("--model", "sim", "--url", running.gateway_urls[0], "--endpoint-type", "chat")
    shape = ("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8", "--streaming")
    count = ("--request-count", "4", "--concurrency", "2", "--ui", "none")
    folder_args = ("--tokenizer", tokenizer, "--artifact-dir", tmp_path)
    online = {"HF_HUB_OFFLINE": ""}  # else it looks for a folder's name among what was downloaded
    await run(
        BIN / "aiperf", "profile", *words, *shape, *count, *folder_args, env=online, cwd=tmp_path
    )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 4 and report["error_summary"] == []
