"""A passage's tokens as the served model reads them: ready to be put into a prompt."""

import hashlib
from pathlib import Path

from tokenizers import Tokenizer

from schemas.errors import ConfigError
from schemas.settings import ModelSettings

_DIGEST_CHARS = 12
_FILE = "tokenizer.json"


class ServedTokens:
    """By the tokenizer of [model]; raises ConfigError where there is none."""

    def __init__(self, model: ModelSettings) -> None:
        file = _tokenizer_file(model)
        self._raw = Tokenizer.from_file(str(file))
        self._raw.no_padding()
        self._raw.no_truncation()
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGEST_CHARS]
        self.name = f"{model.served_name}@{digest}"

    def ids(self, text: str) -> list[int]:
        """Without the signs that a tokenizer puts around a text."""
        # The form for batches leaves the interpreter to others meanwhile.
        (encoding,) = self._raw.encode_batch_fast([text], add_special_tokens=False)
        found: list[int] = encoding.ids
        return found


def _tokenizer_file(model: ModelSettings) -> Path:
    folder = Path(model.path)
    if not folder.is_dir():
        return _fetched(model)
    if not (folder / _FILE).exists():
        raise ConfigError(
            f"{folder / _FILE}: no such file; expected the served model's tokenizer ([model]), or "
            'embedding.tokenizer = "none"'
        )
    return folder / _FILE


def _fetched(model: ModelSettings) -> Path:
    revision = model.pinned
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(model.path, _FILE, revision=revision))
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"model.path: expected a folder or a Hugging Face name, found {model.path!r}: {error}"
        ) from error
