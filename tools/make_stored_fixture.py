"""Keeps a store as this version writes it: tiny models with what they answer, for tests of later versions.

`python -m tools.make_stored_fixture` writes `tests/store/released/<version>.tar.xz`. Run it once for a release, and
keep what earlier ones wrote: a later version has to load it (M07 of docs/bugs.md).
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

from arriero import __version__
from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import upload
from tests.helpers.drafts import GOLDENS as DRAFTS
from tests.helpers.drafts import TARGETS
from tests.helpers.forward import whole
from tests.helpers.golden_store import small_tokenizer

RELEASED = Path(__file__).parents[1] / "tests" / "store" / "released"
MODELS: dict[str, tuple[str, str, str]] = {
    # name: golden, precision, draft
    "llama-plain": ("llama", "", ""),
    "llama-int4": ("llama", "int4", ""),
    "qwen3-drafted": ("qwen3", "mxfp8", "dflash_full"),
    "qwen3.5-nvfp4": ("qwen3_5", "nvfp4", ""),
    "qwen3-moe-int8": ("qwen3_moe", "int8", ""),
    "gemma3-mxfp4": ("gemma3", "mxfp4", ""),
}
"""Dense layers, windows, recurrences with convolutions, experts one by one, a draft; every kind of layer's file."""


def make(folder: Path) -> dict[str, np.ndarray]:
    """A store in `folder`, and tokens and logits of its models."""
    store = Store(folder / "store")
    found: dict[str, np.ndarray] = {}
    for name, (golden, kind, draft) in MODELS.items():
        uploads = folder / "upload"
        uploads.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(TARGETS / golden / file, uploads / file)
        (uploads / "tokenizer.json").write_text(small_tokenizer())
        request = CreateRequest(
            model=name,
            files=upload(store, uploads),
            quantize=kind,
            draft_files={path.name: store.blobs.ingest([path.read_bytes()]).digest for path in _weights(draft)},
            system="Be brief.",
            parameters={"temperature": 0.5, "stop": ["x"]},
        )
        model = create(store, request, print)
        with np.load(TARGETS / golden / "golden.npz") as file:
            ids = file["ids"].tolist()[:16]
        found[f"{name}.ids"] = np.array(ids, np.int32)
        found[f"{name}.logits"] = whole(load_model(Checkpoint.open(model.source()), mx.float32), ids)
        shutil.rmtree(uploads)
    return found


def _weights(draft: str) -> list[Path]:
    return [DRAFTS / draft / name for name in ("config.json", "model.safetensors")] if draft else []


def main() -> None:
    """Write the archive of this version; an older one of the same version is replaced."""
    RELEASED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        answers = make(folder)
        data = io.BytesIO()
        np.savez_compressed(data, allow_pickle=False, **answers)
        (folder / "store" / "answers.npz").write_bytes(data.getvalue())
        target = RELEASED / f"{__version__}.tar.xz"
        with tarfile.open(target, "w:xz") as archive:
            for path in sorted((folder / "store").rglob("*")):
                if path.is_file() and "lock" not in path.name:
                    archive.add(path, path.relative_to(folder / "store"))
        print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
