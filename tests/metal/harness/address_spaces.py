"""Address spaces, which C++ has not: clang parses a kernel once more as C++ for OpenCL."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from tests.metal.harness.build import SHIM
from tests.metal.harness.errors import MetalError
from tests.metal.harness.rewrite import line_offsets, rewrite_threadgroup
from tests.metal.harness.signature import signature, template_args

if TYPE_CHECKING:
    from tests.metal.harness.kernel import Kernel

VECTOR = r"\b(float|half|bfloat|int|uint|short|ushort|char|uchar|long|ulong)([234])\s*\("
DECLARE = "threadgroup msl_tg_{name}& {name} = *(threadgroup msl_tg_{name}*)0;"
PARAMETER = r"\s*(const constant|const device|device|uint3|uint)\s*([^\[]*?)([*&]?)\s*\w+ \[\["
FLAGS = (
    "-cc1 -triple x86_64-unknown-linux-gnu -target-feature +sse2 -x clcpp -cl-std=clc++2021 -w "
    "-Wno-reserved-user-defined-literal -cl-single-precision-constant -ast-dump"
).split()


@cache
def clang() -> str | None:
    """Its name, None where there is none of version 16 or newer. `METAL_ON_CPU_CLANG` names another."""
    for name in (os.environ.get("METAL_ON_CPU_CLANG", ""), "clang", *(f"clang-{v}" for v in range(22, 15, -1))):
        if name and shutil.which(name):
            answer = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
            found = re.search(r"version (\d+)", answer)
            if found and int(found[1]) >= 16:
                return name
    return None


def check_address_spaces(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]] = (),
) -> None:
    """MetalError for pointers and references whose address space Metal would refuse."""
    tool = clang()
    if tool is None:
        raise MetalError("no-compiler", "the check of address spaces needs clang 16 or newer")
    name = f"custom_kernel_{kernel.name}"
    head, _, _ = signature(
        name,
        kernel.input_names,
        [(a.dtype, a.ndim, a.size) for a in map(mx.array, inputs)],
        kernel.output_names,
        output_dtypes,
        template,
        kernel.source,
        kernel.atomic_outputs,
    )
    lines = line_offsets(kernel.path) if kernel.path else {}
    label = kernel.path.name if kernel.path else f"{kernel.name}.metal"
    made = f"<{template_args(template)}>" if template else ""
    body = _spelled(rewrite_threadgroup(kernel.source, DECLARE))
    text = "".join(
        [
            f'#include "as_check.h"\n#line {lines.get("header", 1)} "{label}"\n{_spelled(kernel.header)}',
            f'\n#line 1 "signature"\n{head}#line {lines.get("body", 1)} "{label}"\n{body}\n}}\n',
            f'#line 1 "launch"\nvoid msl_check() {{ {name}{made}({", ".join(_arguments(head))}); }}\n',
        ]
    )
    done = subprocess.run([tool, *FLAGS, "-I", str(SHIM), "-"], input=text, capture_output=True, text=True)
    if done.returncode:
        found = [line for line in done.stderr.splitlines() if ": error" in line or ": note" in line]
        raise MetalError("address-space", "\n".join(found)[:3000] or done.stderr[-1500:])
    bad = _generic(done.stdout, label)
    if bad:
        raise MetalError("address-space", "\n".join(bad))


def _spelled(text: str) -> str:
    """OpenCL has no constructors of vectors."""
    return re.sub(VECTOR, lambda found: f"make_{found[1]}{found[2]}(", text)


def _arguments(head: str) -> list[str]:
    made = []
    for line in head[head.index("[[kernel]]") :].split("\n")[1:]:
        found = re.match(PARAMETER, line)
        if found is None:
            continue
        if found[1] in ("uint", "uint3"):
            made.append("0" if found[1] == "uint" else "uint3(0)")
        else:
            made.append(f"{'*' if found[3] == '&' else ''}({found[1]} {found[2]}*)0")
    return made


def _generic(tree: str, label: str) -> list[str]:
    """A pointer or reference without a qualifier is 'generic' in OpenCL, and an error in Metal."""
    bad: dict[str, None] = {}
    file = ""
    for line in tree.splitlines():
        places = re.findall(r"([\w./-]+\.(?:metal|h)|<built-in>|signature|launch):\d+:\d+", line)
        file = places[-1] if places else file
        found = re.search(r"(?:VarDecl|ParmVarDecl|FieldDecl) .* (\w+) '([^']*__generic[^']*)'", line)
        if found is None or file != label or re.search(r"\bauto\b", line):
            continue
        if found[1] not in ("used", "referenced", "implicit", "col"):
            kind = found[2].replace("__generic ", "").replace("__private", "").strip()
            bad[f"'{found[1]}' has a pointer or reference type without an address space: {kind}"] = None
    return list(bad)
