"""Machine code of kernels that outlives the process.

MLX 0.32.4 compiles a custom kernel anew in every process, one after another, with headers of its own that take longer
than the kernel. Before it does, it looks into its folder of compiled code for a file named after the kernel and a hash
of its text. Here each kernel is compiled once for a machine and left where MLX looks. An MLX that names its files in
another way finds nothing and compiles as ever: slower to start, never another result.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import mlx.core as mx

log = logging.getLogger(__name__)

TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.uint8: "uint8_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int64: "int64_t",
    mx.uint64: "uint64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
}
"""How MLX writes types in the signature that it generates."""

OWN = """\
typedef signed char int8_t; typedef unsigned char uint8_t; typedef int int32_t; typedef unsigned uint32_t;
typedef long long int64_t; typedef unsigned long long uint64_t;
#include <cuda_fp16.h>
namespace mlx::core::cu {
struct Shape { int32_t of[10]; __device__ int32_t operator[](int i) const { return of[i]; } };
struct Strides { int64_t of[10]; __device__ int64_t operator[](int i) const { return of[i]; } };
}
"""
"""Stands for MLX's headers: the types that a signature may name, laid out as MLX passes them."""

MLX = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
GROUPS = "namespace cg = cooperative_groups;\n\n"
"""What MLX puts before a kernel's header, and inside its namespace."""

LONGEST_NAME = 245
"""Characters of a file's name before MLX makes folders of it."""

UNUSED_DAYS = 60
"""After so long without a load compiled code is removed: kernels that change leave their old code behind."""

MASK = (1 << 64) - 1
MULTIPLIER, SEED = 0xC6A4A7935BD1E995, 0xC70F6907


def hashed(data: bytes) -> int:
    """`std::hash` of a string as libstdc++ computes it on 64 bits: MurmurHash64A with a seed of its own."""
    value = SEED ^ (len(data) * MULTIPLIER & MASK)
    whole = len(data) & ~7
    for (read,) in struct.iter_unpack("<Q", data[:whole]):
        word = read * MULTIPLIER & MASK
        value = (value ^ ((word ^ word >> 47) * MULTIPLIER & MASK)) * MULTIPLIER & MASK
    if whole < len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * MULTIPLIER & MASK
    value = (value ^ value >> 47) * MULTIPLIER & MASK
    return value ^ value >> 47


@dataclass(frozen=True, slots=True)
class Text:
    """A kernel as MLX is given it: its name without MLX's own prefix, what stands in front, and its body."""

    name: str
    front: str
    header: str
    """`front` with the text of the files that it includes."""
    body: str
    inputs: tuple[tuple[str, mx.Dtype], ...]
    outputs: tuple[tuple[str, mx.Dtype], ...]
    template: tuple[tuple[str, int | bool], ...]

    @property
    def function(self) -> str:
        """The name of the function: MLX appends the values of the template."""
        values = (("t" if v else "f") if isinstance(v, bool) else str(v) for _, v in self.template)
        return "_".join([f"custom_kernel_{self.name}", *values])

    @property
    def module(self) -> str:
        """The name of MLX's file."""
        source = MLX + self.front + "namespace mlx::core::cu {\n\n" + GROUPS + self.definition
        return f"{self.function}_{hashed(source.encode()):x}"

    @property
    def source(self) -> str:
        """What is compiled here."""
        return OWN + self.header + "namespace mlx::core::cu {\n\n" + self.definition

    @property
    def definition(self) -> str:
        """The function as MLX writes it, to the end of its namespace."""
        arguments = []
        for name, dtype in self.inputs:
            arguments.append(f"    const {TYPES[dtype]}* {name}")
            for what, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
                if f"{name}_{what}" in self.body:
                    arguments.append(f"    const __grid_constant__ {kind} {name}_{what}")
        arguments += [f"    {TYPES[dtype]}* {name}" for name, dtype in self.outputs]
        constants = "".join(
            f"  constexpr {'bool' if isinstance(v, bool) else 'int'} {name} = {str(v).lower()};\n"
            for name, v in self.template
        )
        signature = f"__global__ void {self.function}(\n" + ",\n".join(arguments) + ") {\n"
        ending = "\n}\n\n} // namespace mlx::core::cu\n"
        return signature + constants + ("\n" if constants else "") + self.body + ending


class Store:
    """The folder of compiled code for one kind of GPU."""

    def __init__(self, folder: Path, capability: tuple[int, int]) -> None:
        self.folder = folder
        major, minor = capability
        self._architecture = f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def keep(self, text: Text) -> bool:
        """Have the machine code of a kernel where MLX looks for it; False, and a log, when that cannot be.

        MLX then compiles it itself.
        """
        place = self.place(text)
        try:
            if _whole(place):
                _used_now(place)
                return True
            started = time.monotonic()
            code, symbol = _compiled(text, self._architecture)
            place.parent.mkdir(parents=True, exist_ok=True)
            # MLX takes the code for complete once it is there, so that comes last.
            _write(place.with_suffix(".txt"), f"mlx::core::cu::{text.function}\t{symbol}\n".encode())
            _write(place, code)
        except (OSError, RuntimeError) as error:
            log.warning("%s is compiled anew by every process, which takes a second or more: %s", text.name, error)
            return False
        log.debug("compiled %s in %.2f s", text.function, time.monotonic() - started)
        return True

    def place(self, text: Text) -> Path:
        """MLX's file for a kernel; a name too long for one is folders and a file."""
        name, parts = text.module, []
        while len(name) > LONGEST_NAME:
            parts.append(name[:LONGEST_NAME])
            name = name[LONGEST_NAME:]
        return self.folder.joinpath(*parts, f"{name}.ptx")

    def tidy(self) -> None:
        """Remove code of ours that nobody has loaded for a long time."""
        oldest = time.time() - UNUSED_DAYS * 86400
        for path in self.folder.rglob("*.ptx"):
            try:
                if "custom_kernel_arriero_" in str(path) and path.stat().st_mtime < oldest:
                    path.unlink()
                    path.with_suffix(".txt").unlink(missing_ok=True)
            except OSError as error:
                log.info("%s is not used any more but stays: %s", path, error)


_USED: list[Store] = []


def use(store: Store) -> None:
    """Keep machine code there from now on; MLX must be told the same folder before it compiles anything."""
    _USED[:] = [store]


def in_use() -> Store | None:
    """Where machine code is kept, if anywhere."""
    return _USED[0] if _USED else None


def folder_for(capability: tuple[int, int]) -> Path:
    """Where MLX keeps compiled code: what `MLX_PTX_CACHE_DIR` names, else a folder of `~/.arriero/cuda`.

    MLX's file names say nothing of the GPU, the compiler and MLX itself, so a folder of ours does. `ARRIERO_HOME` moves
    it.
    """
    chosen = os.environ.get("MLX_PTX_CACHE_DIR")
    if chosen is not None:
        return Path(chosen)
    home = Path(os.environ.get("ARRIERO_HOME") or Path.home() / ".arriero")
    major, minor = capability
    return home / "cuda" / f"sm{major}{minor}-nvrtc{version()}-mlx{metadata.version('mlx')}"


def _whole(code: Path) -> bool:
    """Whether a file of code and the one with its symbol are there, not cut short as a full disk or a crash leave them.

    MLX loads whatever it finds, and fails at each start on a piece of one.
    """
    try:
        with code.open("rb") as file:
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
        symbols = code.with_suffix(".txt").stat().st_size
    except FileNotFoundError:
        return False
    if not head or not symbols:
        return False
    if not head.startswith(b"\x7fELF"):
        return True
    if len(head) < 64:
        return False
    # Of a 64-bit ELF: where the tables of segments and sections begin, and sizes and counts of their entries.
    numbers: tuple[int, ...] = struct.unpack_from("<QQ4xxxHHHH", head, 32)
    segments, sections, segment, count, entry, entries = numbers
    return size >= max(segments + segment * count, sections + entry * entries)


def _used_now(code: Path) -> None:
    """Note a load for `tidy`; another user's folder, or one on a read-only disk, serves as well without."""
    try:
        os.utime(code)
    except OSError as error:
        log.debug("the use of %s is not noted: %s", code, error)


def _write(path: Path, data: bytes) -> None:
    """The whole file or none of it, whoever else writes the same."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@cache
def compiler() -> ctypes.CDLL:
    """NVRTC, which MLX brings; OSError when it cannot be loaded."""
    for major in (13, 12):
        try:
            return ctypes.CDLL(f"libnvrtc.so.{major}")
        except OSError as error:
            missing = error
    raise missing


@cache
def includes() -> tuple[Path, ...]:
    """Folders with CUDA's headers: those of installed packages, else of a toolkit, as MLX looks for them."""
    packages = Path(mx.__file__).resolve().parent.parent / "nvidia"
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    folders = [packages / "cu13" / "include", packages / "cuda_runtime" / "include", Path(toolkit) / "include"]
    return tuple(folder for folder in folders if folder.exists())


def version() -> str:
    """NVRTC's, as `13.0`; OSError when it cannot be loaded."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _compiled(text: Text, architecture: str) -> tuple[bytes, str]:
    """Machine code and the function's symbol in it; RuntimeError with the compiler's words."""
    nvrtc = compiler()
    program = ctypes.c_void_p()
    name = f"mlx::core::cu::{text.function}".encode()
    source = text.source.encode()
    _checked(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, f"{text.name}.cu".encode(), 0, None, None))
    try:
        _checked(nvrtc.nvrtcAddNameExpression(program, name))
        options = [b"--device-as-default-execution-space", f"--gpu-architecture={architecture}".encode()]
        options += [f"--include-path={folder}".encode() for folder in includes()]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status:
            said = _read(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0\n")
            raise RuntimeError(f"NVRTC does not compile it ({said.splitlines()[0] if said else status})")
        symbol = ctypes.c_char_p()
        _checked(nvrtc.nvrtcGetLoweredName(program, name, ctypes.byref(symbol)))
        if symbol.value is None:
            raise RuntimeError("NVRTC gives no symbol")
        return _read(nvrtc, program, "CUBIN"), symbol.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _checked(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _checked(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _checked(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC answers with error {status}")
