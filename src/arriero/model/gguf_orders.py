"""Rows and columns that GGUF files hold in another order than Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.mapped import REPAIR

_LAYER = re.compile(r"^blk\.\d+\.([a-z0-9_]+)(?:\.(?:weight|bias))?$")
TILED = "linear_value_heads_tiled"
"""Field of a configuration made from a file whose value heads go round the key heads (not: neighbours by key head)."""
_ONE_PER_HEAD = {"ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"}
_AFTER_KEYS = {"attn_qkv", "ssm_conv1d"}
_VALUE_ROWS = _ONE_PER_HEAD | _AFTER_KEYS | {"attn_gate"}


def row_order(architecture: str, name: str, shape: Sequence[int], config: Mapping[str, Any]) -> np.ndarray | None:
    """Where Hugging Face's rows (of a vector: elements) are in a GGUF tensor, or None where both agree.

    Files of the `llama` architecture hold q and k with the two halves of each rotary pair side by side; we want the
    first halves of a head before the second halves. Those of Qwen 3.5 may hold value head `g · r + j`, the j-th of the
    r that share key head g, as number `j · key heads + g`. Raises CheckpointError for rows that are no whole heads.
    """
    match = _LAYER.match(name)
    if not match:
        return None
    module, rows = match[1], shape[-2] if len(shape) > 1 else shape[-1]
    if architecture == "llama" and module in ("attn_q", "attn_k"):
        count = config.get("num_attention_heads" if module == "attn_q" else "num_key_value_heads", 0)
        if count <= 0 or rows % (2 * count):
            raise CheckpointError(f"tensor {name} has {rows} rows for {count} heads; {REPAIR}")
        return np.arange(rows).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(-1)
    if not config.get(TILED) or module not in _VALUE_ROWS:
        return None
    width = 1 if module in _ONE_PER_HEAD else config["linear_value_head_dim"]
    before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] if module in _AFTER_KEYS else 0
    order = _value_order(name, config, width, rows - before)
    return np.concatenate([np.arange(before), before + order]) if before else order


def column_order(name: str, shape: Sequence[int], config: Mapping[str, Any]) -> np.ndarray | None:
    """As `row_order`, along the input axis: the output projection of Qwen 3.5's delta nets reads the value heads."""
    match = _LAYER.match(name)
    if not match or match[1] != "ssm_out" or not config.get(TILED):
        return None
    return _value_order(name, config, config["linear_value_head_dim"], shape[-1])


def take_columns(array: np.ndarray, order: np.ndarray, unit: int) -> np.ndarray:
    """Columns of a packed array in another order; its last axis holds whole units of `unit` numbers.

    CheckpointError where the order divides a unit.
    """
    runs = order.reshape(-1, unit) if len(order) % unit == 0 else order[:, None]
    if runs.shape[1] != unit or (runs[:, 0] % unit).any() or (np.diff(runs, axis=1) != 1).any():
        raise CheckpointError(f"its columns move in runs that are no multiples of the {unit} numbers packed together")
    units = array.reshape(*array.shape[:-1], len(runs), -1)
    return np.take(units, runs[:, 0] // unit, axis=-2).reshape(array.shape)


def _value_order(name: str, config: Mapping[str, Any], width: int, found: int) -> np.ndarray:
    """Where the elements of the value heads, `width` of each, are in the file, which has `found`."""
    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
    if heads * width != found:
        raise CheckpointError(f"tensor {name} has {found} numbers for {heads} value heads of {width}; {REPAIR}")
    return np.arange(found).reshape(heads // keys, keys, width).swapaxes(0, 1).reshape(-1)
