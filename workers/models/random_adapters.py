"""Generates LoRA adapters with random weights over a model folder, for tests and trials.

Nothing is downloaded or trained. The weights are seeded, and large enough to change most answers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from schemas.model.adapters import CONFIG_FILE, SIMULATED, WEIGHTS_FILE
from schemas.model.files import read_json

_SCALE = 1.0  # of an update of a layer, in units of the layer's own weights


def make_adapter(folder: Path, base: Path, seed: int, rank: int = 8) -> Path:
    """Write an adapter over the Llama in the folder `base`, or over the simulated model, and return
    its folder. Equal seeds give equal files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = read_json(base / "config.json")
    modules = {} if config.get("model_type") == SIMULATED else _modules(config)
    adapter: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(adapter, indent=2) + "\n", encoding="utf-8")
    if modules:
        layers = config["num_hidden_layers"]
        save_file(
            _weights(modules, layers, seed, rank), str(folder / WEIGHTS_FILE), {"format": "pt"}
        )
    return folder


def _modules(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the numbers of outputs and inputs of a layer's matrices, by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _weights(
    modules: dict[str, tuple[int, int]], layers: int, seed: int, rank: int
) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int, scale: float) -> NDArray[np.float32]:
        values = random.standard_normal((outputs, inputs), dtype=np.float32)
        return values * np.float32(scale / inputs**0.5)

    weights = {}
    for layer in range(layers):
        for name, (outputs, inputs) in modules.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = matrix(rank, inputs, 1.0)
            weights[f"{prefix}.lora_B.weight"] = matrix(outputs, rank, _SCALE)
    return weights
