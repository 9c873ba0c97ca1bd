"""Reads the file of the policy `table`."""

import json
from pathlib import Path

from schemas.errors import ConfigError
from streams.config import RouterSettings
from streams.core.placement.ppd_table import PpdTable


def load_table(settings: RouterSettings) -> PpdTable | None:
    """The table, where the settings name one, for the policy `table` or for requests that wish it;
    raises ConfigError for what is none.
    """
    if not settings.table:
        return None
    try:
        return PpdTable.from_dict(json.loads(Path(settings.table).read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"router.table: expected a JSON file from `trivium plan ppd` at {settings.table}, "
            f"found {error}"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"router.table: {settings.table}: {error.message}") from error
