"""Make the tiny drafts and their golden outputs of `tests/model/drafts/goldens` with the reference implementations.

    python tools/make_draft_goldens.py [FOLDER] [NAME ...]

Needs torch, transformers, safetensors, and the `dflash` package (0.1.0, installed without its dependencies). Targets
are the golden models of `tests/model/goldens`. A name is its own seed.
"""

from __future__ import annotations

import copy
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from dflash import model as dflash
from make_goldens import TOKENS, randomise
from safetensors.torch import save_file
from torch.nn import functional
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen4_exp import modeling_qwen4_exp

TARGETS = Path(__file__).parent.parent / "tests" / "model" / "goldens"
STEPS = 4
SLIDING, FULL = "sliding_attention", "full_attention"
Tensors = dict[str, torch.Tensor]


def open_target(name: str) -> Any:
    """A golden model in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGETS / name, dtype=torch.float32)
    model.config._attn_implementation = "eager"
    return model.eval()


def golden_ids(name: str) -> torch.Tensor:
    """Its tokens `[1, T]`."""
    with np.load(TARGETS / name / "golden.npz") as file:
        return torch.tensor(file["ids"].astype(np.int64))[None]


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode()) % 1000


def save(folder: Path, config: dict[str, Any], tensors: Tensors, golden: dict[str, Any]) -> None:
    """Tensors are stored in bfloat16, which `randomise` has rounded them to."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    stored = {
        name: value.detach().clone().contiguous().to(value.dtype if value.dtype == torch.int64 else torch.bfloat16)
        for name, value in tensors.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    np.savez(folder / "golden.npz", **golden)


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


DRAFT: dict[str, Any] = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "model_type": "qwen3",
}
# name: (target, architecture, fields of the top level, fields of dflash_config)
BLOCKS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "dflash_full": (
        "qwen3",
        "DFlashDraftModel",
        {"layer_types": [FULL] * 2},
        {"block_size": 6, "target_layer_ids": [0, 1]},
    ),
    "dflash_mixed": (
        "qwen3_5",
        "DFlashDraftModel",
        {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 7},
        {"block_size": 5, "target_layer_ids": [0, 1]},
    ),
    "dflash_gemma4": (
        "gemma4_31b",
        "DFlashDraftModel",
        {"layer_types": [SLIDING, FULL], "sliding_window": 9, "is_causal": False},
        {"block_size": 6, "target_layer_ids": [0, 1], "final_logit_softcapping": 3.0, "output_multiplier": 0.7},
    ),
    "dflash_scaled": (
        "gemma4_e2b",
        "DFlashDraftModel",
        {"layer_types": [SLIDING], "sliding_window": 9, "has_lm_head": True},
        {"block_size": 6, "target_layer_ids": [1, 3], "input_embedding_scale": 5.0},
    ),
    "dflash_laguna": (
        "laguna",
        "DFlashLagunaForCausalLM",
        {"layer_types": [SLIDING] * 2, "sliding_window": 8, "gating": "per-head", "draft_vocab_size": 128},
        {"block_size": 6, "target_layer_ids": [0, 1], "causal": True},
    ),
    "dflash2": (
        "qwen3_5_moe",
        "DFlash2DraftModel",
        {"layer_types": [SLIDING] * 2, "sliding_window": 9, "is_causal": False},
        {
            "block_size": 8,
            "target_layer_ids": [0],
            "conv_kernel_size": 2,
            "conv_group_size": 8,
            "selector_rank": 6,
            "selector_top_k": 5,
        },
    ),
}


class Laguna(torch.nn.Module):
    """Laguna's draft as its public implementations describe it, without a cache: everything is computed each time.

    Every tap is normed, each layer norms the context like its own input, and `softplus(g_proj(x))` scales each head.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, taps = config.hidden_size, len(config.dflash_config["target_layer_ids"])
        inner = dflash.DFlashDraftModel(config)
        self.inner = inner
        self.aux_hidden_norms = torch.nn.ModuleList(
            dflash.Qwen3RMSNorm(hidden, config.rms_norm_eps) for _ in range(taps)
        )
        for layer in inner.layers:
            layer.self_attn.g_proj = torch.nn.Linear(hidden, config.num_attention_heads, bias=False)

    def forward(self, taps: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Taps `[n, taps · hidden]` of all positions before, and a block's embeddings `[B, hidden]`."""
        inner, n = self.inner, len(taps)
        parts = taps.chunk(len(self.aux_hidden_norms), -1)
        context = torch.cat([norm(part) for norm, part in zip(self.aux_hidden_norms, parts, strict=True)], -1)
        context = inner.hidden_norm(inner.fc(context))
        cos, sin = (part[0] for part in inner.rotary_emb(rows[None], torch.arange(n + len(rows))[None]))
        places = torch.arange(n + len(rows))
        x = rows
        for layer in inner.layers:
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            both = torch.cat([layer.input_layernorm(context), normed])

            def heads(states: torch.Tensor, width: int = attention.head_dim) -> torch.Tensor:
                return states.view(len(states), -1, width).transpose(0, 1)

            q, k = attention.q_norm(heads(attention.q_proj(normed))), attention.k_norm(heads(attention.k_proj(both)))
            v = heads(attention.v_proj(both))
            q = q * cos[n:] + dflash.rotate_half(q) * sin[n:]
            k = k * cos + dflash.rotate_half(k) * sin
            group = q.shape[0] // k.shape[0]
            scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * attention.scaling
            apart = places[n:, None] - places[None]
            scores = scores.masked_fill((apart < 0) | (apart >= attention.sliding_window), -torch.inf)
            y = scores.softmax(-1) @ v.repeat_interleave(group, 0)
            gate = functional.softplus(attention.g_proj(normed))
            y = (y.transpose(0, 1) * gate[..., None]).reshape(len(rows), -1)
            x = x + attention.o_proj(y)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return inner.norm(x)


def tapped(target: Any, ids: torch.Tensor, layers: list[int]) -> torch.Tensor:
    """Outputs of the layers `[T, taps · hidden]`, from hooks: the library's list norms the last one."""
    seen: dict[int, torch.Tensor] = {}

    def hook(index: int) -> Callable[..., None]:
        def keep(_: Any, __: Any, output: Any) -> None:
            seen[index] = output[0] if isinstance(output, tuple) else output

        return keep

    hooks = [target.model.layers[index].register_forward_hook(hook(index)) for index in layers]
    target(ids)
    for handle in hooks:
        handle.remove()
    return torch.cat([seen[index] for index in layers], -1)[0]


def block_draft(name: str, folder: Path) -> None:
    """Blocks behind contexts of 14, 3, 1 and 6 more rows: across the window, and one row by itself."""
    target_name, architecture, fields, nested = BLOCKS[name]
    target, ids = open_target(target_name), golden_ids(target_name)
    vocab, hidden = target.config.vocab_size, target.config.hidden_size
    mask = vocab - 1
    stored = {
        **DRAFT,
        **fields,
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": len(fields["layer_types"]),
        "num_target_layers": target.config.num_hidden_layers,
        "dflash_config": {**nested, "mask_token_id": mask},
        "target": target_name,
    }
    config = transformers.Qwen3Config(**{key: value for key, value in stored.items() if key != "architectures"})
    # The library drops the window where `use_sliding_window` does not ask for it.
    config.sliding_window = stored.get("sliding_window")
    two, laguna = architecture == "DFlash2DraftModel", architecture == "DFlashLagunaForCausalLM"
    draft = (Laguna if laguna else dflash.DFlash2DraftModel if two else dflash.DFlashDraftModel)(config).eval()
    randomise(draft, seed_of(name))
    with torch.no_grad():
        for key, value in draft.named_parameters():
            if key.endswith("base_kernel"):
                value[:, 0] += 1
                value.copy_(value.to(torch.bfloat16))
    head = target.get_output_embeddings()
    tensors = {key.removeprefix("inner."): value for key, value in draft.state_dict().items() if "inv_freq" not in key}
    tensors = {key.removesuffix(".weight") if "codebook" in key else key: value for key, value in tensors.items()}
    if fields.get("has_lm_head"):
        head = torch.nn.Linear(hidden, vocab, bias=False)
        randomise(head, seed_of(name) + 1)
        tensors["lm_head.weight"] = head.weight
    inner = draft.inner if laguna else draft
    taps = tapped(target, ids, inner.target_layer_ids)
    golden: dict[str, Any] = {"ids": ids[0].numpy().astype(np.int32), "taps": taps.numpy()}
    generator = torch.Generator().manual_seed(seed_of(name))
    cache = dflash._make_cache(config)
    splits = [(0, 14), (14, 17), (17, 18), (18, 24)]
    for i, (low, high) in enumerate(splits):
        anchor = int(torch.randint(0, vocab - 1, (1,), generator=generator))
        tokens = torch.tensor([[anchor] + [mask] * (inner.block_size - 1)])
        if "input_embedding_scale" in nested:
            rows = dflash._raw_input_embeddings(target, tokens, nested["input_embedding_scale"])
        else:
            rows = target.get_input_embeddings()(tokens)
        if laguna:
            states = draft(taps[:high], rows[0])[None]
        else:
            positions = torch.arange(low, high + inner.block_size)[None]
            states = draft(
                target_hidden=taps[None, low:high],
                position_ids=positions,
                noise_embedding=rows,
                past_key_values=cache,
                use_cache=True,
            )
            dflash._crop_to(cache, high)
        logits = inner.compute_logits(states[:, 1:], head)
        golden |= {f"anchor{i}": anchor, f"states{i}": states[0].numpy(), f"logits{i}": logits[0].numpy()}
        golden[f"path{i}"] = logits[0].argmax(-1).numpy()
        if two:
            start = torch.tensor([anchor])
            path, candidates, _ = draft.propose(states[:, 1:], start, head, 0.0)
            golden |= {f"path{i}": path[0].numpy(), f"candidates{i}": candidates[0].numpy()}
            torch.manual_seed(seed_of(name) + i)
            path, candidates, law = draft.propose(states[:, 1:], start, head, 0.8)
            golden |= {f"drawn{i}": path[0].numpy(), f"drawn_from{i}": candidates[0].numpy(), f"law{i}": law[0].numpy()}
    save(folder, stored, tensors, golden | {"splits": np.array(splits)})


TRACED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "trace_dflash": (
        "DFlashDraftModel",
        {"layer_types": [SLIDING, FULL], "sliding_window": 7},
        {"block_size": 5, "target_layer_ids": [0, 2, 4]},
    ),
    "trace_dflash2": (
        "DFlash2DraftModel",
        {"layer_types": [SLIDING] * 2, "sliding_window": 9, "is_causal": False},
        {
            "block_size": 8,
            "target_layer_ids": [1, 2, 4],
            "conv_kernel_size": 2,
            "conv_group_size": 8,
            "selector_rank": 6,
            "selector_top_k": 5,
        },
    ),
}


def trace(name: str, folder: Path) -> None:
    """Whole greedy generations of the reference: what each round verified and how much it kept.

    The target has 16 tokens, and the liveliest of some drafts is taken: random ones rarely agree with it.
    """
    architecture, fields, nested = TRACED[name]
    vocab, hidden, layers = 16, 32, 6
    shape = {**DRAFT, "vocab_size": vocab, "hidden_size": hidden, "tie_word_embeddings": False}
    target_config = transformers.Qwen3Config(num_hidden_layers=layers, **shape)
    target_config._attn_implementation = "eager"
    target = transformers.Qwen3ForCausalLM(target_config).eval()
    randomise(target, seed_of("trace"))
    prompt = torch.randint(0, vocab - 1, (1, 12), generator=torch.Generator().manual_seed(5))
    stored = {
        **shape,
        **fields,
        "architectures": [architecture],
        "num_hidden_layers": len(fields["layer_types"]),
        "num_target_layers": layers,
        "dflash_config": {**nested, "mask_token_id": vocab - 1},
        "target": "trace_target",
    }
    config = transformers.Qwen3Config(**{key: value for key, value in stored.items() if key != "architectures"})
    config.sliding_window = stored.get("sliding_window")
    dflash._cuda_time = lambda: 0.0
    calls: list[list[int]] = []
    forward = target.forward

    def listen(input_ids: torch.Tensor, **named: Any) -> Any:
        calls.append(input_ids[0].tolist())
        return forward(input_ids, **named)

    best: tuple[float, Any, dict[str, Any]] | None = None
    for seed in range(100, 160):
        draft = (dflash.DFlash2DraftModel if "selector_rank" in nested else dflash.DFlashDraftModel)(config).eval()
        randomise(draft, seed)
        calls.clear()
        target.forward = listen
        found = dflash.dflash_generate(draft, target, prompt, 60, None, return_stats=True)
        target.forward = forward
        produced = found.acceptance_lengths
        run = {
            "prompt": prompt[0].tolist(),
            "output": found.output_ids[0, 12:].tolist(),
            "verified": [list(call) for call in calls[1:]],
            "produced": [int(count) for count in produced],
        }
        score = float(np.std(produced) + 0.2 * np.mean(produced))
        if best is None or score > best[0]:
            best = (score, draft, run)
    assert best is not None
    tensors = {key: value for key, value in best[1].state_dict().items() if "inv_freq" not in key}
    tensors = {key.removesuffix(".weight") if "codebook" in key else key: value for key, value in tensors.items()}
    save(folder, stored, tensors, {})
    (folder / "golden.npz").unlink()
    (folder / "trace.json").write_text(json.dumps(best[2]) + "\n")
    target.to(torch.bfloat16).save_pretrained(folder.parent / "trace_target", safe_serialization=True)
    (folder.parent / "trace_target" / "generation_config.json").unlink(missing_ok=True)
    print(f"{name}: {len(best[2]['produced'])} rounds, produced {np.bincount(best[2]['produced']).tolist()}")


POSITIONS = [3, 17, 38, 39]


def targets(root: Path) -> None:
    """What each golden model hands to drafts, at a few positions: `NAME.taps` `[4, layers · hidden]` and `NAME.raw`.

    Taps are the outputs of layers, from hooks; Flash Next's are what the next layer's mixer reads, or the final states.
    Raw logits are the head's products with the final states, without cap or scale.
    """
    golden: dict[str, np.ndarray] = {}
    for folder in sorted(TARGETS.iterdir()):
        config = folder / "config.json"
        if not config.is_file() or "quantization_config" in json.loads(config.read_text()):
            continue
        model, ids, seen = open_target(folder.name), golden_ids(folder.name), {}

        def hook(index: int, seen: dict[int, torch.Tensor] = seen) -> Callable[..., None]:
            def keep(_: Any, __: Any, output: Any) -> None:
                seen[index] = (output[0] if isinstance(output, tuple) else output).reshape(TOKENS, -1)[POSITIONS]

            return keep

        layers = list(model.model.layers)
        final = (
            model.model.norm
            if hasattr(model.model, "norm")
            else model.model.norm_f
            if hasattr(model.model, "norm_f")
            else None
        )
        if final is None:
            for index, layer in enumerate(layers[1:]):
                layer.attn_hyper_connection.register_forward_hook(hook(index))
            model.model.hyper_connection_mixer.register_forward_hook(hook(len(layers) - 1))
            model.model.hyper_connection_mixer.register_forward_hook(hook(-1))
        else:
            for index, layer in enumerate(layers):
                layer.register_forward_hook(hook(index))
            final.register_forward_hook(hook(-1))
        model(ids)
        golden[f"{folder.name}.taps"] = torch.cat([seen[index] for index in range(len(layers))], -1).numpy()
        golden[f"{folder.name}.raw"] = functional.linear(seen[-1], model.get_output_embeddings().weight).numpy()
        print(folder.name)
    np.savez(root / "targets.npz", **golden)


MAKERS: dict[str, Callable[[str, Path], None]] = {
    **dict.fromkeys(MTP, mtp),
    "mtp_qwen4_exp": mtp_flash_next,
    **dict.fromkeys(ASSISTANTS, assistant),
    **dict.fromkeys(BLOCKS, block_draft),
    **dict.fromkeys(TRACED, trace),
}


def main(arguments: list[str]) -> None:
    root = Path(arguments[0]) if arguments else TARGETS.parent / "drafts" / "goldens"
    # Such small products gain nothing from more, and lose much on a busy machine.
    torch.set_num_threads(1)
    with torch.inference_mode():
        if not arguments[1:] or "targets" in arguments:
            targets(root)
        for name in [n for n in arguments[1:] or MAKERS if n != "targets"]:
            MAKERS[name](name, root / name)
            size = sum(file.stat().st_size for file in (root / name).iterdir())
            print(f"{name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
