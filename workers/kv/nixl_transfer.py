"""KV transfer over NIXL: one-sided READs and WRITEs between arenas, over UCX. The only file that
imports nixl, and only when an agent is made. Implements `KvTransfer` of `workers/kv/transfer.py`.

Theory of operation. The agent runs without NIXL's progress thread, which would spin on a core when
idle. `poll` makes progress, on both sides. Data moves without the peer's polls where the network
allows it, but connection setup and the notice need them. So the engine polls often while peers may
need it.

Every arena is one prepared descriptor list. It has one row for each piece of a block, so its size
does not depend on the number of blocks. A move names elements of two such lists in ascending order,
and NIXL merges those that are neighbours on both sides. A peer's list is prepared at its first use
and dropped with the peer. An agent's very first connection costs 5 to 20 ms, so each agent connects
to a throwaway one before it serves; then a new peer costs about 0.5 ms. An unreachable peer costs 5
to 15 ms, so it is tried again only after a pause, which doubles up to a bound.
"""

import importlib
import logging
import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from schemas.errors import ConfigError
from workers.kv.layout import Card, card_of, elements, in_order, pieces_of
from workers.kv.network import LOOPBACK, ucx_variables, variables
from workers.kv.transfer import BlockMove, MoveEnd, PollResult, checked_card

_log = logging.getLogger(__name__)
_MEMORY = "DRAM"
_ABSENT_MAX = 1_024  # unreachable peers that are remembered; beyond it the oldest is forgotten


@dataclass(slots=True)
class _Flight:
    """A posted move. NIXL may access the local blocks until it is done, even after a timeout."""

    move: BlockMove
    transfer: Any
    ends_at_s: float
    reported: bool = False


@dataclass(slots=True)
class _Peer:
    """A connected agent, and the prepared lists of its arena, by pieces per block."""

    agent: str
    prepared: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Absence:
    """A peer that could not be reached, and the pause before the next try."""

    pause_s: float
    until_s: float


class NixlTransfer:
    """One agent and one registered arena, of shape (ranks, blocks, words of a rank's share)."""

    def __init__(
        self,
        engine_id: str,
        regions: "np.ndarray[Any, Any]",
        *,
        reconnect_s: float = 0.05,
        reconnect_max_s: float = 5.0,
        devices: str = LOOPBACK,
    ) -> None:
        self._devices = devices
        self._reconnect_s, self._reconnect_max_s = reconnect_s, reconnect_max_s
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # both are read at the first import
        os.environ.setdefault("UCX_LOG_FILE", "stderr")
        try:
            self._api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise ConfigError(f"worker.transfer: nixl needs the package nixl: {error}") from error
        self._agent: Any = self._new_agent(engine_id)
        self._card = card_of(regions, engine_id, b"")
        rows = [(address, int(regions[0].nbytes), 0, "") for address in self._card.regions]
        self._registered: Any = self._agent.register_memory(rows, _MEMORY)
        self._metadata = replace(self._card, agent=self._agent.get_agent_metadata()).pack()
        self._prepared: dict[int, Any] = {}  # lists of the own arena, by pieces per block
        self._peers: dict[str, _Peer] = {}
        self._absent: dict[str, _Absence] = {}
        self._flights: dict[int, _Flight] = {}
        self._ends: list[MoveEnd] = []
        self._warm_up()

    def metadata(self) -> bytes:
        return self._metadata

    def move(self, move: BlockMove) -> None:
        try:
            card = checked_card(move, self._card)
            peer = self._peer(move.engine_id, card)
            if not move.remote_blocks:
                self._agent.send_notif(peer.agent, move.notice)
                self._ends.append(MoveEnd(move.tag))
                return
            transfer = self._make_transfer(move, peer, card)
            state = self._agent.transfer(transfer)
        except Exception as error:  # the bindings raise undocumented exceptions of their own
            self._fail_move(move, str(error))
            return
        flight = _Flight(move, transfer, time.monotonic() + move.timeout_s)
        self._flights[move.tag] = flight
        self._progress(flight, state)

    def poll(self) -> PollResult:
        for flight in list(self._flights.values()):
            try:
                state = self._agent.check_xfer_state(flight.transfer)
            except Exception as error:  # as in `move`
                _log.debug("move %s: %s", flight.move.tag, error)
                state = "ERR"
            self._progress(flight, state)
        arrived = self._agent.get_new_notifs().values()
        polled = PollResult(
            self._ends, [notice for notices in arrived for notice in notices if notice]
        )
        self._ends = []
        return polled

    def forget(self, engine_id: str) -> None:
        self._absent.pop(engine_id, None)
        self._disconnect(engine_id)

    def close(self) -> None:
        if self._agent is None:
            return
        for flight in self._flights.values():
            self._release(flight)
        self._flights.clear()
        for engine_id in list(self._peers):
            self._disconnect(engine_id)
        for prepared in self._prepared.values():
            self._agent.release_dlist_handle(prepared)
        self._agent.deregister_memory(self._registered)
        self._agent = None

    def _disconnect(self, engine_id: str) -> None:
        peer = self._peers.pop(engine_id, None)
        if peer is None:
            return
        try:
            for prepared in peer.prepared.values():
                self._agent.release_dlist_handle(prepared)
            self._agent.remove_remote_agent(peer.agent)
        except Exception as error:  # the peer is already gone
            _log.debug("peer %s: %s", engine_id, error)

    def _new_agent(self, name: str) -> Any:
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        with variables(ucx_variables(self._devices)):
            return self._api.nixl_agent(name, config)

    def _warm_up(self) -> None:
        """Connect to a throwaway agent, so that UCX does the setup of its first connection."""
        name = f"{self._card.name}/warm-up"
        peer = self._new_agent(name)
        self._agent.add_remote_agent(peer.get_agent_metadata())
        self._agent.send_notif(name, b"")
        for _ in range(10):
            peer.get_new_notifs()
            self._agent.get_new_notifs()
        self._agent.remove_remote_agent(name)

    def _peer(self, engine_id: str, card: Card) -> _Peer:
        peer = self._peers.get(engine_id)
        if peer is None:
            peer = self._peers[engine_id] = self._connect(engine_id, card)
        return peer

    def _connect(self, engine_id: str, card: Card) -> _Peer:
        absence, now_s = self._absent.pop(engine_id, None), time.monotonic()
        if absence is not None and now_s < absence.until_s:
            self._absent[engine_id] = absence
            raise ConnectionError(f"not reached; tried again in {absence.until_s - now_s:.3f} s")
        try:
            name = self._agent.add_remote_agent(card.agent)
        except Exception:  # as in `move`
            pause_s = absence.pause_s * 2 if absence is not None else self._reconnect_s
            pause_s = min(pause_s, self._reconnect_max_s)
            self._absent[engine_id] = _Absence(pause_s, time.monotonic() + pause_s)
            if len(self._absent) > _ABSENT_MAX:
                del self._absent[next(iter(self._absent))]
            raise
        return _Peer(name.decode() if isinstance(name, bytes) else str(name))

    def _make_transfer(self, move: BlockMove, peer: _Peer, card: Card) -> Any:
        pieces = pieces_of(self._card, card)
        if pieces not in self._prepared:
            self._prepared[pieces] = self._list("NIXL_INIT_AGENT", self._card, pieces)
        if pieces not in peer.prepared:
            peer.prepared[pieces] = self._list(peer.agent, card, pieces)
        local, remote = in_order(move.local_blocks, move.remote_blocks)
        return self._agent.make_prepped_xfer(
            move.direction.value,
            self._prepared[pieces],
            elements(local, pieces, self._card.block_count),
            peer.prepared[pieces],
            elements(remote, pieces, card.block_count),
            move.notice,
        )

    def _list(self, agent: str, card: Card, pieces: int) -> Any:
        """Prepare a list of all pieces of all blocks; in NIXL's compressed form, a row each."""
        rows = [
            (row.address, row.length, 0, row.stride, card.block_count) for row in card.rows(pieces)
        ]
        return self._agent.prep_xfer_dlist(agent, np.array(rows, np.uint64), _MEMORY)

    def _progress(self, flight: _Flight, state: str) -> None:
        tag = flight.move.tag
        if state == "PROC":
            if not flight.reported and time.monotonic() >= flight.ends_at_s:
                flight.reported = True
                late = f"not done within {flight.move.timeout_s} s"
                self._ends.append(MoveEnd(tag, late, settled=False))
            return
        del self._flights[tag]
        self._release(flight)
        if state == "DONE":
            self._ends.append(MoveEnd(tag))
        else:
            self._fail_move(flight.move, f"the {flight.move.direction.value} failed")

    def _fail_move(self, move: BlockMove, error: str) -> None:
        """Report a failed move. Drop the connection: the peer may be gone, and the next move then
        connects again."""
        self._disconnect(move.engine_id)
        self._ends.append(MoveEnd(move.tag, f"engine {move.engine_id}: {error}"))

    def _release(self, flight: _Flight) -> None:
        try:
            self._agent.release_xfer_handle(flight.transfer)
        except Exception as error:  # still active; freed together with the agent
            _log.debug("move %s: %s", flight.move.tag, error)
