"""Fitting a conversation into a window: what goes, what stays, what is refused (A12)."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.errors import PromptTooLong
from arriero.server.fit import check_fits, fit, split_exchanges


@dataclass(frozen=True)
class Said:
    role: str
    size: int = 10


def encode(messages: list[Said]) -> list[int]:
    return [index for index, message in enumerate(messages) for _ in range(message.size)]


def of(roles: str, size: int = 10) -> list[Said]:
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [Said(names[letter], size) for letter in roles]


def test_a_prompt_that_fits_is_left_alone():
    assert fit(of("sua"), encode, window=31, limit=31).dropped_messages == 0


def test_a_prompt_that_fills_the_window_leaves_no_room_for_a_reply_and_is_refused():
    with pytest.raises(PromptTooLong, match=r"has 30 tokens and the context window holds 30"):
        fit(of("sua"), encode, window=30, limit=30)


def test_whole_oldest_exchanges_go_until_a_quarter_of_the_window_is_free():
    fitted = fit(of("s" + "ua" * 10 + "u"), encode, window=100, limit=100)
    assert len(fitted.prompt) <= 75
    assert len(fitted.prompt) == 60
    assert fitted.dropped_messages == 16


def test_a_small_num_predict_needs_less_room():
    assert len(fit(of("s" + "ua" * 10 + "u"), encode, window=100, limit=100, num_predict=5).prompt) == 80


def test_when_only_the_last_exchange_fits_it_need_not_leave_a_quarter():
    messages = [Said("user", 50), Said("assistant", 50), Said("user", 95)]
    assert len(fit(messages, encode, window=100, limit=100).prompt) == 95


def test_a_last_exchange_that_does_not_fit_is_refused_with_its_own_numbers():
    messages = [Said("system", 10), Said("user", 50), Said("assistant", 50), Said("user", 95)]
    with pytest.raises(PromptTooLong, match=r"105 tokens.*100.*up to 4096"):
        fit(messages, encode, window=100, limit=4096)


def test_truncate_false_is_a_refusal_with_the_whole_prompts_number():
    with pytest.raises(PromptTooLong, match="220 tokens"):
        fit(of("s" + "ua" * 10 + "u"), encode, window=100, limit=100, truncate=False)


def test_a_tool_exchange_is_never_split():
    assert split_exchanges(of("suatatauatau")) == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10], [11]]


def test_system_messages_in_the_middle_belong_to_no_exchange():
    assert split_exchanges(of("suasdua")) == [[1, 2], [5, 6]]


def test_a_greeting_and_repeated_user_messages_go_with_their_exchange():
    assert split_exchanges(of("auuauua")) == [[0, 1, 2, 3], [4, 5, 6]]


@given(roles=st.text("suatd", max_size=30), window=st.integers(2, 200), sizes=st.data())
def test_what_is_kept_is_a_subsequence_with_every_system_message_and_the_last_exchange(roles, window, sizes):
    messages = [Said(message.role, sizes.draw(st.integers(0, 30))) for message in of(roles)]
    seen: list[list[Said]] = []

    def encoded(kept):
        seen.append(kept)
        return encode(kept)

    try:
        fitted = fit(messages, encoded, window=window, limit=4096)
    except PromptTooLong:
        last = split_exchanges(messages)[-1]
        least = [m for i, m in enumerate(messages) if i in last or m.role in ("system", "developer")]
        assert len(encode(least)) >= window
        return
    assert len(fitted.prompt) < window
    kept = next(k for k in seen if len(k) == len(messages) - fitted.dropped_messages)
    exchanges = split_exchanges(messages)
    gone = fitted.dropped_messages
    assert gone in [sum(map(len, exchanges[:count])) for count in range(len(exchanges))]
    assert [m for m in messages if m.role in ("system", "developer")] == [
        m for m in kept if m.role in ("system", "developer")
    ]


def test_the_refusal_says_what_to_do():
    with pytest.raises(PromptTooLong, match="raise num_ctx"):
        check_fits(10, 10, 20)
    with pytest.raises(PromptTooLong, match="longer context"):
        check_fits(20, 20, 20)
    check_fits(9, 10, 10)
