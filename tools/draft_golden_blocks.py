"""Golden outputs of drafts that guess a block at once: DFlash, DFlash 2, Laguna's, and whole generations of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from dflash import model as dflash
from torch.nn import functional

from tools.draft_golden_files import golden_ids, open_target, save, seed_of
from tools.golden_windowed import FULL, SLIDING
from tools.make_goldens import randomise

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
