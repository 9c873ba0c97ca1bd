"""Tokenizes passages for the served model, so that they can be put into a prompt."""

import hashlib

from tokenizers import Tokenizer

from schemas.errors import ConfigError
from schemas.model.files import control_tokens_of, model_folder
from schemas.settings import ModelSettings

_DIGEST_CHARS = 12


class ServedTokens:
    """The tokenizer of [model]; raises ConfigError if its file does not exist."""

    def __init__(self, model: ModelSettings) -> None:
        folder = model_folder(model)
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ConfigError(
                f"{file}: no such file; expected the served model's tokenizer ([model]), or "
                'embedding.tokenizer = "none"'
            )
        self._raw = Tokenizer.from_file(str(file))
        self._raw.no_padding()
        self._raw.no_truncation()
        self._control = control_tokens_of(folder, self._raw)
        names = "".join(sorted(self._control.names))
        digest = hashlib.sha256(file.read_bytes() + names.encode()).hexdigest()[:_DIGEST_CHARS]
        self.name = f"{model.served_name}@{digest}"

    def ids(self, text: str) -> list[int]:
        """Return the text's token ids, without special tokens and control tokens: a document's
        spelling of a control token is text (`schemas/model/control_tokens.py`)."""
        control = self._control
        # Unlike `encode`, `encode_batch_fast` releases the interpreter's lock.
        encodings = self._raw.encode_batch_fast(
            control.pieces(control.mark(text)), add_special_tokens=False
        )
        return [token for part in encodings for token in part.ids if token not in control.ids]
