"""A tokenizer of 300 tokens with a chat template, trained in milliseconds."""

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from streams.calls.request.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]


@cache
def tokenizer_folder() -> Path:
    """A folder with a small byte-level tokenizer and a chat template."""
    folder = Path(mkdtemp(prefix="trivium-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(["hello world, how do you do"], trainer)
    raw.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"vocab_size": 300}')
    return folder


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_folder())


def model_folder(path: Path, *, template: str = "", token: str = "") -> Path:
    """A model's folder, with another template or one more token than usual."""
    shutil.copytree(tokenizer_folder(), path)
    if template:
        (path / "chat_template.jinja").write_text(template)
    if token:
        content = json.loads((path / "tokenizer.json").read_text())
        added = {**content["added_tokens"][0], "id": 300, "content": token}
        content["added_tokens"].append(added)
        (path / "tokenizer.json").write_text(json.dumps(content))
    return path
