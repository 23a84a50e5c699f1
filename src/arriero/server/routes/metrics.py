"""`/metrics`: the server's numbers for Prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero import __version__
from arriero.runner.messages import Status
from arriero.scheduler import LoadedModel
from arriero.server.metrics import CONTENT_TYPE, Reading
from arriero.server.routes.system import COMPATIBLE_VERSION
from arriero.server.services import Services, services_of

_PATIENCE = 0.5
"""Seconds that runners have to tell their figures; those that don't are left out of them this time."""


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    services = services_of(request)
    statuses = await services.scheduler.statuses(_PATIENCE)
    return Response(services.metrics.text(_readings(services, statuses)), headers={"content-type": CONTENT_TYPE})


def _readings(services: Services, statuses: list[tuple[str, Status]]) -> Iterable[Reading]:
    scheduler, counted = services.scheduler, services.metrics
    loaded = scheduler.loaded()
    yield Reading(
        "arriero_info",
        "What serves.",
        ("version", "api_version"),
        {(__version__, COMPATIBLE_VERSION): 1},
    )
    yield Reading("process_start_time_seconds", "When the server started (Unix time).", (), {(): counted.started})
    yield Reading("arriero_requests_in_flight", "Requests that are being answered.", (), {(): counted.in_flight})
    yield Reading(
        "arriero_queue_length", "Requests that wait for a model or for a row in its batch.", (), {(): scheduler.waiting}
    )
    yield Reading("arriero_reserved_bytes", "Memory promised to runners.", (), {(): scheduler.reserved_bytes})
    yield from _of_models(loaded)
    yield from _of_runners(statuses)
    drafting = scheduler.drafting()
    for name, what, scale in (
        ("rounds", "Rounds of speculation.", 1),
        ("drafted_tokens", "Tokens that drafts proposed and the model judged.", 1),
        ("accepted_tokens", "Drafted tokens that stayed.", 1),
        ("plain_steps", "Steps that could have had drafts and had none.", 1),
        ("parked_seconds", "Time of those steps.", 1e-9),
    ):
        field = name.removesuffix("_tokens").replace("_seconds", "_ns")
        yield Reading(
            f"arriero_speculation_{name}_total",
            what,
            ("model", "draft"),
            {key: scale * getattr(used, field) for key, used in drafting.items()},
            "counter",
        )


def _of_models(loaded: list[LoadedModel]) -> Iterable[Reading]:
    states: dict[tuple[str, ...], float] = {("queued",): 0, ("loading",): 0, ("ready",): 0}
    for model in loaded:
        states[model.state,] += 1
    yield Reading("arriero_models", "Models that wait to be loaded, load, or are loaded.", ("state",), states)
    for name, what, field in (
        ("weight_bytes", "Memory of a model's weights.", "weight_bytes"),
        ("reserved_bytes", "Memory promised to a model: weights, scratch and caches.", "reserved_bytes"),
        ("requests", "Requests that use a model.", "requests"),
    ):
        yield _summed(f"arriero_model_{name}", what, [(model.name, getattr(model, field)) for model in loaded])


def _of_runners(statuses: list[tuple[str, Status]]) -> Iterable[Reading]:
    for name, what, field in (
        ("memory_bytes", "Memory that a runner's arrays take, free ones kept for reuse included.", "memory_bytes"),
        ("cache_bytes", "Memory of the caches of rows in flight.", "cache_bytes"),
        ("snapshot_bytes", "Memory of stored prefixes.", "snapshot_bytes"),
        ("rows_running", "Rows in a runner's batch.", "rows_running"),
        ("rows_waiting", "Rows that wait in a runner.", "rows_waiting"),
    ):
        yield _summed(f"arriero_runner_{name}", what, [(model, getattr(status, field)) for model, status in statuses])


def _summed(name: str, about: str, pairs: Iterable[tuple[str, float]]) -> Reading:
    """One number a name: a model that leaves and its successor may have the same one."""
    totals: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for model, number in pairs:
        totals[model,] += number
    return Reading(name, about, ("model",), dict(totals))


ROUTES = [Route("/metrics", metrics, methods=["GET"])]
