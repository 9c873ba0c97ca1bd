"""How `trivium up` shows a stack: a live table in a terminal, lines elsewhere."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from infra.launcher import Stack

_REFRESH_S = 0.2
COLOURS = {
    "ready": "green",
    "draining": "yellow",
    "restarting": "yellow",
    "failed": "red",
    "stopped": "dim",
    "waiting": "dim",
    "gone": "red",
}


class PlainLines:
    """One line for every change."""

    def __init__(self, stack: "Stack") -> None:
        self._stack = stack
        self._console = Console(highlight=False)
        self._shown: dict[str, str] = {}
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    async def follow(self) -> None:
        """Show changes until cancelled."""
        while True:
            for row in self._stack.rows():
                if self._shown.get(row.name) != row.state and row.state != "waiting":
                    self._shown[row.name] = row.state
                    self._say(f"{row.name}: {row.state}" + (f", pid {row.pid}" * bool(row.pid)))
            await asyncio.sleep(_REFRESH_S)

    def ready(self) -> None:
        """Where to go now."""
        for url in self._stack.gateway_urls:
            self._say(f"ready: {url}/v1 (OpenAI API), {url}/docs")
        self._say(f"Kafka at {self._stack.bootstrap}; logs in {self._stack.folder / 'logs'}")
        self._say("Ctrl-C drains and stops; `trivium status` and `trivium chat` in another shell")

    def stopping(self) -> None:
        """The drain begins."""
        self._say("draining; again Ctrl-C stops at once")

    def stopped(self) -> None:
        """The end."""
        self._say("stopped; nothing of it runs any more")

    def _say(self, text: str) -> None:
        after_s = time.monotonic() - self._began_s
        self._console.print(f"[dim]{after_s:6.1f} s[/dim]  {text}", soft_wrap=True)


class LiveTable(PlainLines):
    """A table that redraws itself, with a bar until everything is ready."""

    def __init__(self, stack: "Stack") -> None:
        super().__init__(stack)
        self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    async def follow(self) -> None:
        """Redraw until cancelled."""
        while True:
            self._live.update(self._picture(), refresh=True)
            await asyncio.sleep(_REFRESH_S)

    def _picture(self) -> RenderableType:
        rows = self._stack.rows()
        table = Table("process", "pid", "state", "restarts", "address", "log", box=None)
        for row in rows:
            table.add_row(
                row.name,
                str(row.pid or ""),
                Text(row.state, style=COLOURS.get(row.state, "")),
                str(row.restarts or ""),
                row.url,
                Text(Path(row.log_file).name, style="dim"),
            )
        if self._stack.ready:
            return table
        done = sum(row.state == "ready" for row in rows)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=len(rows), completed=done, width=30),
            f"{done} of {len(rows)} ready, {time.monotonic() - self._began_s:.0f} s",
        )
        return Group(table, bar)
