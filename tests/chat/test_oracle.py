"""The golden values of this folder, made again by transformers and sentencepiece when they are installed."""

from __future__ import annotations

import json

import pytest

from tests.helpers.text_models import FIXTURES


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_golden_values_are_what_the_references_give() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("sentencepiece")
    from tools.make_chat_fixtures import make

    for name, content in make().items():
        assert json.loads((FIXTURES / name).read_text("utf-8")) == json.loads(json.dumps(content)), name
