"""Embeds with a sentence-transformers model on the CPU: the only file here that imports torch.

Theory of operation. The model's folder names the layers: a transformer, a pooling of its token
vectors (their mean, or the first), and optionally a normalization. Here vectors always get length
one. Texts of all callers share batches, padded at the right. To pad little, texts are sorted by
length, and the longest text's length times the number of texts is bounded. A text's vector is the
same in every batch except for the last bits: padding is masked, but longer rows are summed in
another order. Measured values differ by less than 1e-6.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from schemas.errors import ConfigError
from schemas.retrieval import Vector
from workers.embed.embedders.protocol import Text
from workers.embed.embedders.words import slices

# A quarter of the import time of transformers goes to scikit-learn, which nothing here needs.
is_hidden = sys.modules.setdefault("sklearn", None) is None  # type: ignore[arg-type]  # not found
from transformers import AutoModel  # noqa: E402  # only now

if is_hidden:
    del sys.modules["sklearn"]

_LAYERS = ("Transformer", "Pooling", "Normalize")
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}


class SentenceEmbedder:
    """An `Embedder` of a sentence-transformers folder; raises ConfigError if it is unsupported."""

    def __init__(self, folder: Path, name: str, *, threads: int, batch_tokens: int) -> None:
        self.name = name
        self._pooling = pooling_of(folder)
        torch.set_num_threads(threads)
        try:
            self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True)
            file = str(folder / "tokenizer.json")
            self._plain, self._bounded = Tokenizer.from_file(file), Tokenizer.from_file(file)
        except Exception as error:  # these packages raise errors of many types
            raise ConfigError(f"embedding.model: {folder} cannot be loaded: {error}") from error
        self._model = self._model.eval().float()
        config = self._model.config
        self.dim = int(config.hidden_size)
        self.vocab = int(config.vocab_size)
        max_length = _read(folder / "sentence_bert_config.json").get("max_seq_length")
        self.tokens_max = int(max_length or getattr(config, "max_position_embeddings", 512))
        for tokenizer in (self._plain, self._bounded):
            tokenizer.no_padding()
        self._plain.no_truncation()
        self._bounded.enable_truncation(self.tokens_max)
        self._batch_tokens = batch_tokens

    def token_starts(self, text: str) -> Sequence[int]:
        """Return the starts of tokens, in characters, without the model's special tokens."""
        starts: list[int] = []
        for begin, end in slices(text):
            # Unlike `encode`, `encode_batch` releases the interpreter's lock.
            (encoding,) = self._plain.encode_batch([text[begin:end]], add_special_tokens=False)
            starts += [begin + start for start, _ in encoding.offsets]
        return starts

    def embed(self, texts: Sequence[Text]) -> Vector:
        """Embed the texts in batches of similar lengths."""
        ids = [text_ids or [0] for text_ids in self._token_ids(texts)]
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for numbers in groups([len(text_ids) for text_ids in ids], self._batch_tokens):
            vectors[numbers] = self._compute([ids[number] for number in numbers])
        return vectors

    def _token_ids(self, texts: Sequence[Text]) -> list[list[int]]:
        words = [text for text in texts if isinstance(text, str)]
        encoded = iter(self._bounded.encode_batch_fast(words))
        return [
            next(encoded).ids if isinstance(text, str) else list(text[: self.tokens_max])
            for text in texts
        ]

    def _compute(self, ids: list[list[int]]) -> Vector:
        longest = max(map(len, ids))
        padded = torch.tensor([text_ids + [0] * (longest - len(text_ids)) for text_ids in ids])
        lengths = torch.tensor([len(text_ids) for text_ids in ids])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        with torch.inference_mode():
            states = self._model(input_ids=padded, attention_mask=mask).last_hidden_state
            if self._pooling == "mean":
                vectors = (states * mask[..., None]).sum(1) / lengths[:, None]
            else:
                vectors = states[:, 0]
            rows: Vector = torch.nn.functional.normalize(vectors, dim=1).numpy()
        return rows


def pooling_of(folder: Path) -> str:
    """Return a model's pooling, `mean` or `first`; raises ConfigError for another one."""
    layers = _read(folder / "modules.json") or []
    kinds = [str(layer.get("type", "")).rpartition(".")[2] for layer in layers]
    if not kinds:
        raise ConfigError(
            f"embedding.model: expected the folder of a sentence-transformers model, found no "
            f"modules.json in {folder}"
        )
    if unknown := [kind for kind in kinds if kind not in _LAYERS]:
        raise ConfigError(
            f"embedding.model: {folder}: expected the layers {', '.join(_LAYERS)}, found "
            f"{', '.join(unknown)}"
        )
    pooling = [
        layer["path"] for layer, kind in zip(layers, kinds, strict=True) if kind == "Pooling"
    ]
    pooling_config = _read(folder / pooling[0] / "config.json") if pooling else {}
    set_ = [
        name
        for name, value in pooling_config.items()
        if name.startswith("pooling_mode") and value is True
    ]
    if len(set_) == 1 and set_[0] in _POOLINGS:
        return _POOLINGS[set_[0]]
    mode = pooling_config.get("pooling_mode")  # the field of newer folders
    if mode in ("mean", "cls"):
        return "mean" if mode == "mean" else "first"
    raise ConfigError(
        f"embedding.model: {folder}: expected one pooling, {' or '.join(_POOLINGS)}, found "
        f"{', '.join(set_) or mode or 'none'}"
    )


def groups(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Group the numbers of texts by length: in each group the longest length times the count is
    at most `tokens_max`, or there is one text."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= tokens_max:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"embedding.model: {file}: expected JSON: {error}") from error
