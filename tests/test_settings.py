import math
from pathlib import Path

import pytest

from arriero.settings import Settings, parse_host, unread


def read(**environ: str) -> Settings:
    return Settings.from_environ(environ)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0", ("0.0.0.0", 11434)),
        ("localhost:1234", ("localhost", 1234)),
        (":1234", ("127.0.0.1", 1234)),
        ("http://example.com", ("example.com", 80)),
        ("https://example.com/x", ("example.com", 443)),
        ("[::1]:99", ("::1", 99)),
        ("::1", ("::1", 11434)),
    ],
)
def test_the_host_takes_the_forms_that_clients_use(text: str, expected: tuple[str, int]) -> None:
    assert parse_host(text) == expected


def test_our_variable_wins_over_the_one_of_the_same_meaning() -> None:
    assert read(ARRIERO_HOST="a:1", OLLAMA_HOST="b:2").port == 1
    assert read(OLLAMA_HOST="b:2").port == 2


def test_values_are_trimmed_of_blanks_and_quotes() -> None:
    assert read(OLLAMA_NUM_PARALLEL=' "4" ').num_parallel == 4


def test_a_bad_number_is_the_default_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert read(OLLAMA_MAX_QUEUE="many").max_queue == 512
    assert "ARRIERO_MAX_QUEUE" in caplog.text


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("CONTEXT_LENGTH", 0),
        ("NUM_PARALLEL", 0),
        ("MAX_LOADED_MODELS", 0),
        ("MAX_QUEUE", 512),
        ("MEMORY_LIMIT", 0),
        ("PREFILL_CHUNK", 0),
        ("DRAFT_TOKENS", 0),
    ],
)
def test_a_negative_count_is_the_default_and_a_warning(
    name: str, default: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert getattr(read(**{f"ARRIERO_{name}": "-1"}), name.lower()) == default
    assert f"ARRIERO_{name}='-1' cannot be read (it is below 0)" in caplog.text


@pytest.mark.parametrize(("text", "value"), [("1", True), ("false", False), ("F", False), ("banana", True)])
def test_an_unreadable_boolean_counts_as_true(text: str, value: bool) -> None:
    assert read(OLLAMA_NOPRUNE=text).no_prune is value


@pytest.mark.parametrize(("text", "seconds"), [("300", 300), ("5m", 300), ("-1", math.inf), ("0", 0)])
def test_keep_alive_takes_a_number_or_a_duration(text: str, seconds: float) -> None:
    assert read(OLLAMA_KEEP_ALIVE=text).keep_alive == seconds


def test_a_load_timeout_of_zero_never_ends() -> None:
    assert read(OLLAMA_LOAD_TIMEOUT="0").load_timeout == math.inf


def test_an_ollama_store_is_never_taken_for_our_own(tmp_path: Path) -> None:
    settings = read(OLLAMA_MODELS=str(tmp_path), ARRIERO_HOME=str(tmp_path / "home"))
    assert settings.models == tmp_path / "home" / "models"
    assert settings.ollama_models == tmp_path


def test_what_drafts_and_how_much_is_passed_on() -> None:
    settings = read(ARRIERO_SPECULATION="lookup", ARRIERO_DRAFT_TOKENS="5")
    assert (settings.speculation, settings.draft_tokens) == ("lookup", 5)
    assert (read().speculation, read().draft_tokens) == ("", 0)


@pytest.mark.parametrize(("environ", "value"), [({}, ""), ({"ARRIERO_PREFILL": " int8 "}, "int8")])
def test_the_prefill_is_passed_on_as_it_is_written(environ: dict[str, str], value: str) -> None:
    assert read(**environ).prefill == value


def test_keys_are_separated_by_commas_and_belong_to_us_alone() -> None:
    assert read(ARRIERO_API_KEY=" a , b,").api_keys == ("a", "b")
    assert read(ARRIERO_API_KEY='"a, b"').api_keys == ("a", "b")
    assert read(OLLAMA_API_KEY="a").api_keys == ()


def test_a_body_has_some_size_and_a_grace_is_not_negative(caplog: pytest.LogCaptureFixture) -> None:
    assert read(ARRIERO_MAX_BODY="1000").max_body == 1000
    assert read(ARRIERO_MAX_BODY="0").max_body == 512 << 20
    assert "ARRIERO_MAX_BODY" in caplog.text
    assert read(ARRIERO_SHUTDOWN_GRACE="1m").shutdown_grace == 60
    assert read(ARRIERO_SHUTDOWN_GRACE="-1").shutdown_grace == math.inf


def test_a_variable_of_ours_that_nothing_reads_is_named_with_the_nearest_setting() -> None:
    environ = {"ARRIERO_KEEPALIVE": "5m", "ARRIERO_XYZ": "1", "ARRIERO_HOST": "a", "OLLAMA_KV_CACHE_TYPE": "q8_0"}
    assert unread(environ) == [
        "ARRIERO_KEEPALIVE is no setting, and nothing reads it; did you mean ARRIERO_KEEP_ALIVE?",
        "ARRIERO_XYZ is no setting, and nothing reads it",
    ]


@pytest.mark.parametrize(
    ("text", "on", "warned"),
    [
        ("", False, False),
        ("1", True, False),
        ("Yes", True, False),
        ("off", False, False),
        ("no", False, False),
        ("disabled", False, True),
    ],
)
def test_images_are_fetched_only_where_it_plainly_says_so(
    text: str, on: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(ARRIERO_FETCH_IMAGES=text).fetch_images is on
    assert ("FETCH_IMAGES" in caplog.text) is warned
