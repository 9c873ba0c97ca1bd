"""Models of several kinds, each as a folder with its tokenizer and a template that writes whatever
it is told, and the names of what steers them.

Names may be special or not, part of the vocabulary, inside of one another, written by the template
in pieces, and in capitals.
"""

import atexit
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from schemas.settings import ModelSettings
from workers.models.folder import model_folder
from workers.models.wheels import MINILM, SMOLLM2

TEXTS = ["hello world, how do you do", "the river stone | of [inst] <b> 1 2 3 </b>"] * 20
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson(ensure_ascii=true) }}<{{ t.function.name }}>"
    "{{ t.function.name | upper }}{{ t.function.description | trim }}{% endfor %}"
    "{{ word }}{{ (word or '') | lower }}<{{ word }}>{{ (words or []) | tojson }}"
    "{{ reasoning_effort }}"
    "{% for m in messages %}BEGIN{{ m.role }}\n{{ m.name }}"
    "{{ m.content }}{% for c in m.tool_calls %}{{ c | tojson }}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"
    "{% endfor %}{{ m.tool_call_id }}END{% endfor %}"
    "{% if add_generation_prompt %}BEGINassistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Steered:
    """A model, and the names of what begins and ends a turn."""

    folder: Path
    begin: str
    end: str
    names: tuple[str, ...]  # of all that steers it


def _template(begin: str, end: str) -> str:
    return TEMPLATE.replace("BEGIN", begin).replace("END", end)


def _folder(tokenizer: Tokenizer | Path, begin: str, end: str) -> Path:
    folder = Path(mkdtemp(prefix="trivium-steered-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if isinstance(tokenizer, Path):
        shutil.copy(tokenizer / "tokenizer.json", folder)
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_template(begin, end))
    config = {"eos_token": end, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _trained(model: Any, trainer: Any, before: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = before
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _bytes(normalizer: Any = None) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre.ByteLevel.alphabet()), show_progress=False
    )
    before = pre.ByteLevel(add_prefix_space=False)
    tokenizer = _trained(models.BPE(), trainer, before, normalizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _unigram() -> Tokenizer:
    """Return a tokenizer whose control tokens are words of its vocabulary, as T5's are."""
    special = ["<unk>", "</s>", "<s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    before = pre.Sequence([pre.WhitespaceSplit(), pre.Metaspace(prepend_scheme="never")])
    return _trained(models.Unigram(), trainer, before)


def _not_special() -> Tokenizer:
    """Return a tokenizer whose control tokens are not special, as some of Qwen's are."""
    tokenizer = _bytes()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<\uff5cUser\uff5c>",)])
    tokenizer.add_tokens([AddedToken("<end_of_turn>", normalized=True)])
    tokenizer.add_tokens([AddedToken("<b>", normalized=False)])  # which steers nothing
    return tokenizer


def _folding() -> Tokenizer:
    """Return a tokenizer that folds names to small letters."""
    tokenizer = _bytes(normalizers.Lowercase())
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=True) for name in ("<|begin|>", "<|end|>")]
    )
    return tokenizer


def _special(*names: str) -> Tokenizer:
    tokenizer = _bytes()
    tokenizer.add_special_tokens([*names])
    return tokenizer


def _wheel(name: str) -> Path:
    return Path(model_folder(ModelSettings(path=name)))


_ROLES = ("<s>", "<|system|>", "<|user|>", "<|assistant|>")
_INSIDE = ("<|im", "<|im_start|>")
_MADE: dict[str, tuple[Callable[[], Tokenizer | Path], str, str, tuple[str, ...]]] = {
    "sim": (lambda: _wheel("sim"), "<|im_start|>", "<|im_end|>", ()),
    "SmolLM2": (
        lambda: _wheel(SMOLLM2),
        "<|im_start|>",
        "<|im_end|>",
        ("<|endoftext|>", "<repo_name>", "<filename>", "<empty_output>"),
    ),
    "words in pieces": (lambda: _wheel(MINILM), "[CLS]", "[SEP]", ("[MASK]", "[PAD]")),
    "of words in brackets": (
        lambda: _special(*_ROLES, "</s>"),
        "<|user|>",
        "</s>",
        _ROLES,
    ),
    "not special": (_not_special, "<\uff5cUser\uff5c>", "<end_of_turn>", ()),
    "part of the vocabulary": (_unigram, "<s>", "</s>", ()),
    "in small letters": (_folding, "<|begin|>", "<|end|>", ()),
    "in capitals, inside of one another": (
        lambda: _special("[INST]", "[/INST]", *_INSIDE),
        "[INST]",
        "[/INST]",
        _INSIDE,
    ),
}
KINDS = {  # by name; that one's tokenizer comes with its weights, half a minute of unpacking
    name: pytest.param(name, marks=pytest.mark.slow if name == "SmolLM2" else (), id=name)
    for name in _MADE
}


@cache
def steered(kind: str) -> Steered:
    make, begin, end, other_names = _MADE[kind]
    return Steered(_folder(make(), begin, end), begin, end, (begin, end, *other_names))
