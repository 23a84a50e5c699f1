"""What every step of a create works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from arriero.create.kinds import refuse, sniff
from arriero.create.plan import Plan
from arriero.create.request import CreateRequest
from arriero.create.write import Progress
from arriero.errors import InvalidRequest
from arriero.store.store import Build, Store

Check = Callable[[Plan, Mapping[str, Path]], None]
"""Raises CheckpointError for a plan that makes no model, given the configuration files by name."""


@dataclass(frozen=True)
class Work:
    """One create on its way."""

    store: Store
    build: Build
    request: CreateRequest
    progress: Progress
    check: Check

    def uploaded(self, files: Mapping[str, str]) -> dict[str, Path]:
        """Where uploaded files are, by the client's names; raises InvalidRequest for what is not there, or no file of
        a model.
        """
        paths = {}
        for name, digest in files.items():
            path = self.store.find_blob(digest)
            if path is None:
                raise InvalidRequest(
                    f"file {name!r} is blob {digest}, which has not been uploaded (POST /api/blobs/{digest})"
                )
            self.store.blobs.touch(digest)
            kind = sniff(path)
            if kind in ("lfs", "pytorch", "empty"):
                raise refuse(name, kind)
            paths[name] = path
        return paths
