"""The examples of docs/modelfile.md are Modelfiles."""

import re
from pathlib import Path

import pytest

from arriero import modelfile

PAGE = (Path(__file__).parents[2] / "docs" / "modelfile.md").read_text()
EXAMPLES = re.findall(r"```modelfile\n(.*?)```", PAGE, re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_reads_and_round_trips(example):
    read = modelfile.parse(example)
    assert modelfile.parse(modelfile.format(read)) == read


def test_the_text_between_long_quotes_has_no_line_break_at_its_ends():
    system = modelfile.parse(EXAMPLES[1]).last("system")
    assert system == 'Write functions like this:\ndef f():\n    """Say what it does."""'
