"""Every instruction set that this machine has, and what keeps a better one from running on a lesser machine."""

from __future__ import annotations

import bisect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import arriero_cpu as cpu
import pytest

HERE = Path(__file__).parent


def run(isa: str, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"ARRIERO_CPU_ISA": isa, "ARRIERO_THREADS": "2"}
    return subprocess.run([sys.executable, *command], env=env, check=False, capture_output=True, text=True)


def named(isa: str) -> str:
    done = run(isa, "-c", "import arriero_cpu; print(arriero_cpu.isa())")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("isa", "files"),
    [
        ("avx2-plain", [""]),
        ("portable", [""]),
        ("avx512-plain", ["test_products.py", "test_packed.py"]),
        ("avx2-vnni", ["test_products.py", "test_packed.py"]),
    ],
)
@pytest.mark.skipif("ARRIERO_CPU_ISA" in os.environ, reason="already forced")
def test_a_forced_set_passes_the_kernel_tests(isa: str, files: list[str]) -> None:
    if named(isa) != isa:
        pytest.skip(f"no {isa} here")
    paths = [str(HERE / f) for f in files]
    done = run(isa, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not forced", *paths)
    assert done.returncode == 0, done.stdout[-3000:]


BITS = """
import hashlib, numpy as np, mlx.core as mx, arriero_cpu as cpu
mx.set_default_device(mx.cpu)
rng, sums = np.random.default_rng(3), hashlib.sha256()
kinds = [("affine", b, 32) for b in (2, 3, 4, 5, 6, 8)] + [("nvfp4", 4, 16), ("mxfp4", 4, 32)]
for dtype in (mx.bfloat16, mx.float16):
    for mode, bits, group in kinds:
        how = {"mode": mode, "bits": bits, "group_size": group}
        words = mx.array(rng.integers(0, 2**32, (53, 512 * bits // 32), dtype=np.uint32))
        if mode == "affine":
            rest = [mx.array(rng.standard_normal((53, 16), dtype=np.float32)).astype(dtype) for _ in range(2)]
        else:
            rest = [mx.array(rng.integers(100, 126, (53, 512 // group), dtype=np.uint8))]
        x = mx.array(rng.standard_normal((21, 512), dtype=np.float32)).astype(dtype)
        y = cpu.packed_matmul(x, cpu.pack(words, *rest, **how))
        sums.update(np.array(y.view(mx.uint16)).tobytes())
print(sums.hexdigest())
"""


@pytest.mark.skipif("ARRIERO_CPU_ISA" in os.environ, reason="already forced")
def test_every_set_gives_the_same_bits_of_packed_products() -> None:
    sets = [
        "avx512-vnni",
        "avx512-plain",
        "avx2-vnni",
        "avx2-plain",
        "neon-i8mm",
        "neon-dotprod",
        "neon-plain",
        "portable",
    ]
    bits = {isa: run(isa, "-c", BITS) for isa in sets if named(isa) == isa}
    assert len(bits) > 1
    assert len({(done.stdout, done.returncode) for done in bits.values()}) == 1, bits
    assert bits["portable"].returncode == 0, bits["portable"].stderr


@pytest.mark.skipif("ARRIERO_CPU_ISA" in os.environ, reason="already forced")
def test_a_name_without_extension_picks_the_sets_best_form() -> None:
    assert named(cpu.isa().partition("-")[0]) == cpu.isa()
    assert named("") == cpu.isa()
    assert named("portable") == "portable"


def test_probe_refuses_a_set_that_is_not_there() -> None:
    done = run("avx3", "-c", "import arriero_cpu; arriero_cpu.probe()")
    assert done.returncode
    assert "ARRIERO_CPU_ISA is 'avx3'; this machine has" in done.stderr


needs_binutils = pytest.mark.skipif(
    not (shutil.which("objdump") and os.uname().machine == "x86_64"), reason="needs objdump on x86-64"
)
Function = tuple[int, int, str]  # address, end, and the source file of a local one or the name of a shared one


def objdump(*options: str) -> list[str]:
    module = sys.modules["arriero_cpu._native"].__file__
    assert module
    done = subprocess.run(["objdump", *options, module], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def functions() -> list[Function]:
    found = []
    file = ""
    for line in objdump("-t"):
        fields = line[24:].split()
        if len(line) < 24 or len(fields) < 3:
            continue
        kind = line[17:24]
        if "f" in kind:  # the local symbols behind it come from this file
            file = fields[2]
        elif "F" in kind and fields[0].startswith(".text") and int(fields[1], 16):
            start = int(line[:16], 16)
            found.append((start, start + int(fields[1], 16), file if kind[0] == "l" else fields[-1]))
    assert found, "the module was stripped"
    return sorted(found)


@needs_binutils
def test_each_units_instructions_stay_in_functions_of_its_own(functions: list[Function]) -> None:
    """AVX-512 code (EVEX, mask registers) reached on an AVX2 machine, or VEX code on an older one, ends the process."""
    mask = re.compile(r"%k[0-7]\b")
    users: dict[str, set[str]] = {"wide": set(), "vex": set()}
    starts = [f[0] for f in functions]
    for line in objdump("-d", "-j", ".text", "-w"):
        head, _, code = line.partition(":")
        if not code.startswith("\t"):
            continue
        first = code[1:3]  # in 64-bit code 62 always begins EVEX, c4 and c5 always VEX
        kind = "wide" if first == "62" or mask.search(code) else "vex" if first in ("c4", "c5") else ""
        if kind:
            address = int(head, 16)
            start, end, owner = functions[bisect.bisect(starts, address) - 1]
            assert start <= address < end, f"outside every function: {line}"
            users[kind].add(owner)
    kinds = ("", "strips_", "sequence_")
    avx512 = {f"{kind}avx512.cpp" for kind in kinds} | {"strips_avx512_vnni.cpp"}
    avx2 = {f"{kind}avx2.cpp" for kind in kinds} | {"strips_avx2_vnni.cpp"}
    assert users["wide"] == avx512
    assert users["vex"] == avx512 | avx2


@needs_binutils
def test_the_plain_units_need_no_integer_extension(functions: list[Function]) -> None:
    starts = [f[0] for f in functions]
    users = set()
    for line in objdump("-d", "-j", ".text", "--no-show-raw-insn"):
        if "vpdpbusd" in line or "vpdpwssd" in line:
            users.add(functions[bisect.bisect(starts, int(line.partition(":")[0], 16)) - 1][2])
    assert users == {"strips_avx512_vnni.cpp", "strips_avx2_vnni.cpp"}
