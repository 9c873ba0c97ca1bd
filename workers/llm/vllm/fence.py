"""What vLLM's NIXL connectors lack, in vLLM's own processes: giving blocks up, never writing late.

Theory of operation. vLLM frees the blocks that it holds for a peer when their lease ends or the
peer has read them; `KvRelease` frees those that no peer will fetch. It frees the blocks that a
decode engine awaits only when they are written, so those of a prefill that never ends would be held
for ever; `release_unwritten` frees them when no write can come any more. To know when, a decode
engine names a time in its registration (`fence_writes`), after which no prefill engine begins a
write; nor does one begin from blocks whose lease has ended. Loaded by `plugin.py`.
"""

import functools
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

FENCE_VARIABLE = "TRIVIUM_PLUGIN_FENCE"
# Beside vLLM's own parameters of a request: until when a prefill engine may begin to write.
WRITE_UNTIL_MS = "write_until_ms"
_SUFFIX = 9  # "-" and eight digits, which vLLM appends to request ids
_writing = threading.RLock()  # a write is begun by one thread, blocks are given up by another
log = logging.getLogger(__name__)


def fence_writes() -> None:
    """Mend vLLM's push connector in this process, where the launcher asks for it."""
    if not os.environ.get(FENCE_VARIABLE):
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import (
        NixlPushConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
        NixlPushConnectorWorker,
    )

    register = NixlPushConnectorScheduler.update_state_after_alloc
    write = NixlPushConnectorWorker._do_start_push_kv  # noqa: SLF001  # there is no hook around it
    if getattr(write, "fenced", False):
        return

    @functools.wraps(register)
    def register_until(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        register(self, request, *args, **kwargs)
        registration = self._push_pending_registrations.get(request.request_id)
        if registration is not None and request.kv_transfer_params:
            registration[WRITE_UNTIL_MS] = request.kv_transfer_params.get(WRITE_UNTIL_MS)

    @functools.wraps(write)
    def write_in_time(self: Any, request_id: str, blocks: Any, registration: Any) -> None:
        with _writing:
            until_ms = registration.get(WRITE_UNTIL_MS)
            if until_ms is not None and time.time() * 1_000 >= until_ms:
                log.warning("%s: not written: its decode engine waits no more", request_id)
            elif request_id not in self._reqs_to_process:
                log.warning("%s: not written: its blocks are given up", request_id)
            else:
                write(self, request_id, blocks, registration)

    write_in_time.fenced = True  # type: ignore[attr-defined]  # marks the replacement
    NixlPushConnectorScheduler.update_state_after_alloc = register_until
    NixlPushConnectorWorker._do_start_push_kv = write_in_time  # noqa: SLF001  # see above


class KvRelease:
    """Mixed into vLLM's workers: gives up KV, which vLLM cannot by itself."""

    def release_kv(self, engine_request_id: str) -> bool:
        """Free a finished request's blocks now, not when its lease ends; False if none are held.

        Blocks that are being written to a peer are freed by the write's end.
        """
        connector = _connector()
        with _writing:
            if connector._reqs_to_send.get(engine_request_id) is None:  # noqa: SLF001  # no call
                return False
            if engine_request_id in getattr(connector, "_sending_transfers", ()):
                return True
            del connector._reqs_to_send[engine_request_id]  # noqa: SLF001  # see above
            connector._reqs_to_process.discard(engine_request_id)  # noqa: SLF001  # as after a read
            # What is in this set is reported as sent at the next step.
            connector._replicated_pcp_done_sending.add(engine_request_id)  # noqa: SLF001  # see above
        return True

    def release_unwritten(self, request_id: str) -> bool:
        """Free the blocks of an aborted request that still wait for a peer's write."""
        connector = _connector()
        waiting = connector._recving_metadata  # noqa: SLF001  # there is no call for it
        for name in [name for name in waiting if name[:-_SUFFIX] == request_id]:
            if any(waiting[name].local_block_ids):
                connector._recving_transfers.setdefault(name, [])  # noqa: SLF001  # received
            else:  # aborted before it had blocks
                del waiting[name]
        return True

    def unsent_kv(self, engine_request_ids: Sequence[str]) -> list[str]:
        """Which of these have blocks that no peer has yet."""
        kept = _connector()._reqs_to_process  # noqa: SLF001  # there is no call for it
        return [name for name in engine_request_ids if name in kept]


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker
