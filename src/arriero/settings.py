"""Settings from the environment: every one is `ARRIERO_X` and falls back to `OLLAMA_X` of the same meaning.

Values are trimmed of blanks and quotes. A value that cannot be read is a warning and the default, except for a Boolean,
where anything unreadable counts as true (Ollama's rule); one that opens a way into the network is false then.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from arriero.durations import FOREVER, parse_keep_alive
from arriero.errors import InvalidRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 11434

NAMES = frozenset(
    "HOST ORIGINS KEEP_ALIVE LOAD_TIMEOUT CONTEXT_LENGTH NUM_PARALLEL MAX_LOADED_MODELS MAX_QUEUE NOPRUNE "
    "MAX_TRANSFER_STREAMS NOHISTORY EDITOR DEBUG HOME MODELS API_KEY FETCH_IMAGES MAX_BODY SHUTDOWN_GRACE MEMORY_LIMIT "
    "DTYPE PREFILL_CHUNK PREFILL SPECULATION DRAFT_TOKENS PREFIX_CACHE CACHE_DIR CACHE_LIMIT RESIDENT_TABLES KERNELS "
    "THREADS CPU_ISA SPIN_US CUDA_CHAIN METAL_KERNELS".split()
)
"""All settings, without `ARRIERO_`; some are read where they are used (kernels, the conversation)."""


def _trimmed(text: str) -> str:
    return text.strip().strip("\"'").strip()


def raw(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The trimmed text of `ARRIERO_<name>`, else of `OLLAMA_<name>`, else ''."""
    environ = os.environ if environ is None else environ
    for prefix in ("ARRIERO_", "OLLAMA_"):
        value = _trimmed(environ.get(prefix + name, ""))
        if value:
            return value
    return ""


def unread(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each variable that begins with `ARRIERO_` and is no setting: one may be spelled wrong."""
    environ = os.environ if environ is None else environ
    sentences = []
    for variable in sorted(environ):
        name = variable.removeprefix("ARRIERO_")
        if name == variable or name in NAMES:
            continue
        near = difflib.get_close_matches(name, sorted(NAMES), n=1, cutoff=0.75)
        meant = f"; did you mean ARRIERO_{near[0]}?" if near else ""
        sentences.append(f"{variable} is no setting, and nothing reads it{meant}")
    return sentences


def _read(name: str, default: T, convert: Callable[[str], T], environ: Mapping[str, str]) -> T:
    text = raw(name, environ)
    if not text:
        return default
    try:
        return convert(text)
    except (ValueError, InvalidRequest) as error:
        log.warning("ARRIERO_%s=%r cannot be read (%s); the default %r is used", name, text, error, default)
        return default


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError("it is below 0")
    return count


def _size(text: str) -> int:
    if (size := int(text)) <= 0:
        raise ValueError("it is not above 0")
    return size


def _boolean(text: str) -> bool:
    return text.lower() not in ("0", "f", "false")


def _switch(text: str) -> bool:
    """What opens a way into the network is on only where it plainly says so."""
    if text.lower() in ("1", "t", "true", "y", "yes", "on"):
        return True
    if text.lower() in ("0", "f", "false", "n", "no", "off"):
        return False
    raise ValueError("it is neither true nor false")


def parse_host(text: str) -> tuple[str, int]:
    """`[scheme://]host[:port]` → (host, port); a scheme sets the default port (80, 443), else 11434."""
    scheme, _, rest = text.rpartition("://")
    port = {"http": 80, "https": 443}.get(scheme.lower(), DEFAULT_PORT)
    rest = rest.split("/", 1)[0]
    if rest.startswith("["):
        host, _, tail = rest[1:].partition("]")
        port_text = tail.removeprefix(":")
    elif rest.count(":") == 1:
        host, _, port_text = rest.partition(":")
    else:
        host, port_text = rest, ""
    if port_text:
        port = int(port_text)
        if not 0 <= port <= 65535:
            raise ValueError(f"port {port} is not between 0 and 65535")
    return host or DEFAULT_HOST, port


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says, read once at start (tests build their own)."""

    host: str
    port: int
    scheme: str
    origins: tuple[str, ...]
    models: Path
    """Root of our own model store (`~/.arriero/models`)."""
    ollama_models: Path | None
    """An existing Ollama store, read in place, when there is one."""
    home: Path
    """`~/.arriero`: history, logs, caches."""
    keep_alive: float
    """Seconds that an idle model stays loaded; infinity = for ever."""
    load_timeout: float
    """Seconds without load progress before a load is given up; infinity = never."""
    context_length: int
    """Default `num_ctx`; 0 = decided from memory."""
    num_parallel: int
    """Most rows decoded at once in one runner; 0 = decided by the engine."""
    max_loaded_models: int
    """Most models loaded at once; 0 = three."""
    max_queue: int
    """Most requests waiting per server before a 503."""
    memory_limit: int
    """Bytes that all runners together may reserve; 0 = decided from the machine."""
    transfer_streams: int
    """Files that a pull or push transfers at once; 0 = eight."""
    no_prune: bool
    no_history: bool
    debug: int
    """0 info, 1 debug, 2 trace."""
    dtype: str
    """Activation dtype override for runners: '', 'float32', 'bfloat16' or 'float16'."""
    prefill_chunk: int
    """Prompt tokens forwarded at once; 0 = decided by the device."""
    prefix_cache: int
    """Bytes that each runner may keep of earlier prompts and replies; 0 = nothing, -1 = decided from memory."""
    cache_dir: Path | None
    """Folder where they are kept beyond a runner's life; None = they are not."""
    cache_limit: int
    """Bytes that this folder may hold."""
    speculation: str
    """What drafts tokens: '' or 'auto', 'off', 'lookup' or 'draft'. A runner refuses any other."""
    draft_tokens: int
    """Most tokens drafted in a round; 0 = decided by the draft."""
    api_keys: tuple[str, ...] = field(repr=False)
    """Keys of which each request must carry one; none = no key is asked for. The command line sends the first."""
    fetch_images: bool
    """Whether images are fetched from the addresses that requests name."""
    max_body: int
    """Bytes of a JSON body; uploads of blobs have no limit."""
    shutdown_grace: float
    """Seconds that replies in flight have to end once the server is told to stop; infinity = as long as they take."""
    prefill: str
    """How products of many tokens are computed: '' or 'exact', or 'int8'. A runner refuses any other."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read all settings; never raises for a bad value (see the module docstring)."""
        env = os.environ if environ is None else environ
        home = Path(env.get("ARRIERO_HOME") or Path.home() / ".arriero")
        host, port = _read("HOST", (DEFAULT_HOST, DEFAULT_PORT), parse_host, env)
        own_models = (env.get("ARRIERO_MODELS") or "").strip()
        ollama = (env.get("OLLAMA_MODELS") or "").strip()
        ollama_path = Path(ollama).expanduser() if ollama else Path.home() / ".ollama" / "models"
        return cls(
            host=host,
            port=port,
            scheme="https" if raw("HOST", env).lower().startswith("https://") else "http",
            origins=tuple(part.strip() for part in raw("ORIGINS", env).split(",") if part.strip()),
            models=Path(own_models).expanduser() if own_models else home / "models",
            ollama_models=ollama_path if ollama_path.is_dir() else None,
            home=home,
            keep_alive=_read("KEEP_ALIVE", 300.0, _keep_alive, env),
            load_timeout=_read("LOAD_TIMEOUT", 300.0, _timeout, env),
            context_length=_read("CONTEXT_LENGTH", 0, _count, env),
            num_parallel=_read("NUM_PARALLEL", 0, _count, env),
            max_loaded_models=_read("MAX_LOADED_MODELS", 0, _count, env),
            max_queue=_read("MAX_QUEUE", 512, _count, env),
            memory_limit=_read("MEMORY_LIMIT", 0, _count, env),
            transfer_streams=_read("MAX_TRANSFER_STREAMS", 0, _count, env),
            no_prune=_read("NOPRUNE", False, _boolean, env),
            no_history=_read("NOHISTORY", False, _boolean, env),
            debug=_read("DEBUG", 0, _debug_level, env),
            dtype=_read("DTYPE", "", str, env),
            prefill_chunk=_read("PREFILL_CHUNK", 0, _count, env),
            prefix_cache=_read("PREFIX_CACHE", -1, _count, env),
            cache_dir=Path(cache_dir).expanduser() if (cache_dir := raw("CACHE_DIR", env)) else None,
            cache_limit=_read("CACHE_LIMIT", 20 << 30, _count, env),
            speculation=_read("SPECULATION", "", str, env),
            draft_tokens=_read("DRAFT_TOKENS", 0, _count, env),
            api_keys=tuple(filter(None, map(_trimmed, env.get("ARRIERO_API_KEY", "").split(",")))),
            fetch_images=_read("FETCH_IMAGES", False, _switch, env),
            max_body=_read("MAX_BODY", 512 << 20, _size, env),
            shutdown_grace=_read("SHUTDOWN_GRACE", 5.0, _keep_alive, env),
            prefill=_read("PREFILL", "", str, env),
        )


def _keep_alive(text: str) -> float:
    """The environment accepts a bare number of seconds too."""
    try:
        return parse_keep_alive(float(text))
    except ValueError:
        return parse_keep_alive(text)


def _timeout(text: str) -> float:
    seconds = _keep_alive(text)
    return seconds if seconds > 0 else FOREVER


def _debug_level(text: str) -> int:
    return int(text) if text.isdigit() else int(_boolean(text))
