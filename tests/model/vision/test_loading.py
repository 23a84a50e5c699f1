"""How towers are loaded: other tools' layouts, and what is missing, foreign or not honoured, in words."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError, InvalidRequest
from arriero.model.architectures import load_model
from arriero.model.contract import Layout, Model, vision_of
from arriero.model.vision import family_of, tower_of
from arriero.model.vision.qwen import block_order
from arriero.model.weight import Quantization, Weight
from tests.helpers.memory_checkpoint import MemoryCheckpoint
from tests.helpers.pictures import GOLDENS, Golden, patches, seen

pytestmark = pytest.mark.usefixtures("kernels")

ATOMIC = {"gemma3", "gemma4_31b", "gemma4_unified"}
NAMES = sorted(folder.name for folder in GOLDENS.iterdir() if folder.is_dir() and folder.name != "qwen4_exp")
"""Flash Next has the tower of Qwen 3.5; its tables want a checkpoint of files."""


def golden(name: str) -> MemoryCheckpoint:
    return MemoryCheckpoint.golden(GOLDENS / name)


def features(model: Model, name: str) -> np.ndarray:
    vision = vision_of(model)
    assert vision is not None
    return np.array(vision.encode(Golden.load(name, "between").images[0].patches))


def changed(name: str, **vision: Any) -> MemoryCheckpoint:
    checkpoint = golden(name)
    return checkpoint.copy(vision_config=checkpoint.config["vision_config"] | vision)


def tower_names(checkpoint: MemoryCheckpoint) -> list[str]:
    words = ("visual", "vision", "multi_modal_projector")
    return [name for name in checkpoint.tensors if any(word in name for word in words)]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_a_tower_is_taken_and_counted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = golden(name)
    with caplog.at_level(logging.INFO):
        model = load_model(checkpoint.typed(), mx.float32)
    assert set(checkpoint.unused()) & set(tower_names(checkpoint)) == set()
    assert "not loaded" not in caplog.text
    without = golden(name)
    for tensor in tower_names(without):
        del without.tensors[tensor]
    blind = load_model(without.typed(), mx.float32)
    assert vision_of(blind) is None
    assert sum(a.nbytes for a in model.parameters()) > sum(a.nbytes for a in blind.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_tower_that_lacks_a_tensor_does_not_load(name: str) -> None:
    checkpoint = golden(name)
    every = tower_names(checkpoint)
    for missing in every:
        tensors = {tensor: value for tensor, value in checkpoint.tensors.items() if tensor != missing}
        with pytest.raises(CheckpointError, match=missing.rpartition(".")[2]):
            load_model(MemoryCheckpoint(checkpoint.config, tensors).typed(), mx.float32)


@pytest.mark.parametrize("name", NAMES)
def test_a_stray_tensor_of_a_tower_is_reported(name: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = golden(name)
    prefix = next(n for n in tower_names(checkpoint) if "projector" not in n and "embed_vision" not in n)
    checkpoint.tensors[prefix.rpartition(".")[0] + ".stray"] = mx.zeros(3)
    load_model(checkpoint.typed(), mx.float32)
    assert "does not use 1 tensors" in caplog.text
    assert "stray" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_images_wait_for_each_other_only_where_their_tokens_see_each_other(name: str) -> None:
    vision = vision_of(load_model(golden(name).typed(), mx.float32))
    assert vision is not None
    assert vision.atomic == (name in ATOMIC)


@pytest.mark.parametrize("root", ["visual.", "vision_tower."])
def test_qwens_tower_is_found_under_every_name_and_in_mlxs_layout(root: str) -> None:
    original = golden("qwen3_5")
    tensors = {n.replace("model.visual.", root): v for n, v in original.tensors.items()}
    kernel = tensors[f"{root}patch_embed.proj.weight"]
    assert isinstance(kernel, mx.array)
    tensors[f"{root}patch_embed.proj.weight"] = kernel.transpose(0, 2, 3, 4, 1)
    moved = load_model(MemoryCheckpoint(original.config, tensors).typed(), mx.float32)
    expected = features(load_model(original.typed(), mx.float32), "qwen3_5")
    np.testing.assert_array_equal(features(moved, "qwen3_5"), expected)


@pytest.mark.parametrize("name", ["gemma3", "gemma4_e2b"])
def test_gemmas_tower_is_found_under_older_names(name: str) -> None:
    original = golden(name)
    inner = "vision_tower.vision_model." if name == "gemma3" else "vision_tower."

    def moved(tensor: str) -> str:
        for part in ("vision_tower.", "multi_modal_projector.", "embed_vision."):
            tensor = tensor.replace(f"model.{part}", inner if part == "vision_tower." else part)
        return tensor.replace("model.language_model.", "language_model.model.")

    tensors = {moved(tensor): value for tensor, value in original.tensors.items()}
    model = load_model(MemoryCheckpoint(original.config, tensors).typed(), mx.float32)
    expected = features(load_model(original.typed(), mx.float32), name)
    np.testing.assert_array_equal(features(model, name), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", [Quantization("affine", 8, 32), Quantization("mxfp8", 8, 32)], ids=["affine", "mxfp8"])
def test_a_packed_tower_gives_what_its_numbers_mean(name: str, how: Quantization) -> None:
    original = golden(name)
    norms = ("norm", "ln", "bias", "mm_input", "position_embedding_table", "patch_embed", "_min", "_max", "std_")
    packed = MemoryCheckpoint(original.config, dict(original.tensors))
    for tensor in tower_names(original):
        if not any(word in tensor for word in norms):
            packed.tensors |= MemoryCheckpoint({}, {tensor: original.tensors[tensor]}).quantized(how, "weight").tensors
    assert sum(isinstance(packed.tensors[tensor], Weight) for tensor in tower_names(packed))
    found = features(load_model(packed.typed(), mx.float32), name)
    expected = features(load_model(packed.dequantized().typed(), mx.float32), name)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3_5", {"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes"),
        ("qwen3_5", {"hidden_act": "silu"}, "hidden_act"),
        ("qwen3_5", {"in_channels": 1}, "in_channels"),
        ("qwen3_5", {"num_position_embeddings": 26}, "num_position_embeddings"),
        ("qwen3_5", {"out_hidden_size": 47}, "out_hidden_size"),
        ("qwen3_5", {"num_heads": 3}, "num_heads"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ("gemma4_e2b", {"attention_bias": True}, "attention_bias"),
        ("gemma4_e2b", {"head_dim": 18}, "head_dim"),
        ("gemma4_e2b", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("gemma4_e2b", {"standardize": True}, "std_bias"),
        ("gemma4_e2b", {"position_embedding_size": 17}, "position_embedding_table"),
        ("gemma3", {"image_size": 26}, "image_size"),
        ("gemma3", {"num_attention_heads": 5}, "num_attention_heads"),
        ("gemma3", {"hidden_act": "relu"}, "hidden_act"),
        ("gemma4_unified", {"mm_embed_dim": 33}, "pos_embedding"),
    ],
)
def test_a_configuration_that_is_not_honoured_is_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(changed(name, **fields).typed(), mx.float32)


def test_axes_that_do_not_fit_the_frequencies_are_refused() -> None:
    checkpoint = golden("qwen3_5")
    text = checkpoint.config["text_config"]
    for sections, message in (([2, 1, 2], "4 frequencies"), (None, "4 frequencies"), ([4], "three whole numbers")):
        turns = {k: v for k, v in (text["rope_parameters"] | {"mrope_section": sections}).items() if v is not None}
        with pytest.raises(CheckpointError, match=message):
            load_model(checkpoint.copy(text_config=text | {"rope_parameters": turns}).typed(), mx.float32)
    apart = text["rope_parameters"] | {"mrope_interleaved": False}
    with pytest.raises(CheckpointError, match="mrope_interleaved"):
        load_model(checkpoint.copy(text_config=text | {"rope_parameters": apart}).typed(), mx.float32)


def test_which_models_have_a_tower() -> None:
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}}
    assert family_of(config) == "qwen"
    assert family_of({**config, "vision_config": None}) is None
    assert family_of({**config, "architectures": ["LlamaForCausalLM"]}) is None
    assert family_of({"architectures": "x", "vision_config": {}}) is None
    assert tower_of(config, ["model.language_model.norm.weight", "mtp.fc.weight"]) is None
    assert tower_of(config, ["model.language_model.norm.weight", "model.visual.pos_embed.weight"]) == "qwen"


@pytest.mark.parametrize("name", NAMES)
def test_patches_of_another_form_are_refused(name: str) -> None:
    vision = vision_of(load_model(golden(name).typed(), mx.float32))
    assert vision is not None
    image = Golden.load(name, "between").images[0].patches
    vision.check(image)
    values = len(image.pixels) // (image.rows * image.columns)
    odd = patches(np.zeros((7 * 9, values), np.uint8), 7, 9, 1)
    shorter = patches(np.zeros((image.rows * image.columns, values - 3), np.uint8), image.rows, image.columns)
    huge = patches(np.zeros((26 * 2, values), np.uint8), 26, 2, 1)
    # Qwen's grid has no bounds of its own; the unified Gemma 4 has no squares that a grid must divide into.
    wrong = {"qwen3_5": [shorter, odd], "qwen3_5_moe": [shorter, odd], "gemma4_unified": [shorter, huge]}
    for bad in wrong.get(name, [shorter, odd, huge]):
        with pytest.raises(InvalidRequest):
            vision.check(bad)


def test_positions_go_on_behind_the_prompt() -> None:
    layout = Layout(np.array([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]], np.int32), -2)
    assert layout.at(np.array([1, 2])).tolist() == [[1, 1], [1, 1], [1, 2]]
    assert layout.at(np.array([4, 5, 6, 7])).tolist() == [[1, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]]
    assert layout.at(np.array([9])).tolist() == [[7], [7], [7]]


def test_patches_of_a_block_are_neighbours() -> None:
    row, column = block_order(4, 6, 2)
    assert list(zip(row.tolist(), column.tolist(), strict=True))[:8] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3),
    ]  # fmt: skip


def test_what_an_images_neighbour_on_the_right_shows_reaches_its_left_only_where_tokens_see_each_other() -> None:
    """The last row of pixels changes; logits of the image's first token follow in models that look both ways."""
    for name in ("qwen3_5", "gemma4_e2b", "gemma4_31b", "gemma3"):
        # The tower itself mixes all patches, so features are taken as they are and only the last row is swapped.
        model = load_model(golden(name).typed(), mx.float32)
        asked = Golden.load(name, "between")
        expected = seen(model, asked)
        vision = vision_of(model)
        assert vision is not None
        encode = vision.encode

        def swapped(image: Any, encode: Any = encode) -> mx.array:
            rows = encode(image)
            return mx.concatenate([rows[:-1], rows[:1]])

        vision.encode = swapped  # type: ignore[method-assign]
        first = asked.images[0].offset
        same = np.array_equal(seen(model, asked)[first], expected[first])
        assert same == (name not in ATOMIC), name
