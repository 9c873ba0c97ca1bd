"""The model folder of the simulated engine: a tokenizer, a chat template, and no weights.

The tokenizer has all bytes, and the words below as merges of their own characters. So it needs no
training and is lossless for any text. The gateway tokenizes with it, and
`workers/llm/sim/vocabulary.py` samples its tokens.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SIM_MODEL = "sim"
END, TURN = "<|im_end|>", "<|im_start|>"
WORDS = (
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


def make_tokenizer() -> Tokenizer:
    """Return a lossless byte-level tokenizer with a few hundred words."""
    special = [END, TURN]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    merges: list[tuple[str, str]] = []
    for word in dict.fromkeys(WORDS):
        prefix = "Ġ"
        for letter in word:
            if prefix + letter not in vocabulary:
                vocabulary[prefix + letter] = len(vocabulary)
                merges.append((prefix, letter))
            prefix += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def make_sim_model(folder: Path) -> Path:
    """Write the model folder "sim", with the gateway's tokenizer, and return it."""
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
