"""What the pages of docs/ say of files, settings, options and routes is so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from arriero import settings
from arriero.chat.parsers.families import FAMILIES
from arriero.chat.renderers.builtin.catalogue import RENDERERS
from arriero.options import OPTIONS
from arriero.server.compat.fields import FieldRules
from arriero.server.schemas.anthropic import COUNT, MESSAGES
from arriero.server.schemas.openai import CHAT, COMPLETION, EMBEDDINGS
from arriero.server.schemas.responses import RESPONSES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "native" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = ("bench", "docs", "native", "src", "tests", "tools")
FOREIGN = {"mlx/backend/cpu/encoder.h", "chat_template.jinja"}
"""Files of others that pages speak of."""


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def pages() -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]


def ours() -> set[str]:
    """The files of the repository, and every end of each path that begins at a folder."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    parts = [path.relative_to(ROOT).parts for path in [*paths, *ROOT.glob("*")]]
    return {"/".join(part[start:]) for part in parts for start in range(len(part))}


def anchors(page: Path) -> set[str]:
    """What a link may have behind `#`."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def files() -> set[str]:
    return ours()


@pytest.mark.parametrize("page", pages())
def test_every_file_that_a_page_names_is_there(page: Path, files: set[str]) -> None:
    code = re.findall(r"`([^`\n]+)`", page.read_text("utf-8"))
    named = {
        name
        for piece in code
        for name in re.findall(r"(?<![\w*}>-])[\w/.-]+\.(?:py|cpp|h|inc|cmake|sh|cu|metal|jinja|md)\b", piece)
    }
    assert {name for name in named if name.strip("./") not in files} <= FOREIGN


@pytest.mark.parametrize("page", pages())
def test_every_folder_that_a_page_names_is_there(page: Path, files: set[str]) -> None:
    code = re.findall(r"`([^`\n]+)`", page.read_text("utf-8"))
    tops = "|".join((*FOLDERS, *(path.name for path in (ROOT / "src" / "arriero").iterdir() if path.is_dir())))
    named = {name for piece in code for name in re.findall(rf"^(?:{tops})/(?:[\w-]+/)*$", piece)}
    assert {name for name in named if name.rstrip("/") not in files} == set()


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8"))
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", text("README.md")))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_page_of_settings_has_them_all_and_no_others() -> None:
    assert set(re.findall(r"^\| `ARRIERO_(\w+)`", text("docs/settings.md"), re.MULTILINE)) == settings.NAMES


def test_every_setting_that_code_reads_is_a_known_one() -> None:
    read = set()
    for path in (ROOT / "src" / "arriero").rglob("*.py"):
        source = path.read_text("utf-8")
        read |= set(re.findall(r"(?:environ\.get\(|env\.get\(|= )\"ARRIERO_(\w+)\"", source))
        read |= set(re.findall(r"\b(?:raw|_read)\(\"(\w+)\"", source))
    assert read <= settings.NAMES
    assert len(read) > 30


def test_defaults_on_the_page_of_settings_are_those_of_the_code() -> None:
    defaults = dict(re.findall(r"^\| `ARRIERO_(\w+)` \| ([^|]*) \|", text("docs/settings.md"), re.MULTILINE))
    found = settings.Settings.from_environ({})
    assert defaults["HOST"] == f"`{found.host}:{found.port}`"
    assert defaults["KEEP_ALIVE"] == defaults["LOAD_TIMEOUT"] == "`5m`"
    assert found.keep_alive == found.load_timeout == 300
    assert defaults["MAX_QUEUE"] == str(found.max_queue)
    assert defaults["MAX_BODY"] == f"{found.max_body >> 20} MiB"
    assert defaults["CACHE_LIMIT"] == f"{found.cache_limit >> 30} GiB"
    assert defaults["SHUTDOWN_GRACE"] == f"`{found.shutdown_grace:.0f}s`"
    assert not any((found.no_prune, found.no_history, found.fetch_images, found.debug))
    assert {defaults[name] for name in ("NOPRUNE", "NOHISTORY", "FETCH_IMAGES", "RESIDENT_TABLES")} == {"false"}


def test_every_route_is_on_the_pages_of_the_api(tmp_path: Path) -> None:
    from arriero.server.app import create_app

    app = create_app(settings.Settings.from_environ({"ARRIERO_HOME": str(tmp_path)}))
    described = text("docs/api.md") + text("docs/v1.md")
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert len(paths) > 30
    shown = {re.sub(r"\{(\w+)(:path)?\}", r"<\1>", path) for path in paths}
    assert {path for path in shown if f"`{path.replace('<digest>', 'sha256:<hex>')}`" not in described} == set()


@pytest.mark.parametrize(
    "rules", [CHAT, COMPLETION, EMBEDDINGS, MESSAGES, COUNT, RESPONSES], ids=lambda rules: rules.route
)
def test_every_field_of_a_v1_route_is_in_its_section(rules: FieldRules[Any]) -> None:
    page = text("docs/v1.md")
    heading = rules.route.removesuffix("/count_tokens")
    section = page.partition(f"## `{heading}`")[2].partition("\n## ")[0]
    shared = page.partition("## What all of them share")[2].partition("\n## ")[0]
    assert section
    assert {name for name in [*rules.ignored, *rules.refused] if f"`{name}`" not in section} == set()
    assert {name for name in rules.honoured if not re.search(rf"`{name}[`.]", section + shared)} == set()


def test_the_options_of_a_modelfile_are_on_its_page_with_their_defaults() -> None:
    section = text("docs/modelfile.md").partition("## PARAMETER")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE))
    effective = {name: option for name, option in OPTIONS.items() if "compatibility" not in option.meaning}
    assert set(rows) == set(effective)
    for name, option in effective.items():
        if option.default not in (None, ()):
            assert float(rows[name]) == option.default, name


def test_the_page_of_modelfiles_names_every_renderer_and_parser() -> None:
    page = text("docs/modelfile.md").partition("## RENDERER and PARSER")[2]
    aliases = {"nemotron-3-nano", "nemotron-3.5-nano", "deepseek3.1"}
    families = {"gemma4-small": "-small", "gemma4-large": "-large"}
    assert {name for name in RENDERERS if f"`{families.get(name, name)}`" not in page} <= aliases
    assert {name for name in FAMILIES if f"`{name}`" not in page} == set()


def test_nothing_of_the_machine_that_built_this_is_on_a_page() -> None:
    found = subprocess.run(
        ["grep", "-nE", "/(home|op[t]|roo[t]|wor[k])/", *map(str, PAGES)], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""
