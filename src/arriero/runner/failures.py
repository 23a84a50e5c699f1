"""What a user is told when a forward fails."""

from __future__ import annotations

from arriero.errors import ArrieroError, OutOfMemory
from arriero.runner.memory import is_out_of_memory


def described(error: Exception) -> tuple[str, str]:
    """Class name in `arriero.errors` and text."""
    if isinstance(error, ArrieroError):
        return type(error).__name__, str(error)
    if is_out_of_memory(error):
        return OutOfMemory.__name__, f"the device ran out of memory while computing ({error}); lower num_ctx"
    return ArrieroError.__name__, f"the model failed while computing: {type(error).__name__}: {error}"
