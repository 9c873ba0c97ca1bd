"""What a simulated engine that is told what to say says in the turns of an agent's loop, and what
the agents in Python have in common."""

import json

from pydantic import BaseModel

MODEL, TURNS = "sim", 5
ALL = [str(turn) for turn in range(TURNS)]  # paths of the files that a loop reads
paths: list[str] = []  # of the files that were read
LAST = f"Done after {TURNS}."
OPEN, CLOSE = "⟦", "⟧"  # between them: what the engine answers


def answer_script(text: str, thought: str = "Hm.") -> str:
    """What makes the engine reason so, and answer this."""
    return f"{OPEN}{thought}\n</think>\n\n{text}{CLOSE}"


def calls_text(*calls: tuple[str, dict[str, object]]) -> str:
    """The text of these calls, as models of Hermes' kind write it."""
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def script(turn: int) -> str:
    """What makes the engine read the next file in this turn, and answer after the last one."""
    if turn == TURNS:
        return answer_script(LAST, "All read.")
    return answer_script(calls_text(("read_file", {"path": str(turn)})), f"Step {turn}.")


def read_file(path: str) -> str:
    """Read a file."""
    paths.append(path)
    return script(int(path) + 1)


class Pier(BaseModel):
    """What an answer is to be."""

    pier: int
