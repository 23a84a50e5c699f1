"""Writing: what is written reads back the same, in the plainest spelling."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arriero import modelfile
from arriero.modelfile import Instruction, Modelfile

PIECES = st.sampled_from(
    ['"', '""', '"""', '""""', "\n", " ", "a", "#", "\r", "\t", "\u00a0", "FROM x", "'", "\\", "ü", "\x1c"]
)
TEXTS = st.lists(PIECES, max_size=8).map("".join) | st.text(max_size=30)
PLAIN = st.sampled_from(["system", "template", "license", "adapter", "draft", "renderer", "parser", "requires"])
INSTRUCTIONS = st.one_of(
    st.builds(Instruction, PLAIN, TEXTS),
    st.builds(Instruction, st.just("parameter"), TEXTS, st.sampled_from(["stop", "temperature", "num_ctx"])),
    st.builds(Instruction, st.just("message"), TEXTS, st.sampled_from(["system", "user", "assistant"])),
)
MODELFILES = st.lists(INSTRUCTIONS, max_size=6).map(lambda found: Modelfile((Instruction("from", "x"), *found)))


OPENS_A_FENCE = Modelfile(
    (Instruction("from", "x"), Instruction("parameter", '""', "stop"), Instruction("system", '\n"""""'))
)


@example(OPENS_A_FENCE)
@given(MODELFILES)
def test_what_is_written_reads_back_the_same(original):
    text = modelfile.format(original)
    assert modelfile.parse(text) == original
    assert modelfile.parse(text.encode()) == original


@given(MODELFILES)
def test_the_last_newline_does_not_matter(original):
    assert modelfile.parse(modelfile.format(original).removesuffix("\n")) == original


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "SYSTEM plain"),
        ('a "b" c', 'SYSTEM a "b" c'),
        (" a", 'SYSTEM " a"'),
        ("a\nb", 'SYSTEM "a\nb"'),
        ('a\n"b"', 'SYSTEM """a\n"b""""'),
        ('"x"', 'SYSTEM """"x""""'),
        ("", 'SYSTEM ""'),
        ('x """ y', 'SYSTEM x """ y'),
        ('def f():\n    """Doc."""\n    pass', 'SYSTEM """"\ndef f():\n    """Doc."""\n    pass\n""""'),
        ('""""\n', 'SYSTEM """""\n""""\n\n"""""'),
    ],
)
def test_the_plainest_quotes_that_hold_a_value_are_used(value, text):
    assert modelfile.format_instruction(Instruction("system", value)) == text


def test_an_old_reader_refuses_the_long_quotes_instead_of_misreading_them():
    """An old reader ends the text at the inner three quotes; what follows is then no instruction."""
    written = modelfile.format(Modelfile((Instruction("from", "x"), Instruction("system", 'a """\nb'))))
    head, tail = written.split('"""\nb')
    assert head == 'FROM x\nSYSTEM """"\na '
    assert tail == '\n""""\n'
