"""Grammars in the engine: every reply fits, alone and in batches, with thoughts, with log-probabilities."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import mlx.core as mx
import msgspec
import numpy as np
import pytest

from arriero.chat.calls.forms import form_of
from arriero.chat.forced import call_format
from arriero.chat.grammar import grammar_for
from arriero.chat.messages import Tool
from arriero.chat.parsers.events import Thinking, ToolCallEvent
from arriero.chat.parsers.families import FAMILIES
from arriero.errors import InvalidRequest
from arriero.runner.messages import Failed, Finished, Grammar, SamplingOptions, Thoughts, Trigger, Vocabulary
from arriero.runner.sampling import Sampler
from arriero.runner.sampling.constraint import Constraint
from arriero.runner.sampling.grammar import Grammars
from arriero.runner.sampling.masks import ruled_out
from tests.helpers.engine_runs import Reply, run
from tests.helpers.grammars import (
    CALL,
    SCHEMAS,
    STOP,
    THINK,
    THOUGHTS,
    TOKENS,
    UNTHINK,
    VOCABULARY,
    answer,
    ask,
    engine,
    schema,
)

OPENED = Thoughts(opening=b"<think>", closing="</think>", opened=True)


def check(reply: Reply, wanted: Any) -> None:
    """The reply ended by itself and fits."""
    assert reply.reason == "stop", reply.end
    value = json.loads(answer(reply.tokens))
    jsonschema.validate(value, wanted, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("ahead", [False, True])
def test_250_hot_replies_in_batches_of_eight_fit_their_thirty_schemas(ahead: bool) -> None:
    made = engine(ahead)
    wanted = {f"{number}-{i}": SCHEMAS[number] for i in range(8) for number in range(len(SCHEMAS))}
    for seed, (row, value) in enumerate(wanted.items()):
        made.submit(ask(row, schema(value), seed))
    for i in range(10):
        made.submit(ask(f"last-{i}", schema(SCHEMAS[i]), 1000 + i))
    replies = run(made)
    assert len(replies) == 250
    for row, value in wanted.items():
        check(replies[row], value)
    made.close()


def test_hot_replies_with_thoughts_fit_behind_them() -> None:
    made = engine()
    for number, value in enumerate(SCHEMAS):
        made.submit(ask(str(number), schema(value, OPENED if number % 2 else THOUGHTS), number))
    replies = run(made)
    thoughtful = 0
    for number, value in enumerate(SCHEMAS):
        check(replies[str(number)], value)
        thoughtful += UNTHINK in replies[str(number)].tokens
    assert thoughtful >= len(SCHEMAS) // 2
    made.close()


def test_a_free_row_says_the_same_beside_rows_with_grammars() -> None:
    alone, beside = engine(), engine()
    for made in (alone, beside):
        made.submit(ask("free", None, 5, count=40))
    for number in range(4):
        beside.submit(ask(str(number), schema(SCHEMAS[number]), number))
    assert run(alone)["free"].tokens == run(beside)["free"].tokens


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_row_with_a_grammar_says_the_same_alone_and_in_a_batch_and_launched_ahead(temperature: float) -> None:
    said = []
    for ahead, others in ((False, 0), (True, 0), (False, 6), (True, 6)):
        made = engine(ahead)
        for number in range(others):
            made.submit(ask(f"other {number}", schema(SCHEMAS[number]) if number % 2 else None, number, count=30))
        made.submit(ask("row", schema(SCHEMAS[0]), 3, temperature=temperature))
        said.append(run(made)["row"].tokens)
    assert said[0]
    assert all(tokens == said[0] for tokens in said)


def test_penalties_and_narrow_choices_act_on_what_the_grammar_allows() -> None:
    made = engine()
    rules: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_p": 0.1},
        {"min_p": 0.5},
        {"typical_p": 0.3},
        {"repeat_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 2.0, "repeat_last_n": -1},
        {"temperature": 0.0, "repeat_penalty": 2.0},
    ]
    for number, rule in enumerate(rules):
        made.submit(ask(str(number), schema(SCHEMAS[0]), number, **rule))
    for reply in run(made).values():
        check(reply, SCHEMAS[0])


def test_log_probabilities_under_a_grammar_are_the_models_own() -> None:
    made = engine()
    made.submit(ask("row", schema(SCHEMAS[0]), 2, logprobs=True, top_logprobs=3))
    reply = run(made)["row"]
    check(reply, SCHEMAS[0])
    assert len(reply.logprobs) == len(reply.tokens)
    likeliest = [entry.top[0][0] for entry in reply.logprobs]
    assert any(token not in likeliest[i : i + 1] for i, token in enumerate(reply.tokens))
    assert all(entry.logprob <= 0 and len(entry.top) == 3 for entry in reply.logprobs)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar(kind="regex", text="a{3}"), "aaa"),
        (Grammar(kind="lark", text='start: "x" num\nnum: "1" "2"'), "x12"),
        (Grammar(kind="json_schema", text='{"const": 7}'), "7"),
    ],
)
def test_a_reply_ends_when_nothing_can_follow(grammar: Grammar, said: str) -> None:
    made = engine()
    made.submit(ask("row", grammar))
    reply = run(made)["row"]
    assert (answer(reply.tokens), reply.reason) == (said, "stop")


def test_a_stop_token_is_drawn_only_when_the_reply_is_whole() -> None:
    made = engine()
    for seed in range(20):
        made.submit(ask(str(seed), Grammar(kind="regex", text="(ab)+"), seed))
    for reply in run(made).values():
        text = answer(reply.tokens)
        assert reply.reason == "stop"
        assert text
        assert text == "ab" * (len(text) // 2)


def test_a_reply_that_reaches_its_limit_ends_there() -> None:
    made = engine()
    made.submit(ask("row", Grammar(kind="regex", text="a{50}"), count=3))
    reply = run(made)["row"]
    assert reply.reason == "length"
    assert set(answer(reply.tokens)) == {"a"}


def test_a_dead_end_fails_the_row_and_says_so_while_others_go_on() -> None:
    made = engine()
    tokens = [b"z" if b"b" in data else data for data in TOKENS]
    made._grammars = Grammars(Vocabulary(tokens=tokens, special=VOCABULARY.special), len(TOKENS))
    made.submit(ask("alive", schema(SCHEMAS[1])))
    made.submit(ask("stuck", Grammar(kind="regex", text="xb")))
    replies = run(made)
    check(replies["alive"], SCHEMAS[1])
    end = replies["stuck"].end
    assert isinstance(end, Failed)
    assert end.error == "InvalidRequest"
    assert "no token of this model continues it" in end.message


def test_an_unsupported_keyword_is_named() -> None:
    made = engine()
    made.submit(ask("row", schema({"type": "object", "properties": {"a": {"not": {}}}})))
    end = run(made)["row"].end
    assert isinstance(end, Failed)
    assert (end.error, "'not' is not supported" in end.message) == ("InvalidRequest", True)


def test_a_grammar_before_the_vocabulary_is_refused() -> None:
    made = engine()
    made._grammars = None
    made.submit(ask("row", schema(True)))
    end = run(made)["row"].end
    assert isinstance(end, Failed)
    assert "vocabulary" in end.message


def test_rows_go_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    made.submit(ask("compiled", schema(SCHEMAS[0])))
    constraint = made._waiting[0].constraint
    ready = type("Late", (), {"ready": False})()
    made._waiting[0].constraint = ready
    made.submit(ask("free", None, count=5))
    replies: dict[str, Reply] = {}
    for _ in range(12):
        made.step()
    made._waiting[0].constraint = constraint
    run(made, replies)
    assert replies["free"].reason == "length"
    check(replies["compiled"], SCHEMAS[0])


def test_a_waiting_row_with_a_grammar_can_be_cancelled() -> None:
    made = engine(rows=1)
    made.submit(ask("first", schema(SCHEMAS[0])))
    made.submit(ask("second", schema(SCHEMAS[0])))
    made.step()
    made.cancel("second")
    made.cancel("first")
    replies = run(made)
    assert [replies[row].reason for row in ("first", "second")] == ["cancelled", "cancelled"]


def test_replies_fit_while_copies_of_their_own_text_are_drafted() -> None:
    made = engine(speculate=True)
    repeated = {"type": "array", "items": {"const": "abcabc"}, "minItems": 8, "maxItems": 8}
    for number in range(12):
        wanted = repeated if number % 2 else SCHEMAS[number]
        made.submit(ask("row", schema(wanted, OPENED if number % 3 == 2 else None), number))
        check(run(made)["row"], wanted)
    counts = made.counts()
    assert counts.draft_rounds > 0
    assert 0 < counts.drafts_accepted <= counts.drafts_judged


def test_a_call_on_offer_may_stand_in_the_grammars_place() -> None:
    grammars = Grammars(VOCABULARY, len(TOKENS))
    wanted = Grammar(kind="regex", text="a{3}", thoughts=OPENED, calls=[b"<think>"])
    constraint = Constraint(grammars, wanted, [STOP])
    constraint.start()
    for token in (1, 2, UNTHINK):
        constraint.advance(token)
    allowed = constraint.allowed()
    assert allowed[THINK]
    assert allowed[ord("a")]
    assert not allowed[STOP]
    constraint.advance(THINK)
    assert constraint.allowed().all()
    grammars.close()


def test_thoughts_that_lead_to_a_call_may_end_the_reply() -> None:
    grammars = Grammars(VOCABULARY, len(TOKENS))
    for may in (False, True):
        wanted = Grammar(kind="regex", text="a", thoughts=OPENED, calls_stop=may)
        constraint = Constraint(grammars, wanted, [STOP])
        constraint.start()
        assert constraint.allowed()[STOP] == may
    grammars.close()


def test_one_line_break_may_follow_thoughts_and_no_more() -> None:
    grammars = Grammars(VOCABULARY, len(TOKENS))
    constraint = Constraint(grammars, Grammar(kind="regex", text="a", thoughts=OPENED), [])
    constraint.start()
    constraint.advance(UNTHINK)
    assert constraint.allowed()[ord("\n")]
    constraint.advance(ord("\n"))
    assert np.flatnonzero(constraint.allowed()).tolist() == [ord("a")]
    grammars.close()


def test_control_tokens_are_no_part_of_a_grammars_text() -> None:
    grammars = Grammars(VOCABULARY, len(TOKENS))
    constraint = Constraint(grammars, Grammar(kind="regex", text="(?s:.*)"), [STOP])
    constraint.start()
    allowed = constraint.allowed()
    assert not allowed[[THINK, UNTHINK]].any()
    assert allowed[ord("<")]
    assert allowed[STOP]
    grammars.close()


def test_what_a_token_holds_behind_a_trigger_is_its_grammars() -> None:
    tokens = [*(bytes((byte,)) for byte in range(128)), b">{"]
    grammars = Grammars(Vocabulary(tokens=tokens, special=[]), len(tokens))
    trigger = Trigger(pattern="<call>", lark='start: "{" "a" "}"')
    row = Constraint(grammars, Grammar(kind="free", text="", triggers=[trigger]), [])
    row.start()
    for byte in b"<call":
        row.advance(byte)
    assert row.allowed().all()
    row.advance(128)
    assert np.flatnonzero(row.allowed()).tolist() == [ord("a")]
    grammars.close()


def test_where_a_tag_is_a_token_no_other_of_the_same_bytes_spells_it() -> None:
    tokens = [b"a", b"<t>", b"<t>", b"b", b"b"]
    grammars = Grammars(Vocabulary(tokens=tokens, special=[2]), len(tokens))
    grammars.compile(Grammar(kind="regex", text="a")).result()
    assert (grammars.spelled(b"<t>"), grammars.spelled(b"b"), grammars.spelled(b"c")) == ([2], [3, 4], [])
    grammars.close()


def spelled(words: list[str]) -> list[bytes]:
    return [word.encode() for word in words]


def constraint_of(tokens: list[bytes], thoughts: Thoughts, text: str = "ab?") -> tuple[Any, Grammars]:
    grammars = Grammars(Vocabulary(tokens=tokens, special=[]), len(tokens))
    made = Constraint(grammars, Grammar(kind="regex", text=text, thoughts=thoughts), [])
    made.start()
    return made, grammars


def test_thoughts_may_open_in_several_tokens_of_plain_text() -> None:
    tokens = spelled(["<", "think", ">", "<think", "a", "b", "</", "\n\n"])
    made, grammars = constraint_of(tokens, Thoughts(opening=b"<think>", closing="</think>", opened=False))
    assert np.flatnonzero(made.allowed()).tolist() == [0, 3, 4]
    made.advance(0)
    assert np.flatnonzero(made.allowed()).tolist() == [1]
    made.advance(1)
    made.advance(2)
    assert made.allowed().all()
    for token in (4, 6, 1, 2):
        made.advance(token)
    assert np.flatnonzero(made.allowed()).tolist() == [4, 7]
    made.advance(7)
    assert np.flatnonzero(made.allowed()).tolist() == [4]
    grammars.close()


def test_what_a_token_holds_behind_the_closing_tag_is_the_grammars() -> None:
    tokens = spelled(["</think>a", "a", "b", "x"])
    made, grammars = constraint_of(tokens, Thoughts(opening=b"", closing="</think>", opened=True))
    made.advance(3)
    made.advance(0)
    assert np.flatnonzero(made.allowed()).tolist() == [2]
    made.advance(2)
    assert made.complete
    grammars.close()


def test_a_token_that_the_grammar_takes_does_not_open_thoughts() -> None:
    tokens = spelled(["[", "THINK]", "]"])
    made, grammars = constraint_of(tokens, Thoughts(opening=b"[THINK]", closing=r"\[/THINK\]", opened=False), r"\[\]")
    made.advance(0)
    assert np.flatnonzero(made.allowed()).tolist() == [2]
    grammars.close()


def as_tool(name: str, value: Any) -> Tool:
    """A tool with one parameter, which must fit a schema."""
    inner = {key: one for key, one in value.items() if key != "$defs"}
    parameters = {"type": "object", "properties": {"v": inner}, "required": ["v"], "additionalProperties": False}
    parameters |= {"$defs": value["$defs"]} if "$defs" in value else {}
    return Tool({"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}})


def called(family: str, count: int, seed: int = 0) -> int:
    """Hot replies in batches of eight that must call one of a few tools of all schemas: how many did, all fitting."""
    form = form_of(family, "", lambda _: False)
    assert form is not None
    tools, formats = [], []
    for number, value in enumerate(SCHEMAS):
        tool = as_tool(f"tool_{number}", value)
        try:
            formats.append(call_format(form, lambda _: None, [tool]))
        except InvalidRequest:
            assert family != "qwen"  # whose arguments are JSON
            continue
        tools.append(tool)
    made = engine()
    for number in range(count):
        parser = FAMILIES[family].parser("", tools)
        made.submit(ask(str(number), grammar_for(formats[number % len(tools)], parser), seed + number, count=2000))
    replies = run(made)
    for number in range(count):
        reply = replies[str(number)]
        if reply.reason != "stop":
            continue
        parser = FAMILIES[family].parser("", tools)
        events = [
            *parser.feed(b"".join(TOKENS[token] for token in reply.tokens).decode("utf-8", "replace")),
            *parser.flush(),
        ]
        calls = [event.call for event in events if isinstance(event, ToolCallEvent)]
        assert calls
        assert all(isinstance(event, ToolCallEvent | Thinking) for event in events)
        wanted = tools[number % len(tools)].definition["function"]["parameters"]
        for call in calls:
            jsonschema.validate(call.arguments, wanted, format_checker=jsonschema.FormatChecker())
    made.close()
    return sum(reply.reason == "stop" for reply in replies.values())


@pytest.mark.parametrize("family", ["qwen", "gemma4"])
def test_hot_replies_in_a_batch_are_calls_that_fit_their_schemas(family: str) -> None:
    assert called(family, 24) >= 12


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["qwen", "gemma4", "mistral", "kimi"])
def test_500_hot_replies_are_calls_that_fit(family: str) -> None:
    assert called(family, 500, seed=5000) >= 300


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("thoughts", [None, THOUGHTS, OPENED], ids=["plain", "thoughts", "opened thoughts"])
def test_500_hot_replies_fit_their_thirty_schemas(thoughts: Thoughts | None) -> None:
    made = engine()
    for number in range(500):
        made.submit(ask(str(number), schema(SCHEMAS[number % len(SCHEMAS)], thoughts), 9000 + number))
    replies = run(made)
    for number in range(500):
        check(replies[str(number)], SCHEMAS[number % len(SCHEMAS)])
    made.close()


CALLED = Trigger(pattern="[A-Z]", lark='start: "(" /[0-9]{2}/ <[274]>')
"""Behind a capital letter, two digits in brackets, the closing one being the token CALL."""


def held(reply: Reply) -> int:
    """Triggers that were followed as they say; the reply is anything else between them."""
    said = b"".join(b"\xff)" if token == CALL else TOKENS[token] for token in reply.tokens)
    free = re.sub(rb"[A-Z]\([0-9]{2}\xff\)", b"", said)
    # The last one may have met the end of the reply.
    assert not re.search(rb"[A-Z](?!\(?[0-9]{0,2}\Z)", free), said
    return len(re.findall(rb"[A-Z]\([0-9]{2}\xff\)", said))


@pytest.mark.parametrize("speculate", [False, True])
def test_a_free_reply_is_bound_behind_its_triggers_alone_in_batches_and_under_drafts(speculate: bool) -> None:
    free = Grammar(kind="free", triggers=[CALLED])
    made = engine(rows=1 if speculate else 8, speculate=speculate)
    for seed in range(8):
        request = ask(str(seed), free, seed, count=120, logprobs=True, top_logprobs=2)
        made.submit(msgspec.structs.replace(request, stop_tokens=[STOP]))
    replies = run(made)
    assert sum(map(held, replies.values())) > 8
    assert all(len(reply.logprobs) == len(reply.tokens) for reply in replies.values())
    assert not speculate or made.counts().draft_rounds > 0
    made.close()


def test_a_trigger_that_ends_the_reply_does() -> None:
    made = engine()
    ends = Trigger(pattern="[A-Z]", lark='start: "(" /[0-9]{2}/ ")"', ends=True)
    for seed in range(8):
        made.submit(ask(str(seed), Grammar(kind="free", triggers=[ends]), seed, count=400))
    replies = run(made)
    found = [re.fullmatch(r"(?s)[^A-Z]*([A-Z]\([0-9]{2}\))?", answer_of(reply)) for reply in replies.values()]
    assert sum(match is not None and match[1] is not None for match in found) > 3
    assert all(found)
    made.close()


def answer_of(reply: Reply) -> str:
    return b"".join(TOKENS[token] for token in reply.tokens).decode("latin-1")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_best_token_is_that_of_those_allowed(dtype: mx.Dtype) -> None:
    sampler = Sampler(4, 16)
    for row in ("masked", "free"):
        sampler.add(row, SamplingOptions(temperature=0.0), [0])
    logits = mx.array([[3.0, 2.0, 1.0, 0.0]] * 2, dtype)
    drawn = sampler.sample(["masked", "free"], logits, {"masked": np.array([False, False, True, True])})
    assert drawn.read_tokens() == [2, 0]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("size", [1, 8, 37, 300])
def test_what_is_ruled_out_is_minus_infinity_and_the_rest_is_as_it_was(dtype: mx.Dtype, size: int) -> None:
    chance = np.random.default_rng(size)
    scores = mx.array(chance.normal(size=(3, size)).astype(np.float32) * 50).astype(dtype)
    allowed = chance.random((3, size)) < 0.5
    found = np.array(ruled_out(scores, allowed).astype(mx.float32))
    assert (found == np.where(allowed, np.array(scores.astype(mx.float32)), -np.inf)).all()


def test_a_finished_row_counts_its_tokens() -> None:
    made = engine()
    made.submit(ask("row", Grammar(kind="regex", text="a{3}")))
    reply = run(made)["row"]
    assert isinstance(reply.end, Finished)
    assert reply.end.generated_tokens == len(reply.tokens)
