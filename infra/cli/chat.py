"""Implements `trivium chat`: a conversation in the terminal, over the gateway's OpenAI API."""

import json
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from infra.cli.options import ApiKey, AsJson, Config, gateway_url
from infra.terminal.citations import citation_lines
from infra.terminal.output import print_json
from infra.terminal.printable import printable
from schemas.errors import ConfigError, NotReady, from_wire
from schemas.records import WireError


def chat(
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Ask this question, then end.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Address of the gateway.", show_default="the one that runs here"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    collection: Annotated[
        str | None,
        typer.Option("--collection", "-c", help="Search these documents for each answer."),
    ] = None,
    probes: Annotated[
        bool, typer.Option("--probes", help="Search again while an answer is generated.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Name of a model or an adapter.", show_default="the first model"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="Temperature; 0: always the likeliest token.")
    ] = 0.7,
    api_key: ApiKey = "none",
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Talk to the model.

    Each answer says where it was computed. An empty line ends the conversation.

    Examples: `trivium chat`, `trivium chat -m "Why a log?" --max-tokens 40`,
    `trivium chat -m "Why a log?" --json | jq -r .text`, `trivium chat --collection docs`,
    `trivium chat --collection docs --probes`
    """
    import httpx

    if as_json and message is None:
        raise ConfigError("--json: expected a question with -m; a conversation is for people")
    if probes and collection is None:
        raise ConfigError("--probes: needs --collection, the documents to look in")
    base = url or gateway_url(config)
    headers = {"Authorization": f"Bearer {api_key}", "X-Session-Id": f"chat-{uuid.uuid4().hex}"}
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if probes:
        options["retrieval"] = {"collection": collection, "probes": True}
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=None) as client:
            answer = client.get("/v1/models")
            check(answer)
            name = model or answer.json()["data"][0]["id"]
            called = name + (f"@{collection}" if collection else "")
            if message is None:
                print(f"{called} at {base}; an empty line or Ctrl-D ends")
            for text in _inputs(message):
                messages.append({"role": "user", "content": text})
                body = {"model": called, "messages": messages, "stream": True, **options}
                turn = _turn(client, body, show=not as_json)
                messages.append({"role": "assistant", "content": turn["text"]})
                if as_json:
                    print_json(turn)
                else:
                    _print_where(turn)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        raise ConfigError(
            f"--url: expected one such as http://127.0.0.1:8000, found {base!r}"
        ) from None
    except httpx.TransportError as error:
        raise NotReady(f"no gateway at {base}: {error}; start one with `trivium up`") from error


def _inputs(message: str | None) -> Iterator[str]:
    if message is not None:
        yield message
        return
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            print()
            return
        if not text:
            return
        yield text


def _turn(client: Any, body: dict[str, Any], *, show: bool) -> dict[str, Any]:
    """Stream one answer, shown in the terminal if `show`; return it with its times."""
    began_s, first_s, tokens = time.monotonic(), 0.0, 0
    content, reasoning = "", ""
    placement: dict[str, Any] = {}
    options = {"stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json={**body, **options}) as answer:
        if answer.is_error:
            answer.read()
        check(answer)
        for event in _events(answer.iter_lines()):
            placement = event.get("trivium") or placement
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event.get("choices", ()):
                thought = choice["delta"].get("reasoning") or ""
                piece = choice["delta"].get("content") or ""
                if (thought or piece) and not first_s:
                    first_s = time.monotonic() - began_s
                if show:
                    _print_pieces(thought, piece, ends_reasoning=not content and bool(reasoning))
                reasoning, content = reasoning + thought, content + piece
    return {
        "text": content,
        **({"reasoning": reasoning} if reasoning else {}),
        "completion_tokens": tokens,
        "first_token_ms": round(first_s * 1000, 1),
        "total_ms": round((time.monotonic() - began_s) * 1000, 1),
        **placement,
    }


def _print_pieces(thought: str, piece: str, *, ends_reasoning: bool) -> None:
    """Print what is new of an answer: its reasoning to standard error, and its text."""
    if thought:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        console.print(printable(thought, "\n\t"), style="dim", markup=False, end="", soft_wrap=True)
        ends_reasoning = True
    if piece:
        if ends_reasoning:
            print(file=sys.stderr)
        print(printable(piece, "\n\t"), end="", flush=True)


def _print_where(turn: dict[str, Any]) -> None:
    """Print a line about an answer's placement."""
    from rich.console import Console

    timing = (
        f"{turn['completion_tokens']} tokens in {turn['total_ms'] / 1000:.2f} s, "
        f"first after {turn['first_token_ms']:.0f} ms"
    )
    console = Console(stderr=True, highlight=False)
    if probes := turn.get("probes"):
        timing += f"; {probes} probes, for which it stood still {turn['stalled_ms']:.0f} ms"
    console.print(f"\n[dim]{_where(turn)}; {timing}[/dim]", soft_wrap=True)
    for line in citation_lines(turn.get("retrieval", {})):
        console.print(line, style="dim", markup=False, soft_wrap=True)


def _where(placement: dict[str, Any]) -> str:
    if cache := placement.get("cache"):
        return f"kept answer, {cache['age_s']:.0f} s old"
    workers = [placement.get("prefill_worker"), placement.get("decode_worker")]
    path = " -> ".join(dict.fromkeys(worker for worker in workers if worker))
    moved = placement.get("kv_bytes", 0)
    return f"{placement.get('mode', 'unknown')}: {path}" + (f", {moved:,} B of KV" if moved else "")


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix("data: ")
        if line.startswith("data: ") and data != "[DONE]":
            event = json.loads(data)
            if error := event.get("error"):
                raise from_wire(
                    WireError(code=str(error.get("code")), message=str(error.get("message")))
                )
            yield event


def check(answer: Any) -> None:
    """Raise the error that a gateway's answer reports, if it does."""
    if answer.is_error:
        try:
            error = answer.json()["error"]
        except (ValueError, KeyError, TypeError):
            error = {"code": "", "message": answer.text[:500]}
        message = f"{answer.status_code}: {error.get('message')}"
        raise from_wire(WireError(code=str(error.get("code")), message=message))
