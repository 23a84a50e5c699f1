"""Reading a config.json: typed fields, defaults, and a loud refusal of what would change the numbers unseen."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from arriero.errors import CheckpointError

_MISSING: Any = object()
LARGEST = 2**31 - 1
"""Of whole numbers: what a shape and a position of MLX hold."""

# Fields that change a model's numbers, with the values that change nothing. A model that honours one reads it; any
# other value is refused, because the answers would be wrong without a word.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (None, False),
    "attention_bias": (None, False),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "attention_k_eq_v": (None, False),
    "attn_temperature_tuning": (None, False),
    "clip_qkv": (None,),
    "cross_attention_layers": (None, []),
    "embedding_multiplier": (None, 1, 1.0),
    "enable_moe_block": (None, False),
    "final_logit_softcapping": (None,),
    "hidden_size_per_layer_input": (None, 0),
    "is_causal": (None, True),
    "layer_types": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "mlp_bias": (None, False),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "num_kv_shared_layers": (None, 0),
    "parallel_attn": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "per_layer_config": (None, {}),
    "qk_layernorm": (None, False),
    "residual_multiplier": (None, 1, 1.0),
    "rope_scaling": (None, {}),
    "sliding_window": (None,),
    "use_bidirectional_attention": (None, False),
    "use_qk_norm": (None, False),
}


class Fields:
    """The fields of one configuration, read by name; errors name the field, the value and what was expected."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether a field is given (null counts as not given)."""
        return self.values.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """A field as it is, marked as honoured."""
        self._read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: Any = _MISSING, *, minimum: int = 1, maximum: int = LARGEST) -> int:
        """A whole number from `minimum` to `maximum`."""
        value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(name, f"a whole number of at least {minimum}", value)
        if value > maximum:
            raise self.wrong(name, f"at most {maximum}", value)
        return value

    def number(self, name: str, default: Any = _MISSING, *, positive: bool = True) -> float:
        """A finite number, > 0 unless `positive` is False."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.wrong(name, "a number", value)
        if positive and value <= 0:
            raise self.wrong(name, "a positive number", value)
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A positive number or nothing: null says nothing, a field that is missing means `default`."""
        self._read.add(name)
        if self.has(name):
            return self.number(name)
        return None if name in self.values else default

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """A whole number ≥ 1 or nothing: null says nothing, a field that is missing means `default`."""
        self._read.add(name)
        if self.has(name):
            return self.integer(name)
        return None if name in self.values else default

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def section(self, name: str) -> dict[str, Any] | None:
        """An object or nothing."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return value

    def strings(self, name: str, length: int, allowed: Sequence[str]) -> list[str] | None:
        """A list of `length` words out of `allowed`, or nothing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length or any(v not in allowed for v in value[:length]):
            raise self.wrong(name, f"a list of {length} out of {', '.join(allowed)}", value)
        return value[:length]

    def wrong(self, name: str, expected: str, found: Any) -> CheckpointError:
        """The error for a field whose value can't be used."""
        text = repr(found)
        return CheckpointError(
            f"{self.where}: `{name}` should be {expected}, found {text if len(text) < 80 else text[:77] + '…'}"
        )

    def finish(self, architecture: str) -> None:
        """Refuse a field that changes the numbers and that nobody has read."""
        for name, neutral in NEUTRAL.items():
            value = self.values.get(name)
            if name not in self._read and not any(value == n and type(value) is type(n) for n in neutral):
                raise CheckpointError(
                    f"{self.where}: `{name}` is {value!r}, which {architecture} does not honour; "
                    "running it would give wrong answers"
                )

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise CheckpointError(f"{self.where}: `{name}` is missing")
        return default


def text_fields(values: Mapping[str, Any]) -> Fields:
    """The fields of the text model; whether its head is tied is said outside of `text_config`, if there."""
    text = Fields(values).section("text_config")
    if text is None:
        return Fields(values)
    outer = values.get("tie_word_embeddings")
    return Fields(text if outer is None else {**text, "tie_word_embeddings": outer}, "config.json: text_config")
