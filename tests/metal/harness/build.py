"""Kernels compiled to shared objects, kept by content.

`METAL_ON_CPU_CXX` names another compiler, `METAL_ON_CPU_CACHE` another folder to keep them in.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tests.metal.harness.errors import MetalError

SHIM = Path(__file__).with_name("shim")
CACHE = Path(os.environ.get("METAL_ON_CPU_CACHE", Path(tempfile.gettempdir()) / f"arriero-metal-on-cpu-{os.getuid()}"))
INCLUDE = '#include "msl.h"\n#include "prelude.h"\n'

COMMON = (
    "-std=c++20 -O1 -fPIC -fvisibility=hidden -g1 -fno-strict-aliasing -fwrapv -ffp-contract=off "
    "-ftrivial-auto-var-init=pattern -w"
).split()
GCC = "-fexcess-precision=16 -fno-tree-vectorize -fsingle-precision-constant".split()
CLANG = (
    "-Xclang -ffloat16-excess-precision=none -Xclang -cl-single-precision-constant -fno-vectorize -fno-slp-vectorize"
).split()
GCC_CHECKS = ["--param=tsan-instrument-func-entry-exit=0"]
CLANG_CHECKS = ("-mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-read-before-write=1").split()
CHECKS = ["-fsanitize=thread,bounds", "-fno-sanitize-recover=bounds"]
"""The sanitizer's calls before each access; the runtime answers them itself."""


def compiler() -> str | None:
    """The C++ compiler, None where there is none."""
    return shutil.which(os.environ.get("METAL_ON_CPU_CXX", "g++")) or shutil.which("clang++")


@cache
def _flags(hostile: int) -> tuple[str, list[str], list[str]]:
    """The compiler, its flags, and those for kernels alone."""
    found = compiler()
    if found is None:
        raise MetalError("no-compiler", "the harness needs g++ 12 or clang++ 16, or newer")
    flags = list(COMMON)
    if os.uname().machine == "x86_64" and " f16c" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        flags += ["-mf16c", "-mfma"]
    if hostile:
        flags.append(f"-DMSL_HOSTILE={hostile}")
    if "clang" in Path(found).name:
        return found, flags + CLANG, [*CLANG_CHECKS, *CHECKS]
    return found, flags + GCC, [*GCC_CHECKS, *CHECKS]


@cache
def _shim() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(SHIM.iterdir()))


def _compile(command: Sequence[str], target: Path) -> None:
    """Run the compiler and put what it makes in its place, in one step: others may be doing the same."""
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    done = subprocess.run([*command, "-o", str(beside)], capture_output=True, text=True)
    if done.returncode:
        beside.unlink(missing_ok=True)
        lines = done.stderr.splitlines()
        raise MetalError("compile", "\n".join([line for line in lines if "error" in line][:12] or lines[:12]))
    beside.replace(target)


def _write(text: str, target: Path) -> None:
    """A file in one step."""
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(target)


def _swizzles() -> str:
    """The members of vectors of 2, 3 and 4 that name some of their components."""
    lines = []
    for n in (2, 3, 4):
        made = [
            f"msl::swz<T,{n},{','.join(map(str, picked))}> {''.join(names[i] for i in picked)};"
            for names in ("xyzw", "rgba")
            for count in (2, 3, 4)
            for picked in itertools.product(range(n), repeat=count)
        ]
        lines.append(f"#define MSL_SWIZZLES_{n} {' '.join(made)}")
    return "\n".join(lines) + "\n"


def _precompiled(compiler: str, flags: list[str], folder: Path) -> list[str]:
    """The flags that use the precompiled shim, which is made once."""
    clang = "clang" in Path(compiler).name
    made = folder / ("shim.pch" if clang else "shim.h.gch")
    if not made.exists():
        folder.mkdir(exist_ok=True)
        _write("#pragma once\n" + INCLUDE, folder / "shim.h")
        _write(_swizzles(), folder / "swizzles.inc")
        _compile([compiler, *flags, f"-I{SHIM}", f"-I{folder}", "-x", "c++-header", str(folder / "shim.h")], made)
    return ["-include-pch", str(made)] if clang else ["-include", str(folder / "shim.h")]


def build(text: str, hostile: int = 0) -> tuple[Path, Path]:
    """A unit that begins with INCLUDE compiled to a shared object, and the runtime that it needs; both are kept."""
    compiler, flags, checks = _flags(hostile)
    tag = hashlib.sha256("\0".join([compiler, *flags, *checks]).encode() + _shim()).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    runtime = CACHE / f"libmslrt-{tag}.so"
    if not runtime.exists():
        visible = [flag for flag in flags if "visibility" not in flag]
        link = [f"-Wl,-soname,{runtime.name}", "-Wl,-Bsymbolic"]
        _compile([compiler, *visible, "-shared", str(SHIM / "rt.cpp"), *link], runtime)
    made = CACHE / f"k-{hashlib.sha256((tag + text).encode()).hexdigest()[:24]}.so"
    if not made.exists():
        shim = _precompiled(compiler, flags + checks, CACHE / f"pch-{tag}")
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            source, compiled = Path(folder) / "kernel.cpp", Path(folder) / "kernel.o"
            source.write_text(text.removeprefix(INCLUDE), encoding="utf-8")
            _compile([compiler, *flags, *checks, *shim, f"-I{SHIM}", "-c", str(source)], compiled)
            link = ["-Wl,-Bsymbolic", "-Wl,--no-undefined", "-Wl,-rpath,$ORIGIN/..", f"-Wl,-rpath,{CACHE}", "-lm"]
            _compile([compiler, "-shared", str(compiled), str(runtime), *link], made)
    return made, runtime


@cache
def library(path: Path) -> ctypes.CDLL:
    """Loaded once."""
    return ctypes.CDLL(str(path))


def entry(path: Path) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
    """A kernel's entry, and where its image begins and ends."""
    loaded = library(path)
    image = (ctypes.c_void_p * 2).in_dll(loaded, "msl_image")
    return ctypes.cast(loaded.msl_entry, ctypes.c_void_p), ctypes.c_void_p(image[0]), ctypes.c_void_p(image[1])


def locate(path: Path, places: Iterable[int]) -> list[str]:
    """Lines of source, from offsets in a kernel's image; none where addr2line is missing."""
    tool = shutil.which("addr2line")
    found = []
    for place in places:
        if not place or tool is None:
            continue
        answer = subprocess.run([tool, "-i", "-e", str(path), hex(place - 1)], capture_output=True, text=True).stdout
        frames = [Path(line.split(" ")[0]).name for line in answer.splitlines() if not line.startswith("??")]
        own = [frame for frame in frames if ".metal:" in frame]
        found.append(" < ".join(own or frames[:2]) or hex(place))
    return found
