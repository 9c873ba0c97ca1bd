"""Two libraries that encode alike, whichever of them a model and a text get."""

import asyncio
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

from schemas.errors import TooManyRequests
from streams.calls.request import tokenizer
from streams.calls.request.tokenizer import Encoder
from tests.waits import PATIENCE_S

TEXTS = Path(__file__).parents[4]
WORDS = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{WORDS}"
BYTES = pre.ByteLevel(add_prefix_space=False, use_regex=False)
SPLIT = [pre.Split(Regex(LLAMA), "isolated"), BYTES]
KINDS: dict[str, tuple[Any, Any]] = {
    "GPT-2": (pre.ByteLevel(add_prefix_space=False), None),
    "with a space before": (pre.ByteLevel(add_prefix_space=True), None),
    "digits apart": (
        pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]),
        None,
    ),
    "Llama 3": (pre.Sequence(SPLIT), None),
    "Qwen": (pre.Sequence(SPLIT), normalizers.NFC()),
}
ALPHABETS = (
    "abcdefghij ABC'sdt \n\t.,!",
    " \n\r\t\u00a0\u3000x",
    "0123456789,. -+x",
    "e\u0301n\u0303a\u0308\ufb01\u0130 \u00df\u1e9e",
    "\u4f60\u597d\u3002\u3053\u3093 \u0645\u0631\u062d \u0928\u092e\u0938\u094d",
    "\U0001f600\U0001f468\u200d\U0001f469\u2764\ufe0f #",
    "<|>/s[]INST \n",
    "".join(map(chr, range(1, 0x300))),
)


def model(folder: Path, kind: str, *, whole: bool = True) -> Path:
    """A tokenizer of this kind, trained on pages of this checkout; `whole`: it knows all bytes."""
    before, normalizer = KINDS[kind]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = before
    if normalizer is not None:
        raw.normalizer = normalizer
    special = ["<s>", "</s>", "<|im_start|>", "<|im", "[INST]"]
    alphabet = sorted(pre.ByteLevel.alphabet()) if whole else []
    trainer = trainers.BpeTrainer(
        vocab_size=1_200,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    raw.train([str(TEXTS / "ARCHITECTURE.md"), str(TEXTS / "CONTRIBUTING.md")], trainer)
    raw.add_tokens([AddedToken("tool_call", normalized=True), AddedToken("<b>", lstrip=True)])
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
    )
    raw.save(str(file := folder / "tokenizer.json"))
    return file


def texts(seed: int, count: int) -> list[str]:
    """Words of a page, characters of one kind, and what models mark turns with."""
    rng = random.Random(seed)
    page = (TEXTS / "ARCHITECTURE.md").read_text()
    samples = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 6)):
            at, length = rng.randrange(len(page)), rng.randrange(40)
            parts += [
                page[at : at + length],
                "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randrange(30))),
                rng.choice(("", "", "<|im_start|>", "<|im", " <b>", "tool_call", "</s>", "<s")),
            ]
        samples.append("".join(parts))
    return samples


@pytest.mark.parametrize("kind", KINDS)
def test_fast_encoder_equals_plain_encoder(tmp_path: Path, kind: str) -> None:
    text_encoder = Encoder(model(tmp_path, kind))
    assert text_encoder._fast is not None
    for special in (False, True):
        for text in texts(1, 400):
            assert text_encoder.ids([text], add_special_tokens=special) == text_encoder._plain(
                [text], special
            ), text
    pieces = texts(2, 50)
    assert text_encoder.ids(pieces) == text_encoder._plain(pieces, False)
    assert list(text_encoder.ids([])) == list(text_encoder.ids([""])) == []


def test_encoder_falls_back_for_model_without_fast_support(tmp_path: Path) -> None:
    raw = Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "##s": 2}, unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer()
    raw.pre_tokenizer = pre.BertPreTokenizer()
    raw.save(str(file := tmp_path / "tokenizer.json"))
    text_encoder = Encoder(file)
    assert text_encoder._fast is None
    assert list(text_encoder.ids(["Hellos", "no"])) == [1, 2, 0]
    assert text_encoder.thread_chars_max < Encoder(model(tmp_path, "GPT-2")).thread_chars_max


def test_encoder_falls_back_for_text_with_unknown_bytes(tmp_path: Path) -> None:
    """A vocabulary may lack bytes, which `tokenizers` leaves out."""
    text_encoder = Encoder(model(tmp_path, "GPT-2", whole=False))
    assert text_encoder._fast is not None
    with pytest.raises(ValueError, match="no token in vocabulary"):
        text_encoder._fast.encode_batch_flat(["a log\u4f60"])
    assert (
        text_encoder.ids(["a log\u4f60"]) == text_encoder.ids(["a log"]) != text_encoder.ids(["a"])
    )


def test_encoder_thread_rejects_long_text_of_slow_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_encoder = Encoder(model(tmp_path, "GPT-2", whole=False))
    monkeypatch.setattr(tokenizer, "_PLAIN_CHARS_MAX", 4)
    with pytest.raises(tokenizer.TooLong):
        text_encoder.ids(["a log\u4f60"], in_thread=True)
    assert text_encoder.ids(["\u4f60"], in_thread=True) == text_encoder.ids(["\u4f60"])
    assert text_encoder.ids(["a log\u4f60"]) == text_encoder.ids(["a log"], in_thread=True)


async def test_encoder_bounds_texts_waiting_for_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of any length may wait alone."""
    text_encoder, has_started, go_on = (
        Encoder(model(tmp_path, "GPT-2")),
        threading.Event(),
        threading.Event(),
    )
    monkeypatch.setattr(tokenizer, "_WAITING_CHARS_MAX", 10)

    def first() -> bool:
        has_started.set()
        return go_on.wait(PATIENCE_S)

    waits = asyncio.create_task(text_encoder.offload(first, 11))
    await asyncio.to_thread(has_started.wait, PATIENCE_S)
    with pytest.raises(TooManyRequests):
        await text_encoder.offload(first, 1)
    go_on.set()
    assert await waits
    assert await asyncio.gather(*(text_encoder.offload(partial(int, n), 5) for n in (3, 4))) == [
        3,
        4,
    ]


def test_encoder_drops_fast_library_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = model(tmp_path, "GPT-2")
    plain = Encoder._plain

    def otherwise(self: Encoder, pieces: Any, special: bool) -> Any:
        return plain(self, pieces, special)[1:]

    monkeypatch.setattr(Encoder, "_plain", otherwise)
    assert Encoder(file)._fast is None
