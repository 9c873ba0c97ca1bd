"""Checks of jobs and KV handles before vLLM receives them. Pure; does not import vLLM.

vLLM checks sampling parameters itself. It does not check KV handles: a missing field kills the
engine, a wrong one lets the request hang, a late or repeated one gives other tokens without an
error. So vLLM receives a handle only if it is exactly as a peer's engine returned it.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Annotated, Any
from zlib import crc32

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import (
    InvalidRequest,
    KvUnavailable,
    PromptTooLong,
    StaleEpoch,
    TriviumError,
)
from schemas.records import KvHandle, Orchestration
from schemas.rules.tokens import pack_tokens
from workers.kv.retries import Retries
from workers.llm.engine import Job

_USED_MAX = 16_384  # handles remembered as used; far more than can be valid at once
# Added to vLLM's parameters: a keyed hash of the KV's tokens and adapter, and its key, which is
# random for each handle, so that other tokens with the same mark cannot be searched for.
PREFIX_KEY, PREFIX_MARK = "prefix_key", "prefix_mark"

# Further parameters of a request, and settings of the connector (`connectors.py`): until when KV
# may be read or written, by the clock of its host; whether to report allocated blocks.
UNTIL_MS, TELLS_BLOCKS = "until_ms", "tells_blocks"
TRIES_MAX, RETRY_MS = "transfer_tries_max", "transfer_retry_ms"
READ_NOTICE = "read."  # prefix of the request id in the notice to a peer whose blocks were read
_SUFFIX_CHARS = 9  # "-" and eight digits

Ascii = Annotated[str, Field(pattern=r"^[\x00-\x7f]*$")]  # other texts are compared exactly
Ranks = Annotated[int, Field(ge=1, le=4_096)]  # of a kind of parallelism; vLLM has state for each
BlockId = Annotated[int, Field(ge=0, lt=2**31)]


def retries_of(vllm_config: Any) -> Retries[str]:
    """Return the retries of one kind of move, by the connector's settings."""
    extra = vllm_config.kv_transfer_config.get_from_extra_config
    return Retries(extra(TRIES_MAX, 1), extra(RETRY_MS, 0) / 1_000)


def request_of(name: str) -> str:
    """Return the job id of a request name in vLLM, which appends a number to ids."""
    return name[:-_SUFFIX_CHARS]


class PeerParams(BaseModel):
    """The address of a peer's engine. Other fields of the peer are dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    remote_host: Annotated[Ascii, Field(min_length=1)]
    remote_port: Annotated[int, Field(gt=0, lt=65_536)]
    tp_size: Ranks


class TargetParams(BaseModel):
    """Parameters of a decode engine's handle for allocated blocks."""

    model_config = ConfigDict(strict=True, extra="ignore")

    prefix_key: Ascii
    prefix_mark: Ascii


class KvParams(PeerParams):
    """vLLM's `kv_transfer_params` of a handle."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_block_ids: Annotated[
        list[Annotated[list[BlockId], Field(min_length=1)]], Field(min_length=1)
    ]
    remote_engine_id: str
    remote_request_id: str
    dcp_size: Ranks
    pp_size: Ranks
    remote_num_tokens: int
    transfer_mode: str
    prefix_key: Ascii
    prefix_mark: Ascii


class KeptParams(KvParams):
    """`kv_transfer_params` of KV that decode keeps for the conversation's next turn."""

    remote_blocks_expiry_time: float


def job_problem(job: Job, *, max_model_len: int, vocab_size: int) -> TriviumError | None:
    """Return why the engine must not receive this job; None if it may."""
    name, tokens = job.request_id, job.prompt_tokens
    if not name:
        return InvalidRequest("expected a request id, found none")
    if not tokens:
        return InvalidRequest(f"{name}: expected a prompt of at least one token")
    if len(tokens) >= max_model_len:
        return PromptTooLong(f"{name}: expected under {max_model_len} tokens, found {len(tokens)}")
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        token_id = low if low < 0 else high
        return InvalidRequest(f"{name}: expected tokens below {vocab_size}, found {token_id}")
    if job.sampling.max_tokens < 1:
        return InvalidRequest(f"{name}: expected max_tokens of at least 1")
    if job.sampling.min_tokens > job.sampling.max_tokens:
        return InvalidRequest(
            f"{name}: expected min_tokens of at most max_tokens, {job.sampling.max_tokens}, "
            f"found {job.sampling.min_tokens}"
        )
    return None


def rest_of(job: Job) -> Job:
    """Return the job for vLLM: the answer's prior tokens count as prompt, not as answer.

    The random numbers of the prior tokens cannot be repeated. The seed of the rest is derived from
    the job's seed and the number of prior tokens, so every continuation there samples the same.
    """
    if not job.prior_tokens:
        return job
    sampling, seed = job.sampling, job.sampling.seed
    rest = replace(
        sampling,
        max_tokens=sampling.max_tokens - job.prior_tokens,
        min_tokens=max(0, sampling.min_tokens - job.prior_tokens),
        seed=None if seed is None else crc32(f"{seed}.{job.prior_tokens}".encode()),
    )
    return replace(job, sampling=rest)


class HandleGate:
    """Accepts each handle once, if it is intact, not expired, and of its worker's latest epoch."""

    def __init__(self, *, engine_id: str, block_size: int, mode: str = "pull") -> None:
        self._engine_id, self._block_size, self._mode = engine_id, block_size, mode
        self._used: dict[tuple[str, str], None] = {}
        self._epochs: dict[str, int] = {}

    def observe_epoch(self, worker_id: str, epoch: int) -> None:
        """Note a worker's latest epoch; KV of earlier ones is refused."""
        self._epochs[worker_id] = max(epoch, self._epochs.get(worker_id, 0))

    def use(
        self, kv: KvHandle, prompt: Sequence[int], now_ms: int, adapter: str = ""
    ) -> dict[str, Any]:
        """Mark a prefilled prompt's handle as used, and return vLLM's parameters.

        Raises KvUnavailable or StaleEpoch if it must not be used.
        """
        params = check_params(kv, self._mode)
        self._check_size(kv, len(prompt), params)
        _check_mark(kv, prompt, params, adapter)
        self._claim(kv, now_ms)
        return params

    def use_kept(
        self, kv: KvHandle, prompt: Sequence[int], now_ms: int, adapter: str = ""
    ) -> dict[str, Any]:
        """Do as `use`, for a decode engine's KV of a conversation that the prompt continues."""
        params = check_params(kv, self._mode, is_kept=True)
        if kv.tokens >= len(prompt):
            raise KvUnavailable(
                f"{kv.engine_request_id}: expected KV of fewer than {len(prompt)} tokens, "
                f"found {kv.tokens}"
            )
        self._check_size(kv, kv.tokens, params)
        _check_mark(kv, prompt[: kv.tokens], params, adapter)
        self._claim(kv, now_ms)
        return params

    def promise(
        self, kv: KvHandle, prompt_tokens: int, peer: bytes | None, now_ms: int
    ) -> dict[str, Any]:
        """Do as `use`, for KV that a prefill engine will write; `peer` is its `nixl_metadata`."""
        name = kv.engine_request_id
        if (kv.tokens, kv.block_size) != (prompt_tokens, self._block_size):
            raise KvUnavailable(
                f"{name}: expected {prompt_tokens} tokens in blocks of {self._block_size}, "
                f"found {kv.tokens} in blocks of {kv.block_size}"
            )
        if peer is None:
            raise KvUnavailable(f"{name}: expected to know engine {kv.engine_id} from the fleet")
        params = _read(PeerParams, name, peer)
        self._claim(kv, now_ms)
        return {
            **params,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": kv.engine_id,
            "remote_request_id": name,
            "remote_num_tokens": kv.tokens,
        }

    def check_target(self, job: Job, now_ms: int) -> None:
        """Check that the handle of a job's decode engine is valid and, for `decode_first`, has
        blocks for the prompt. Raises KvUnavailable or StaleEpoch.
        """
        target = job.kv_target
        assert target is not None
        self._check_life(target, now_ms)
        if job.orchestration is not Orchestration.DECODE_FIRST:
            return
        tokens, size, block_count = len(job.prompt_tokens), self._block_size, len(target.block_ids)
        if (
            (target.block_size, block_count) != (size, -(-tokens // size))
            or not 0 <= target.tokens < tokens
            or target.tokens % size
        ):
            raise KvUnavailable(
                f"{target.engine_request_id}: expected room for {tokens} tokens in blocks of "
                f"{size}, found {block_count} of {target.block_size}, of which {target.tokens} "
                "tokens are valid"
            )

    def use_target(
        self,
        kv: KvHandle,
        prompt: Sequence[int],
        peer: bytes | None,
        now_ms: int,
        adapter: str = "",
    ) -> dict[str, Any]:
        """Mark a handle that `check_target` has checked as used; return vLLM's parameters to read
        the decode engine's prefix. Raises KvUnavailable or StaleEpoch.
        """
        name = kv.engine_request_id
        if peer is None:
            raise KvUnavailable(f"{name}: expected to know engine {kv.engine_id} from the fleet")
        params = _read(PeerParams, name, peer)
        _check_mark(kv, prompt[: kv.tokens], _read(TargetParams, name, kv.params), adapter)
        self._claim(kv, now_ms)
        return {
            **params,
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_engine_id": kv.engine_id,
            "remote_request_id": READ_NOTICE + name,
            "remote_num_tokens": kv.tokens,
            "remote_block_ids": [list(kv.block_ids[: kv.tokens // self._block_size])],
        }

    def _check_size(self, kv: KvHandle, tokens: int, params: dict[str, Any]) -> None:
        name = kv.engine_request_id
        if kv.block_size != self._block_size:
            raise KvUnavailable(
                f"{name}: expected blocks of {self._block_size} tokens, found {kv.block_size}"
            )
        blocks, group_sizes = (
            -(-tokens // self._block_size),
            [*map(len, params["remote_block_ids"])],
        )
        if kv.tokens != tokens or group_sizes != [blocks]:
            raise KvUnavailable(
                f"{name}: expected {tokens} tokens in one group of {blocks} blocks, "
                f"found {kv.tokens} in groups of {group_sizes!r:.200}"
            )

    def _check_life(self, kv: KvHandle, now_ms: int) -> None:
        name = kv.engine_request_id
        if kv.engine_id == self._engine_id:
            raise KvUnavailable(f"{name}: expected another engine's KV, found this one's")
        if now_ms >= kv.expires_at_ms:
            raise KvUnavailable(f"{name}: expired {now_ms - kv.expires_at_ms} ms ago")
        latest = self._epochs.get(kv.worker_id, 0)
        if kv.worker_epoch < latest:
            raise StaleEpoch(
                f"{kv.worker_id}: expected epoch {latest}, found KV of epoch {kv.worker_epoch}"
            )

    def _claim(self, kv: KvHandle, now_ms: int) -> None:
        self._check_life(kv, now_ms)
        key = (kv.engine_id, kv.engine_request_id)
        if key in self._used:
            raise KvUnavailable(f"{kv.engine_request_id}: already used once")
        self.observe_epoch(kv.worker_id, kv.worker_epoch)
        self._used[key] = None
        if len(self._used) > _USED_MAX:
            del self._used[next(iter(self._used))]


def prefix_mark(tokens: Sequence[int], key: str, adapter: str = "") -> str:
    """Return the keyed BLAKE2b of the tokens and of the adapter that computed their KV; a reader of
    KV has no other check of them.
    """
    data = pack_tokens(tokens) + (blake2b(adapter.encode()).digest() if adapter else b"")
    return blake2b(data, key=key.encode()[:64], digest_size=32).hexdigest()


def add_mark(params: dict[str, Any], tokens: Sequence[int], adapter: str = "") -> dict[str, Any]:
    """Return the parameters with a mark of the KV's tokens and its key."""
    key = secrets.token_hex(16)
    return {**params, PREFIX_KEY: key, PREFIX_MARK: prefix_mark(tokens, key, adapter)}


def _check_mark(kv: KvHandle, tokens: Sequence[int], params: dict[str, Any], adapter: str) -> None:
    """Remove the mark from the parameters; raises KvUnavailable if it is of other tokens, or of
    another adapter.
    """
    key, mark = params.pop(PREFIX_KEY), params.pop(PREFIX_MARK)
    if mark != prefix_mark(tokens, key, adapter):
        raise KvUnavailable(f"{kv.engine_request_id}: expected KV of the prompt's own tokens")


def check_params(kv: KvHandle, mode: str = "pull", *, is_kept: bool = False) -> dict[str, Any]:
    """Return the handle's `kv_transfer_params` with checked types and no other fields.

    The KV is a prompt's that prefill computed, or with `is_kept` a conversation's that decode
    keeps. Raises KvUnavailable.
    """
    name = kv.engine_request_id
    params = _read(KeptParams if is_kept else KvParams, name, kv.params)
    for field, expected in {
        "do_remote_prefill": not is_kept,
        "do_remote_decode": is_kept,
        "transfer_mode": mode,
        "remote_engine_id": kv.engine_id,
        "remote_request_id": kv.engine_request_id,
        "remote_num_tokens": kv.tokens,
    }.items():
        if params[field] != expected:
            raise KvUnavailable(f"{name}: expected {field} {expected!r}, found {params[field]!r}")
    return params


def _read(kind: type[BaseModel], name: str, data: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object with checked types and ranges; raises KvUnavailable."""
    try:
        return kind.model_validate_json(data).model_dump()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "params"
        raise KvUnavailable(
            f"{name}: {field}: {first['msg']}, found {first['input']!r:.200}"
        ) from None
