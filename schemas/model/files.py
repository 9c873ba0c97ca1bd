"""Finds a model's folder, and reads its special tokens, control tokens and chat template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError
from schemas.model.control_tokens import ControlTokens
from schemas.settings import ModelSettings

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
)


def model_folder(model: ModelSettings) -> Path:
    """Return the folder of a model: the given one if it exists, else downloaded by its Hugging Face
    name and revision. Raise ConfigError.
    """
    path, folder = model.path, Path(model.path)
    if folder.is_dir():
        return folder
    revision = model.pinned
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(FILES)))
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"model.path: expected a folder or a Hugging Face name, found {path!r}: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file. Raise ConfigError."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def special_tokens_of(folder: Path) -> dict[str, str]:
    """Return the special tokens' texts by name, such as `bos_token`. Raise ConfigError."""
    return _special_tokens(read_json(folder / "special_tokens_map.json")) | _special_tokens(
        read_json(folder / "tokenizer_config.json")
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[name] = text
    return texts


def template_source_of(folder: Path) -> str | None:
    """Return the chat template, if the model has one. Raise ConfigError."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return jinja.read_text(encoding="utf-8")
    source = read_json(folder / "chat_template.json").get("chat_template")
    if source is None:
        source = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):  # several by name; `default` is the one for chat
        templates = {entry["name"]: entry["template"] for entry in source}
        source = templates.get("default")
    return source if isinstance(source, str) else None


def control_tokens_of(folder: Path, tokenizer: Any) -> ControlTokens:
    """Return a model's control tokens; `tokenizer` is one of `tokenizers`. Raise ConfigError."""
    special = special_tokens_of(folder)
    return ControlTokens(
        tokenizer.get_added_tokens_decoder(),
        template_source_of(folder) or "",
        special,
        getattr(tokenizer.model, "unk_token", special.get("unk_token", "<unk>")),
    )
