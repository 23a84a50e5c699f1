"""What `arriero bench gpu` measures of whole models, at small sizes and on whatever device there is."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
import pytest

from arriero.bench import gpu, gpu_drafts, gpu_mlx_lm, gpu_models
from arriero.bench.gpu_conditions import Conditions
from arriero.bench.gpu_drafts import Rounds, random_draft, rounds
from arriero.bench.gpu_mlx_lm import MlxLm
from arriero.bench.gpu_models import Quantization, RandomCheckpoint, random_model
from arriero.bench.gpu_served import END, served, tokenizer
from arriero.bench.gpu_shapes import CONFIGS, cache_bytes, packing, step_bytes, tensor_bytes, tensors
from arriero.bench.speed import Speed
from arriero.errors import CheckpointError
from tests.helpers.small_shapes import small, small_draft

NVFP4 = Quantization("nvfp4", 4, 16)

SIZES = {"Qwen3-8B": 8.2, "Qwen3-30B-A3B": 30.5, "Qwen3.5-35B-A3B": 34.7, "Qwen3.8-27B": 26.9, "Gemma-4-31B": 30.7}
"""Billions of numbers in the published text networks."""


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_shape_has_as_many_numbers_as_its_name_says(name: str) -> None:
    count = sum(tensor_bytes(shape, None) / 2 for _, shape in tensors(CONFIGS[name]))
    assert count / 1e9 == pytest.approx(SIZES[name], abs=0.06)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_step_reads_what_the_model_holds(name: str) -> None:
    config = small(name)
    model = random_model(config, NVFP4)
    held = sum(array.nbytes for array in model.parameters())
    everything = sum(tensor_bytes(shape, packing(tensor, shape, config, NVFP4)) for tensor, shape in tensors(config))
    # Besides, it holds angles of positions; gains and rates may be float32, and packed matrices have a global scale.
    assert everything <= held < 1.08 * everything
    table = 0 if config["tie_word_embeddings"] else 2 * config["vocab_size"] * config["hidden_size"]
    all_experts = step_bytes(config, NVFP4, rows=1, context=0, tokens=10_000)
    assert all_experts == pytest.approx(everything - table + cache_bytes(config, 0), rel=1e-6)


def test_a_step_of_a_few_rows_reads_some_of_the_experts() -> None:
    config = small("Qwen3-30B-A3B")
    one, eight = (step_bytes(config, NVFP4, rows=rows, context=0) for rows in (1, 8))
    bank = sum(tensor_bytes(s, NVFP4) for tensor, s in tensors(config) if ".switch_mlp." in tensor)
    assert eight - one == pytest.approx(bank * ((1 - (1 - 8 / 128) ** 8) - 8 / 128))


def test_a_window_bounds_what_is_read_of_the_context() -> None:
    config = small("Gemma-4-31B")
    assert config["sliding_window"] == 32
    assert [cache_bytes(config, n) for n in (32, 33)] == [
        5 * 2 * 2 * 64 * 32 * 2 + 2 * 128 * 32 * 2,
        5 * 2 * 2 * 64 * 32 * 2 + 2 * 128 * 33 * 2,
    ]


def test_a_checkpoint_of_random_weights_has_no_other_tensors() -> None:
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.9"):
        RandomCheckpoint(small("Qwen3-8B"), NVFP4).weight("model.layers.9.mlp.up_proj.weight")


@contextmanager
def only(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """The shape of this name made small wherever it is looked up."""
    monkeypatch.setitem(CONFIGS, name, small(name))
    monkeypatch.setitem(gpu_drafts.DRAFTS, name, small_draft(name))
    monkeypatch.setattr(gpu, "CONTEXT", 40)
    monkeypatch.setattr(gpu, "PROMPT", 80)
    monkeypatch.setattr(gpu, "STEPS", 12)
    monkeypatch.setattr(gpu_drafts, "TOKENS", 40)
    yield


def test_a_model_is_measured_with_rounds_of_its_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with only(monkeypatch, "Qwen3.8-27B"):
        found = gpu.model_run("Qwen3.8-27B", 1e11, told.append)
    assert [line.split(":")[0] for line in told] == [
        "Qwen3.8-27B, 1 at once",
        "Qwen3.8-27B, 8 at once",
        "Qwen3.8-27B, 8 tokens of a row",
        "Qwen3.8-27B, a prompt of 80",
        "Qwen3.8-27B, rounds with 5 right",
    ]
    assert (found.one.rows, found.eight.rows, found.prompt.context) == (1, 8, 80)
    assert found.verify > 0
    assert found.shares.one == pytest.approx(
        step_bytes(small("Qwen3.8-27B"), NVFP4, rows=1, context=40) / 1e11 / found.one.step
    )
    assert isinstance(found.drafts, Rounds)
    assert found.drafts.drafted == 7
    assert found.peak_bytes >= RandomCheckpoint(small("Qwen3.8-27B"), NVFP4).nbytes
    assert found.mlx_lm == "mlx-lm was not measured"


def test_ours_is_gone_before_servers_and_these_before_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    left: list[int] = []

    def beside(name: str, how: Quantization, *, context: int, prompt: int) -> str:
        order.append(f"mlx-lm {name} {context} {prompt}")
        left.append(mx.get_active_memory())
        return "mlx-lm is elsewhere"

    def serve(*_: object, **__: object) -> list[Speed]:
        order.append("served")
        return []

    def alone() -> Conditions:
        order.append("conditions")
        return Conditions(1e11, 0)

    monkeypatch.setattr(gpu_mlx_lm, "beside", beside)
    monkeypatch.setattr(gpu, "served", serve)
    monkeypatch.setattr(gpu, "conditions", alone)
    monkeypatch.setattr(gpu, "copy_rate", lambda: 1e11)
    monkeypatch.setattr(gpu, "product_rate", lambda size: 1e12)
    monkeypatch.setattr(gpu, "device", SimpleNamespace(cuda=object))
    with only(monkeypatch, "Qwen3-8B"):
        gpu.free()
        before = mx.get_active_memory()
        found = gpu.measure(["Qwen3-8B"], order.append, through_server=["Qwen3.8-27B"])
    assert found.models["Qwen3-8B"].mlx_lm == "mlx-lm is elsewhere"
    assert left[0] - before < RandomCheckpoint(small("Qwen3-8B"), NVFP4).nbytes / 10
    parts = [line for line in order if line.startswith(("mlx-lm", "served", "conditions")) or "at once" in line]
    assert [line.split(":")[0] for line in parts] == [
        "conditions",
        "Qwen3-8B, 1 at once",
        "Qwen3-8B, 8 at once",
        "conditions",
        "served",
        "conditions",
        "mlx-lm Qwen3-8B 40 80",
    ]
    assert list(found.conditions) == ["Qwen3-8B", "Qwen3.8-27B, served", "Qwen3-8B, mlx-lm"]
    assert not found.disturbed


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3.8-27B"])
def test_forced_rounds_keep_as_many_drafts_as_they_are_meant_to(name: str) -> None:
    model = random_model(small(name), None)
    draft = random_draft(small_draft(name), model, None)
    found = rounds(model, draft, right=5, context=20, tokens=60)
    assert (found.drafted, found.right) == (7, 5)
    assert found.share == 1
    assert found.seconds > found.step > 0
    assert found.speed == pytest.approx(6 / found.seconds)


def test_a_draft_that_is_forced_still_computes_its_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    model = random_model(small("Qwen3-8B"), None)
    draft = random_draft(small_draft("Qwen3-8B"), model, None)
    propose = draft.propose

    def counted(*args: object) -> mx.array:
        found: mx.array = propose(*args)  # type: ignore[arg-type]
        computed.append(found.shape[0])
        return found

    monkeypatch.setattr(draft, "propose", counted)
    rounds(model, draft, right=2, context=20, tokens=40)
    assert computed.count(7) > 8


def test_mlx_lm_runs_shapes_of_several_families() -> None:
    pytest.importorskip("mlx_lm")
    for name, layers in (("Qwen3.5-35B-A3B", 4), ("Gemma-4-31B", 1)):
        config = small(name, num_hidden_layers=layers, vocab_size=128, hidden_size=128)
        model = gpu_mlx_lm.random_mlx_lm(config, Quantization("affine", 4, 64))
        found = gpu_mlx_lm.measured(model, vocab=128, context=2, prompt=2, steps=2)
        assert found.step > 0
        assert found.prefill > 0


def test_mlx_lm_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu_mlx_lm.beside("Qwen3-8B", NVFP4, context=4, prompt=4) == "mlx-lm is not installed"


def test_what_goes_wrong_in_mlx_lm_is_said() -> None:
    pytest.importorskip("mlx_lm")
    assert "KeyError" in str(gpu_mlx_lm.beside("Llama-9", NVFP4, context=4, prompt=4))


class Child:
    """Stands for mlx-lm's process."""

    pid = 1 << 22  # more than a process' number can be

    def __init__(self, said: str | None) -> None:
        self.said = said
        self.returncode = 0
        self.waited = False

    def communicate(self, timeout: float) -> tuple[str, str]:
        if self.said is None:
            raise subprocess.TimeoutExpired("mlx-lm", timeout)
        return self.said, ""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.waited = True


def test_mlx_lm_runs_without_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx_lm")
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", "0")
    monkeypatch.setenv("KEPT", "1")
    child = Child('a warning\n{"step": 0.5, "prefill": 7.0, "prompt": 6}\n')

    def start(command: list[str], *, env: dict[str, str], **how: Any) -> Child:
        assert "MLX_USE_CUDA_GRAPHS" not in env
        assert env["KEPT"] == "1"
        asked = json.loads(command[-1])
        assert asked == {"how": ["nvfp4", 4, 16], "context": 5, "prompt": 6}
        return child

    monkeypatch.setattr(subprocess, "Popen", start)
    assert gpu_mlx_lm.beside("Qwen3-8B", NVFP4, context=5, prompt=6) == MlxLm(0.5, 7.0, 6)
    assert child.waited


def test_mlx_lm_that_takes_too_long_is_ended_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("mlx_lm")
    noted = tmp_path / "child"
    command = ["sh", "-c", f"sleep 600 & echo $! > {noted}; wait"]
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **how: start(command, **how))
    monkeypatch.setattr(gpu_mlx_lm, "PATIENCE", 1.0)
    assert gpu_mlx_lm.beside("Qwen3-8B", NVFP4, context=5, prompt=6) == "mlx-lm took longer than 1 s"
    child, deadline = int(noted.read_text()), time.monotonic() + 30
    while _runs(child):
        assert time.monotonic() < deadline, "what mlx-lm started runs on"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether there is such a process that is not just waiting to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_prompt_that_mlx_lm_would_read_for_long_is_left_at_the_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx_lm")
    config = small("Qwen3-8B", num_hidden_layers=1, vocab_size=128)
    model = gpu_mlx_lm.random_mlx_lm(config, Quantization("affine", 4, 64))
    assert gpu_mlx_lm.measured(model, vocab=128, context=4, prompt=8, steps=2).prompt == 8
    monkeypatch.setattr(gpu_mlx_lm, "LONG", 0.0)
    assert gpu_mlx_lm.measured(model, vocab=128, context=4, prompt=8, steps=2).prompt == 4


def test_a_random_model_is_served_like_any_other() -> None:
    config = small("Qwen3-8B", num_hidden_layers=2, vocab_size=1024)
    (found,) = served(config, NVFP4, parallels=(2,), words=4, tokens=12, runs=1)
    assert found.parallel == 2
    assert found.prompt_tokens > 20
    assert found.decode > 0
    assert found.streamed > 0


def test_its_tokenizer_has_a_text_for_every_token() -> None:
    made = tokenizer(1024)
    assert made.get_vocab_size() == 1024
    assert made.token_to_id(END) == 1023
    text = "Wörter, 3 of them\n"
    ids = made.encode(text).ids
    assert len(ids) == len(text.encode())
    assert made.decode(ids) == text
    assert len({made.id_to_token(token) for token in range(1024)}) == 1024


def test_decoding_is_timed_while_all_rows_decode() -> None:
    found = gpu_models.decoding(random_model(small("Qwen3-8B"), NVFP4), rows=3, context=20, tokens=12)
    assert (found.rows, found.context) == (3, 20)
    assert found.total == pytest.approx(3 / found.step)
