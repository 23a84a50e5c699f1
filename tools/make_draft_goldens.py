"""Make the tiny drafts and their golden outputs of `tests/model/drafts/goldens` with the reference implementations.

    python tools/make_draft_goldens.py [FOLDER] [NAME ...]

Needs torch, transformers, safetensors, and the `dflash` package (0.1.0, installed without its dependencies). Targets
are the golden models of `tests/model/goldens`. A name is its own seed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import draft_golden_blocks as blocks
from tools import draft_golden_heads as heads
from tools.draft_golden_files import TARGETS, golden_ids, open_target
from tools.make_goldens import TOKENS

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
    **dict.fromkeys(heads.MTP, heads.mtp),
    "mtp_qwen4_exp": heads.mtp_flash_next,
    **dict.fromkeys(heads.ASSISTANTS, heads.assistant),
    **dict.fromkeys(blocks.BLOCKS, blocks.block_draft),
    **dict.fromkeys(blocks.TRACED, blocks.trace),
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
