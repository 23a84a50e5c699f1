"""ADAPTER: W + scale · B · A, merged in float32 and rounded once, for adapters of PEFT and of mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from arriero.create.adapter import open_adapter
from arriero.create.create import create
from arriero.create.gather import gather
from arriero.create.request import CreateRequest
from arriero.errors import ArrieroError, CheckpointError, InvalidRequest, UnsupportedFeature
from arriero.formats.safetensors import write
from arriero.model.checkpoint import Checkpoint
from arriero.modelfile import parse
from arriero.store.store import Store
from tests.create.conftest import Judged
from tests.helpers.checkpoint_folder import packed, tensors, upload, write_folder
from tests.helpers.memory_checkpoint import dequantize
from tests.helpers.unchecked import unchecked

Q = "model.layers.0.self_attn.q_proj"
EMBED = "model.embed_tokens"
RANK = 4
A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"


def halves(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Multiples of 1/8 up to 1: sums of products of four of them are exact in float32 and in bfloat16's range."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32) / 8


def peft(folder: Path, held: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if held is None:
        held = {f"base_model.model.{Q}.lora_A.weight": halves((RANK, 64), 1)}
        held[f"base_model.model.{Q}.lora_B.weight"] = halves((64, RANK), 2)
    facts = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    write(folder / "adapter_model.safetensors", held)
    return folder


def mlx(folder: Path, held: dict[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    facts = {"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": 2.0, "dropout": 0.0}} | config
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    write(folder / "adapters.safetensors", held)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def made(store: Store, adapter: Path, *, check: Any = unchecked, **fields: Any) -> Any:
    request = CreateRequest(**({"model": "m", "adapters": upload(store, adapter)} | fields))
    return create(store, request, lambda status: None, check=check)


def base(store: Store, tmp_path: Path, held: dict[str, np.ndarray] | None = None, **config: Any) -> dict[str, str]:
    shards = None if held is None else {"model.safetensors": held}
    return upload(store, write_folder(tmp_path / "f", shards, config=config))


def of(model: Any, name: str) -> np.ndarray:
    weight = Checkpoint.open(model.source()).weight(f"{name}.weight")
    return np.array(dequantize(weight).astype(mx.float32))


def test_a_peft_adapter_is_added_exactly(store, tmp_path, judged: Judged):
    model = made(store, peft(tmp_path / "a"), files=base(store, tmp_path), check=judged)
    expected = tensors()[f"{Q}.weight"] + np.float32(2) * halves((64, RANK), 2) @ halves((RANK, 64), 1)
    np.testing.assert_array_equal(of(model, Q), expected)
    assert Checkpoint.open(model.source()).info(f"{Q}.weight").dtype == "F32"
    for name, value in tensors().items():
        if name != f"{Q}.weight" and value.ndim == 2:
            np.testing.assert_array_equal(of(model, name.removesuffix(".weight")), value)
    assert store.verify() == []


def test_an_mlx_adapter_is_added_exactly(store, tmp_path):
    held = {f"{Q}.lora_a": halves((64, RANK), 1), f"{Q}.lora_b": halves((RANK, 64), 2)}
    held |= {f"{EMBED}.lora_a": halves((259, RANK), 3), f"{EMBED}.lora_b": halves((RANK, 64), 4)}
    model = made(store, mlx(tmp_path / "a", held), files=base(store, tmp_path))
    # mlx-lm's own sum: (scale · bᵀ) · aᵀ, and for tables (scale · a) · b.
    expected = tensors()[f"{Q}.weight"] + (2 * halves((RANK, 64), 2).T) @ halves((64, RANK), 1).T
    np.testing.assert_array_equal(of(model, Q), expected)
    table = tensors()[f"{EMBED}.weight"] + (2 * halves((259, RANK), 3)) @ halves((RANK, 64), 4)
    np.testing.assert_array_equal(of(model, EMBED), table)


def test_a_table_of_pefts_and_one_scale_for_each_module_are_read(store, tmp_path):
    held = {
        f"base_model.model.{EMBED}.lora_embedding_A": halves((RANK, 259), 1),
        f"base_model.model.{EMBED}.lora_embedding_B": halves((64, RANK), 2),
        f"base_model.model.{Q}.lora_A.default.weight": halves((RANK, 64), 3),
        f"base_model.model.{Q}.lora_B.default.weight": halves((64, RANK), 4),
    }
    adapter = peft(tmp_path / "a", held, alpha_pattern={"q_proj": 2}, use_rslora=True)
    model = made(store, adapter, files=base(store, tmp_path))
    # Scales of alpha over the root of the rank: 8 / 2, and 2 / 2.
    table = tensors()[f"{EMBED}.weight"] + 4 * (halves((64, RANK), 2) @ halves((RANK, 259), 1)).T
    np.testing.assert_array_equal(of(model, EMBED), table)
    np.testing.assert_array_equal(
        of(model, Q), tensors()[f"{Q}.weight"] + halves((64, RANK), 4) @ halves((RANK, 64), 3)
    )


def test_a_sum_is_rounded_once_to_the_tensors_own_type(store, tmp_path):
    half = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors().items()}
    model = made(store, peft(tmp_path / "a"), files=base(store, tmp_path, half))
    whole = half[f"{Q}.weight"].astype(np.float32) + 2 * halves((64, RANK), 2) @ halves((RANK, 64), 1)
    np.testing.assert_array_equal(of(model, Q), whole.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert Checkpoint.open(model.source()).info(f"{Q}.weight").dtype == "BF16"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_an_adapter_may_be_in_any_type(store, tmp_path, dtype):
    held = {A: halves((RANK, 64), 1).astype(dtype), B: halves((64, RANK), 2).astype(dtype)}
    model = made(store, peft(tmp_path / "a", held), files=base(store, tmp_path))
    expected = tensors()[f"{Q}.weight"] + np.float32(2) * halves((64, RANK), 2) @ halves((RANK, 64), 1)
    np.testing.assert_array_equal(of(model, Q), expected)


def test_an_adapter_goes_onto_a_stored_model(store, tmp_path):
    create(store, CreateRequest(model="base", files=base(store, tmp_path)), lambda status: None, check=unchecked)
    model = made(store, peft(tmp_path / "a"), from_="base")
    np.testing.assert_array_equal(
        of(model, Q), tensors()[f"{Q}.weight"] + 2 * halves((64, RANK), 2) @ halves((RANK, 64), 1)
    )
    old = {layer.digest for layer in store.get("base").manifest.layers}
    assert sum(layer.digest not in old for layer in model.manifest.layers) == 1


def test_a_packed_matrix_becomes_bfloat16_and_may_be_packed_again_after_the_sum(store, tmp_path):
    held = packed({name: value for name, value in tensors().items() if "down" not in name}, 4, 64)
    create(
        store,
        CreateRequest(model="base", files=base(store, tmp_path, held, quantization={"bits": 4, "group_size": 64})),
        lambda status: None,
        check=unchecked,
    )
    whole = of(store.get("base"), Q) + 2 * halves((64, RANK), 2) @ halves((RANK, 64), 1)
    model = made(store, peft(tmp_path / "a"), from_="base")
    info = Checkpoint.open(model.source()).info(f"{Q}.weight")
    assert (info.quantization, info.dtype) == (None, "BF16")
    np.testing.assert_allclose(of(model, Q), whole, rtol=2**-8, atol=1e-6)
    smaller = made(store, peft(tmp_path / "a"), from_="base", quantize="int8")
    info = Checkpoint.open(smaller.source()).info(f"{Q}.weight")
    assert info.quantization.name == "int8"
    assert np.linalg.norm(of(smaller, Q) - whole) < 0.01 * np.linalg.norm(whole)


def test_a_stack_of_experts_gets_a_sum_for_each(store, tmp_path):
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    stack = halves((3, 64, 64), 7)
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    files = base(store, tmp_path, tensors() | {f"{name}.weight": stack}, **config)
    held = {f"{name}.lora_a": halves((3, RANK, 64), 1), f"{name}.lora_b": halves((3, 64, RANK), 2)}
    model = made(store, mlx(tmp_path / "a", held), files=files)
    np.testing.assert_array_equal(of(model, name), stack + 2 * halves((3, 64, RANK), 2) @ halves((3, RANK, 64), 1))


@pytest.mark.parametrize(
    ("held", "config", "error", "match"),
    [
        ({A: halves((2, 64), 1), B: halves((64, RANK), 2)}, {}, CheckpointError, r"the ranks 2 and 4, and .* says 4"),
        ({A: halves((2, 64), 1), B: halves((64, 2), 2)}, {}, CheckpointError, r"the ranks 2 and 2, and .* says 4"),
        (
            {A: halves((4, 32), 1), B: halves((64, 4), 2)},
            {},
            CheckpointError,
            r"changes .*q_proj by a matrix of shape \[64, 32\], but tensor .*\.q_proj\.weight has \[64, 64\]",
        ),
        (
            {A.replace(".0.", ".7."): halves((4, 64), 1), B.replace(".0.", ".7."): halves((64, 4), 2)},
            {},
            CheckpointError,
            r"it changes base_model\.model\.model\.layers\.7\.self_attn\.q_proj, for which the model has no matrix",
        ),
        ({A: halves((4, 64), 1)}, {}, CheckpointError, r"has only one of the two matrices .*; B is missing"),
        ({A: halves((4, 64), 1), B: np.zeros((64, 4), np.int32)}, {}, CheckpointError, r"is I32 of shape \[64, 4\]"),
        ({A: halves((4, 64), 1), B: np.full((64, 4), np.inf, np.float32)}, {}, CheckpointError, r"not finite"),
        ({"x.lora_magnitude_vector": halves((4,), 1)}, {}, UnsupportedFeature, r"lora_magnitude_vector is not one"),
        (None, {"use_dora": True}, UnsupportedFeature, r"has use_dora"),
        (None, {"peft_type": "IA3"}, UnsupportedFeature, r"'IA3', not LORA"),
        (None, {"lora_alpha": "x"}, CheckpointError, r"lora_alpha 'x', expected a number"),
        (None, {"alpha_pattern": {".*q": 1}}, UnsupportedFeature, r"only names of modules"),
        (None, {"fine_tune_type": "dora"}, UnsupportedFeature, r"fine_tune_type is 'dora'"),
    ],
)  # fmt: skip
def test_what_is_no_adapter_of_this_model_is_refused(store, tmp_path, held, config, error, match):
    files = base(store, tmp_path)
    with pytest.raises(error, match=match) as info:
        made(store, peft(tmp_path / "a", held, **config), files=files)
    assert isinstance(info.value, ArrieroError)
    assert store.list() == []


def test_an_adapter_is_its_configuration_and_its_weights(tmp_path):
    folder = peft(tmp_path / "a")
    with pytest.raises(InvalidRequest, match=r"an adapter is adapter_config.json and one of .*; found nothing"):
        open_adapter({})
    (folder / "adapter_config.json").write_text("[")
    files = {path.name: path for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match=r"adapter_config.json is not a JSON object"):
        open_adapter(files)
    (folder / "adapter_model.safetensors").write_bytes(b"GGUF" + b"\0" * 60)
    with pytest.raises(UnsupportedFeature, match=r"adapter_model.safetensors is an adapter as GGUF"):
        open_adapter(files)


def test_adapter_names_a_folder_or_the_file_in_it(tmp_path):
    write_folder(tmp_path / "m")
    peft(tmp_path / "a")
    (tmp_path / "a" / "0000100_adapters.safetensors").write_bytes(b"an older state")
    for name in ("./a", "./a/adapter_model.safetensors"):
        found = gather(parse(f"FROM ./m\nADAPTER {name}\n"), tmp_path)
        assert set(found.body["adapters"]) == {"adapter_config.json", "adapter_model.safetensors"}
        assert set(found.body["adapters"].values()) <= set(found.uploads)
