"""The engine of an encoder: it answers requests for vectors, and says of anything else that it can't."""

from __future__ import annotations

import logging

import mlx.core as mx

from arriero.model.contract import Encoder
from arriero.runner.embedding import Embeddings, EncoderStates
from arriero.runner.failures import described
from arriero.runner.limits import Counts, Limits
from arriero.runner.messages import Embed, Failed, FromRunner, Submit, Vocabulary

log = logging.getLogger(__name__)


class EncoderEngine:
    """As much of an engine as a runner process needs of it."""

    speculation = ""

    def __init__(self, encoder: Encoder, limits: Limits) -> None:
        self.model = encoder
        self.limits = limits
        self.outbox: list[FromRunner] = []
        self._embeddings = Embeddings(EncoderStates(encoder), limits.context_length, limits.prefill_chunk)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self._embeddings.busy

    def counts(self) -> Counts:
        """Figures of this moment."""
        waiting = len(self._embeddings.ids)
        return Counts(rows_running=min(waiting, 1), rows_waiting=max(waiting - 1, 0))

    def drain(self) -> list[FromRunner]:
        """The messages since the last call."""
        messages, self.outbox = self.outbox, []
        return messages

    def learn(self, vocabulary: Vocabulary) -> None:
        """Nothing here follows a grammar."""

    def submit(self, request: Submit) -> None:
        """An encoder generates nothing."""
        message = f"{self.model.facts.architecture} is an encoder: it makes embeddings and writes no text"
        self.outbox.append(Failed(request.id, "UnsupportedFeature", message))

    def embed(self, request: Embed) -> None:
        """Queue a request, or answer it with `Failed`."""
        failed = self._embeddings.submit(request)
        if failed is not None:
            self.outbox.append(failed)

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        ended = self._embeddings.cancel(request_id)
        if ended is not None:
            self.outbox.append(ended)

    def limit(self, context_length: int, cache_bytes: int) -> None:
        """Change how long texts may be."""
        own = self.model.facts.context_length
        self._embeddings.context_length = min(context_length, own) or own

    def step(self) -> None:
        """One forward; what it raises ends the requests that wait. Raises when the device no longer works."""
        try:
            self.outbox += self._embeddings.step()
        except Exception as error:
            log.error("an encoder failed", exc_info=error)
            name, message = described(error)
            self.outbox += [Failed(request_id, name, message) for request_id in self._embeddings.drop()]
            mx.eval(mx.zeros(1) + 1)
        if not self.busy:
            mx.clear_cache()

    def close(self) -> None:
        """Forget everything."""
        for request_id in self._embeddings.ids:
            self.cancel(request_id)
        mx.clear_cache()
