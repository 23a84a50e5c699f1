"""Makes the golden values of tests/real from llama.cpp: token ids, top-1 choices and the likelihood of a fixed text.

Development only. Needs a build of llama.cpp: its `llama-tokenize` and `tools/llamacpp_logits.cpp` compiled against it.

    python tools/make_llamacpp_goldens.py --tokenize BUILD/bin/llama-tokenize --logits ./llamacpp_logits
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.models import fetch  # noqa: E402

REAL = ROOT / "tests" / "real"
TEXT_TOKENS = 2000


def tokenize(program: str, model: Path, text: str) -> list[int]:
    """Token ids of a text by llama.cpp, BOS as the model wants it, control tokens parsed."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = [program, "-m", str(model), "-f", file.name, "--ids", "--no-escape", "--log-disable"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ids: list[int] = json.loads(output)
    return ids


def logits(program: str, model: Path, sequences: list[list[int]]) -> np.ndarray:
    """Float32 logits `[sum of lengths, vocabulary]` by llama.cpp."""
    flat = [len(sequences)]
    for sequence in sequences:
        flat += [len(sequence), *sequence]
    with tempfile.TemporaryDirectory() as folder:
        tokens, out = Path(folder) / "tokens", Path(folder) / "logits"
        np.array(flat, "<i4").tofile(tokens)
        subprocess.run([program, str(model), str(tokens), str(out)], check=True, stderr=subprocess.DEVNULL)
        values = np.fromfile(out, "<f4")
    return values.reshape(sum(len(sequence) for sequence in sequences), -1)


def main() -> None:
    """Write tests/real/<model>.json for both development models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenize", required=True)
    parser.add_argument("--logits", required=True)
    options = parser.parse_args()
    prompts = (REAL / "prompts.txt").read_text("utf-8").strip().split("\n")
    prompts = [prompt.replace("\\n", "\n") for prompt in prompts]
    text = (REAL / "text.txt").read_text("utf-8")
    for name in ("smollm2", "gemma3"):
        model = fetch(name)
        sequences = [tokenize(options.tokenize, model, prompt) for prompt in prompts]
        ids = tokenize(options.tokenize, model, text)[:TEXT_TOKENS]
        rows = logits(options.logits, model, [*sequences, ids])
        top = rows.argmax(-1).tolist()
        golden, at = [], 0
        for prompt, sequence in zip(prompts, sequences, strict=True):
            golden.append({"text": prompt, "ids": sequence, "top1": top[at : at + len(sequence)]})
            at += len(sequence)
        scores = rows[at:].astype(np.float64)
        maximum = scores.max(-1, keepdims=True)
        log_sum = maximum[:, 0] + np.log(np.exp(scores - maximum).sum(-1))
        losses = log_sum[:-1] - scores[np.arange(len(ids) - 1), ids[1:]]
        record = {
            "prompts": golden,
            "text_ids": ids,
            "text_top1": top[at:],
            "text_losses": [round(float(loss), 4) for loss in losses],
            "perplexity": float(np.exp(losses.mean())),
        }
        (REAL / f"{name}.json").write_text(json.dumps(record) + "\n", "utf-8")
        print(f"{name}: {len(ids)} tokens, perplexity {record['perplexity']:.4f}")


if __name__ == "__main__":
    main()
