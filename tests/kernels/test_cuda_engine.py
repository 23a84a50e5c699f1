"""The real engine on an NVIDIA GPU: replayed steps, in company, with stored prefixes, give the tokens of plain ones."""

from __future__ import annotations

from typing import Any

import pytest

from arriero.bench.gpu_models import CONFIGS, random_model
from arriero.kernels.cuda.gpu import Gpu
from arriero.model.quantization import Quantization
from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import Failed, SamplingOptions, Submit, Tokens
from arriero.runner.sampling import Sampler
from tests.helpers import small_models
from tests.helpers.cuda import gpu

__all__ = ["gpu"]

CONFIG = CONFIGS["Qwen3-8B"] | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 96,
}
RECURRENT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 96,
}
SPARSE = {
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
MODELS = {
    "dense": CONFIG,
    "recurrent": CONFIGS["Qwen3.8-27B"] | RECURRENT | {"intermediate_size": 128},
    "sparse": CONFIGS["Qwen3.5-35B-A3B"] | RECURRENT | SPARSE,
}
PROMPTS = [[5, 9, 2, 40], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [30, 31]]
NEW = 12


OTHERS = {"sinks": small_models.gpt_oss, "latent": small_models.latent}


@pytest.fixture(params=[*MODELS, *OTHERS])
def model(gpu: Gpu, request: pytest.FixtureRequest) -> Any:
    if request.param in OTHERS:
        return OTHERS[request.param](CONFIG["vocab_size"])
    return random_model(MODELS[request.param], Quantization("nvfp4", 4, 16))


def written(
    model: Any, prompts: list[list[int]], *, replay: bool, prefixes: int = 0, turns: int = 1
) -> list[list[int]]:
    """Greedy replies; each further turn goes on from the reply before it."""
    model._replay._refused = not replay
    model._replay._forms.clear()
    limits = Limits(512, max_rows=len(prompts), prefix_bytes=prefixes, cache_bytes=1 << 30 if prefixes else 0)
    engine = Engine(model, Sampler(CONFIG["vocab_size"], 512), limits)
    texts = [list(prompt) for prompt in prompts]
    for turn in range(turns):
        for row, text in enumerate(texts):
            options = SamplingOptions(temperature=0.0)
            engine.submit(Submit(id=f"{turn} {row}", tokens=text, max_tokens=NEW, stop_tokens=[], sampling=options))
        while engine.busy:
            engine.step()
        for message in engine.drain():
            assert not isinstance(message, Failed), message
            if isinstance(message, Tokens):
                texts[int(message.id.split()[1])] += message.tokens
    return texts


def test_a_row_writes_the_same_replayed(model: Any) -> None:
    plain = written(model, PROMPTS[:1], replay=False)
    assert len(plain[0]) == len(PROMPTS[0]) + NEW
    assert written(model, PROMPTS[:1], replay=True) == plain
    assert any(seen.run is not None for seen in model._replay._forms.values())


def test_rows_write_the_same_replayed_side_by_side(model: Any) -> None:
    assert written(model, PROMPTS, replay=True) == written(model, PROMPTS, replay=False)


def test_a_second_turn_goes_on_from_what_was_written_in_place(model: Any, request: pytest.FixtureRequest) -> None:
    # Dense products round otherwise for other numbers of rows: there what is compared goes on from prefixes, too.
    prefixes = 1 << 28 if request.node.callspec.params["model"] in OTHERS else 0
    plain = written(model, PROMPTS[:2], replay=False, prefixes=prefixes, turns=2)
    assert written(model, PROMPTS[:2], replay=True, prefixes=1 << 28, turns=2) == plain
