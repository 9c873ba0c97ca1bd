"""Generates the model "tiny": a tiny Llama and its tokenizer, from the text beside this file.

The weights are random but seeded. The words are real, the sentences are not, and every token
depends on the whole prompt, so a wrong KV block changes the answer. The demo and the tests use it.
`folder.py` chooses its folder. Nothing is downloaded. The module needs only numpy, safetensors and
tokenizers, so the gateway can generate the model too.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = Path(__file__).with_name("tiny_corpus.txt")
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BEGIN_ID, END_ID = 0, 1
VOCAB = 2_048
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 512, 8, 4, 32
SEED = 20_260
# Standard deviations of the random weights, in units of 1/sqrt(inputs). Found by trial: queries and
# keys sharp enough to look at few places, values large enough that the context outweighs the last
# token. With less of either, greedy answers fall into a loop of a few tokens.
INIT = {"q": 3.0, "k": 3.0, "v": 1.5, "o": 1.5, "mlp": 1.0, "head": 3.0}
PIECE_SCALE = 0.6

CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    # tools in the form of Hermes, as many small models have it
    "{% if tools %}{{ '<|system|>Call these tools if they help:\\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    '{{ \'A call: <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|end|>\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<tool_response>\\n' }}{{ message['content'] }}{{ '\\n</tool_response>' }}"
    "{% elif message['tool_calls'] %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] %}"
    "{{ '<tool_call>\\n{\"name\": ' }}{{ call['function']['name'] | tojson }}"
    "{{ ', \"arguments\": ' }}"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 4_096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "torch_dtype": "float32",
    "use_cache": True,
}
GENERATION_CONFIG = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIAL_TOKENS[BEGIN_ID],
    "eos_token": SPECIAL_TOKENS[END_ID],
    "add_bos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONFIG["max_position_embeddings"],
    "chat_template": CHAT_TEMPLATE,
}

Weights = dict[str, NDArray[np.float32]]


def version() -> str:
    """Return a short hash of everything that determines the model's content."""
    parts = (CORPUS.read_bytes(), CONFIG, TOKENIZER_CONFIG, SPECIAL_TOKENS, INIT, PIECE_SCALE, SEED)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def write_tiny_model(folder: Path) -> None:
    """Write tokenizer, configuration and weights into an existing folder."""
    tokenizer = _train_tokenizer(CORPUS.read_text(encoding="utf-8"))
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = _weights(_head_scales(tokenizer))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _train_tokenizer(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    token_count = tokenizer.get_vocab_size()
    if token_count != VOCAB:
        raise ValueError(f"{CORPUS.name}: expected text for {VOCAB} tokens, found {token_count}")
    return tokenizer


def _head_scales(tokenizer: Tokenizer) -> NDArray[np.float32]:
    """Return each token's logit scale: 1 for whole words and the end, less for pieces of words.

    Shape (VOCAB,), float32. Role marks, and bytes that are no text on their own, get 0. Their logit
    is then 0, while the largest of the others is about 9, so greedy decoding never picks them.
    """
    scales = np.zeros(VOCAB, dtype=np.float32)
    scales[END_ID] = 1.0
    for token_id in range(len(SPECIAL_TOKENS), VOCAB):
        piece = tokenizer.decode([token_id])
        if piece.startswith(" ") and piece[1:].isalpha():
            scales[token_id] = 1.0
        elif piece.isprintable() and "\ufffd" not in piece:
            scales[token_id] = PIECE_SCALE
    return scales


def _weights(head_scales: NDArray[np.float32]) -> Weights:
    random = np.random.default_rng(SEED)

    def matrix(outputs: int, inputs: int, scale: float) -> NDArray[np.float32]:
        values = random.standard_normal((outputs, inputs), dtype=np.float32)
        return values * np.float32(scale / inputs**0.5)

    ones = np.ones(HIDDEN, dtype=np.float32)
    # Embeddings have scale 1, not 1/sqrt(inputs): a row is looked up, not summed over.
    weights: Weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, HIDDEN**0.5)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        kv_rows = KV_HEADS * HEAD_DIM
        weights |= {
            f"{prefix}.input_layernorm.weight": ones.copy(),
            f"{prefix}.post_attention_layernorm.weight": ones.copy(),
            f"{attention}.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, INIT["q"]),
            f"{attention}.k_proj.weight": matrix(kv_rows, HIDDEN, INIT["k"]),
            f"{attention}.v_proj.weight": matrix(kv_rows, HIDDEN, INIT["v"]),
            f"{attention}.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, INIT["o"]),
            f"{mlp}.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN, INIT["mlp"]),
            f"{mlp}.up_proj.weight": matrix(INTERMEDIATE, HIDDEN, INIT["mlp"]),
            f"{mlp}.down_proj.weight": matrix(HIDDEN, INTERMEDIATE, INIT["mlp"]),
        }
    head = matrix(VOCAB, HIDDEN, INIT["head"]) * head_scales[:, None]
    return weights | {"model.norm.weight": ones.copy(), "lm_head.weight": head}
