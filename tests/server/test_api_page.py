"""The pages of the APIs name every route, field and number, and that of the settings every setting."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
from starlette.routing import Route

from arriero import settings
from arriero.server.app import _APIS
from arriero.server.metrics import Metrics
from arriero.server.schemas import embed, ollama

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api.md").read_text("utf-8")
OTHER = (DOCS / "v1.md").read_text("utf-8")
ROUTES = [route for api in _APIS for route in api.ROUTES]


def section(title: str) -> str:
    """The text below a heading, up to the next of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}$\n(.*?)(?=^#{{1,3}} |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[2]


def names(kind: Any) -> set[str]:
    """Fields of a struct and of the structs in it, as they are on the wire."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return {field.encode_name for field in fields}.union(*(names(field.type) for field in fields))
    return set().union(*(names(part) for part in get_args(kind))) if get_origin(kind) is not None else set()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.path} {sorted(route.methods or ())[0]}")
def test_every_route_is_named(route: Route) -> None:
    spelled = route.path.replace("{digest}", "sha256:<hex>")
    spelled = re.sub(r"\{(\w+)(:\w+)?\}", r"<\1>", spelled)
    page = OTHER if spelled.startswith("/v1/") else PAGE
    assert f"`{spelled}`" in page or f"`{spelled}," in page


OF_SHOW = {"model", "name", "verbose", "system", "options"}
OF_TRANSFERS = {"model", "name", "stream", "insecure"}


@pytest.mark.parametrize(
    ("title", "wanted"),
    [
        ("`POST /api/generate`", names(ollama.GenerateRequest) | names(ollama.GenerateReply)),
        ("`POST /api/chat`", names(ollama.ChatRequest) | names(ollama.ChatReply)),
        ("`POST /api/embed`", names(embed.EmbedRequest) | names(embed.EmbedReply)),
        ("`POST /api/embeddings`", names(embed.EmbeddingRequest) | names(embed.EmbeddingReply)),
        ("`POST /api/create`", names(ollama.CreateRequest)),
        ("`POST /api/copy`", names(ollama.CopyRequest)),
        ("`POST /api/show`", OF_SHOW),
        ("`DELETE /api/delete`", {"model", "name"}),
        ("`POST /api/pull`, `POST /api/push`", OF_TRANSFERS),
        ("`POST /api/verify`", names(ollama.VerifyRequest) - OF_SHOW - OF_TRANSFERS | {"model", "name", "stream"}),
    ],
)
def test_every_field_is_named_where_its_route_is(title: str, wanted: set[str]) -> None:
    text = section(title)
    # What is in these objects is told once for both routes.
    above = section("`POST /api/generate`") if "chat" in title else ""
    nested = names(ollama.DebugInfo) | names(ollama.Truncated) | names(ollama.Drafted)
    missing = {
        name
        for name in wanted
        if not re.search(rf"`(messages\[\]\.)?{name}`", text + (above if name in nested else ""))
    }
    # A call's and a log-probability's fields are told under /api/chat.
    if "generate" in title:
        missing -= names(ollama.ToolCall) | names(ollama.Logprob)
    assert missing == set()


def test_no_field_of_a_request_is_shared_by_routes_without_being_accounted_for() -> None:
    assert names(ollama.ModelRequest) == OF_SHOW | OF_TRANSFERS


def test_every_number_is_named() -> None:
    text = section("Numbers")
    for line in Metrics().text([]).splitlines():
        if line.startswith("# TYPE arriero_"):
            assert f"`{line.split()[2].removeprefix('arriero_')}`" in text


def test_every_setting_is_named() -> None:
    page = (DOCS / "settings.md").read_text("utf-8")
    read = ast.walk(ast.parse(Path(settings.__file__).read_text("utf-8")))
    found = {
        node.args[0].value
        for node in read
        if isinstance(node, ast.Call)
        and isinstance(node.args[0] if node.args else None, ast.Constant)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("_read", "raw", "get")
    }
    assert len(found) > 25
    for name in found:
        bare = str(name).removeprefix("ARRIERO_")
        assert re.search(rf"`(ARRIERO_)?{bare}`", page), name
