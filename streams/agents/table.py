"""Reads the file of the policy `table`."""

import json
from pathlib import Path

from schemas.errors import ConfigError
from streams.config import RouterSettings
from streams.core.table import Table


def load_table(settings: RouterSettings) -> Table | None:
    """The table, where the policy wants one; raises ConfigError for what is none."""
    if settings.policy != "table" or not settings.table:
        return None
    try:
        content = json.loads(Path(settings.table).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"router.table: expected a JSON file from `trivium plan ppd`, found {error}"
        ) from error
    return Table.from_dict(content)
