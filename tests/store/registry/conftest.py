from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arriero.store.names import Name
from arriero.store.registry.key import Key
from arriero.store.registry.limits import Limits
from arriero.store.registry.pull import pull
from arriero.store.store import Store
from tests.helpers.registry import FakeRegistry, fake_registry

QUICK = Limits(
    streams=4,
    part_least=100_000,
    part_most=200_000,
    tries=3,
    backoff=0.01,
    stall=5.0,
    slow_after=0.2,
    save_every=0.02,
    report_every=0.02,
)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRegistry]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with fake_registry() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


class Puller:
    """Pulls by one registry into one store, and keeps what was reported."""

    def __init__(self, registry: FakeRegistry, store: Store, home: Path) -> None:
        self.registry, self.store, self.home = registry, store, home
        self.statuses: list[dict[str, Any]] = []
        self.stop = threading.Event()
        self.limits = QUICK

    def __call__(
        self, name: str = "a/b", report: Callable[[dict[str, Any]], None] | None = None, *, host: str = ""
    ) -> Any:
        return pull(
            self.store,
            Name.parse(f"{host or self.registry.host}/{name}"),
            report or self.statuses.append,
            self.stop,
            key=Key(self.home),
            limits=self.limits,
            insecure=True,
        )


@pytest.fixture
def puller(registry: FakeRegistry, store: Store, tmp_path: Path) -> Puller:
    return Puller(registry, store, tmp_path / "home")
