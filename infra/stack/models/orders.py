"""Orders that a worker loads another model, as files in the state folder.

Commands write them, and the launcher of the folder's stack takes them within a second. An order
that nobody takes is deleted when the next stack starts.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.state_folder import private_folder

FOLDER = "orders"
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """Drain this worker, and start it with this model."""

    worker: str
    model: str


def write_order(folder: Path, order: LoadModel) -> None:
    """Write an order, in place of an earlier one for the worker."""
    orders = private_folder(folder / FOLDER)
    draft = orders / f"{order.worker}.new"
    draft.write_text(json.dumps(asdict(order)))
    draft.replace(orders / f"{order.worker}{_SUFFIX}")


def take_orders(folder: Path) -> Iterator[LoadModel]:
    """Yield the orders in the folder, and delete them; skip files that are none."""
    for file in sorted((folder / FOLDER).glob(f"*{_SUFFIX}")):
        try:
            content = json.loads(file.read_text())
            order = LoadModel(worker=str(content["worker"]), model=str(content["model"]))
        except (OSError, ValueError, KeyError, TypeError):
            order = None
        file.unlink(missing_ok=True)
        if order is not None:
            yield order
