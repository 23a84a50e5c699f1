"""GGUF files of encoders give the states of the folders that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Encoder
from arriero.source import GGUFSource
from tests.helpers.gguf_files import encode, gguf_bytes
from tests.model.test_encoders import ENCODER_GOLDENS, expected, states

BERT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "encoder.layer.": "blk.",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
NOMIC = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "layers.": "blk.",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"▁{chr(97 + i)}" for i in range(26)), "bc", *map(str, range(29))]


def metadata(architecture: str, **changes: Any) -> dict[str, Any]:
    keys = {
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 1e-12,
        "attention.causal": False,
        "pooling_type": 1,
        "rope.freq_base": 1000.0,
    }
    held: dict[str, Any] = {"general.architecture": architecture}
    held |= {f"{architecture}.{key}": value for key, value in (keys | changes).items() if value is not None}
    return held | {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
    }


def tensors(name: str, kind: str = "F32") -> dict[str, Any]:
    held = mx.load(str(ENCODER_GOLDENS / name / "model.safetensors"))
    assert isinstance(held, dict)
    if name == "nomic_bert":
        for i in range(2):
            parts = [held.pop(f"layers.{i}.self_attn.{part}_proj.weight") for part in "qkv"]
            held[f"blk.{i}.attn_qkv.weight"] = mx.concatenate(parts)
    found = {}
    for key, array in held.items():
        if "pooler" in key:
            continue
        renamed = key
        for ours, theirs in sorted((NOMIC if name == "nomic_bert" else BERT).items(), key=lambda pair: -len(pair[0])):
            renamed = renamed.replace(ours, theirs)
        matrix = array.ndim == 2 and renamed.startswith("blk.")
        found[renamed] = encode(kind if matrix else "F32", np.array(array))
    return found


def write(path: Path, name: str, architecture: str, kind: str = "F32", **changes: Any) -> GGUFSource:
    path.write_bytes(gguf_bytes(metadata(architecture, **changes), tensors(name, kind)))
    return GGUFSource((str(path),))


def load(source: GGUFSource) -> Encoder:
    model = load_model(Checkpoint.open(source), mx.float32)
    assert isinstance(model, Encoder)
    return model


@pytest.mark.parametrize(("name", "architecture"), [("bert", "bert"), ("nomic_bert", "nomic-bert")])
def test_a_gguf_file_gives_the_states_of_its_folder(tmp_path: Path, name: str, architecture: str) -> None:
    model = load(write(tmp_path / "m.gguf", name, architecture))
    for ids, wanted in expected(name):
        np.testing.assert_allclose(states(model, ids), wanted, atol=2e-5)


def test_sixteen_bit_and_packed_matrices_are_read(tmp_path: Path) -> None:
    ids, wanted = expected("bert")[0]
    half = states(load(write(tmp_path / "half.gguf", "bert", "bert", "F16")), ids)
    np.testing.assert_allclose(half, wanted, atol=0.02)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention.causal": True}, "attention.causal"),
        ({"expert_count": 8}, "experts"),
        ({"block_count": None}, "block_count"),
        ({"feed_forward_length": 50}, "shape"),
    ],
)
def test_a_file_that_is_not_honoured_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        load(write(tmp_path / "m.gguf", "bert", "bert", **changes))


GEMMA = {
    "embed_tokens": "token_embd",
    "layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


@pytest.mark.parametrize(
    ("architecture", "dense"),
    [("gemma-embedding", ("dense_2", "dense_3")), ("gemma3", ("dense.0", "dense.1")), ("gemma-embedding", ())],
)
def test_embeddinggemma_is_read_by_both_of_its_names_with_the_matrices_behind_its_pooling(
    tmp_path: Path, architecture: str, dense: tuple[str, ...]
) -> None:
    held = mx.load(str(ENCODER_GOLDENS / "gemma3_encoder" / "model.safetensors"))
    assert isinstance(held, dict)
    found: dict[str, Any] = {}
    for key, array in held.items():
        renamed = key
        for ours, theirs in GEMMA.items():
            renamed = renamed.replace(ours, theirs)
        renamed = renamed if renamed.startswith(("blk", "token")) else "output_norm.weight"
        # Files hold the gain itself.
        found[renamed] = encode("F32", np.array(array) + (array.ndim == 1))
    matrices = [
        np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(((64, 32), (32, 64)))
    ]
    found |= {f"{name}.weight": encode("F32", matrix) for name, matrix in zip(dense, matrices, strict=False)}
    keys = {
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "block_count": 3,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": 3,
        "attention.causal": False,
        "pooling_type": 1,
        "rope.freq_base": 1e6,
    }
    held_keys = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in keys.items()}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(held_keys | {"tokenizer.ggml.model": "llama"}, found))
    model = load(GGUFSource((str(tmp_path / "m.gguf"),)))
    for ids, wanted in expected("gemma3_encoder"):
        np.testing.assert_allclose(states(model, ids), wanted, atol=2e-5)
    pooled = np.ones((2, 32), np.float32)
    wanted = pooled @ matrices[0].T @ matrices[1].T if dense else pooled
    np.testing.assert_allclose(np.array(model.finish(mx.array(pooled))), wanted, rtol=1e-4, atol=1e-3)
