"""The real model: what its vectors depend on, and which folders it takes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError
from workers.embed.chunking import cut
from workers.embed.embedders.protocol import Embedder
from workers.embed.embedders.words import SLICE_CHARS, slices
from workers.models.wheels import MINILM, wheel_folder

TEXTS = [
    "When does the Ondry ferry leave?",
    "The ferry from Ondry leaves pier 7 every twelve minutes.",
    "Bread is baked from flour, water and salt.",
    "",
    "word " * 600,
]


@pytest.fixture(scope="module")
def sentence() -> Any:
    """The module, imported where it is used: torch takes seconds in each process that collects."""
    return pytest.importorskip("workers.embed.embedders.sentence", reason="torch is missing")


@pytest.fixture(scope="module")
def embedder(sentence: Any) -> Iterator[Embedder]:
    yield sentence.SentenceEmbedder(
        wheel_folder(MINILM), "all-minilm-l6-v2@test", threads=1, batch_tokens=1_024
    )


def test_sentence_embedder_places_similar_texts_near(embedder: Embedder) -> None:
    rows = embedder.embed(TEXTS)
    assert rows.shape == (len(TEXTS), embedder.dim) == (5, 384) and rows.dtype == np.float32
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert rows[0] @ rows[1] > 0.6 > 0.2 > rows[0] @ rows[2]


def test_sentence_embedder_vector_is_independent_of_batch(embedder: Embedder) -> None:
    """Batch mates and padding change only the last bits."""
    together = embedder.embed(TEXTS)
    for text, row in zip(TEXTS, together, strict=True):
        alone = embedder.embed([text])[0]
        assert np.abs(alone - row).max() < 1e-5
        assert np.array_equal(alone, embedder.embed([text])[0]), "alone: the same bytes each time"


def test_sentence_embedder_truncates_long_text_at_token_limit(
    embedder: Embedder,
) -> None:
    assert list(embedder.token_starts("Pier seven, noon")) == [0, 5, 10, 12]
    assert len(embedder.token_starts("word " * 600)) == 600, "cutting sees all of them"
    assert embedder.tokens_max == 256
    same, extended = embedder.embed(["word " * 600, "word " * 600 + "ferry"])
    assert np.array_equal(same, extended)
    text = "The Ondry ferry leaves from pier 7. " * 40
    spans = cut(text, embedder.token_starts(text), tokens_max=100, overlap=20)
    ends = [text[span.start : span.end] for span in spans]
    assert all(
        len(embedder.token_starts(passage)) <= 100 and passage[-1] == "." for passage in ends
    )


def test_sentence_embedder_accepts_token_ids(embedder: Any) -> None:
    text = "The ferry leaves at noon."
    by_text, by_ids = embedder.embed([text, embedder._plain.encode(text).ids])
    assert np.allclose(by_text, by_ids, atol=1e-5)


def test_sentence_batches_group_texts_by_length(sentence: Any) -> None:
    assert sentence.groups([3, 9, 4, 100, 9], 20) == [[3], [1, 4], [2, 0]]
    assert sentence.groups([], 20) == []


def test_sentence_embedder_rejects_unsupported_model_folder(sentence: Any, tmp_path: Path) -> None:
    def write_folder(layers: list[str], pooling: dict[str, object]) -> Path:
        modules = [
            {"path": str(number), "type": f"sentence_transformers.models.{kind}"}
            for number, kind in enumerate(layers)
        ]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1").mkdir(exist_ok=True)
        (tmp_path / "1" / "config.json").write_text(json.dumps(pooling))
        return tmp_path

    with pytest.raises(ConfigError, match="found no modules.json"):
        sentence.pooling_of(tmp_path)
    usual = ["Transformer", "Pooling", "Normalize"]
    assert sentence.pooling_of(write_folder(usual, {"pooling_mode_mean_tokens": True})) == "mean"
    assert sentence.pooling_of(write_folder(usual, {"pooling_mode_cls_token": True})) == "first"
    assert sentence.pooling_of(write_folder(usual, {"pooling_mode": "cls"})) == "first"
    with pytest.raises(ConfigError, match="expected one pooling.* found pooling_mode_max_tokens"):
        sentence.pooling_of(write_folder(usual, {"pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigError, match="expected the layers .* found Dense"):
        sentence.pooling_of(write_folder([*usual, "Dense"], {}))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        folder = write_folder(usual, {"pooling_mode_mean_tokens": True})
        sentence.SentenceEmbedder(folder, "x", threads=1, batch_tokens=1)


def test_sentence_embedder_tokenises_long_text_in_slices(embedder: Any, monkeypatch: Any) -> None:
    """One call on a very long text would block the interpreter until the lease is lost."""
    text_lengths: list[int] = []
    plain = embedder._plain

    class Counting:
        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            text_lengths.extend(map(len, texts))
            return plain.encode_batch(texts, **options)

    words, dense = "Pier seven, noon. " * 2_000, "aGVsbG8+d29ybGQ/" * 4_000
    whole = [start for start, _ in plain.encode_batch([words])[0].offsets][1:-1]
    monkeypatch.setattr(embedder, "_plain", Counting())
    assert embedder.token_starts(words) == whole
    starts = embedder.token_starts(dense)
    assert starts == sorted(starts) and len(starts) > len(dense) / 20
    assert max(text_lengths) <= SLICE_CHARS and sum(text_lengths) == len(words) + len(dense)
    assert list(slices("")) == [] and list(slices("ab cd", 4)) == [(0, 3), (3, 5)]
