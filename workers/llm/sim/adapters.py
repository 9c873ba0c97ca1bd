"""The LoRA adapters of the simulated engine: a bounded number is loaded, and a load takes time.

An adapter has no weights here: its name changes the answers (`run.py`). Pure: time is an argument.
"""


class SimAdapters:
    """At most `loaded_max` adapters; a further one takes the place of the least recently used."""

    def __init__(self, loaded_max: int, load_s: float) -> None:
        self._loaded_max, self._load_s = loaded_max, load_s
        self._loaded_s: dict[str, float] = {}  # when each is loaded; the least recently used first

    def names(self, now_s: float) -> tuple[str, ...]:
        """Return the adapters that are loaded, in order of their names."""
        return tuple(sorted(name for name, at_s in self._loaded_s.items() if at_s <= now_s))

    def loaded_s(self, name: str, now_s: float) -> float:
        """Use an adapter; return when it is loaded, at the earliest `now_s`. "" is no adapter."""
        if not name:
            return now_s
        at_s = self._loaded_s.pop(name, now_s + self._load_s)
        if len(self._loaded_s) >= self._loaded_max:
            del self._loaded_s[next(iter(self._loaded_s))]
        self._loaded_s[name] = at_s
        return max(now_s, at_s)
