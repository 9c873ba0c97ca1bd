"""The answers that a decode or replica worker has to give, as columns.

`fleet/members.py` adds and removes them. Each placement asks of all answers of a worker which would
miss their deadlines (`streams/core/placement/selection.py`); a loop over them took half of a
router's time at 256 streams.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
_ROWS_MIN = 8


class Answer(NamedTuple):
    """One answer that a worker holds for this router."""

    request_id: str
    prompt_tokens: int
    max_tokens: int  # that were still to be said when it came
    deadline_ms: int
    begins_ms: int  # when its first token is expected there


class Answers:
    """One row for each; the last row takes the place of one that is removed."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._rows: dict[str, int] = {}  # by request id
        self._columns = np.zeros((3, _ROWS_MIN))

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer) -> None:
        """One whose request holds none yet."""
        row = len(self._answers)
        if row == self._columns.shape[1]:
            self._columns = np.hstack((self._columns, np.zeros_like(self._columns)))
        self._columns[:, row] = answer.max_tokens, answer.deadline_ms, answer.begins_ms
        self._answers.append(answer)
        self._rows[answer.request_id] = row

    def remove(self, request_id: str) -> Answer | None:
        """The request's, if it holds one."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return None
        found, last = self._answers[row], self._answers.pop()
        if last is not found:
            self._answers[row], self._rows[last.request_id] = last, row
            self._columns[:, row] = self._columns[:, len(self._answers)]
        return found

    @property
    def max_tokens(self) -> Numbers:
        """Per answer: tokens that were still to be said when it came."""
        return self._column(0)

    @property
    def deadline_ms(self) -> Numbers:
        """Per answer."""
        return self._column(1)

    @property
    def begins_ms(self) -> Numbers:
        """Per answer: when its first token is expected."""
        return self._column(2)

    def _column(self, column: int) -> Numbers:
        found: Numbers = self._columns[column, : len(self._answers)]
        return found
