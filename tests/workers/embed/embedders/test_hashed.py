"""The light embedder: near where words are the same, and the same bytes everywhere."""

import numpy as np

from workers.embed.embedders.hashed import DIM, HashEmbedder


def test_hash_embedder_returns_unit_vectors_independent_of_batch() -> None:
    light = HashEmbedder()
    texts = ["The ferry leaves from pier 7.", "", "!?", "渡船从七号码头出发", "a b a b"]
    rows = light.embed(texts)
    assert rows.shape == (5, DIM) and rows.dtype == np.float32
    assert np.allclose(np.linalg.norm(rows, axis=1), 1)
    for row, text in zip(rows, texts, strict=True):
        assert np.array_equal(light.embed([text])[0], row)


def test_hash_embedder_places_similar_texts_near() -> None:
    light = HashEmbedder()
    question, right, wrong = light.embed(
        ["When does the ONDRY ferry leave?", "The Ondry ferry leaves.", "A baker sells bread."]
    )
    assert question @ right > 0.3 > abs(question @ wrong)


def test_hash_embedder_counts_words_and_signs_as_tokens() -> None:
    assert list(HashEmbedder().token_starts("Pier 7, 海港.")) == [0, 5, 6, 8, 9, 10]
