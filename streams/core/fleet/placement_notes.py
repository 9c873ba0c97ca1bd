"""What a placement has noted of its workers, to learn from what is measured later."""

from dataclasses import dataclass

Features = tuple[float, ...]


@dataclass(slots=True)
class PlacementNote:
    """The load before a request when it was placed, and what was measured of it so far."""

    at_ms: int
    max_tokens: int
    prompt_tokens: int = 0
    prefill: Features = ()  # without the tokens to compute, which the worker reports
    append: Features = ()
    decode: tuple[str, int] = ("", 0)  # the decode worker's id and epoch
    running: float = 0.0  # requests on the decode worker when this one was placed
    batch_tokens: int = 0  # likewise, tokens of context
    appended_tokens: float = 0.0  # likewise, total of `Worker.appended_tokens`
    moved_tokens: int = 0  # prompt tokens whose KV the decode worker lacks
    prefill_ms: float = 0.0
