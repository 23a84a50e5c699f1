"""Architectures of mlx-lm through our contract: its own logits, whatever rows and caches do around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.formats.safetensors import write as write_tensors
from arriero.model.adapters.mlx_lm import spelled_out
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model
from arriero.source import FolderSource
from tests.helpers.engine_runs import collect, make_engine, plain_loop, run, submit
from tests.helpers.foreign_checkpoint import CONFIGS, write
from tests.helpers.forward import Rows, chunked, packed, whole

IDS = np.random.default_rng(3).integers(0, 96, 40).tolist()
KINDS = sorted(CONFIGS)


def opened(folder: Path, dtype: mx.Dtype = mx.float32) -> Model:
    return load_model(Checkpoint.open(FolderSource(str(folder))), dtype)


def own_logits(network: Any) -> np.ndarray:
    return np.array(network(mx.array([IDS]))[0].astype(mx.float32))


@pytest.fixture(params=KINDS, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    """A model of ours around a network, and mlx-lm's own with the same weights."""
    folder, network = write(tmp_path_factory.mktemp(request.param), request.param)
    return opened(folder), network


def test_logits_are_those_of_mlx_lm(pair: tuple[Model, Any]) -> None:
    model, network = pair
    np.testing.assert_allclose(whole(model, IDS), own_logits(network), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1,), (17, 1, 9, 2)])
def test_chunks_and_single_steps_give_the_logits_of_the_whole(pair: tuple[Model, Any], sizes: tuple[int, ...]) -> None:
    model, network = pair
    np.testing.assert_allclose(chunked(model, IDS, sizes), own_logits(network), rtol=0, atol=1e-4)


def test_rows_that_share_a_forward_keep_their_bits(pair: tuple[Model, Any]) -> None:
    model, _ = pair
    prompts = [IDS[:5], IDS, IDS[7:8], IDS[::-1]]
    for prompt, logits in zip(prompts, packed(model, prompts), strict=True):
        np.testing.assert_array_equal(logits, whole(model, prompt))


def test_the_engine_gives_the_plain_loops_tokens_among_neighbours(pair: tuple[Model, Any]) -> None:
    model, _ = pair
    expected = plain_loop(model, IDS[:20], 30)
    engine = make_engine(model)
    engine.submit(submit("main", IDS[:20], 30))
    engine.submit(submit("gone", IDS[5:30], 30))
    engine.submit(submit("other", IDS[3:9], 5))
    replies: dict[str, Any] = {}
    for step in range(12):
        if step == 6:
            engine.cancel("gone")
        engine.step()
        collect(engine, replies)
    assert run(engine, replies)["main"].tokens == expected
    assert len(replies["other"].tokens) == 5


def test_turns_of_a_conversation_go_on_from_what_is_stored(pair: tuple[Model, Any]) -> None:
    model, _ = pair
    engine = make_engine(model, prefill_chunk=7, prefix_bytes=1 << 30)
    prompt, known = IDS[:18], 0
    for turn in range(3):
        engine.submit(submit(str(turn), prompt, 12))
        reply = run(engine)[str(turn)]
        assert reply.tokens == plain_loop(model, prompt, 12)
        assert reply.end is not None
        assert reply.end.cached_tokens == known  # type: ignore[union-attr]
        known = len(prompt) + 11
        prompt = [*prompt, *reply.tokens, *IDS[20 + turn : 24 + turn]]


def test_a_branch_of_a_stored_conversation_changes_no_token(pair: tuple[Model, Any]) -> None:
    model, _ = pair
    engine = make_engine(model, prefill_chunk=9, prefix_bytes=1 << 30)
    for number, prompt in enumerate([IDS, [*IDS[:25], 1, 2, 3], IDS[:25], [*IDS[:10], 4], IDS]):
        engine.submit(submit(str(number), prompt, 8))
        assert run(engine)[str(number)].tokens == plain_loop(model, prompt, 8)


def test_activations_have_the_dtype_asked_for(tmp_path: Path) -> None:
    folder, network = write(tmp_path, "olmo2")
    model = opened(folder, mx.bfloat16)
    rows = Rows(model)
    hidden = model.forward(rows.batch([IDS])).final
    assert hidden.dtype == model.facts.dtype == mx.bfloat16
    assert {array.dtype for array in model.parameters()} == {mx.bfloat16}
    assert {array.dtype for array in rows.caches[0][0].state()} == {mx.bfloat16}  # type: ignore[union-attr]
    wanted = own_logits(network)
    error = np.array(model.logits(hidden).astype(mx.float32)) - wanted
    assert np.sqrt(np.mean(error**2)) < 0.05 * np.sqrt(np.mean(wanted**2))


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_stay_packed_and_give_mlx_lms_logits(tmp_path: Path, bits: int) -> None:
    folder, network = write(tmp_path, "phi3", bits=bits)
    model = opened(folder)
    assert sum(array.dtype == mx.uint32 for array in model.parameters()) == 3 * 4 + 2
    np.testing.assert_allclose(whole(model, IDS), own_logits(network), rtol=0, atol=1e-5)


def test_facts_bound_what_caches_take(pair: tuple[Model, Any]) -> None:
    model, _ = pair
    facts = model.facts
    assert (facts.vocab_size, facts.hidden_size, facts.layers, facts.context_length) == (96, 64, 3, 512)
    assert facts.architecture.endswith("ForCausalLM (through mlx-lm)")
    rows = Rows(model)
    for count in (1, 255, 1, 200):
        rows.logits([IDS[:1] * count])
        held = sum(cache.nbytes for cache in rows.caches[0] if cache is not None)
        assert 0 < held <= facts.cache_bytes_fixed + rows.positions[0] * facts.cache_bytes_per_token


def test_what_it_cannot_give_is_refused(pair: tuple[Model, Any]) -> None:
    model, _ = pair
    with pytest.raises(UnsupportedFeature, match="no hidden states to drafts"):
        model.forward(Rows(model).batch([IDS[:3]], taps=[0]))
    with pytest.raises(UnsupportedFeature, match="does not take images"):
        model.forward(Rows(model).batch([IDS[:3]], features=[object()]))
    with pytest.raises(UnsupportedFeature, match="no token rows"):
        model.embed(mx.array([1]))
    with pytest.raises(UnsupportedFeature, match="no bare logits"):
        model.raw_logits(mx.zeros((1, 64)))


def edited(folder: Path, change: Any) -> Path:
    """The folder with its tensors changed."""
    path = folder / "model.safetensors"
    tensors = {name: mx.array(np.array(value)) for name, value in mx.load(str(path)).items()}
    change(tensors)
    mx.save_safetensors(str(path), tensors, {"format": "mlx"})
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.q_proj.weight"), r"layers\.1\.self_attn\.q_proj\.weight"),
        (lambda t: t.update({"model.stray.weight": mx.zeros(3)}), r"model\.stray\.weight"),
        (lambda t: t.update({"model.norm.weight": mx.zeros(3)}), r"model\.norm\.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    folder, _ = write(tmp_path, "olmo2")
    with pytest.raises(CheckpointError, match=rf"mlx-lm 0\.32\.2 cannot build its olmo2[\s\S]*{message}"):
        opened(edited(folder, change))


def test_what_mlx_lm_drops_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def sanitize(_: Any, weights: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in weights.items() if "mtp." not in name and "inv_freq" not in name}

    folder, _ = write(tmp_path, "olmo2")
    monkeypatch.setattr("mlx_lm.models.olmo2.Model.sanitize", sanitize)
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": mx.zeros(8)}
    opened(edited(folder, lambda tensors: tensors.update(inverse)))
    assert "leaves out" not in caplog.text
    opened(edited(folder, lambda tensors: tensors.update({"mtp.fc.weight": mx.zeros((2, 3))})))
    assert "mlx-lm leaves out 6 of the checkpoint's" in caplog.text
    assert caplog.text.rstrip().endswith("not used as they are: mtp.fc.weight")


def test_a_missing_hyper_parameter_is_named(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "olmo2")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != "intermediate_size"}))
    with pytest.raises(CheckpointError, match=r"its olmo2 from this checkpoint: .*intermediate_size"):
        opened(folder)


def test_a_rope_is_found_in_rope_parameters(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    old, _ = write(tmp_path / "old", "olmo2", rope_theta=500.0, rope_scaling=scaling)
    nested = {"rope_theta": 500.0, **scaling}
    new, _ = write(tmp_path / "new", "olmo2", rope_parameters=nested, rope_theta=None, rope_scaling=None)
    plain, _ = write(tmp_path / "plain", "olmo2")
    found, wanted, other = (whole(opened(folder), IDS) for folder in (new, old, plain))
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(found - other).max() > 0.01


def test_fields_beside_rope_parameters_win_and_layered_ones_stay() -> None:
    assert spelled_out({"rope_theta": 3.0, "rope_parameters": {"rope_theta": 4.0}})["rope_theta"] == 3.0
    layered = {"rope_parameters": {"full_attention": {"rope_theta": 4.0}}}
    assert spelled_out(layered) == layered
    inner = {"rope_parameters": {"rope_theta": 4.0, "partial_rotary_factor": 0.5}}
    text = spelled_out({"text_config": inner})["text_config"]
    assert (text["rope_theta"], text["partial_rotary_factor"], "rope_scaling" in text) == (4.0, 0.5, False)


def test_numbers_without_letters_in_json_are_read() -> None:
    values = spelled_out({"limit": [0.0, {"__float__": "Infinity"}], "low": {"x": {"__float__": "-Infinity"}}})
    assert values == {"limit": [0.0, float("inf")], "low": {"x": float("-inf")}}


def test_a_program_in_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "olmo2", model_file="evil.py")
    (folder / "evil.py").write_text("raise SystemExit('run')")
    with pytest.raises(CheckpointError, match="its own program"):
        opened(folder)


def test_a_float4_tensor_with_a_global_scale_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "olmo2")

    tensors = {name: np.array(value) for name, value in mx.load(str(folder / "model.safetensors")).items()}
    owner = "model.layers.0.mlp.up_proj"
    codes, scales = mx.quantize(mx.array(tensors.pop(f"{owner}.weight")), group_size=16, bits=4, mode="nvfp4")
    tensors[f"{owner}.weight_packed"] = np.array(codes.view(mx.uint8))
    tensors[f"{owner}.weight_scale"] = np.array(scales).view(ml_dtypes.float8_e4m3fn)
    tensors[f"{owner}.weight_global_scale"] = np.full(1, 2, np.float32)
    write_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=rf"{owner}\.weight is packed as nvfp4 with a global scale"):
        opened(folder)
