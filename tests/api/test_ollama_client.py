"""The `ollama` Python client against a real server: every verb, streamed and not, blocking and asynchronous."""

import hashlib

import ollama
import pytest

from tests.helpers.echo_runner import say


@pytest.fixture
def client(server):
    client = ollama.Client(host=server.url, verify=False)
    yield client
    client._client.close()


@pytest.fixture
async def aclient(server):
    client = ollama.AsyncClient(host=server.url, verify=False)
    yield client
    await client._client.aclose()


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_chat_in_one_piece(client):
    reply = client.chat("tiny", user(say("Grüße, 漢字 👩‍👩‍👧!")))
    assert reply.message.content == "Grüße, 漢字 👩‍👩‍👧!"
    assert (reply.done, reply.done_reason, reply.model) == (True, "stop", "tiny")
    assert reply.eval_count == len("Grüße, 漢字 👩‍👩‍👧!".encode())
    assert reply.total_duration > 0
    assert reply.prompt_eval_count > 0


def test_chat_streamed(client):
    parts = list(client.chat("tiny", user(say("one two three", piece=3)), stream=True))
    assert "".join(part.message.content for part in parts) == "one two three"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == "stop"


def test_generate_in_one_piece_and_streamed(client):
    assert client.generate("tiny", say("whole")).response == "whole"
    parts = list(client.generate("tiny", say("whole"), stream=True))
    assert "".join(part.response for part in parts) == "whole"
    assert parts[-1].context
    assert all(not part.context for part in parts[:-1])


async def test_the_asynchronous_client(aclient):
    assert (await aclient.chat("tiny", user(say("hello")))).message.content == "hello"
    parts = [part async for part in await aclient.chat("tiny", user(say("hello")), stream=True)]
    assert "".join(part.message.content for part in parts) == "hello"
    assert (await aclient.generate("tiny", say("hello"))).response == "hello"
    parts = [part async for part in await aclient.generate("tiny", say("hello"), stream=True)]
    assert "".join(part.response for part in parts) == "hello"


async def test_the_asynchronous_client_lists_shows_copies_and_deletes(aclient):
    await aclient.copy("tiny", "async-copy")
    assert "async-copy:latest" in [model.model for model in (await aclient.list()).models]
    assert (await aclient.show("async-copy")).details.family == "llama"
    await aclient.delete("async-copy")
    assert "async-copy:latest" not in [model.model for model in (await aclient.list()).models]
    assert isinstance((await aclient.ps()).models, list)


def test_thinking_is_on_by_default_and_comes_apart_from_the_content(client):
    reply = client.chat("thinker", user(say("Plan.\n</think>\n\nAnswer.")))
    assert (reply.message.thinking, reply.message.content) == ("Plan.", "Answer.")
    parts = list(client.chat("thinker", user(say("Plan.\n</think>\n\nAnswer.")), stream=True, think=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Plan."
    assert "".join(part.message.content or "" for part in parts) == "Answer."
    assert client.chat("thinker", user(say("Answer.")), think=False).message.content == "Answer."


def test_list_names_every_model(client):
    models = {model.model: model for model in client.list().models}
    assert {"tiny:latest", "thinker:latest", "dressed:latest"} <= models.keys()
    assert models["tiny:latest"].size > 0
    assert models["tiny:latest"].modified_at is not None
    assert len(models["tiny:latest"].digest) == 64


def test_show_tells_what_a_model_is(client):
    shown = client.show("dressed")
    assert shown.modelinfo["general.architecture"] == "llama"
    assert "Be brief." in shown.modelfile
    assert shown.parameters.splitlines() == sorted(shown.parameters.splitlines())
    assert '"STOP"' in shown.parameters
    assert "completion" in shown.capabilities
    assert "thinking" in client.show("thinker").capabilities


def test_ps_shows_a_loaded_model_and_forgets_it_when_unloaded(client):
    client.generate("tiny", keep_alive="10m")
    loaded = {model.model: model for model in client.ps().models}
    assert loaded["tiny:latest"].expires_at is not None
    assert loaded["tiny:latest"].context_length == 4096
    client.generate("tiny", keep_alive=0)
    assert "tiny:latest" not in [model.model for model in client.ps().models]


def test_create_from_a_model_copy_and_delete(client):
    created = client.create(model="made", from_="tiny", system="Sing.", parameters={"temperature": 0.5})
    assert created.status == "success"
    assert client.show("made").modelfile.count("Sing.") == 1
    statuses = [part.status for part in client.create(model="made", from_="tiny", stream=True)]
    assert statuses[-2:] == ["writing manifest", "success"]
    client.copy("made", "made:two")
    client.delete("made")
    names = [model.model for model in client.list().models]
    assert "made:two" in names
    assert "made:latest" not in names
    client.delete("made:two")


def test_create_blob_uploads_a_file_once(client, tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"x" * 5_000_000)
    digest = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    assert client.create_blob(path) == digest
    assert client.create_blob(path) == digest


def test_an_unknown_model_is_a_404_with_the_words_that_clients_look_for(client):
    for call in (client.chat, client.generate, client.show, client.delete):
        with pytest.raises(ollama.ResponseError, match=r"^model 'nobody' not found") as caught:
            call("nobody", user("hi")) if call == client.chat else call("nobody")
        assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match='model "nobody" not found') as caught:
        client.copy("nobody", "x")
    assert caught.value.status_code == 404


def test_an_error_in_a_stream_reaches_the_client(client):
    parts = client.chat("tiny", user(say("half", fail_after=2)), stream=True)
    with pytest.raises(ollama.ResponseError, match="scripted failure"):
        list(parts)


def test_log_probabilities_come_with_the_text(client):
    reply = client.chat("tiny", user(say("ab")), logprobs=True, top_logprobs=0)
    assert [item.token for item in reply.logprobs] == ["a", "b"]
