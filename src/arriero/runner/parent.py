"""A runner never outlives the process that started it, whatever way that one dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def bind_to_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies; exits at once when `parent` is gone already.

    Elsewhere, and as a second line of defence, the message thread asks `orphaned` every second.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if orphaned(parent):
        sys.exit(0)


def orphaned(parent: int) -> bool:
    """Whether the process `parent` no longer is our parent, which means that it died."""
    return os.getppid() != parent
