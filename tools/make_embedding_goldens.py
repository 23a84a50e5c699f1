"""Tiny random encoders with the states that transformers gives them, for tests/model/test_encoders.py.

    python tools/make_embedding_goldens.py tests/model/encoders   # needs torch and transformers

Each folder gets config.json, model.safetensors and expected.npz: token ids of three texts and their final states.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

COMMON: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {"hidden_act": "gelu"}),
    "bert_tanh": ("BertModel", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-6}),
    "xlm_roberta": ("XLMRobertaModel", {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 42}),
    "nomic_bert": ("NomicBertModel", {"max_position_embeddings": 64}),
    "modernbert": (
        "ModernBertModel",
        {"num_hidden_layers": 4, "local_attention": 8, "max_position_embeddings": 64, "pad_token_id": 0}
        | dict.fromkeys(["bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"], 1),
    ),
    "gemma3_encoder": (
        "Gemma3TextModel",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "use_bidirectional_attention": True,
            "max_position_embeddings": 64,
        },
    ),
}
LENGTHS = (7, 1, 30)


def make(folder: Path, name: str, seed: int) -> None:
    """One encoder."""
    kind, changes = ENCODERS[name]
    torch.manual_seed(seed)
    found = getattr(transformers, kind)
    model = found(found.config_class(**COMMON | changes)).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for index, length in enumerate(LENGTHS):
        ids = rng.integers(5, COMMON["vocab_size"], length)
        with torch.no_grad():
            states = model(input_ids=torch.tensor(ids)[None]).last_hidden_state[0]
        arrays |= {f"ids{index}": ids.astype(np.int32), f"states{index}": states.numpy()}
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() | {"architectures": [kind]}
    (target / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, target / "model.safetensors")
    np.savez(target / "expected.npz", **arrays)


def main(arguments: list[str]) -> int:
    """Make all of them in the folder given."""
    for seed, name in enumerate(ENCODERS):
        make(Path(arguments[0]), name, seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
