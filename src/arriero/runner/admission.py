"""Which requests can run at all, and the rows that they become."""

from __future__ import annotations

from arriero.errors import InvalidRequest, OutOfMemory, PromptTooLong, UnsupportedFeature
from arriero.model.contract import Model, vision_of
from arriero.runner.images import RowImages
from arriero.runner.limits import Limits
from arriero.runner.memory import readable
from arriero.runner.messages import Submit
from arriero.runner.row import Row, reserved_bytes
from arriero.runner.sampling.constraint import Constraint
from arriero.runner.sampling.grammar import Grammars
from arriero.runner.speculation.speculator import Speculator


def make_row(
    request: Submit, model: Model, limits: Limits, speculator: Speculator | None, grammars: Grammars | None
) -> Row:
    """A row for a request that can run; raises what its `Failed` says."""
    length, context, vocab = len(request.tokens), limits.context_length, model.facts.vocab_size
    if not length:
        raise InvalidRequest("the prompt is empty: it has no tokens")
    if min(request.tokens) < 0 or max(request.tokens) >= vocab:
        wrong = next(token for token in request.tokens if not 0 <= token < vocab)
        raise InvalidRequest(f"the prompt holds the token id {wrong}, but the model's ids are 0 to {vocab - 1}")
    if length >= context:
        raise PromptTooLong(
            f"input length ({length} tokens) exceeds the model's maximum context length ({context} tokens)"
        )
    room = context - length
    max_new = min(request.max_tokens, room) if request.max_tokens > 0 else room
    draft = None if speculator is None else speculator.draft
    needed = reserved_bytes(length + max_new, model.facts, *([] if draft is None else [draft.facts]))
    needed += 0 if speculator is None else speculator.row_bytes
    if limits.cache_bytes and needed > limits.cache_bytes:
        raise OutOfMemory(
            f"the request needs {readable(needed)} of cache for {length + max_new} tokens, but the model may use"
            f" only {readable(limits.cache_bytes)}; lower num_ctx or num_predict"
        )
    row = Row(request, max_new, needed, _images(request, model), 0 if speculator is None else speculator.lookahead)
    row.constraint = _constraint(request, grammars)
    return row


def _constraint(request: Submit, grammars: Grammars | None) -> Constraint | None:
    """What a request's grammar lets it say."""
    if request.grammar is None:
        return None
    if grammars is None:
        raise UnsupportedFeature("a grammar was sent to a runner that was not told its vocabulary")
    return Constraint(grammars, request.grammar, request.stop_tokens)


def _images(request: Submit, model: Model) -> RowImages | None:
    """The images of a request that can run."""
    if not request.images:
        return None
    vision = vision_of(model)
    if vision is None:
        raise UnsupportedFeature(f"{model.facts.architecture} does not take images")
    return RowImages(request.images, vision, len(request.tokens))
