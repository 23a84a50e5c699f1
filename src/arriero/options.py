"""The table of generation options: name, type and default, as Ollama's API and Modelfile know them.

Used by the server (request and model parameters), the Modelfile checks and the command line. Refuses to know HTTP,
models and sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from arriero.errors import InvalidRequest

Kind = Literal["integer", "float32", "boolean", "string list"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its wire name, its kind and its default (None = unset)."""

    name: str
    kind: Kind
    default: Any
    meaning: str


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("num_ctx", "integer", None, "context window in tokens; unset = decided from memory"),
        Option("num_batch", "integer", 512, "accepted for compatibility; see ARRIERO_PREFILL_CHUNK"),
        Option("num_gpu", "integer", -1, "accepted for compatibility; the device is the machine's"),
        Option("main_gpu", "integer", None, "accepted for compatibility"),
        Option("use_mmap", "boolean", None, "accepted for compatibility; files are always mapped"),
        Option("num_thread", "integer", 0, "accepted for compatibility; see ARRIERO_THREADS"),
        Option("draft_num_predict", "integer", None, "accepted for compatibility; see ARRIERO_DRAFT_TOKENS"),
        Option("num_keep", "integer", 4, "accepted for compatibility; nothing is cut within a message"),
        Option("seed", "integer", -1, "seed of the draws; negative = random"),
        Option("num_predict", "integer", -1, "most new tokens; negative = the rest of the context"),
        Option("top_k", "integer", 40, "draw among the k likeliest; 0 = all"),
        Option("top_p", "float32", 0.9, "nucleus mass; 1 = off"),
        Option("min_p", "float32", 0.0, "least probability relative to the likeliest; 0 = off"),
        Option("typical_p", "float32", 1.0, "locally typical mass; 1 = off"),
        Option("temperature", "float32", 0.8, "0 = greedy"),
        Option("repeat_last_n", "integer", 64, "penalty window; 0 = off, -1 = the whole context"),
        Option("repeat_penalty", "float32", 1.0, "divides the score of a repeated token; 1 = off"),
        Option("presence_penalty", "float32", 0.0, "subtracted once per repeated token"),
        Option("frequency_penalty", "float32", 0.0, "subtracted per occurrence"),
        Option("stop", "string list", (), "texts that end the reply"),
    )
}

OBSOLETE = frozenset(
    {
        *("mirostat", "mirostat_tau", "mirostat_eta", "tfs_z", "penalize_newline", "numa"),
        *("low_vram", "f16_kv", "vocab_only", "use_mlock", "logits_all"),
    }
)
"""Names that old clients still send: accepted with a warning, without effect."""


_LARGEST_FLOAT32 = 3.4028234663852886e38


def unknown_option(name: str) -> InvalidRequest:
    """The error for an option that nobody knows, with the list of those that exist."""
    return InvalidRequest(f"unknown option '{name}'; the options are {', '.join(sorted(OPTIONS))}")


def check_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Typed options of a JSON object: nulls dropped, numbers truncated as Ollama does, unknown names refused.

    Obsolete names are dropped. Raises InvalidRequest naming the option and the type that it must have.
    """
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or name in OBSOLETE:
            continue
        option = OPTIONS.get(name)
        if option is None:
            raise unknown_option(name)
        checked[name] = _typed(option, value)
    return checked


def parse_parameter(name: str, texts: list[str]) -> Any:
    """The value of a Modelfile PARAMETER (all texts given for one name, in order; the last wins except for lists)."""
    option = OPTIONS.get(name)
    if option is None:
        raise InvalidRequest(f"unknown parameter '{name}'")
    if option.kind == "string list":
        return list(texts)
    text = texts[-1].strip()
    if option.kind in ("integer", "float32"):
        try:
            return _typed(option, int(text) if option.kind == "integer" else float(text))
        except ValueError:
            kind = "int" if option.kind == "integer" else "float"
            raise InvalidRequest(f"invalid {kind} value [{text}] for {name}") from None
    if text.lower() in ("1", "t", "true"):
        return True
    if text.lower() in ("0", "f", "false"):
        return False
    raise InvalidRequest(f"invalid bool value [{text}]")


def _typed(option: Option, value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if option.kind == "integer" and number and value == value and abs(value) < 2**63:
        return int(value)
    if option.kind == "float32" and number and abs(value) <= _LARGEST_FLOAT32:
        return float(value)
    if option.kind == "boolean" and isinstance(value, bool):
        return value
    if option.kind == "string list":
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return list(value)
        what = "of an array of strings"
    else:
        what = f"of type {option.kind}"
    raise InvalidRequest(f'option "{option.name}" must be {what}; it is {shortened(value)}')


def shortened(value: object) -> str:
    """A value as an error message shows it: its front, when it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
