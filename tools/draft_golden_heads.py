"""Golden outputs of the heads that go on from their target's states: MTP, Flash Next's, Gemma 4's assistant."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen4_exp import modeling_qwen4_exp

from tools.draft_golden_files import TARGETS, golden_ids, open_target, save, seed_of
from tools.golden_windowed import FULL, SLIDING
from tools.make_goldens import randomise

STEPS = 4


def chained(
    step: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    tokens: torch.Tensor,
    states: torch.Tensor,
) -> dict[str, np.ndarray]:
    """A head over pairs, and then over its own guesses: `step` maps tokens `[T]` and states to states and logits."""
    head, logits = step(tokens, states)
    golden = {"states": head.numpy(), "logits": logits.numpy()}
    path, scores = [], []
    for _ in range(STEPS):
        scores.append(logits[-1])
        path.append(int(logits[-1].argmax()))
        tokens, states = torch.cat([tokens, torch.tensor(path[-1:])]), torch.cat([states, head[-1:]])
        head, logits = step(tokens, states)
    return golden | {"path": np.array(path, np.int32), "scores": torch.stack(scores).numpy()}


MTP = {
    "mtp_qwen3_5": ("qwen3_5", modeling_qwen3_5.Qwen3_5DecoderLayer, modeling_qwen3_5.Qwen3_5RMSNorm),
    "mtp_qwen3_5_moe": (
        "qwen3_5_moe",
        modeling_qwen3_5_moe.Qwen3_5MoeDecoderLayer,
        modeling_qwen3_5_moe.Qwen3_5MoeRMSNorm,
    ),
    "mtp_qwen3_next": ("qwen3_next", modeling_qwen3_next.Qwen3NextDecoderLayer, modeling_qwen3_next.Qwen3NextRMSNorm),
}
MTP_NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "mtp_block.": "layers.0.",
    "post_norm.": "norm.",
}


def mtp(name: str, folder: Path) -> None:
    """The library's general layer for several tokens, with the decoder layer of the target's file."""
    target_name, layer_class, norm_class = MTP[name]
    target, ids = open_target(target_name), golden_ids(target_name)
    config = copy.deepcopy(target.config)
    config.layer_types, config.num_hidden_layers = ["full_attention"], 1
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers = []
    head = MtpLayer(config, layer_class, norm_class, 0).eval()
    randomise(head, seed_of(name))
    hidden = target(ids, output_hidden_states=True).hidden_states[-1][0]

    def step(tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(tokens)
        rows = target.get_input_embeddings()(tokens)[None]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        angles = target.model.rotary_emb(rows, positions)
        out = head(
            rows, states[None], position_embeddings=angles, attention_mask=mask, position_ids=positions, cache=None
        )
        return out[0], target.lm_head(out[0])

    tensors = {}
    for key, value in head.state_dict().items():
        old = next(prefix for prefix in MTP_NAMES if key.startswith(prefix))
        tensors["mtp." + MTP_NAMES[old] + key.removeprefix(old)] = value
    golden = chained(step, ids[0, 1:], hidden[:-1])
    save(folder, {"target": target_name}, tensors, golden | {"ids": ids[0].numpy().astype(np.int32)})


def mtp_flash_next(name: str, folder: Path) -> None:
    """The library's model of one layer, whose streams are replaced before it and read behind it."""
    target_name = "qwen4_exp"
    target, ids = open_target(target_name), golden_ids(target_name)
    config = copy.deepcopy(target.config)
    config.layer_types, config.num_hidden_layers = ["indexed_attention"], 1
    config.ple_layer_ids = []
    one = transformers.Qwen4ExpForCausalLM(config).eval()
    one.config._attn_implementation = "eager"
    randomise(one, seed_of(name))
    one.lm_head.load_state_dict(target.lm_head.state_dict())
    hidden, count = config.hidden_size, config.hc_count
    own = torch.nn.ModuleDict(
        {
            "pre_fc_norm_embedding": modeling_qwen4_exp.Qwen4ExpTextRMSNorm(hidden, eps=config.rms_norm_eps),
            "pre_fc_norm_hidden": modeling_qwen4_exp.Qwen4ExpTextRMSNorm(hidden * count, eps=config.rms_norm_eps),
            "fc_embedding": torch.nn.Linear(hidden, hidden, bias=False),
            "fc_hidden": torch.nn.Linear(hidden, hidden, bias=False),
        }
    )
    randomise(own, seed_of(name) + 1)
    seen: dict[str, torch.Tensor] = {}

    def keep(_: Any, __: Any, output: Any) -> None:
        seen["streams"] = output[0] if isinstance(output, tuple) else output

    target.model.layers[-1].register_forward_hook(keep)
    target(ids)
    streams = seen["streams"][0].reshape(ids.shape[1], -1)

    def replace(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if arguments:
            return (seen["x"].reshape(arguments[0].shape), *arguments[1:]), named
        return arguments, named | {"hidden_states": seen["x"].reshape(named["hidden_states"].shape)}

    one.model.layers[0].register_forward_pre_hook(replace, with_kwargs=True)
    one.model.layers[0].register_forward_hook(keep)

    def norm_of(states: torch.Tensor, by_stream: bool) -> torch.Tensor:
        own["pre_fc_norm_hidden"].group_size = hidden if by_stream else None
        return own["pre_fc_norm_hidden"](states).reshape(-1, count, hidden)

    golden: dict[str, Any] = {"ids": ids[0].numpy().astype(np.int32), "target_streams": streams.numpy()}
    for kind, by_stream in (("stream", True), ("all", False)):

        def step(
            tokens: torch.Tensor, states: torch.Tensor, by_stream: bool = by_stream
        ) -> tuple[torch.Tensor, torch.Tensor]:
            rows = target.get_input_embeddings()(tokens)
            token = own["fc_embedding"](own["pre_fc_norm_embedding"](rows))
            seen["x"] = own["fc_hidden"](norm_of(states, by_stream)) + token[:, None]
            logits = one(tokens[None], use_cache=False).logits[0]
            return seen["streams"][0].reshape(len(tokens), -1), logits

        golden |= {f"{kind}_{key}": value for key, value in chained(step, ids[0, 1:], streams[:-1]).items()}
    tensors = {f"mtp.{key}": value for key, value in own.state_dict().items()}
    for key, value in one.state_dict().items():
        if key.startswith(("model.layers.0.", "model.hyper_connection_mixer.")):
            tensors["mtp." + key.removeprefix("model.")] = value
    save(folder, {"target": target_name}, tensors, golden)


ASSISTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "assistant_e2b": (
        "gemma4_e2b",
        {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 5},
    ),
    "assistant_31b": ("gemma4_31b", {}),
    "assistant_26b_a4b": ("gemma4_26b_a4b", {}),
}


def assistant(name: str, folder: Path) -> None:
    """A few steps from the last position; sliding layers are handed the window, as a target's cache holds it."""
    target_name, fields = ASSISTANTS[name]
    target, ids = open_target(target_name), golden_ids(target_name)
    text = json.loads((TARGETS / target_name / "config.json").read_text())
    shared = "num_key_value_heads attention_k_eq_v head_dim sliding_window vocab_size rms_norm_eps rope_parameters"
    wide = next(iter(text["per_layer_config"].values()))
    text = {key: text[key] for key in shared.split()} | {
        "global_head_dim": wide["head_dim"],
        "num_global_key_value_heads": wide.get("num_key_value_heads"),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "layer_types": [SLIDING, SLIDING, FULL],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 3,
        "max_position_embeddings": 512,
    }
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**copy.deepcopy(text)),
        backbone_hidden_size=target.config.hidden_size,
        **fields,
    )
    config.text_config._attn_implementation = "eager"
    draft = transformers.Gemma4AssistantForCausalLM(config).eval()
    randomise(draft, seed_of(name))
    if fields:
        order = torch.randperm(text["vocab_size"], generator=torch.Generator().manual_seed(seed_of(name)))
        draft.masked_embedding.token_ordering.copy_(order)
    length = ids.shape[1] - 1
    out = target(ids[:, :length], use_cache=True, output_hidden_states=True, return_shared_kv_states=True)
    window = text["sliding_window"]
    kv = {kind: tuple(part for part in pair) for kind, pair in out.shared_kv_states.items()}
    kv[SLIDING] = tuple(part[:, :, -window:] for part in kv[SLIDING])
    token, state = ids[:, -1:], out.hidden_states[-1][:, -1:]
    golden: dict[str, list[np.ndarray]] = {"path": [], "states": [], "scores": []}
    for _ in range(STEPS):
        rows = target.get_input_embeddings()(token)
        found = draft(
            inputs_embeds=torch.cat([rows, state], -1), position_ids=torch.tensor([[length]]), shared_kv_states=kv
        )
        token, state = found.logits[:, 0].argmax(-1, keepdim=True), found.last_hidden_state
        golden["path"].append(token[0, 0].numpy().astype(np.int32))
        golden["states"].append(state[0, 0].numpy())
        golden["scores"].append(found.logits[0, 0].numpy())
    stored = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.config.hidden_size,
        "text_config": text,
        "tie_word_embeddings": True,
        "target": target_name,
        **fields,
    }
    tensors = {key: value for key, value in draft.state_dict().items() if not key.startswith("lm_head")}
    save(folder, stored, tensors, {key: np.stack(value) for key, value in golden.items()})
