"""What every route works with, made once per server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from arriero.server.fetch import Fetcher
from arriero.server.metrics import Metrics
from arriero.server.transfers import Transfers
from arriero.settings import Settings

if TYPE_CHECKING:
    from arriero.scheduler import Scheduler
    from arriero.server.models import Models
    from arriero.store.store import Store


@dataclass(frozen=True, slots=True)
class Services:
    """Settings, the store, the models opened for their text, the scheduler, transfers, counts, what fetches."""

    settings: Settings
    store: Store
    models: Models
    scheduler: Scheduler
    transfers: Transfers = field(default_factory=Transfers)
    metrics: Metrics = field(default_factory=Metrics)
    fetcher: Fetcher = field(default_factory=Fetcher)

    async def let_go(self, digest: str) -> None:
        """Unload a model once no name stands for it any more; requests that use it come to their end."""
        stored = await asyncio.to_thread(self.store.list)
        if all(model.digest != digest for model in stored):
            # Shielded: a client that leaves meanwhile must not leave a half-stopped runner behind.
            await asyncio.shield(self.scheduler.unload(digest))


def services_of(request: Request) -> Services:
    """The services of the app that handles a request."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
