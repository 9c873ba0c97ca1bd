"""Models in the form of Anthropic's clients, who send the header `anthropic-version`."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]
VERSION_HEADER = "anthropic-version"


def model_info(model: Mapping[str, Any]) -> Json:
    """Return a model; `model` is in OpenAI's form."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


def model_page(models: Sequence[Mapping[str, Any]]) -> Json:
    """Return all models as one page; `models` are in OpenAI's form."""
    return {
        "data": [model_info(model) for model in models],
        "has_more": False,
        "first_id": models[0]["id"],
        "last_id": models[-1]["id"],
    }
