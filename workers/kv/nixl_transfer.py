"""KV transfer over NIXL: one-sided READs from a peer's arena, over UCX.

The agent runs without NIXL's progress thread, which would spin on a core when idle. Progress is
made by `poll`, on both sides: data moves without the producer's help where the network allows it,
but wiring up and the notice need its polls, so the engine polls often while handles or fetches are
outstanding. The only file that imports nixl, and only when an agent is made. Meets
`workers/kv/transfer.py`.
"""

import importlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.errors import ConfigError
from workers.kv.transfer import Card, Fetch, FetchEnd, Polled, checked_card, merged_runs

_log = logging.getLogger(__name__)
_MEMORY = "DRAM"


@dataclass(slots=True)
class _Flight:
    """A posted READ. NIXL may write to the local blocks until it is done, however late."""

    fetch: Fetch
    transfer: Any
    ends_at_s: float
    reported: bool = False


class NixlTransfer:
    """One agent and one registered arena."""

    def __init__(self, engine_id: str, arena: "np.ndarray[Any, Any]") -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # both are read at the first import
        os.environ.setdefault("UCX_LOG_FILE", "stderr")
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise ConfigError(f"worker.transfer: nixl needs the package nixl: {error}") from error
        self._engine_id, self._arena = engine_id, arena
        self._block_bytes = int(arena[0].nbytes)
        self._base = int(arena.ctypes.data)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = api.nixl_agent(engine_id, config)
        region = [(self._base, int(arena.nbytes), 0, "")]
        self._registered: Any = self._agent.register_memory(region, _MEMORY)
        self._metadata = Card(
            self._base, self._block_bytes, len(arena), engine_id, self._agent.get_agent_metadata()
        ).pack()
        self._peers: dict[str, tuple[str, int]] = {}  # agent name and base address
        self._flights: dict[int, _Flight] = {}
        self._ended: list[FetchEnd] = []

    def metadata(self) -> bytes:
        return self._metadata

    def fetch(self, fetch: Fetch) -> None:
        try:
            name, base = self._peer(fetch)
            if not fetch.remote_blocks:
                self._agent.send_notif(name, fetch.notice)
                self._ended.append(FetchEnd(fetch.tag))
                return
            transfer = self._prepared(fetch, name, base)
            state = self._agent.transfer(transfer)
        except Exception as error:  # the bindings raise their own kinds, and say nothing of which
            self._lost(fetch, str(error))
            return
        flight = _Flight(fetch, transfer, time.monotonic() + fetch.timeout_s)
        self._flights[fetch.tag] = flight
        self._progress(flight, state)

    def poll(self) -> Polled:
        for flight in list(self._flights.values()):
            try:
                state = self._agent.check_xfer_state(flight.transfer)
            except Exception as error:  # as above
                _log.debug("fetch %s: %s", flight.fetch.tag, error)
                state = "ERR"
            self._progress(flight, state)
        arrived = self._agent.get_new_notifs()
        polled = Polled(self._ended, [notice for notices in arrived.values() for notice in notices])
        self._ended = []
        return polled

    def forget(self, engine_id: str) -> None:
        peer = self._peers.pop(engine_id, None)
        if peer is None:
            return
        try:
            self._agent.remove_remote_agent(peer[0])
        except Exception as error:  # gone already
            _log.debug("peer %s: %s", engine_id, error)

    def close(self) -> None:
        if self._agent is None:
            return
        for flight in self._flights.values():
            self._released(flight)
        self._flights.clear()
        for engine_id in list(self._peers):
            self.forget(engine_id)
        self._agent.deregister_memory(self._registered)
        self._agent = None

    def _peer(self, fetch: Fetch) -> tuple[str, int]:
        card = checked_card(fetch, self._block_bytes)
        peer = self._peers.get(fetch.engine_id)
        if peer is None:
            name = self._agent.add_remote_agent(card.agent)
            name = name.decode() if isinstance(name, bytes) else str(name)
            peer = self._peers[fetch.engine_id] = (name, card.base)
        return peer

    def _prepared(self, fetch: Fetch, name: str, base: int) -> Any:
        size = self._block_bytes
        runs = list(merged_runs(fetch.remote_blocks, fetch.local_blocks))
        theirs = [(base + remote * size, count * size, 0) for remote, _, count in runs]
        ours = [(self._base + local * size, count * size, 0) for _, local, count in runs]
        local_descs = self._agent.get_xfer_descs(ours, _MEMORY)
        remote_descs = self._agent.get_xfer_descs(theirs, _MEMORY)
        return self._agent.initialize_xfer("READ", local_descs, remote_descs, name, fetch.notice)

    def _progress(self, flight: _Flight, state: str) -> None:
        tag = flight.fetch.tag
        if state == "PROC":
            if not flight.reported and time.monotonic() >= flight.ends_at_s:
                flight.reported = True
                late = f"not read within {flight.fetch.timeout_s} s"
                self._ended.append(FetchEnd(tag, late, settled=False))
            return
        del self._flights[tag]
        self._released(flight)
        if flight.reported:
            self._ended.append(FetchEnd(tag, "late"))
        elif state == "DONE":
            self._ended.append(FetchEnd(tag))
        else:
            self._lost(flight.fetch, "the read failed")

    def _lost(self, fetch: Fetch, error: str) -> None:
        """The peer may be gone: drop its connection, so that the next fetch makes a new one."""
        self.forget(fetch.engine_id)
        self._ended.append(FetchEnd(fetch.tag, f"engine {fetch.engine_id}: {error}"))

    def _released(self, flight: _Flight) -> None:
        try:
            self._agent.release_xfer_handle(flight.transfer)
        except Exception as error:  # still active; the agent's own end frees it
            _log.debug("fetch %s: %s", flight.fetch.tag, error)
