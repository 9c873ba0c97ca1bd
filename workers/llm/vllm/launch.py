"""Starts and stops vLLM's processes: environment, arguments, and an end without orphans.

`start.py` and `engine.py` call it in threads, because vLLM's constructor blocks for the whole
start. Several engines may start in one process; they read the environment one at a time.
"""

import json
import logging
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from schemas.model.adapters import AdapterFolder, check_adapters, loaded_max, rank_room
from schemas.model.parser_rules import NONE
from schemas.model.parsers import known_parsers, parsers_of
from schemas.records import Capability
from schemas.settings import ModelSettings
from workers.kv.network import LOOPBACK, ucx_variables
from workers.kv.network import variables as environment_of
from workers.llm.vllm import preload
from workers.llm.vllm.api import Meter, NoPrometheus
from workers.llm.vllm.check import RETRY_MS, TRIES_MAX
from workers.llm.vllm.plugin import NICE_VARIABLE, OWNER_VARIABLE, SPIN_VARIABLE
from workers.llm.vllm.preload import BIND_VARIABLE
from workers.llm.vllm.settings import VllmSettings
from workers.models.folder import model_folder

_CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector"}  # class names in:
_CONNECTORS_MODULE = "workers.llm.vllm.connectors"  # only vLLM's processes import it
_UNLESS_SET = {
    **preload.UNLESS_SET,
    # One engine's processes are on one machine; other machines must not reach their sockets.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": LOOPBACK,
}
_environment = threading.Lock()
_SPAWN_POLL_S = 0.05
_TRANSFER_TRIES_MAX: Final = 4  # of one read or write; then the decode worker computes the prompt
_TRANSFER_RETRY_MS: Final = 5.0  # pause before the second try; it doubles with every further one
log = logging.getLogger(__name__)


@dataclass(slots=True)
class LaunchedEngine:
    """A running engine, and its properties that the adapter needs."""

    llm: Any
    meter: Meter
    capability: Capability
    kv_blocks: int
    vocab_size: int
    end_ids: frozenset[int]
    has_transfer: bool
    events_endpoint: str  # "": it publishes no KV events
    adapters: tuple[AdapterFolder, ...]
    sockets: TemporaryDirectory[str]  # folder of the sockets between its processes


def launch(
    settings: VllmSettings, model: ModelSettings, *, engine_id: str, has_transfer: bool
) -> LaunchedEngine:
    """Start the engine's processes, and return when they are ready."""
    meter = Meter()
    adapters = check_adapters(replace(model, path=model_folder(model), name=model.served_name))
    # A private folder that is removed with the engine, because vLLM does not remove its sockets.
    sockets = TemporaryDirectory(prefix="trivium-", ignore_cleanup_errors=True)
    args = engine_args(
        settings, model, sockets.name, engine_id, adapters, has_transfer=has_transfer
    )
    with _side_channel_port(settings) as port:
        with _environment:  # otherwise it may be another engine's
            variables = environment(settings, side_channel_port=port if has_transfer else 0)
        variables["VLLM_RPC_BASE_PATH"] = sockets.name
        llm = _construct_llm(args, settings, meter, variables)
    meter.listen(llm.output_processor)
    config = llm.vllm_config
    capability = Capability(
        model=model.served_name,
        engine="vllm",
        engine_id=engine_id,
        block_size=config.cache_config.block_size,
        max_model_len=config.model_config.max_model_len,
        running_max=settings.running_max,
        kv_layout=_layout(config, settings.kv_transfer),
        orchestrations=settings.orchestrations if has_transfer else (),
        nixl_metadata=_peer_metadata(config, variables) if has_transfer else b"",
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        kv_bytes_per_token=_bytes_per_token(config),
        adapters=tuple(adapter.name for adapter in adapters),
        adapters_max=config.lora_config.max_loras if adapters else 0,
    )
    return LaunchedEngine(
        llm=llm,
        meter=meter,
        capability=capability,
        kv_blocks=config.cache_config.num_gpu_blocks,
        vocab_size=config.model_config.get_vocab_size(),
        end_ids=_end_ids(llm.input_processor),
        has_transfer=has_transfer,
        events_endpoint=args.kv_events_config.endpoint if settings.kv_events else "",
        adapters=adapters,
        sockets=sockets,
    )


def engine_args(
    settings: VllmSettings,
    model: ModelSettings,
    sockets: str,
    engine_id: str,
    adapters: tuple[AdapterFolder, ...] = (),
    *,
    has_transfer: bool,
) -> AsyncEngineArgs:
    """Return vLLM's arguments for the settings; `extra` overrides them. `sockets` is a folder."""
    is_cpu = current_platform.is_cpu()
    args: dict[str, Any] = {
        "model": model_folder(model),
        "served_model_name": model.served_name,
        "dtype": "float32" if settings.dtype == "auto" and is_cpu else settings.dtype,
        "max_model_len": model.max_model_len,
        "enforce_eager": settings.enforce_eager,
        "block_size": settings.block_size,
        "max_num_seqs": settings.running_max,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if Path(args["model"]).is_dir():
        names = known_parsers(replace(model, path=args["model"]))
    else:
        args["revision"] = args["tokenizer_revision"] = model.pinned
        names = parsers_of(model)
    if names.reasoning != NONE:
        args["reasoning_parser"] = names.reasoning  # then forms begin after the reasoning
    if step_tokens := settings.step_tokens_max(is_cpu=is_cpu):
        args["max_num_batched_tokens"] = step_tokens
    if settings.kv_cache_bytes:
        args["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if adapters:
        batch_max = min(len(adapters), model.adapters_max)
        args |= {"enable_lora": True, "max_loras": batch_max, "max_lora_rank": rank_room(adapters)}
        args["max_cpu_loras"] = loaded_max(model)
    if settings.kv_events:
        args["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{sockets}/kv"
        )
    if has_transfer:
        args["worker_extension_cls"] = f"{_CONNECTORS_MODULE}.KvRelease"
        args["kv_transfer_config"] = KVTransferConfig(
            kv_connector=_CONNECTORS[settings.kv_transfer],
            kv_connector_module_path=_CONNECTORS_MODULE,
            kv_role="kv_both",
            engine_id=engine_id,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=_connector_config(settings),
        )
        # One group of blocks for all kinds of layers, because KV handles have only one.
        args["disable_hybrid_kv_cache_manager"] = True
    return AsyncEngineArgs(**{**args, **settings.extra_args()})


def _connector_config(settings: VllmSettings) -> dict[str, Any]:
    config: dict[str, Any] = {
        "kv_lease_duration": settings.kv_lease_s,
        TRIES_MAX: _TRANSFER_TRIES_MAX,
        RETRY_MS: _TRANSFER_RETRY_MS,
    }
    if settings.keep_decoded_kv_ms:
        config["bidirectional_kv_xfer"] = True
        config["decoder_kv_blocks_ttl"] = settings.keep_decoded_kv_ms / 1_000
    return config


def environment(settings: VllmSettings, *, side_channel_port: int) -> dict[str, str]:
    """Return variables for settings without an argument in vLLM; port 0 means no KV transfer."""
    variables = {
        **preload.SILENT,
        OWNER_VARIABLE: str(os.getpid()),
        NICE_VARIABLE: str(settings.nice),
        SPIN_VARIABLE: "0",  # idle processes sleep at once: others need the cores
        **ucx_variables(settings.kv_devices),
    }
    for name, value in _UNLESS_SET.items():
        variables[name] = os.environ.get(name, value)
    if settings.cpu_bind:
        variables[BIND_VARIABLE] = settings.cpu_bind
    if current_platform.is_cpu():
        variables |= preload.eager(settings)
    if side_channel_port:
        variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.side_channel_host
        variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)
    return variables


def end(launched: LaunchedEngine, timeout_s: float) -> None:
    """Stop the engine's processes; those that do not end in time are killed."""
    launched.llm.shutdown(timeout=timeout_s)


def forget(launched: LaunchedEngine) -> None:
    """Free what is left in this process after `end`; call it on the event loop of the sockets."""
    resources = launched.llm.engine_core.resources
    if "output_queue_task" in vars(resources):  # otherwise there was no request, and it is done
        resources()  # vLLM's monitor may not have called it, and an open socket blocks `destroy`
    resources.ctx.destroy(linger=0)
    launched.sockets.cleanup()
    launched.llm = None  # its finalizer must not run during the interpreter's shutdown


def _engine_config(args: AsyncEngineArgs, settings: VllmSettings) -> VllmConfig:
    """Return vLLM's configuration for the arguments."""
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if settings.compact_json:
        # Both backends that "auto" prefers apply it; as an argument it needs one of them by name.
        config.structured_outputs_config.disable_any_whitespace = True
    return config


def _construct_llm(
    args: AsyncEngineArgs, settings: VllmSettings, meter: Meter, variables: Mapping[str, str]
) -> Any:
    """Run the constructor in a thread, and keep the environment until it has spawned a process.

    The end of the thread does not end its children: they watch this process, not the thread.
    """
    result: list[Any] = []
    loggers = [meter.logger, NoPrometheus]

    def construct() -> None:
        try:
            config = _engine_config(args, settings)
            quiet = args.disable_log_stats
            result.append(
                AsyncLLM.from_vllm_config(config, stat_loggers=loggers, disable_log_stats=quiet)
            )
        except BaseException as error:  # raised again in the caller's thread
            result.append(error)

    thread = threading.Thread(target=construct, name="vllm-start", daemon=True)
    with _environment, environment_of(variables):
        before = {child.pid for child in multiprocessing.active_children()}
        thread.start()
        while thread.is_alive():
            thread.join(_SPAWN_POLL_S)
            if {child.pid for child in multiprocessing.active_children()} - before:
                break
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _layout(config: Any, mode: str) -> str:
    """Return the KV layout: model, types, block size, tensor parallelism and transfer mode.

    Workers with equal layouts can exchange KV.
    """
    model, cache = config.model_config, config.cache_config
    parallel = config.parallel_config.tensor_parallel_size
    types = f"{model.dtype}/{cache.cache_dtype}"
    return f"vllm/{model.model}/{types}/{cache.block_size}/tp{parallel}/{mode}"


def _bytes_per_token(config: Any) -> int:
    """Return the KV bytes of one token on all ranks, for attention with key and value per head."""
    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    values = 2 * heads * model.get_head_size() * model.get_total_num_hidden_layers()
    return int(values * model.dtype.itemsize)


def _end_ids(processor: Any) -> frozenset[int]:
    """Return the tokens at which vLLM ends an answer by itself."""
    config_ids = processor.generation_config_fields.get("eos_token_id") or ()
    tokenizer_id = processor.renderer.get_eos_token_id()
    ids = {config_ids} if isinstance(config_ids, int) else {*config_ids}
    return frozenset(ids if tokenizer_id is None else ids | {tokenizer_id})


def _peer_metadata(config: Any, variables: Mapping[str, str]) -> bytes:
    peer = {
        "remote_host": variables["VLLM_NIXL_SIDE_CHANNEL_HOST"],
        "remote_port": int(variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
        "tp_size": config.parallel_config.tensor_parallel_size,
    }
    return json.dumps(peer).encode()


@contextmanager
def _side_channel_port(settings: VllmSettings) -> Iterator[int]:
    """Yield the given port, or a free one that stays reserved until the engine listens on it."""
    with socket.socket() as keeper:
        # Linux lets the engine listen too, because this socket is only bound and both allow reuse.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not settings.side_channel_port:
            keeper.bind((settings.side_channel_host, 0))
        yield settings.side_channel_port or int(keeper.getsockname()[1])
