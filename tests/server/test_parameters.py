"""How defaults, settings, the model's parameters and the request's options lie over each other."""

import logging
from dataclasses import replace

import pytest

from arriero.errors import InvalidRequest
from arriero.server import parameters
from arriero.server.parameters import settle
from arriero.settings import Settings

SETTINGS = Settings.from_environ({})


def test_defaults_are_ollamas():
    settled = settle(SETTINGS, {}, {})
    assert (settled.sampling.temperature, settled.sampling.top_k, settled.sampling.top_p) == (0.8, 40, 0.9)
    assert (settled.num_predict, settled.num_ctx, settled.stop) == (-1, 0, ())


def test_the_request_goes_over_the_model_and_the_model_over_the_setting():
    settings = replace(SETTINGS, context_length=1000)
    assert settle(settings, {}, {}).num_ctx == 1000
    assert settle(settings, {"num_ctx": 2000}, {}).num_ctx == 2000
    assert settle(settings, {"num_ctx": 2000}, {"num_ctx": 3000}).num_ctx == 3000


def test_stops_are_replaced_not_joined_and_empty_ones_left_out():
    settled = settle(SETTINGS, {"stop": ["a"]}, {"stop": ["b", "", "b"]})
    assert settled.stop == ("b",)
    assert settle(SETTINGS, {"stop": ["a"]}, {}).stop == ("a",)


def test_alternatives_need_log_probabilities():
    assert settle(SETTINGS, {}, {}, top_logprobs=5).sampling.top_logprobs == 0
    assert settle(SETTINGS, {}, {}, logprobs=True, top_logprobs=5).sampling.top_logprobs == 5


def test_an_unknown_parameter_of_a_stored_model_is_a_warning(caplog):
    parameters._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert settle(SETTINGS, {"from_the_future": 1, "top_k": 7}, {}).sampling.top_k == 7
    assert "from_the_future" in caplog.text


def test_an_option_without_effect_is_a_warning_once(caplog):
    parameters._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        settle(SETTINGS, {}, {"num_gpu": 1, "mirostat": 2})
        settle(SETTINGS, {}, {"num_gpu": 1, "mirostat": 2})
    assert caplog.text.count("num_gpu") == caplog.text.count("mirostat") == 1


@pytest.mark.parametrize("num_ctx", [0, -5])
def test_a_window_of_nothing_is_refused(num_ctx):
    with pytest.raises(InvalidRequest, match="num_ctx"):
        settle(SETTINGS, {}, {"num_ctx": num_ctx})
