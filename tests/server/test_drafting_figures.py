"""What drafting did for a reply stands in its last object, and only where something was drafted."""

from __future__ import annotations

import msgspec
import pytest

from arriero.runner.messages import SpeculationUsed
from arriero.server.completion import Final, Prompt
from arriero.server.routes import ollama
from arriero.server.schemas import ollama as wire


def used(rounds: int) -> SpeculationUsed:
    return SpeculationUsed(
        kind="mtp",
        rounds=rounds,
        drafted=3 * rounds,
        accepted=2 * rounds,
        reached_by_position=[],
        accepted_by_position=[],
        plain_steps=4,
        parked_ns=1,
    )


@pytest.mark.parametrize(("speculation", "found"), [(None, None), (used(0), None), (used(5), (5, 15, 10))])
def test_a_last_object_says_what_drafts_did(speculation, found):
    final = Final(
        reason="stop",
        cached_tokens=0,
        generated_tokens=15,
        total_ns=1,
        load_ns=0,
        prefill_ns=1,
        decode_ns=1,
        speculation=speculation,
        prompt=Prompt(tokens=[1], boundaries=[]),
        tokens=[2],
    )
    reply = wire.GenerateReply(model="m", created_at="", response="", done=False)
    ollama._end(reply, final)
    last = msgspec.json.decode(msgspec.json.encode(reply))
    if found is None:
        assert "drafting" not in last
    else:
        drafting = last["drafting"]
        assert (drafting["rounds"], drafting["drafted"], drafting["accepted"]) == found
        assert (drafting["kind"], drafting["plain_steps"]) == ("mtp", 4)
