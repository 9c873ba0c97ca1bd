"""What a simulated engine that is told what to say says in the turns of an agent's loop."""

import json

MODEL, TURNS = "sim", 5
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
