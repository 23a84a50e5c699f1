"""Towers are tested with plain MLX and with the CPU extension."""

from tests.helpers.kernel_choice import kernels

__all__ = ["kernels"]
