"""Extended NIXL connectors of vLLM, and calls into them. Runs in vLLM's own processes.

Theory of operation.
- Retries. vLLM computes a prompt itself as soon as one read of its KV fails. Here failed reads,
  writes and registrations of a decode engine at a prefill engine are retried after a pause.
- Times. No read or write begins after its handle's expiry, and a read that ends later does not
  count: the blocks may have another prompt by then. vLLM has no such time when it pulls. When it
  pushes, a decode engine that gave up would never get its blocks back; `release_unwritten` frees
  them when no write can arrive any more. No write begins from blocks that were released.
- `decode_first`. When it pushes, vLLM allocates blocks and sends them to the prefill engine before
  that has the prompt. Here they are reported to the front end too. The prefill engine reads the
  prefix that the decode engine has, computes the rest and writes it.
- Reads, misses and allocations reach the front end with vLLM's figures of each step.
`launch.py` names these classes. They have vLLM's names, because vLLM checks for those.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import (
    NixlPushConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from workers.llm.vllm.check import READ_NOTICE, TELLS_BLOCKS, UNTIL_MS, request_of, retries_of

_REACH_S = 1.0  # timeout of a connection to a peer
_OURS = ("is_read", "missed", "retried", "allocated")
_write_lock = threading.RLock()  # one thread begins writes, another releases blocks
log = logging.getLogger(__name__)


class KvStats(NixlKVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's figures of moves, plus: which were reads; [request, tries, why] of missed KV;
    retries; [request, blocks, valid tokens] of allocations.
    """

    is_reading = False

    def reset(self) -> None:
        super().reset()
        self.data |= {name: [] for name in _OURS}

    def record_transfer(self, res: Any) -> None:
        super().record_transfer(res)
        if res is not None:
            self.data["is_read"].append(self.is_reading)

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data[name] for name in _OURS)


class _ReadMixin:
    """A mixin for the side of a connector that moves KV; vLLM's engine calls it at each step."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)  # type: ignore[call-arg]
        self.read_retries = retries_of(vllm_config)
        self.xfer_stats = KvStats()
        self._until_ms: dict[str, int] = {}
        self._read_from: dict[str, Any] = {}  # the peer's blocks, which vLLM replaces in `meta`
        self._why: dict[str, str] = {}
        self._ended_names: set[str] = set()  # requests that ended before their KV arrived

    def start_load_kv(self, metadata: Any) -> None:
        """Begin the transfers that are due, including retries."""
        self._until_ms |= metadata.until_ms
        super().start_load_kv(metadata)  # type: ignore[misc]
        for name in self.read_retries.due(time.monotonic()):
            if name in self._recving_metadata:  # type: ignore[attr-defined]
                self._try_again(name)

    def leave(self, names: Collection[str]) -> None:
        """Stop retrying reads of requests that have ended."""
        self._ended_names |= self._recving_metadata.keys() & names  # type: ignore[attr-defined]

    def _is_late(self, name: str) -> bool:
        until_ms = self._until_ms.get(name)
        return until_ms is not None and time.time() * 1_000 >= until_ms

    def _try_again(self, name: str) -> None:
        self._read_blocks_for_req(name, self._recving_metadata[name])  # type: ignore[attr-defined]

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if req_id in self._recving_metadata:  # type: ignore[attr-defined]  # else a notice only
            meta.remote.block_ids = self._read_from.setdefault(req_id, meta.remote.block_ids)
            if self._is_late(req_id):
                self._recv_failures.add(req_id)  # type: ignore[attr-defined]
                return
        super()._read_blocks_for_req(req_id, meta)  # type: ignore[misc]

    def _nixl_handshake(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        """Connect first, with a timeout of 1 s: vLLM's handshake waits 5 s for a lost peer."""
        with socket.create_connection((host, port), timeout=_REACH_S):
            pass
        return super()._nixl_handshake(host, port, *args, **kwargs)  # type: ignore[misc]

    def _log_failure(self, failure_type: str, req_id: str | None, **details: Any) -> None:
        if req_id is not None:
            error = details.get("error")
            self._why[req_id] = failure_type + ("" if error is None else f": {error}")
        super()._log_failure(failure_type, req_id, **details)  # type: ignore[misc]

    def _pop_done_transfers(self, transfers: Any) -> tuple[set[str], set[str]]:
        """Return the transfers that are done and those that failed, without those retried."""
        reads = self._recving_transfers  # type: ignore[attr-defined]
        self.xfer_stats.is_reading = transfers is reads
        done_names, failed = super()._pop_done_transfers(transfers)  # type: ignore[misc]
        if transfers is not reads:
            return done_names, failed
        failures, failed_peers = self._recv_failures, self._failed_recv_reqs  # type: ignore[attr-defined]
        with contextlib.suppress(queue.Empty):
            while True:
                failures.add(failed_peers.get_nowait())
        failures |= failed | {name for name in done_names if self._is_late(name)}
        failures |= {name for name in self._ended_names if name in self.read_retries}
        for name in tuple(failures):
            if name in transfers or name not in self._recving_metadata:  # type: ignore[attr-defined]
                continue
            is_wanted = name not in self._ended_names and not self._is_late(name)
            if is_wanted and self.read_retries.record_failure(name, time.monotonic()):
                self.xfer_stats.data["retried"].append(1)
                failures.discard(name)
                done_names.discard(name)
            else:
                self._record_miss(name)
        settled_names = (done_names | failures) - transfers.keys()
        for name in settled_names:
            self._forget(name)
        return done_names, failures & settled_names

    def _record_miss(self, name: str) -> None:
        why = self._why.get(name, "")
        if self._is_late(name):
            why = f"its time was over; {why}" if why else "its time was over"
        missed = [name, self.read_retries.tries(name), why or "unknown"]
        self.xfer_stats.data["missed"].append(missed)

    def _forget(self, name: str) -> None:
        self.read_retries.forget(name)
        self._ended_names.discard(name)
        for table in (self._until_ms, self._read_from, self._why):
            table.pop(name, None)


class PullWorker(_ReadMixin, NixlPullConnectorWorker):  # type: ignore[misc]  # no types
    """The worker side of a connector that pulls: decode engines read."""


class PushWorker(_ReadMixin, NixlPushConnectorWorker, NixlPullConnectorWorker):  # type: ignore[misc]
    """The worker side of a connector that pushes: prefill engines write, and read prefixes."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.write_retries = retries_of(vllm_config)
        self._to_write: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._sent_registrations: dict[
            str, dict[str, Any]
        ] = {}  # allocations that were sent to prefill engines

    def start_load_kv(self, metadata: Any) -> None:
        self._sent_registrations |= metadata.push_registrations
        super().start_load_kv(metadata)
        for name, meta in metadata.reqs_to_recv.items():
            if meta.remote.block_ids:
                self._read_blocks_for_req(name, meta)
        while not self._ready_requests.empty():
            self._read_blocks_for_req(*self._ready_requests.get_nowait())
        for name in self.write_retries.due(time.monotonic()):
            if name in self._to_write:
                self._deferred_push_inbox.put((name, *self._to_write[name]))
                self._push_writer_wake.set()

    def _try_again(self, name: str) -> None:
        if name in self._sent_registrations:
            self._reg_send_inbox.put((name, self._sent_registrations[name]))
            self._push_writer_wake.set()
        else:
            super()._try_again(name)

    def _forget(self, name: str) -> None:
        super()._forget(name)
        self._sent_registrations.pop(name, None)

    def _ensure_handshake(self, *args: Any, notif_agents_only: bool = False, **sizes: Any) -> Any:
        """Complete every handshake, also for notices only: roles may change, and vLLM completes no
        connection later. Pipeline parallelism would prevent that, but no engine here uses it.
        """
        return super()._ensure_handshake(*args, **sizes)

    def _get_new_notifs(self) -> Any:
        """Drop notices of reads first: vLLM would take them for notices of writes."""
        notices = []
        with contextlib.suppress(queue.Empty):
            while True:
                notice = self._pending_completion_notifs.get_nowait()
                if not notice.startswith(READ_NOTICE.encode()):
                    notices.append(notice)
        for notice in notices:
            self._pending_completion_notifs.put(notice)
        return super()._get_new_notifs()

    def _handle_push_reg_notif(self, notif: bytes) -> None:
        """Register a decode engine's allocation; drop registrations that have expired."""
        waiting, now_ms = self._pending_d_registrations, time.time() * 1_000
        for name in [name for name in waiting if (waiting[name].get(UNTIL_MS) or now_ms) < now_ms]:
            del waiting[name]
        super()._handle_push_reg_notif(notif)

    def _do_start_push_kv(self, request_id: str, blocks: Any, registration: Any) -> None:
        with _write_lock:
            until_ms = registration.get(UNTIL_MS)
            if until_ms is not None and time.time() * 1_000 >= until_ms:
                log.warning("%s: not written: its decode engine waits no more", request_id)
            elif request_id not in self._reqs_to_process:
                log.warning("%s: not written: its blocks are given up", request_id)
            else:
                self._to_write[request_id] = blocks, registration
                super()._do_start_push_kv(request_id, blocks, registration)

    def _pop_done_transfers(self, transfers: Any) -> tuple[set[str], set[str]]:
        done_names, failed = super()._pop_done_transfers(transfers)
        if transfers is not self._sending_transfers:
            return done_names, failed
        for name in failed | self._send_failures:
            is_wanted = name in self._to_write and name in self._reqs_to_process
            if name in transfers or not is_wanted:
                continue
            if self.write_retries.record_failure(name, time.monotonic()):
                self.xfer_stats.data["retried"].append(1)
                for names in (done_names, failed, self._send_failures):
                    names.discard(name)
        return done_names, failed

    def get_transfer_results(self) -> Any:
        results = super().get_transfer_results()
        for name in results.finished_sending:
            self._to_write.pop(name, None)
            self._why.pop(name, None)
            self.write_retries.forget(name)
        return results


class _TimesMixin:
    """A mixin for the scheduler side of a connector; it sends expiry times to the worker side."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        waiting = self._reqs_need_recv.items()  # type: ignore[attr-defined]
        params = {name: request.kv_transfer_params for name, (request, *_) in waiting}
        meta = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        meta.until_ms = {
            name: kv_params[UNTIL_MS]
            for name, kv_params in params.items()
            if kv_params and UNTIL_MS in kv_params
        }
        return meta

    def stats(self) -> KvStats | None:
        """Return the figures for the front end."""
        return None


class PullScheduler(_TimesMixin, NixlPullConnectorScheduler):  # type: ignore[misc]  # no types
    """The scheduler side of a connector that pulls."""


class PushScheduler(_TimesMixin, NixlPushConnectorScheduler):  # type: ignore[misc]  # no types
    """The scheduler side of a connector that pushes."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._allocated = KvStats()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Return vLLM's matches, or what a prefill can read from the decode engine of its pair."""
        matches = super().get_num_new_matched_tokens(request, num_computed_tokens)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and params.get("remote_block_ids"):
            count = params["remote_num_tokens"] - num_computed_tokens
            if count >= max(1, self.kv_recompute_threshold):
                return count, True
        return matches

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external)
        name, params = request.request_id, request.kv_transfer_params
        if not params or not num_external:
            return
        if params.get("do_remote_decode"):
            unread = blocks.get_unhashed_block_ids_all_groups()
            self._reqs_need_recv[name] = request, self.get_exchange_clipped_blocks(unread), (), True
            # Read only once: blocks that could not be read are computed.
            request.kv_transfer_params = {**params, "remote_num_tokens": 0}
        elif (registration := self._push_pending_registrations.get(name)) is not None:
            registration[UNTIL_MS] = params.get(UNTIL_MS)
            if params.get(TELLS_BLOCKS):
                (ids,) = blocks.get_block_ids()
                valid = request.num_prompt_tokens - num_external
                self._allocated.data["allocated"].append([name, list(ids), valid])

    def stats(self) -> KvStats | None:
        stats: KvStats = self._allocated.clone_and_reset()
        return stats


class _ConnectorMixin:
    """A mixin for both connectors; it replaces the parts that vLLM's constructors create."""

    parts: tuple[type, type]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ValueError("expected decode_context_parallel_size 1")
        nixl.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        of_scheduler, of_worker = self.parts
        arguments = vllm_config, self.engine_id, kv_cache_config  # type: ignore[attr-defined]
        if role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler = of_scheduler(*arguments)
        else:
            self.connector_worker = of_worker(*arguments)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self.connector_worker.leave(finished_req_ids)
        return super().get_transfer_results(finished_req_ids)  # type: ignore[misc]

    def get_kv_connector_stats(self) -> Any:
        if self.connector_scheduler is not None:
            return self.connector_scheduler.stats()
        return super().get_kv_connector_stats()  # type: ignore[misc]

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvStats:
        return KvStats(data=data) if data is not None else KvStats()


class NixlConnector(_ConnectorMixin, nixl.NixlPullConnector):  # type: ignore[misc]  # no types
    """The pull connector: decode engines read KV from prefill engines."""

    parts = PullScheduler, PullWorker


class NixlPushConnector(_ConnectorMixin, nixl.NixlPushConnector):  # type: ignore[misc]  # no types
    """The push connector: prefill engines write KV to decode engines."""

    parts = PushScheduler, PushWorker


class KvRelease:
    """A mixin for vLLM's workers that frees KV on request, which vLLM has no call for."""

    def release_kv(self, engine_request_id: str) -> bool:
        """Free a finished request's blocks before its lease ends; return False if it has none.

        Blocks that are being written to a peer are freed when the write ends.
        """
        connector = _worker()
        with _write_lock:
            if connector._reqs_to_send.get(engine_request_id) is None:  # noqa: SLF001  # no call
                return False
            if engine_request_id in getattr(connector, "_sending_transfers", ()):
                return True
            del connector._reqs_to_send[engine_request_id]  # noqa: SLF001  # see above
            connector._reqs_to_process.discard(engine_request_id)  # noqa: SLF001  # as after a read
            # Requests in this set are reported as sent at the next step.
            connector._replicated_pcp_done_sending.add(engine_request_id)  # noqa: SLF001  # no call
        return True

    def release_unwritten(self, request_id: str) -> bool:
        """Free the blocks of an aborted request that still wait for a peer's write."""
        connector = _worker()
        waiting = connector._recving_metadata  # noqa: SLF001  # there is no call for it
        for name in [name for name in waiting if request_of(name) == request_id]:
            if any(waiting[name].local_block_ids):
                connector._recving_transfers.setdefault(name, [])  # noqa: SLF001  # received
            else:  # aborted before it had blocks
                del waiting[name]
        return True

    def unsent_kv(self, engine_request_ids: Sequence[str]) -> list[str]:
        """Return the requests among these whose blocks were not sent yet."""
        active_ids = _worker()._reqs_to_process  # noqa: SLF001  # there is no call for it
        return [name for name in engine_request_ids if name in active_ids]


def _worker() -> Any:
    return get_kv_transfer_group().connector_worker
