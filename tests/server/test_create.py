"""What becomes of an import whose client leaves."""

import asyncio
import gc
import time
from dataclasses import replace

from arriero.scheduler import Scheduler
from arriero.server.models import Models
from arriero.server.routes import create as route
from arriero.server.schemas.ollama import CreateRequest
from arriero.server.services import Services
from arriero.settings import Settings
from arriero.store.store import Store


async def leave_after_the_first_status(tmp_path, monkeypatch, work) -> list[dict]:
    """Start an import that does `work(report)` and leave; what the loop had to complain about."""
    complaints: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    settings = replace(Settings.from_environ({"ARRIERO_HOME": str(tmp_path)}), ollama_models=None)
    services = Services(settings, Store.from_settings(settings), Models(), Scheduler(settings))
    monkeypatch.setattr(route, "create", lambda _store, _asked, report: work(report))
    statuses = route._statuses(services, CreateRequest(model="x", files={"a": "sha256:" + "0" * 64}))
    assert await anext(statuses) == {"status": "begun"}
    await statuses.aclose()
    del statuses
    gc.collect()
    await asyncio.sleep(0)
    return complaints


async def test_an_import_ends_with_its_client_and_nobody_complains(tmp_path, monkeypatch, caplog):
    ended = []

    def work(report):
        try:
            while True:
                report({"status": "begun"})
                time.sleep(0.005)
        finally:
            ended.append(True)

    assert not await leave_after_the_first_status(tmp_path, monkeypatch, work)
    assert ended
    assert not caplog.records


async def test_an_import_that_breaks_after_its_client_left_is_logged(tmp_path, monkeypatch, caplog):
    def work(report):
        report({"status": "begun"})
        time.sleep(0.05)
        raise ValueError("disk on fire")

    assert not await leave_after_the_first_status(tmp_path, monkeypatch, work)
    assert "the import of x, whose client has left, failed" in caplog.text
    assert "disk on fire" in caplog.text
