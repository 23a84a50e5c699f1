"""What the native API promises in docs/api.md, field by field."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.ask import chat, error, generate, lines
from tests.helpers.echo_runner import say

# --- the front door


def test_the_heartbeat_is_ollamas_and_the_server_header_ours(http):
    assert http.get("/").text == "Ollama is running"
    assert (
        http.head("/").status_code == http.head("/api/version").status_code == http.head("/api/tags").status_code == 200
    )
    assert http.get("/").headers["server"].startswith("arriero/")
    assert http.get("/api/version").json()["version"].count(".") == 2
    assert http.get("/api/status").json() == {"cloud": {"disabled": True, "source": "config"}}


def test_unknown_paths_and_wrong_verbs_are_plain_text(http):
    unknown, wrong = http.get("/api/nothing"), http.get("/api/chat")
    assert (unknown.status_code, unknown.text) == (404, "404 page not found")
    assert (wrong.status_code, wrong.text) == (405, "405 method not allowed")
    assert unknown.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("path", ["/api/pull", "/api/push"])
def test_a_transfer_needs_a_valid_name(http, path):
    assert error(http.post(path, json={})) == "model is required"
    assert "invalid model name" in error(http.post(path, json={"model": "a/../b"}))


def test_there_are_no_accounts_and_no_cloud(http):
    assert http.post("/api/me").status_code == 401
    assert "cloud is disabled" in error(http.post("/api/experimental/web_search", json={"query": "x"}), 403)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show", "/api/create", "/api/copy"])
def test_an_empty_body_is_said_to_be_missing(http, path):
    assert error(http.post(path)) == "missing request body"


@pytest.mark.parametrize("origin", ["http://evil.example", "https://localhost.evil.example"])
def test_a_foreign_page_is_refused(http, origin):
    assert http.get("/api/tags", headers={"Origin": origin}).status_code == 403


def test_a_foreign_host_name_is_refused(http):
    assert http.get("/api/tags", headers={"Host": "evil.example"}).status_code == 403


# --- names


def test_a_missing_model_field_is_refused(http):
    assert error(http.post("/api/chat", json={"messages": []})) == "model is required"
    assert error(http.post("/api/generate", json={"prompt": "x"}), 404) == "model '' not found"
    assert error(http.post("/api/show", json={})) == "model is required"
    assert error(http.post("/api/chat", json={"model": None, "messages": []})) == "model is required"


def test_a_model_is_found_whatever_the_case_and_by_its_local_suffix(http):
    assert chat(http, say("x"), model="TINY:Latest").json()["message"]["content"] == "x"
    assert chat(http, say("x"), model="tiny:local").json()["message"]["content"] == "x"


def test_the_reply_repeats_the_name_as_asked(http):
    assert chat(http, say("x"), model="Tiny").json()["model"] == "Tiny"


# --- forms of replies


def test_a_stream_is_ndjson_with_one_final_object(http):
    reply = chat(http, say("abc"), stream=True)
    assert reply.headers["content-type"] == "application/x-ndjson"
    objects = lines(reply)
    assert [item["done"] for item in objects] == [False, False, False, True]
    assert "done_reason" not in objects[0]
    final = objects[-1]
    assert final["done_reason"] == "stop"
    assert {"total_duration", "load_duration", "prompt_eval_count", "eval_count", "eval_duration"} <= final.keys()
    assert all(item["created_at"].endswith("Z") and len(item["created_at"]) == 30 for item in objects)


@pytest.mark.parametrize("model", ["tiny", "thinker"])
@pytest.mark.parametrize("piece", [1, 2, 5, 50])
def test_the_whole_reply_is_the_folded_stream(http, model, piece):
    asked = say("Some thoughts.</think>Grüße 漢字 and more", piece=piece)
    for path, body in (
        ("/api/chat", {"messages": [{"role": "user", "content": asked}]}),
        ("/api/generate", {"prompt": asked}),
    ):
        body = body | {"model": model, "logprobs": True}
        whole = http.post(path, json=body | {"stream": False}).json()
        parts = lines(http.post(path, json=body))
        folded = dict(parts[-1])
        folded["logprobs"] = [item for part in parts for item in part.get("logprobs", [])]
        for name in ("response", "thinking"):
            if text := "".join(part.get(name, "") for part in parts):
                folded[name] = text
        if path == "/api/chat":
            message = {"role": "assistant", "content": "".join(part["message"]["content"] for part in parts)}
            if thinking := "".join(part["message"].get("thinking", "") for part in parts):
                message["thinking"] = thinking
            folded["message"] = message
        timed = {"created_at"} | {name for name in whole if name.endswith("_duration")}
        assert {k: v for k, v in whole.items() if k not in timed} == {k: v for k, v in folded.items() if k not in timed}


def test_num_predict_one_is_one_token_and_length(http):
    objects = lines(chat(http, say("abc"), stream=True, options={"num_predict": 1}))
    assert [item["message"]["content"] for item in objects] == ["a", ""]
    assert (objects[-1]["done_reason"], objects[-1]["eval_count"]) == ("length", 1)


def test_num_predict_zero_and_below_is_the_rest_of_the_context(http):
    for value in (0, -1, -2):
        assert chat(http, say("abc"), options={"num_predict": value}).json()["message"]["content"] == "abc"


def test_render_only_returns_the_prompt(http):
    debug = chat(http, "Hi", _debug_render_only=True).json()
    assert debug["_debug_info"]["rendered_template"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert debug["done"] is False
    assert generate(http, "Hi", raw=True, _debug_render_only=True).json()["_debug_info"]["rendered_template"] == "Hi"


# --- null fields (A05)

CHAT_FIELDS = ["tools", "stream", "format", "keep_alive", "options", "think", "truncate", "shift", "logprobs"]
CHAT_FIELDS += ["top_logprobs", "_debug_render_only"]
GENERATE_FIELDS = [*CHAT_FIELDS[1:], "suffix", "system", "template", "context", "raw", "images"]


def test_every_null_is_the_same_as_an_absent_field(http):
    expected = "".join(item["message"]["content"] for item in lines(chat(http, say("abc"), stream=True)))
    for fields in [*({name: None} for name in CHAT_FIELDS), dict.fromkeys(CHAT_FIELDS)]:
        reply = chat(http, say("abc"), **({"stream": True} | fields))
        assert "".join(item["message"]["content"] for item in lines(reply)) == expected, fields
    for fields in [*({name: None} for name in GENERATE_FIELDS), dict.fromkeys(GENERATE_FIELDS)]:
        reply = generate(http, say("abc"), **({"stream": True} | fields))
        assert "".join(item["response"] for item in lines(reply)) == "abc", fields


def test_null_options_are_absent_too(http):
    options = dict.fromkeys(["num_ctx", "seed", "temperature", "stop", "top_k", "num_predict"])
    assert chat(http, say("abc"), options=options).json()["message"]["content"] == "abc"


# --- options


def test_an_unknown_option_is_refused_by_name(http):
    assert "unknown option 'temprature'" in error(chat(http, "x", options={"temprature": 1}))


def test_an_option_of_the_wrong_type_is_refused(http):
    assert 'option "num_ctx" must be of type integer' in error(chat(http, "x", options={"num_ctx": "big"}))
    assert "num_ctx" in error(chat(http, "x", options={"num_ctx": 0}))


def test_obsolete_options_are_accepted(http):
    assert chat(http, say("abc"), options={"mirostat": 1, "low_vram": True}).json()["message"]["content"] == "abc"


def test_the_models_stop_applies_and_the_requests_replaces_it(http):
    assert chat(http, say("go STOP on"), model="dressed").json()["message"]["content"] == "go "
    reply = chat(http, say("go STOP on"), model="dressed", options={"stop": ["on"]})
    assert reply.json()["message"]["content"] == "go STOP "


@pytest.mark.parametrize("piece", range(1, 9))
def test_a_stop_string_is_found_over_any_split(http, piece):
    reply = chat(http, say("alpha beta gamma delta", piece=piece), options={"stop": ["beta gamma", "zz", ""]}).json()
    assert (reply["message"]["content"], reply["done_reason"]) == ("alpha ", "stop")


def test_a_stopped_reply_has_no_log_probabilities_of_what_was_cut(http):
    reply = chat(http, say("abSTOPcd"), options={"stop": ["STOP"]}, logprobs=True).json()
    assert [item["token"] for item in reply["logprobs"]] == ["a", "b"]


@pytest.mark.parametrize("value", [21, -1, 100])
def test_top_logprobs_has_limits(http, value):
    assert error(chat(http, "x", logprobs=True, top_logprobs=value)) == "top_logprobs must be between 0 and 20"


def test_bytes_of_half_a_character_are_exact(http):
    reply = chat(http, say("é"), logprobs=True).json()
    assert [item["bytes"] for item in reply["logprobs"]] == [[0xC3], [0xA9]]


def test_alternatives_come_with_their_tokens(http):
    asked = say("ab", logprobs=[[-0.25, [[97, -0.25], [195, -2.0]]]])
    reply = chat(http, asked, logprobs=True, top_logprobs=2).json()
    top = reply["logprobs"][0]["top_logprobs"]
    assert [(item["bytes"], item["logprob"]) for item in top] == [([97], -0.25), ([195], -2.0)]


# --- think, format, images, tools


def test_think_is_refused_by_a_model_that_cannot_and_ignored_when_false(http):
    assert error(chat(http, "x", think=True)) == '"tiny" does not support thinking'
    assert error(generate(http, "x", think="high")) == '"tiny" does not support thinking'
    assert chat(http, say("x"), think=False).json()["message"]["content"] == "x"


@pytest.mark.parametrize(("value", "words"), [("xhigh", 'invalid think value: "xhigh"'), (5, "boolean or string")])
def test_a_think_value_that_means_nothing_is_refused(http, value, words):
    message = error(chat(http, "x", model="thinker", think=value))
    assert words in message
    assert '"medium"' in message


def test_think_reaches_the_template(http):
    def prompt(**fields):
        return chat(http, "x", model="thinker", _debug_render_only=True, **fields).json()["_debug_info"][
            "rendered_template"
        ]

    assert prompt().endswith("assistant\n<think>\n")
    assert prompt(think="low").endswith("assistant\n<think>\n")
    assert prompt(think=False).endswith("<think>\n\n</think>\n\n")


def test_our_own_replies_are_accepted_as_history(http):
    """C06: thoughts, text and all, as they came."""
    history = []
    for turn in ("one", "two", "three"):
        history.append({"role": "user", "content": say(f"hm {turn}</think>\nsaid {turn}")})
        message = chat(http, model="thinker", messages=history).json()["message"]
        assert (message["thinking"].strip(), message["content"]) == (f"hm {turn}", f"said {turn}")
        history.append(message)


@pytest.mark.parametrize("arguments", ['{"city": "Brno"}', "{}", "", None, "not json", "[1]", {"city": "Brno"}])
def test_arguments_of_any_form_are_accepted_in_the_history(http, arguments):
    """C01: what another server or client wrote there must not end a conversation."""
    call = {"function": {"name": "weather", "arguments": arguments}}
    history = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
        {"role": "user", "content": say("go on")},
    ]
    assert chat(http, model="thinker", think=False, messages=history).json()["message"]["content"] == "go on"


def test_an_empty_format_is_none(http):
    assert chat(http, say("x"), format="").status_code == 200


def test_images_are_refused_by_a_model_that_takes_none(http):
    message = [{"role": "user", "content": "x", "images": ["aGk="]}]
    assert error(chat(http, messages=message)) == '"tiny" does not support images'
    assert error(generate(http, "x", images=["aGk="])) == '"tiny" does not support images'


TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "x-kept": 1}}}


def test_tools_are_refused_by_a_model_that_takes_none(http):
    assert error(chat(http, "x", tools=[TOOL])) == "registry.ollama.ai/library/tiny:latest does not support tools"
    assert chat(http, say("x"), tools=[]).status_code == 200


def test_tools_reach_the_template_whole_and_other_kinds_are_left_out(http):
    reply = chat(http, "x", model="thinker", tools=[{"type": "web_search"}, TOOL], _debug_render_only=True)
    rendered = reply.json()["_debug_info"]["rendered_template"]
    assert '"x-kept": 1' in rendered
    assert "web_search" not in rendered


def test_a_tool_without_a_name_is_refused(http):
    assert "tools[0].function.name" in error(chat(http, "x", model="thinker", tools=[{"type": "function"}]))


# --- prompts of generate and chat


def test_the_models_system_and_messages_open_every_conversation(http):
    rendered = chat(http, "Hi", model="dressed", _debug_render_only=True).json()["_debug_info"]["rendered_template"]
    order = ["system\nBe brief.", "user\nA<", "assistant\nB<", "user\nHi<"]
    places = [rendered.index(part) for part in order]
    assert places == sorted(places)


def test_a_system_message_of_the_request_replaces_the_models(http):
    messages = [{"role": "System", "content": "Mine."}, {"role": "user", "content": "Hi"}]
    reply = chat(http, model="dressed", messages=messages, _debug_render_only=True)
    rendered = reply.json()["_debug_info"]["rendered_template"]
    assert "Be brief." not in rendered
    assert "system\nMine." in rendered
    rendered = generate(http, "Hi", model="dressed", system="Mine.", _debug_render_only=True).json()
    assert "Be brief." not in rendered["_debug_info"]["rendered_template"]


def test_a_template_of_the_request_replaces_the_models(http):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    reply = generate(http, "Hi", template=template, _debug_render_only=True).json()
    assert reply["_debug_info"]["rendered_template"] == "[user] Hi"
    assert "line" in error(generate(http, "Hi", template="{% for %}"))


def test_raw_takes_the_prompt_as_it_is_and_returns_no_context(http):
    reply = generate(http, say("abc"), raw=True).json()
    assert reply["response"] == "abc"
    assert "context" not in reply
    for field, value in (("template", "x"), ("system", "x"), ("context", [1])):
        assert "raw mode does not support" in error(generate(http, "x", raw=True, **{field: value}))


def test_a_suffix_needs_a_model_that_can_fill(http):
    assert error(generate(http, "a", suffix="b")) == '"tiny" does not support insert'
    reply = generate(http, say("filled"), model="coder", suffix="b")
    assert reply.json()["response"] == "filled"
    debug = generate(http, "a", model="coder", suffix="b", _debug_render_only=True).json()["_debug_info"]
    assert debug["rendered_template"] == "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"


def test_a_context_sent_back_continues_the_conversation(http):
    first = generate(http, say("one"), model="dressed").json()
    second = generate(http, say("two"), model="dressed", context=first["context"]).json()
    assert second["response"] == "two"
    assert second["context"][: len(first["context"])] == first["context"]
    assert second["prompt_eval_count"] > first["prompt_eval_count"]
    text = bytes(token for token in second["context"] if token < 256).decode()
    assert text.count("Be brief.") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_tokens_that_were_known_have_a_figure_of_their_own(http, stream):
    reply = generate(http, say("x", cached_tokens=3), stream=stream)
    last = lines(reply)[-1]
    assert (last["prompt_cached_count"], last["prompt_eval_count"] > 3) == (3, True)
    assert "prompt_cached_count" not in generate(http, say("x")).json()


def test_an_empty_context_is_none_and_a_foreign_one_is_refused(http):
    assert generate(http, say("x"), context=[]).json()["response"] == "x"
    assert "99999" in error(generate(http, "x", context=[1, 99999]))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PATHS = {
    "/api/chat": [*CHAT_FIELDS, "messages", "model"],
    "/api/generate": [*GENERATE_FIELDS, "prompt", "model"],
    "/api/show": ["model", "name", "system", "options", "verbose"],
    "/api/copy": ["source", "destination"],
    "/api/create": ["model", "from", "files", "modelfile", "parameters", "messages", "info", "license", "template"],
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_value_of_any_field_breaks_the_server(http, data):
    path = data.draw(st.sampled_from(sorted(PATHS)))
    fields = data.draw(st.dictionaries(st.sampled_from(PATHS[path]), ANYTHING, max_size=3))
    if path != "/api/copy":
        fields = {"model": "tiny"} | fields
    if path == "/api/chat":
        fields = {"messages": [{"role": "user", "content": say("x")}]} | fields
    if path == "/api/create":
        fields = fields | {"model": "tiny "}
    reply = http.post(path, json=fields)
    assert reply.status_code < 500, (fields, reply.text)
    if reply.status_code >= 400:
        assert set(reply.json()) == {"error"}


def section(title):
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    return page.partition(f"\n### {title}\n")[2].partition("\n### ")[0]


def test_listings_hold_what_their_page_names(http):
    generate(http, "x")
    [listed] = [model for model in http.get("/api/tags").json()["models"] if model["name"] == "dressed:latest"]
    loaded = next(model for model in http.get("/api/ps").json()["models"] if model["name"] == "tiny:latest")
    shown = http.post("/api/show", json={"model": "dressed", "verbose": True}).json()
    tags = section("`GET /api/tags`")
    for title, entry in (("`GET /api/tags`", listed), ("`GET /api/ps`", loaded), ("`POST /api/show`", shown)):
        assert [name for name in entry if f"`{name}`" not in section(title)] == []
        assert [name for name in entry["details"] if f"`{name}`" not in tags] == []
