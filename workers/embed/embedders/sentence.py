"""Embeds with a sentence-transformers model on the CPU: the one file here that imports torch.

Theory of operation. A folder says which layers there are: a transformer, the way its token vectors
become one (their mean, or the first), and perhaps a norm. Vectors always get length one here. Texts
of all askers are computed in common batches, padded at the right. To pad little, texts are sorted
by their length, and a batch holds so many that its longest times their number stays within a bound.
A text's vector is the same in every batch but for the last bits: padding is masked, but sums over
longer rows are added up in another order. Measured, values differ by less than 1e-6.
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

# A quarter of the time that transformers takes is for scikit-learn, which nothing here needs.
is_hidden = sys.modules.setdefault("sklearn", None) is None  # type: ignore[arg-type]  # not found
from transformers import AutoModel  # noqa: E402  # only now

if is_hidden:
    del sys.modules["sklearn"]

_LAYERS = ("Transformer", "Pooling", "Normalize")
_WAYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}


class SentenceEmbedder:
    """See `Embedder`; raises ConfigError for a folder that it cannot compute."""

    def __init__(self, folder: Path, name: str, *, threads: int, batch_tokens: int) -> None:
        self.name = name
        self._way = pooling_of(folder)
        torch.set_num_threads(threads)
        try:
            self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True)
            file = str(folder / "tokenizer.json")
            self._plain, self._bounded = Tokenizer.from_file(file), Tokenizer.from_file(file)
        except Exception as error:  # these packages raise all kinds
            raise ConfigError(f"embedding.model: {folder} cannot be loaded: {error}") from error
        self._model = self._model.eval().float()
        config = self._model.config
        self.dim = int(config.hidden_size)
        self.vocab = int(config.vocab_size)
        told = _read(folder / "sentence_bert_config.json").get("max_seq_length")
        self.tokens_max = int(told or getattr(config, "max_position_embeddings", 512))
        for tokenizer in (self._plain, self._bounded):
            tokenizer.no_padding()
        self._plain.no_truncation()
        self._bounded.enable_truncation(self.tokens_max)
        self._batch_tokens = batch_tokens

    def token_starts(self, text: str) -> Sequence[int]:
        """By the model's tokenizer, without the signs that it puts around a text."""
        found: list[int] = []
        for begin, end in slices(text):
            # The form for batches leaves the interpreter to others meanwhile.
            (encoding,) = self._plain.encode_batch([text[begin:end]], add_special_tokens=False)
            found += [begin + start for start, _ in encoding.offsets]
        return found

    def embed(self, texts: Sequence[Text]) -> Vector:
        """In batches of like lengths."""
        ids = [each or [0] for each in self._ids(texts)]
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for numbers in groups([len(each) for each in ids], self._batch_tokens):
            vectors[numbers] = self._computed([ids[number] for number in numbers])
        return vectors

    def _ids(self, texts: Sequence[Text]) -> list[list[int]]:
        words = [text for text in texts if isinstance(text, str)]
        encoded = iter(self._bounded.encode_batch_fast(words))
        return [
            next(encoded).ids if isinstance(text, str) else list(text[: self.tokens_max])
            for text in texts
        ]

    def _computed(self, ids: list[list[int]]) -> Vector:
        longest = max(map(len, ids))
        padded = torch.tensor([each + [0] * (longest - len(each)) for each in ids])
        lengths = torch.tensor([len(each) for each in ids])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        with torch.inference_mode():
            states = self._model(input_ids=padded, attention_mask=mask).last_hidden_state
            if self._way == "mean":
                found = (states * mask[..., None]).sum(1) / lengths[:, None]
            else:
                found = states[:, 0]
            rows: Vector = torch.nn.functional.normalize(found, dim=1).numpy()
        return rows


def pooling_of(folder: Path) -> str:
    """How a model's token vectors become one; raises ConfigError for a way that is not here."""
    layers = _read(folder / "modules.json") or []
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in layers]
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
    pooling = [each["path"] for each, kind in zip(layers, kinds, strict=True) if kind == "Pooling"]
    told = _read(folder / pooling[0] / "config.json") if pooling else {}
    set_ = [
        name for name, value in told.items() if name.startswith("pooling_mode") and value is True
    ]
    if len(set_) == 1 and set_[0] in _WAYS:
        return _WAYS[set_[0]]
    mode = told.get("pooling_mode")  # as newer folders say it
    if mode in ("mean", "cls"):
        return "mean" if mode == "mean" else "first"
    raise ConfigError(
        f"embedding.model: {folder}: expected one pooling, {' or '.join(_WAYS)}, found "
        f"{', '.join(set_) or mode or 'none'}"
    )


def groups(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Numbers of texts, put together by length: in each group the longest times their count is
    within the bound, or one text is alone."""
    found: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= tokens_max:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"embedding.model: {file}: expected JSON: {error}") from error
