"""One server for all tests of the API; its runners answer what the prompts say."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.helpers.echo_runner import echo_command
from tests.helpers.embedding_server import embedding_server
from tests.helpers.live_server import LiveServer, live_server
from tests.helpers.seeing_server import Seeing, seeing_server
from tests.helpers.stored_model import CHATML, put_model

THINKING = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    + CHATML
    + "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """`tiny` answers what its prompt says; `thinker` also thinks and takes tools; `dressed` has a system prompt."""
    folder = tmp_path_factory.mktemp("server")
    # Room for the models of all tests: none leaves because another test has loaded one.
    with live_server(folder, echo_command(folder), max_loaded_models=16) as running:
        put_model(running.store, "tiny")
        put_model(running.store, "thinker", template=THINKING)
        put_model(
            running.store,
            "dressed",
            system="Be brief.",
            params={"temperature": 0, "stop": ["STOP"], "num_ctx": 512},
            messages=[{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}],
        )
        put_model(running.store, "coder", special=("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|im_end|>"))
        yield running


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Tiny encoders in real runners."""
    with embedding_server(tmp_path_factory.mktemp("embedder")) as running:
        yield running


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    """A tiny model that sees, in a real runner."""
    with seeing_server(tmp_path_factory.mktemp("seeing")) as found:
        yield found


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """A plain client."""
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False, verify=False) as client:
        yield client


@pytest.fixture
async def ahttp(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    """A plain asynchronous client."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False, verify=False) as client:
        yield client
