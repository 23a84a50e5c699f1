import pytest

from arriero.errors import InvalidRequest
from arriero.options import OPTIONS, check_options, parse_parameter


def test_an_unknown_option_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown option 'temprature'.*temperature"):
        check_options({"temprature": 1})


def test_nulls_and_obsolete_names_are_left_out() -> None:
    assert check_options({"seed": None, "mirostat": 2, "top_k": 5}) == {"top_k": 5}


def test_numbers_take_the_kind_of_their_option() -> None:
    checked = check_options({"num_ctx": 4096.9, "temperature": 1})
    assert checked == {"num_ctx": 4096, "temperature": 1.0}
    assert isinstance(checked["num_ctx"], int)
    assert isinstance(checked["temperature"], float)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ctx": "4096"}, "num_ctx.*integer"),
        ({"num_ctx": float("nan")}, "num_ctx.*integer"),
        ({"temperature": True}, "temperature.*float32"),
        ({"use_mmap": 1}, "use_mmap.*boolean"),
        ({"stop": "x"}, "stop.*array of strings"),
        ({"stop": [1]}, "stop.*array of strings"),
        ({"temperature": 10**400}, "temperature.*float32; it is 1000.*…$"),
        ({"temperature": 1e39}, "temperature.*float32"),
        ({"seed": 10**400}, "seed.*integer; it is 1000.*…$"),
    ],
)
def test_a_wrong_type_names_the_option_and_the_type(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_options(options)


def test_parameters_are_typed_and_the_last_wins_except_for_lists() -> None:
    assert parse_parameter("temperature", ["0.1", "0.5"]) == 0.5
    assert parse_parameter("stop", ["a", "b c"]) == ["a", "b c"]
    assert parse_parameter("use_mmap", ["TRUE"]) is True
    assert parse_parameter("seed", ["-1"]) == -1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("seed", "x", r"invalid int value \[x\]"),
        ("top_p", "x", r"invalid float value \[x\]"),
        ("use_mmap", "x", r"invalid bool value \[x\]"),
        ("nope", "1", "unknown parameter 'nope'"),
        ("temperature", "nan", "temperature.*float32; it is nan"),
        ("temperature", "1e400", "temperature.*float32; it is inf"),
        ("seed", "9" * 30, "seed.*integer"),
    ],
)
def test_a_bad_parameter_says_what_was_read(name: str, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_parameter(name, [text])


def test_every_default_has_the_kind_that_it_declares() -> None:
    kinds = {"integer": int, "float32": float, "boolean": bool, "string list": tuple}
    for option in OPTIONS.values():
        assert option.default is None or isinstance(option.default, kinds[option.kind])
