"""For imports of tensors that make no model: what is tested is another step than building one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from arriero.create.plan import Plan


def unchecked(plan: Plan, documents: Mapping[str, Path]) -> None:
    """A check of `create` that lets every plan pass."""
