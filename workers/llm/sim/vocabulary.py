"""What the simulated engine says: which tokens it draws and the text of each, and the model folder
it needs.

Only tokens whose text is whole characters by itself are drawn, so that text never lags its tokens.
Without a model folder (`model.path` is "sim") the tokenizer that `make_sim_model` writes is built
in memory: bytes, plus the words below as merges of their own characters, so it needs no training
and loses nothing of any text.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from schemas.errors import ConfigError

SIM_MODEL = "sim"
END, TURN = "<|im_end|>", "<|im_start|>"
_WORDS_MIN = 64  # a folder with fewer of the words below as tokens draws from all of its pieces
_WORDS = (
    "the of and to in is that for it as was with be by on not this are or his from at which but "
    "have an had they you were their one all we can her has there been if more when will would "
    "who so no out up into than them only some time could these two may then do first any my "
    "now such like our over man me even most made after also did many before must through back "
    "years where much your way well down should because each just those people how too little "
    "state good very make world still own see men work long get here between both life being "
    "under never day same another know while last might us great old year off come since "
    "against go came right used take three river stone light wind water morning window paper "
    "garden letter music road bridge field house story voice hand winter summer silver copper "
    "engine signal packet token block cache queue worker router answer question model memory "
    "number table record stream moment reason change order part place point system follow begin "
    "open close small large early late quiet bright simple steady clear slow quick north south "
    "east west green blue white"
).split()
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Drawable tokens; the end of sequence is the last entry, one past `size`."""

    ids: tuple[tuple[int, ...], ...]  # one-element tuples, shared by all outputs
    texts: tuple[str, ...]
    special_texts: tuple[str, ...]  # as `texts`, with the end of sequence spelled out
    size: int
    index_of: dict[int, int]


def load_vocabulary(path: str, size_max: int) -> Vocabulary:
    """The drawable tokens of a model folder, or of the built-in tokenizer."""
    if path == SIM_MODEL:
        tokenizer, end = make_tokenizer(), END
    else:
        tokenizer, end = _read_folder(Path(path))
    end_id = tokenizer.token_to_id(end)
    if end_id is None:
        raise ConfigError(f"{path}: expected the end-of-sequence token {end!r} in tokenizer.json")
    special = set(tokenizer.get_added_tokens_decoder())
    pieces = _pieces(tokenizer, [i for i in range(tokenizer.get_vocab_size()) if i not in special])
    known = {" " + word for word in _WORDS}
    words = [pair for pair in pieces if pair[1] in known]
    drawn = (words if len(words) >= _WORDS_MIN else pieces)[:size_max]
    if len(drawn) < 2:
        raise ConfigError(f"{path}: expected at least 2 printable tokens, found {len(drawn)}")
    ids = [token_id for token_id, _ in drawn] + [end_id]
    texts = [text for _, text in drawn]
    return Vocabulary(
        ids=tuple((token_id,) for token_id in ids),
        texts=(*texts, ""),
        special_texts=(*texts, end),
        size=len(drawn),
        index_of={token_id: index for index, token_id in enumerate(ids)},
    )


def make_tokenizer() -> Tokenizer:
    """A lossless byte-level tokenizer that knows a few hundred words."""
    special = [END, TURN]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    merges: list[tuple[str, str]] = []
    for word in dict.fromkeys(_WORDS):
        left = "Ġ"
        for letter in word:
            if left + letter not in vocabulary:
                vocabulary[left + letter] = len(vocabulary)
                merges.append((left, letter))
            left += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def make_sim_model(folder: Path) -> Path:
    """Write the folder that a gateway tokenises with when the model is "sim"; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    end_id = tokenizer.token_to_id(END)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "clean_up_tokenization_spaces": False,
            "chat_template": _TEMPLATE,
        },
        "config.json": {
            "model_type": "trivium-sim",
            "architectures": ["TriviumSim"],
            "vocab_size": tokenizer.get_vocab_size(),
            "eos_token_id": end_id,
            "max_position_embeddings": 1 << 20,
        },
        "generation_config.json": {"eos_token_id": end_id},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return folder


def _read_folder(folder: Path) -> tuple[Tokenizer, str]:
    """The folder's tokenizer and its end-of-sequence token."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except Exception as error:  # tokenizers raises plain Exception for a missing or malformed file
        raise ConfigError(
            f"model.path {folder}: the simulated engine expected tokenizer.json and "
            f"tokenizer_config.json in this folder; name one that has them, or `tiny`: {error}"
        ) from error
    end = config.get("eos_token")
    return tokenizer, end["content"] if isinstance(end, dict) else str(end)


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[int, str]]:
    """Each token's text as it reads in the middle of an answer, where it is printable by itself."""
    if not ids:
        return []
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    lead = len(tokenizer.decode(anchor, skip_special_tokens=False))
    texts = tokenizer.decode_batch([[*anchor, i] for i in ids], skip_special_tokens=False)
    return [
        (token_id, text[lead:])
        for token_id, text in zip(ids, texts, strict=True)
        if text[lead:].replace("\n", " ").isprintable() and text[lead:] and "\ufffd" not in text
    ]
