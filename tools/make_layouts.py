"""Make `tests/model/goldens/layouts.npz`: the reference implementation's logits for packed layouts.

    python tools/make_layouts.py --python INTERPRETER [FILE]

This process writes the plain weights that each layout means; INTERPRETER (with torch and transformers) loads them with
the reference implementation and gives the logits of the golden model's ids, in float32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent

REFERENCE = """
import sys
import numpy as np, torch, transformers
folder, ids, out = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(folder)
kind = getattr(transformers, config.architectures[0])
model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
with torch.no_grad():
    np.save(out, model(torch.tensor(np.load(ids)["ids"])[None].long()).logits[0].numpy())
"""


def main() -> None:
    """Compute and write."""
    sys.path.insert(0, str(ROOT))
    from arriero.formats.safetensors import write
    from tests.helpers.layouts import GOLDENS, LAYOUTS
    from tests.helpers.layouts import REFERENCE as STORED

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch and transformers")
    parser.add_argument("file", nargs="?", type=Path, default=STORED)
    options = parser.parse_args()
    found: dict[str, np.ndarray] = {}
    for name, make in LAYOUTS.items():
        layout = make()
        if layout.meant is None:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder, golden = Path(scratch), GOLDENS / layout.golden
            (folder / "config.json").write_bytes((golden / "config.json").read_bytes())
            write(folder / "model.safetensors", layout.plain(), {"format": "pt"})
            out = folder / "logits.npy"
            command = [options.python, "-c", REFERENCE, str(folder), str(golden / "golden.npz"), str(out)]
            subprocess.run(command, check=True)
            found[name] = np.load(out)
        with np.load(golden / "golden.npz") as file:
            print(f"{name}: off the golden model by {np.abs(found[name] - file['logits']).max():.3f}")
    np.savez_compressed(options.file, **found)


if __name__ == "__main__":
    main()
