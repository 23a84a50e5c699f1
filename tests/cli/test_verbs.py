import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.cli.conftest import Run
from tests.helpers.fake_server import FakeServer, generate_reply

MODEL = {
    "name": "tiny:latest",
    "digest": "0123456789abcdef" * 4,
    "size": 91_000_000,
    "size_vram": 0,
    "modified_at": "2020-01-01T00:00:00Z",
    "expires_at": "2500-01-01T00:00:00Z",
    "context_length": 4096,
}


def test_list_prints_a_table_on_stdout_only(arriero: Run, server: FakeServer) -> None:
    server.replies["GET", "/api/tags"] = lambda _: (200, {"models": [MODEL]})
    result = arriero("list")
    assert result.stdout.splitlines()[0].split() == ["NAME", "ID", "SIZE", "MODIFIED"]
    assert result.stdout.splitlines()[1].split()[:4] == ["tiny:latest", "0123456789ab", "91", "MB"]
    assert (result.stderr, result.returncode) == ("", 0)


def test_list_takes_a_prefix_in_any_case(arriero: Run, server: FakeServer) -> None:
    server.replies["GET", "/api/tags"] = lambda _: (200, {"models": [MODEL, {**MODEL, "name": "other:latest"}]})
    assert "other" not in arriero("ls", "TINY").stdout


def test_ps_shows_processor_context_and_expiry(arriero: Run, server: FakeServer) -> None:
    server.replies["GET", "/api/ps"] = lambda _: (200, {"models": [MODEL]})
    assert arriero("ps").stdout.split()[-4:] == ["100%", "CPU", "4096", "Forever"]


def test_stop_asks_for_an_unload(arriero: Run, server: FakeServer) -> None:
    assert arriero("stop", "tiny").returncode == 0
    assert server.bodies("/api/generate") == [{"model": "tiny", "keep_alive": 0}]


def test_stop_names_a_model_that_is_not_there(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/generate"] = lambda _: (404, {"error": "model 'x' not found"})
    result = arriero("stop", "x")
    assert (result.returncode, result.stderr) == (1, 'Error: couldn\'t find model "x" to stop\n')


def test_cp_and_rm_say_what_they_did(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/copy"] = lambda _: (200, b"")
    server.replies["DELETE", "/api/delete"] = lambda _: (200, b"")
    assert arriero("cp", "a", "b").stdout == "copied 'a' to 'b'\n"
    assert arriero("rm", "a", "b").stdout == "deleted 'a'\ndeleted 'b'\n"


def test_rm_stops_at_the_first_failure(arriero: Run, server: FakeServer) -> None:
    server.replies["DELETE", "/api/delete"] = lambda body: (404, {"error": f"model '{body['model']}' not found"})
    result = arriero("rm", "a", "b")
    assert (result.returncode, result.stderr) == (1, "Error: model 'a' not found\n")
    assert len(server.bodies("/api/delete")) == 1


def test_rm_removes_a_model_that_cannot_be_unloaded(arriero: Run, server: FakeServer) -> None:
    """M04: a damaged model must be removable."""
    server.replies["POST", "/api/generate"] = lambda _: (500, {"error": "model 'a:latest' is damaged"})
    server.replies["DELETE", "/api/delete"] = lambda _: (200, b"")
    assert arriero("rm", "a").stdout == "deleted 'a'\n"


def test_an_unknown_verb_is_named(arriero: Run) -> None:
    result = arriero("frobnicate")
    assert (result.returncode, result.stderr) == (1, 'Error: unknown command "frobnicate" for "arriero"\n')


def test_no_server_says_how_to_start_one(arriero: Run) -> None:
    result = arriero("list", ARRIERO_HOST="127.0.0.1:9")
    assert result.returncode == 1
    assert "arriero serve" in result.stderr
    assert "127.0.0.1:9" in result.stderr


def test_a_prompt_argument_is_answered_without_codes_or_wraps(arriero: Run, server: FakeServer) -> None:
    text = "word " * 100
    server.replies["POST", "/api/generate"] = lambda _: (200, generate_reply(text))
    result = arriero("run", "tiny", "hello")
    assert result.stdout == text + "\n"
    assert result.stderr == ""
    assert server.bodies("/api/generate")[0]["prompt"] == "hello"


def test_piped_text_and_arguments_are_joined(arriero: Run, server: FakeServer) -> None:
    arriero("run", "tiny", "and", "this", stdin="piped")
    assert server.bodies("/api/generate")[0]["prompt"] == "piped and this"


def test_an_empty_prompt_only_loads(arriero: Run, server: FakeServer) -> None:
    assert arriero("run", "tiny", "").returncode == 0
    assert "prompt" not in server.bodies("/api/generate")[0]


def test_thoughts_do_not_reach_a_file(arriero: Run, server: FakeServer) -> None:
    chunks = [{"response": "", "thinking": "hm", "done": False}, *generate_reply("Yes")]
    server.replies["POST", "/api/generate"] = lambda _: (200, chunks)
    assert arriero("run", "tiny", "q").stdout == "Yes\n"


def test_verbose_statistics_go_to_stderr(arriero: Run) -> None:
    result = arriero("run", "--verbose", "tiny", "q")
    assert "eval rate:            4.00 tokens/s" in result.stderr
    assert "total duration:       2s" in result.stderr
    assert "rate" not in result.stdout


def test_an_error_in_the_middle_of_a_reply_is_an_error(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/generate"] = lambda _: (
        200,
        [{"response": "par", "done": False}, {"error": "runner died"}],
    )
    result = arriero("run", "tiny", "q")
    assert (result.returncode, result.stdout, result.stderr) == (1, "par\n", "Error: runner died\n")


class Endless(list):
    """A first chunk, and a second one only when `go` is set."""

    def __init__(self) -> None:
        super().__init__([1])
        self.go = threading.Event()

    def __iter__(self) -> Iterator[object]:
        yield from generate_reply("par")[:1]
        self.go.wait(20)


def test_ctrl_c_during_a_reply_is_an_exit_of_130(environ: dict[str, str], server: FakeServer) -> None:
    chunks = Endless()
    server.replies["POST", "/api/generate"] = lambda _: (200, chunks)
    process = subprocess.Popen(
        [sys.executable, "-m", "arriero", "run", "tiny", "q"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    assert process.stdout is not None
    begun = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=20)
    chunks.go.set()
    assert (begun + rest, errors.strip(), process.returncode) == (b"par\n", b"", 130)


def test_a_reply_without_an_end_is_an_error(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/generate"] = lambda _: (200, [{"response": "par", "done": False}])
    result = arriero("run", "tiny", "q")
    assert result.returncode == 1
    assert "before it was complete" in result.stderr


def test_a_missing_model_lists_those_that_are_there(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/show"] = lambda _: (404, {"error": "model 'x' not found"})
    server.replies["GET", "/api/tags"] = lambda _: (200, {"models": [MODEL]})
    result = arriero("run", "x", "q")
    assert result.returncode == 1
    assert "model 'x' not found here (there are tiny:latest), and it cannot be pulled" in result.stderr


@pytest.mark.parametrize("value", ["10m", "300", "-1"])
def test_keepalive_takes_numbers_and_durations(arriero: Run, server: FakeServer, value: str) -> None:
    assert arriero("run", "--keepalive", value, "tiny", "q").returncode == 0
    sent = server.bodies("/api/generate")[0]["keep_alive"]
    assert sent == value or sent == float(value)


@pytest.mark.parametrize(
    ("words", "think", "prompt"),
    [
        (("--think", "tiny", "q"), True, "q"),
        (("tiny", "--think", "Where to go?"), True, "Where to go?"),
        (("tiny", "--think", "low", "q"), "low", "q"),
        (("tiny", "--think=false", "q"), False, "q"),
        (("tiny", "q", "--think"), True, "q"),
        (("--think", "--", "tiny", "--think"), True, "--think"),
    ],
)
def test_think_takes_a_level_and_no_other_word(
    arriero: Run, server: FakeServer, words: tuple[str, ...], think: object, prompt: str
) -> None:
    assert arriero("run", *words).returncode == 0
    sent = server.bodies("/api/generate")[0]
    assert (sent["think"], sent["prompt"]) == (think, prompt)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--keepalive", "banana"), "invalid duration"),
        (("--think=maybe",), "invalid value for --think"),
        (("--format", "yaml"), "JSON schema"),
    ],
)
def test_a_bad_flag_says_what_it_takes(arriero: Run, flags: tuple[str, ...], message: str) -> None:
    result = arriero("run", *flags, "tiny", "q")
    assert result.returncode == 1
    assert message in result.stderr


def test_two_exclusive_flags_of_show_are_refused(arriero: Run) -> None:
    result = arriero("show", "--system", "--template", "tiny")
    assert result.returncode == 1
    assert "only one of" in result.stderr


def test_show_prints_sections(arriero: Run, server: FakeServer) -> None:
    reply = {
        "details": {"parameter_size": "134.5M", "quantization_level": "Q4_1", "family": "llama"},
        "model_info": {"general.architecture": "llama", "llama.context_length": 8192, "llama.embedding_length": 576},
        "capabilities": ["completion"],
        "parameters": 'temperature                    0\nstop                           "a b"',
        "license": "Line one\n\nLine two\nLine three",
    }
    server.replies["POST", "/api/show"] = lambda _: (200, reply)
    text = arriero("show", "tiny").stdout
    assert "  Model\n    architecture        llama\n" in text
    assert "    context length      8192\n" in text
    assert '    stop           "a b"\n' in text
    assert "  License\n    Line one\n    Line two\n    ...\n" in text


def test_show_prints_groups_of_tensors_and_the_draft_on_its_own(arriero: Run, server: FakeServer) -> None:
    group = {"name": "model.layers.*.mlp.up_proj.weight", "type": "int4", "count": 28, "bytes": 3_500_000}
    draft = {"architecture": "DFlashDraftModel", "quantization_level": "mxfp4", "size": 91_000_000}
    reply = {
        "details": {"quantization_level": "int4"},
        "tensor_groups": [group],
        "tensors": [{"name": "model.norm.weight", "type": "F32", "shape": [4]}],
        "draft": draft | {"tensors": [{"name": "draft.norm.weight", "type": "BF16", "shape": [8]}]},
    }
    server.replies["POST", "/api/show"] = lambda _: (200, reply)
    text = arriero("show", "tiny").stdout
    assert "  Quantization\n    model.layers.*.mlp.up_proj.weight    28    int4    3.5 MB\n" in text
    assert (
        "  Draft\n    architecture    DFlashDraftModel\n    quantization    mxfp4\n    size            91 MB\n" in text
    )
    assert "norm.weight" not in text
    text = arriero("show", "-v", "tiny").stdout
    assert "  Tensors\n    model.norm.weight    F32     [4]\n    draft.norm.weight    BF16    [8]\n" in text


def test_list_has_a_line_for_a_draft(arriero: Run, server: FakeServer) -> None:
    draft = {"architecture": "DFlashDraftModel", "quantization_level": "mxfp4", "size": 91_000_000}
    server.replies["GET", "/api/tags"] = lambda _: (200, {"models": [MODEL | {"draft": draft}]})
    lines = arriero("list").stdout.splitlines()
    assert len(lines) == 3
    assert lines[2].split() == ["+", "draft", "DFlashDraftModel", "mxfp4", "91", "MB"]


def test_a_precision_for_a_draft_wants_a_draft(arriero: Run, server: FakeServer) -> None:
    result = arriero("create", "x", "--draft-quantize", "int8", "-f", "/dev/stdin", stdin="FROM tiny")
    assert result.returncode == 1
    assert "--draft-quantize requires a DRAFT model" in result.stderr
    assert server.bodies("/api/create") == []
    server.replies["POST", "/api/create"] = lambda _: (200, [{"status": "success"}])
    modelfile = "FROM tiny\nDRAFT other"
    assert arriero("create", "x", "--draft-quantize", "int8", "-f", "/dev/stdin", stdin=modelfile).returncode == 0
    body = server.bodies("/api/create")[0]
    assert (body["draft"], body["draft_quantize"], body["scale_search"]) == ("other", "int8", True)


@pytest.mark.parametrize("reply", [(404, b"<!DOCTYPE html>\n<p>no</p>"), (200, b"<html>"), (200, b"[1]\n")])
def test_another_kind_of_server_is_told_from_ours(arriero: Run, server: FakeServer, reply: tuple[int, bytes]) -> None:
    server.replies["POST", "/api/create"] = lambda _: reply
    result = arriero("create", "x", "-f", "/dev/stdin", stdin="FROM tiny")
    assert result.returncode == 1
    assert f"what answers at http://127.0.0.1:{server.port} is neither arriero nor Ollama" in result.stderr
    assert len(result.stderr.splitlines()) == 2


def test_version_warns_about_a_foreign_server(arriero: Run, server: FakeServer) -> None:
    server.replies["GET", "/api/version"] = lambda _: (200, {"version": "0.32.15"})
    result = arriero("--version")
    assert result.stdout.startswith("arriero version is ")
    assert "Ollama 0.32.15, not arriero" in result.stderr


def test_list_imports_nothing_that_takes_long(environ: dict[str, str], server: FakeServer) -> None:
    server.replies["GET", "/api/tags"] = lambda _: (200, {"models": [MODEL]})
    code = "import sys; from arriero.cli.main import _run; _run(['list']); print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    slow = {
        "httpx",
        "rich",
        "mlx",
        "numpy",
        "starlette",
        "uvicorn",
        "prompt_toolkit",
        "tokenizers",
        "asyncio",
        "jinja2",
    }
    assert "tiny:latest" in result.stdout
    assert slow.isdisjoint(result.stderr.split())
