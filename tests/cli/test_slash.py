from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arriero.cli.chat.session import Session
from arriero.cli.chat.slash import Leave, run_command
from arriero.cli.client import Client
from arriero.settings import Settings
from tests.helpers.fake_server import FakeServer, chat_reply

Type = Callable[[str], str]


@pytest.fixture
def session(server: FakeServer, tmp_path: Path) -> Session:
    settings = Settings.from_environ({"ARRIERO_HOME": str(tmp_path)})
    return Session(Client("127.0.0.1", server.port), "tiny", {"parameters": "seed 1"}, settings, {})


@pytest.fixture
def command(session: Session, capsys: pytest.CaptureFixture[str]) -> Type:
    def typed(text: str) -> str:
        capsys.readouterr()
        run_command(session, text)
        return capsys.readouterr().out.strip()

    return typed


def test_parameters_are_typed_and_sent(session: Session, command: Type, server: FakeServer) -> None:
    assert command("/set parameter temperature 0.5") == "Set parameter 'temperature' to '0.5'"
    assert command("/set parameter stop one two") == "Set parameter 'stop' to 'one, two'"
    session.say("hi")
    assert server.bodies("/api/chat")[0]["options"] == {"temperature": 0.5, "stop": ["one", "two"]}


@pytest.mark.parametrize("text", ["/set parameter nope 1", "/set parameter seed x"])
def test_a_bad_parameter_is_explained_and_not_set(session: Session, command: Type, text: str) -> None:
    assert command(text).startswith("Couldn't set parameter:")
    assert session.options == {}


def test_save_sends_lists_as_lists_and_the_whole_conversation(
    session: Session, command: Type, server: FakeServer
) -> None:
    server.replies["POST", "/api/create"] = lambda _: (200, {"status": "success"})
    command("/set parameter stop one two")
    command("/set system Be brief.")
    session.say("hi")
    assert command("/save copy") == "Created new model 'copy'"
    body: dict[str, Any] = server.bodies("/api/create")[0]
    assert body["parameters"] == {"stop": ["one", "two"]}
    assert (body["model"], body["from"], body["system"]) == ("copy", "tiny", "Be brief.")
    assert [m["role"] for m in body["messages"]] == ["user", "assistant"]


def test_a_stop_with_a_blank_is_given_in_quotes(session: Session, command: Type, server: FakeServer) -> None:
    """F02"""
    assert command('/set parameter stop "a b" c') == "Set parameter 'stop' to 'a b, c'"
    assert session.options == {"stop": ["a b", "c"]}


def test_save_keeps_the_messages_that_the_model_brought(session: Session, command: Type, server: FakeServer) -> None:
    """F02: a list of messages replaces the base's, so the whole conversation is sent."""
    server.replies["POST", "/api/create"] = lambda _: (200, {"status": "success"})
    session.facts = {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]}
    session.say("hi")
    command("/save copy")
    said = [m["content"] for m in server.bodies("/api/create")[0]["messages"]]
    assert said == ["A", "B", "hi", "Hello world."]


def test_clear_keeps_the_system_message(session: Session, command: Type, server: FakeServer) -> None:
    command('/set system """Be brief."""')
    session.say("hi")
    assert command("/clear") == "Cleared session context"
    session.say("again")
    roles = [m["role"] for m in server.bodies("/api/chat")[1]["messages"]]
    assert roles == ["system", "user"]


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("/set verbose", "Set 'verbose' mode."),
        ("/set quiet", "Set 'quiet' mode."),
        ("/set nowordwrap", "Set 'nowordwrap' mode."),
        ("/set format json", "Set format to 'json' mode."),
        ("/set noformat", "Disabled format."),
        ("/set think", "Set 'think' mode."),
        ("/set think high", "Set 'think' mode to 'high'."),
        ("/set nothink", "Set 'nothink' mode."),
        ("/show license", "No license was specified for this model."),
        ("/show parameters", "seed 1"),
        ("/nonsense", "Unknown command '/nonsense'. Type /? for help"),
    ],
)
def test_each_command_answers_in_its_words(command: Type, text: str, reply: str) -> None:
    assert command(text) == reply


@pytest.mark.parametrize("text", ["/bye", "/byebye", "/exit"])
def test_leaving_takes_any_word_that_starts_so(command: Type, text: str) -> None:
    with pytest.raises(Leave):
        command(text)


def test_load_of_a_missing_model_keeps_the_conversation(
    session: Session, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    session.say("hi")
    server.replies["POST", "/api/show"] = lambda _: (404, {"error": "model 'x' not found"})
    run_command(session, "/load x")
    assert "Couldn't find model 'x'" in capsys.readouterr().err
    assert (session.model, len(session.messages)) == ("tiny", 2)


def test_an_error_takes_the_unanswered_message_back(session: Session, server: FakeServer) -> None:
    server.replies["POST", "/api/chat"] = lambda _: (500, {"error": "broken"})
    with pytest.raises(Exception, match="broken"):
        session.say("hi")
    assert session.messages == []


def test_text_that_arrived_before_an_error_is_kept(session: Session, server: FakeServer) -> None:
    server.replies["POST", "/api/chat"] = lambda _: (200, [*chat_reply("partial")[:1], {"error": "runner died"}])
    with pytest.raises(Exception, match="runner died"):
        session.say("hi")
    assert session.messages[-1] == {"role": "assistant", "content": "partial"}


def test_a_truncated_conversation_is_reported(
    session: Session, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies["POST", "/api/chat"] = lambda _: (200, chat_reply("ok", truncated={"dropped_messages": 3}))
    session.say("hi")
    assert "oldest 3 messages" in capsys.readouterr().err
