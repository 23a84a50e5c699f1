"""Whether operations run on an Apple GPU, and whether our kernels are to be used there."""

from __future__ import annotations

import logging
import os
from functools import cache

import mlx.core as mx

log = logging.getLogger(__name__)

SETTING = "ARRIERO_METAL_KERNELS"


def available() -> bool:
    """Whether MLX's default device is an Apple GPU."""
    return bool(mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu)


@cache
def wanted() -> bool:
    """Whether the environment asks for our kernels; read once, with one line in the log."""
    choice = os.environ.get(SETTING, "").strip()
    if choice not in ("", "0", "1"):
        log.warning("%s=%s is not known (0, 1); the Metal kernels stay off", SETTING, choice)
    if choice == "1":
        log.info("Metal kernels: on. They are tested on the CPU only; without %s plain MLX runs", SETTING)
    return choice == "1"
