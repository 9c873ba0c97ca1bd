"""Which model or adapter a name means, and which tokenizers are kept."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.errors import ConfigError, UnknownModel
from schemas.settings import ModelSettings
from streams.calls.process import load_models
from streams.calls.request.served import ModelCard, ServedModel, ServedModels
from tests.streams.gateway.small_tokenizer import model_folder, tokenizer

CARD = ModelCard(name="a", model="a", max_model_len=64, created_s=1)


def catalog(*cards: ModelCard) -> ServedModels:
    """A catalog of model `a` and others, whose tokenizers are all the same."""
    return ServedModels(ServedModel(CARD, tokenizer()), cards)


def adapter(name: str) -> ModelCard:
    """An adapter over model `a`."""
    return replace(CARD, name=name, adapter=name)


@pytest.mark.parametrize(
    ("name", "expected", "collection"),
    [
        (None, "a", ""),
        ("", "a", ""),
        ("a", "a", ""),
        ("b", "b", ""),
        ("b@docs", "b", "docs"),
        ("x@1", "x@1", ""),
        ("x@1@docs", "x@1", "docs"),
        ("b@docs@more", "", ""),
        ("b@", "", ""),
        ("@docs", "", ""),
        ("@", "", ""),
        ("B", "", ""),
        ("a ", "", ""),
        ("a\0", "", ""),
        ("\ud800", "", ""),
        ("z" * 100_000, "", ""),
    ],
)
async def test_name_means_model_or_adapter_with_collection(
    name: str | None, expected: str, collection: str
) -> None:
    models = catalog(replace(CARD, name="b", model="b"), adapter("x@1"))
    if not expected:
        with pytest.raises(UnknownModel, match=r"expected one of 'a', 'b', 'x@1', found") as caught:
            models.find(name)
        assert len(caught.value.message) < 400
        return
    card, where = models.find(name)
    assert (card.name, where) == (expected, collection)
    served, where = await models.of_call(name)
    assert (served.card, where) == (card, collection)


def test_error_for_unknown_name_lists_bounded_number() -> None:
    models = catalog(*(adapter(f"x{i}") for i in range(1_000)))
    with pytest.raises(UnknownModel, match=r"'x14' and 985 more of /v1/models, found 'y'"):
        models.find("y")
    with pytest.raises(UnknownModel, match=r"^model: expected 'a', found 'y'; .* a@COLLECTION$"):
        catalog().find("y")


async def test_model_of_tokens_has_no_collection() -> None:
    models = catalog(adapter("x"))
    assert (await models.model_named("x")).card.adapter == "x"
    with pytest.raises(UnknownModel, match="expected one of 'a', 'x', found 'x@docs'"):
        await models.model_named("x@docs")


@pytest.mark.parametrize("name", ["", "a", "b\n", "c\0", "d" * 257])
def test_catalog_refuses_unusable_and_repeated_names(name: str) -> None:
    with pytest.raises(ConfigError, match="expected different names|printable characters"):
        catalog(adapter(name))


async def test_models_of_settings_have_adapters_and_own_lengths(tmp_path: Path) -> None:
    first = model_folder(tmp_path / "first", template="<tool_call>{{ arguments }}")
    second = model_folder(tmp_path / "second", token="<|new|>")
    models = await load_models(
        [
            ModelSettings(path=str(first), max_model_len=64, adapters={"x": "lora/law-7"}),
            ModelSettings(path=str(second), name="other", max_model_len=128),
        ],
        1,
    )
    assert list(models.cards) == ["first", "x", "other"] and models.models == ["first", "other"]
    x, second_card = models.cards["x"], models.cards["other"]
    assert (x.model, x.adapter, x.root, x.max_model_len) == ("first", "x", "law-7", 64)
    assert x.parsers.tool == "hermes" and second_card.parsers.tool == "none"
    assert x.reads_passages and not second_card.reads_passages
    assert models.len_max == 128 and models.max_model_len("other") == 128
    assert models.max_model_len("gone") == 64
    assert models.resident["x"].tokenizer is models.default.tokenizer
    assert "other" not in models.resident


async def test_model_without_tokenizer_stops_the_start(tmp_path: Path) -> None:
    """Also one that is not the first, and whose tokenizer would be loaded later."""
    settings = [ModelSettings(path=str(model_folder(tmp_path / name))) for name in "ab"]
    (tmp_path / "b" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"b/tokenizer.json: no such file"):
        await load_models(settings, 1)


async def test_tokenizers_are_loaded_once_and_shared(tmp_path: Path) -> None:
    """Many calls at once load one tokenizer; a model with another template shares what is large."""
    folders = [
        model_folder(tmp_path / "a"),
        model_folder(tmp_path / "b", template="b"),
        model_folder(tmp_path / "c", token="<|new|>"),
    ]
    models = await load_models([ModelSettings(path=str(folder)) for folder in folders], 4)
    of_b = [served for served, _ in await asyncio.gather(*(models.of_call("b") for _ in range(9)))]
    assert len({id(served.tokenizer) for served in of_b}) == 1
    b, (c, _) = of_b[0].tokenizer, await models.of_call("c")
    assert b is not models.default.tokenizer
    assert b.encoder is models.default.tokenizer.encoder is not c.tokenizer.encoder
    assert b.template is not None and models.cards["b"].reads_passages
    texts = ["<|new|>"]
    assert len(c.tokenizer.encoder.ids(texts)) == 1 < len(b.encoder.ids(texts))


async def test_tokenizers_are_kept_in_bounded_number(tmp_path: Path) -> None:
    """The last used ones are kept."""
    folders = [model_folder(tmp_path / name, token=f"<|{name}|>") for name in "abcd"]
    models = await load_models([ModelSettings(path=str(folder)) for folder in folders], 2)

    async def tokenizer_kept(name: str) -> int:
        return id((await models.of_call(name))[0].tokenizer)

    first = {name: await tokenizer_kept(name) for name in "bc"}
    assert await tokenizer_kept("b") == first["b"]
    (served, _) = await models.of_call("c")
    await tokenizer_kept("b")
    await tokenizer_kept("d")  # takes the place of c
    assert await tokenizer_kept("b") == first["b"]
    assert (await models.of_call("c"))[0].tokenizer is not served.tokenizer
