"""Model names: parsing, display, equality."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.errors import InvalidRequest
from arriero.store.names import Name


@pytest.mark.parametrize(
    ("text", "parts", "shown"),
    [
        ("qwen3", ("registry.ollama.ai", "library", "qwen3", "latest"), "qwen3:latest"),
        ("me/m:v1", ("registry.ollama.ai", "me", "m", "v1"), "me/m:v1"),
        ("hf.co/u/r:Q8_0", ("hf.co", "u", "r", "Q8_0"), "hf.co/u/r:Q8_0"),
        ("localhost:5000/a/b", ("localhost:5000", "a", "b", "latest"), "localhost:5000/a/b:latest"),
        ("registry.ollama.ai/library/x:y", ("registry.ollama.ai", "library", "x", "y"), "x:y"),
        ("hf.co/library/x", ("hf.co", "library", "x", "latest"), "hf.co/library/x:latest"),
    ],
)
def test_a_name_is_completed_and_shown_in_its_shortest_form(text, parts, shown):
    name = Name.parse(text)
    assert (name.host, name.namespace, name.model, name.tag) == parts
    assert str(name) == shown
    assert Name.parse(shown) == name


def test_a_scheme_is_kept_but_not_shown():
    name = Name.parse("http://localhost:5000/a/b")
    assert name.scheme == "http"
    assert str(name) == "localhost:5000/a/b:latest"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.b/c",
        "m:",
        "x/",
        "/x",
        ":t",
        "a//b",
        "a/b/c/d",
        "../x",
        "x:../y",
        "a/../b",
        "-x",
        ".x",
        "x y",
        "x@sha256:0",
        "a" * 81,
        "x:" + "t" * 81,
        "ü",
        "://x",
        "x\0",
        "a/b:c/d",
    ],
)
def test_an_invalid_name_is_refused(text):
    with pytest.raises(InvalidRequest, match=r"^invalid model name"):
        Name.parse(text)


def test_names_that_differ_by_case_have_one_key():
    assert Name.parse("Me/Model:V1").key == Name.parse("me/MODEL:v1").key


@given(st.text(alphabet="ab0_./:-", max_size=20))
def test_every_valid_name_survives_display_and_stays_below_the_manifests_folder(text):
    try:
        name = Name.parse(text)
    except InvalidRequest:
        return
    again = Name.parse(str(name))
    assert again.key == name.key
    assert ".." not in name.path.parts
    assert len(name.path.parts) == 4
