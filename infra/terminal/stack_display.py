"""Shows a stack: a live table in a terminal, lines elsewhere, JSON on request.

Used by `trivium up`, and by the demo while it starts.
"""

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from infra.stack.launcher import Stack
    from infra.stack.statefile import ProcessRow

_REFRESH_S = 0.2
COLOURS = {
    "ready": "green",
    "draining": "yellow",
    "restarting": "yellow",
    "failing": "red",
    "failed": "red",
    "no broker": "red",
    "stopped": "dim",
    "waiting": "dim",
    "gone": "red",
}


class PlainLines:
    """Prints one line for every change."""

    def __init__(self, stack: "Stack", console: Console | None = None) -> None:
        self._stack = stack
        self._console = console or Console(highlight=False)
        self._states: dict[str, str] = {}
        self._held_up = ""
        self._told_usual = False
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is nothing to close."""

    async def follow(self) -> None:
        """Show state changes until cancelled."""
        while True:
            self.show()
            await asyncio.sleep(_REFRESH_S)

    def ready(self) -> None:
        """Print the addresses and the model of the ready stack."""
        self.show()
        for model in self._stack.settings.models:
            self._say(
                f"model: {escape(model.served_name)}; tool parser: {model.tool_parser}, reasoning "
                f"parser: {model.reasoning_parser}"
            )
        for url in self._stack.gateway_urls:
            self._say(f"ready: {url}/v1 (OpenAI API), {url}/docs")
        self._say(f"Kafka at {self._stack.bootstrap}; logs in {self._stack.folder / 'logs'}")
        self._say("Ctrl-C drains and stops; `trivium status` and `trivium chat` in another shell")

    def stopping(self) -> None:
        """Print that the stack is draining."""
        self._say("draining; again Ctrl-C stops at once")

    def stopped(self) -> None:
        """Print that the stack has stopped."""
        self._say("stopped; nothing of it runs any more")

    def show(self) -> None:
        """Print what has changed since the last call."""
        if self._held_up != self._stack.waits_for:
            self._held_up = self._stack.waits_for
            if self._held_up:
                self._waits()
        for row in self._stack.rows():
            if self._states.get(row.name) != row.state and row.state != "waiting":
                self._states[row.name] = row.state
                self._changed(row)

    def _waits(self) -> None:
        usual = f"; a start usually takes {self._stack.usual_s:.0f} s" * (not self._told_usual)
        self._told_usual = True
        self._say(f"waiting: {escape(self._held_up)}{usual}")

    def _changed(self, row: "ProcessRow") -> None:
        pid, model = f", pid {row.pid}" * bool(row.pid), f", model {escape(row.model)}"
        self._say(f"{row.name}: {row.state}{pid}{model * bool(row.model)}")

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{self._after_s():6.1f} s[/dim]  {text}", soft_wrap=True)

    def _after_s(self) -> float:
        return time.monotonic() - self._began_s


class JsonLines(PlainLines):
    """Prints one JSON object per line for every change."""

    def ready(self) -> None:
        """Print the addresses and the model of the ready stack as a JSON line."""
        self.show()
        stack, model = self._stack, self._stack.settings.model
        self._tell(
            "ready",
            bootstrap=stack.bootstrap,
            gateways=stack.gateway_urls,
            folder=str(stack.folder),
            model=model.served_name,
            tool_parser=model.tool_parser,
            reasoning_parser=model.reasoning_parser,
            models=[model.served_name for model in stack.settings.models],
        )

    def stopping(self) -> None:
        """Print that the stack is draining, as a JSON line."""
        self._tell("draining")

    def stopped(self) -> None:
        """Print that the stack has stopped, as a JSON line."""
        self._tell("stopped")

    def _waits(self) -> None:
        self._tell("waiting", reason=self._held_up)

    def _changed(self, row: "ProcessRow") -> None:
        self._tell("process", **asdict(row))

    def _tell(self, event: str, **fields: Any) -> None:
        after_s = round(self._after_s(), 1)
        print(json.dumps({"event": event, "after_s": after_s, **fields}), flush=True)


class LiveTable(PlainLines):
    """A table that redraws itself, with a progress bar until all processes are ready."""

    def __init__(self, stack: "Stack", console: Console | None = None) -> None:
        super().__init__(stack, console)
        self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self) -> None:
        """Redraw the table with the present states."""
        self._live.update(self._picture(), refresh=True)

    def _picture(self) -> RenderableType:
        rows = self._stack.rows()
        models = ["model"] * any(row.model for row in rows)
        heads = ("pid", "state", "restarts", "address", "log")
        table = Table("process", *models, *heads, box=None)
        for row in rows:
            table.add_row(
                row.name,
                *[Text(row.model)] * len(models),
                str(row.pid or ""),
                Text(row.state, style=COLOURS.get(row.state, "")),
                str(row.restarts or ""),
                row.url,
                Text(Path(row.log_file).name, style="dim"),
            )
        if self._stack.ready:
            return table
        ready_count = sum(row.state == "ready" for row in rows)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=len(rows), completed=ready_count, width=30),
            f"{ready_count} of {len(rows)} ready, {self._after_s():.0f} s of usually "
            f"{self._stack.usual_s:.0f}",
        )
        late = ", ".join(row.name for row in rows if row.state != "ready")
        held_up = Text(f"waiting: {self._stack.waits_for or late}", "yellow")
        return Group(table, bar, held_up)
