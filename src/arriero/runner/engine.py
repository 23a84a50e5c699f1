"""The engine: continuous batching of rows over one model, all on one thread.

Each step dispatches one packed forward with one token of every decoding row and some prompt tokens of rows that have
not got so far (on NVIDIA GPUs these in a forward of their own), and reads the forward before it. Rows join and leave at
any step. Token ids in, messages out.
Refuses to know processes, sockets and text.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from arriero.errors import ArrieroError, InvalidRequest
from arriero.kernels.device import cuda, on_cpu
from arriero.model.contract import Model, ReadsAhead
from arriero.runner.admission import make_row
from arriero.runner.decode import Flight, Pipeline, Sampler
from arriero.runner.embedding import Embeddings, ModelStates
from arriero.runner.failures import described
from arriero.runner.limits import Counts, Limits
from arriero.runner.memory import release_buffers
from arriero.runner.messages import (
    Embed,
    Failed,
    FromRunner,
    PrefillProgress,
    Submit,
    TokenLogprob,
    Tokens,
    Vocabulary,
)
from arriero.runner.prefill import plan_chunks
from arriero.runner.prefix.disk import DiskTier
from arriero.runner.prefix.report import prefix_used
from arriero.runner.prefix.store import PrefixStore
from arriero.runner.row import Phase, Row
from arriero.runner.sampling.grammar import Grammars
from arriero.runner.speculation.speculator import Speculator, Together
from arriero.runner.waiting import Waiting

__all__ = ["Counts", "Engine", "Limits"]

log = logging.getLogger(__name__)

CLEAR_EVERY = 256
"""Generated tokens between two looks at the buffers that MLX keeps, which otherwise grow with each new shape."""

CHUNK_SHARE = 4
CUDA_SHARE = 2
"""Part of a prefill chunk that goes with decoding rows, so that their next tokens are not long in coming.

On NVIDIA GPUs 512 tokens take 45 ms and 1,024 hardly longer, since the host bounds both (8B model, H200).
"""


class Engine:
    """Runs rows to their end. Only the thread that made it may call it."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        limits: Limits,
        ahead: bool | None = None,
        disk: DiskTier | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """`disk` keeps stored prefixes beyond the engine's life; without a `speculator` nothing is drafted.

        `ahead` launches each forward before the one before it is read; None = where launching does not block.

        On a CPU MLX's `async_eval` returns only when all but the last few operations are done (measured: 21 of a step's
        26 ms), so there a launch before the read would only hold every token back for the length of a step.
        """
        self.model = model
        self.sampler = sampler
        self.limits = limits
        self.outbox: list[FromRunner] = []
        """Messages for the server, in order; the owner takes them with `drain`."""
        self._ahead = not on_cpu() if ahead is None else ahead
        self._thread = threading.get_ident()
        self._reader = model if isinstance(model, ReadsAhead) else None
        self._speculator = speculator
        self._slots = len(model.new_caches())
        self.prefixes = PrefixStore(Together(model, speculator), limits.prefix_bytes, disk)
        """What earlier rows computed."""
        self._hindered = Waiting(self.prefixes, follow=limits.prefix_bytes > 0)
        self._embeddings = Embeddings(
            ModelStates(model, limits.prefill_chunk), limits.context_length, limits.prefill_chunk
        )
        self._pipeline = Pipeline(model, sampler, speculator)
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._grammars: Grammars | None = None
        self._reserved = 0
        self._generated = 0
        self._prefilled = 0
        self._cleared_at = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._rows or self._waiting or self._pipeline.latest is not None or self._embeddings.busy)

    @property
    def speculation(self) -> str:
        """What drafts; '' for nothing."""
        return "" if self._speculator is None else self._speculator.kind

    @property
    def round_bytes(self) -> int:
        """Memory that a round of drafts takes besides the caches."""
        return 0 if self._speculator is None else self._speculator.round_bytes

    @property
    def row_bytes(self) -> int:
        """Memory of each row that its draft takes besides the caches."""
        return 0 if self._speculator is None else self._speculator.row_bytes

    def counts(self) -> Counts:
        """Figures of this moment."""
        caches = sum(cache.nbytes for row in self._rows for cache in row.held if cache is not None)
        drafts = self._speculator
        return Counts(
            len(self._rows),
            len(self._waiting),
            self._reserved,
            caches,
            self.prefixes.nbytes,
            self._generated,
            self._prefilled,
            *((0, 0, 0) if drafts is None else (drafts.rounds, drafts.judged, drafts.accepted)),
        )

    def drain(self) -> list[FromRunner]:
        """The messages since the last call."""
        messages, self.outbox = self.outbox, []
        return messages

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take in the bytes of the tokens, which requests with a grammar need."""
        if self._grammars is None:
            self._grammars = Grammars(vocabulary, self.model.facts.vocab_size)

    def submit(self, request: Submit) -> None:
        """Queue a request, or answer it with `Failed` when it can never run."""
        try:
            row = self._checked(request)
        except ArrieroError as error:
            self.outbox.append(Failed(request.id, type(error).__name__, str(error)))
            return
        self._waiting.append(row)

    def embed(self, request: Embed) -> None:
        """Queue texts to be turned into vectors, a forward a step beside the rows; or answer with `Failed`."""
        failed = self._embeddings.submit(request)
        if failed is not None:
            self.outbox.append(failed)

    def cancel(self, row_id: str) -> None:
        """End a row now; a row that is unknown or done is none of our business (its end crossed the message)."""
        self._check_thread()
        ended = self._embeddings.cancel(row_id)
        if ended is not None:
            self.outbox.append(ended)
            return
        for row in self._waiting:
            if row.id == row_id:
                self._waiting.remove(row)
                self.outbox.append(row.finish("cancelled"))
                return
        for row in self._rows:
            if row.id == row_id:
                try:
                    self._finish(row, "cancelled")
                except Exception as error:  # noqa: BLE001 - a draft may still have had to compute something
                    self._fail(error)
                return

    def limit(self, context_length: int, cache_bytes: int) -> None:
        """Change what rows may take; waiting rows are measured again, admitted ones keep what they have."""
        context = self.model.facts.context_length
        self.limits = replace(
            self.limits, context_length=min(context_length, context) or context, cache_bytes=cache_bytes
        )
        self._embeddings.context_length = self.limits.context_length
        requests = [row.request for row in self._waiting]
        self._waiting.clear()
        for request in requests:
            self.submit(request)
        self._make_room()

    def step(self) -> None:
        """Admit, build and launch one forward, read the one before it; or a round of drafts and their verdict.

        What a request or a forward does wrong ends rows with `Failed`. Raises only when the device itself no longer
        works, after which the process is best ended.
        """
        self._check_thread()
        try:
            self.outbox += self._embeddings.step()
            self._admit()
            if not self._speculate():
                self._plain_step()
        except Exception as error:  # noqa: BLE001 - whatever a forward raises ends its rows, not the engine
            self._fail(error)
        if not self.busy:
            release_buffers(idle=True)

    def _plain_step(self) -> None:
        previous = self._pipeline.latest
        if previous is not None and self._ahead and any(not row.generated for row in previous.rows):
            # A first token doesn't wait for the next step to be built, which may take long where steps are recorded.
            self._read(previous)
            previous = None
        flight = self._build()
        if flight is not None and self._ahead:
            flight.launch()
        self._read_ahead()
        if previous is not None:
            self._read(previous)
        if flight is not None and not self._ahead:
            self._launch_late(flight)
        if flight is not None and flight.logits is not None:
            self._sample(flight)

    def _sample(self, flight: Flight) -> None:
        """Draw what the grammars allow, now that the tokens before are known."""
        allowed: dict[Hashable, np.ndarray] = {}
        for row in flight.rows:
            if row.phase is Phase.DONE or row.constraint is None:
                continue
            try:
                mask = row.constraint.allowed()
            except ArrieroError as error:
                self._drop(row, error)
                continue
            if row.constraint.complete:
                self._finish(row, "stop")
            else:
                allowed[row.id] = mask
        self._pipeline.sample(flight, allowed)

    def _speculate(self) -> bool:
        """A round of drafts for the only row; False, perhaps with its latest token read, for a plain step."""
        if self._speculator is None:
            return False
        depth = self._speculator.choose(self._rows)
        if not depth:
            return False
        row = self._rows[0]
        previous, self._pipeline.latest = self._pipeline.latest, None
        if previous is not None:
            row.slot = None
            self._read(previous)
            if row.phase is Phase.DONE:
                return True
        run = self._speculator.round(row, depth)
        if run is None:
            return False
        row.sampled += len(run.tokens)
        self._deliver(row, run.tokens, run.logprobs)
        if self._generated // CLEAR_EVERY > self._cleared_at:
            self._cleared_at = self._generated // CLEAR_EVERY
            release_buffers()
        return True

    def close(self) -> None:
        """End every row as cancelled and free the memory."""
        self._check_thread()
        for row in [*self._waiting, *self._rows]:
            self.cancel(row.id)
        for request_id in self._embeddings.ids:
            self.cancel(request_id)
        self.prefixes.shut()
        self._pipeline.latest = None
        if self._grammars is not None:
            self._grammars.close()
        mx.clear_cache()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("the engine was called from another thread than the one that owns its arrays")

    def _checked(self, request: Submit) -> Row:
        """A row for a request that can run; raises what its `Failed` says."""
        if any(row.id == request.id for row in (*self._waiting, *self._rows)):
            raise InvalidRequest(f"a request with the id {request.id} is already running")
        return make_row(request, self.model, self.limits, self._speculator, self._grammars)

    def _admit(self) -> None:
        """Start waiting rows in their order while rows and reserved bytes allow it.

        A row that would read what another is just reading waits for it, and lets those behind it pass.
        """
        for row in list(self._waiting):
            if len(self._rows) >= self.limits.max_rows:
                return
            if self.limits.cache_bytes and self._reserved + row.reserved > self.limits.cache_bytes:
                return
            if not self._may_begin(row):
                continue
            # One of the rows from here on: whatever goes wrong in the next lines, it is told.
            self._waiting.remove(row)
            self._rows.append(row)
            self._reserved += row.reserved
            try:
                self.sampler.add(row.id, row.request.sampling, row.request.tokens)
                if row.constraint is not None:
                    row.constraint.start()
            except ArrieroError as error:
                self._leave([row])
                self.outbox.append(Failed(row.id, type(error).__name__, str(error)))
                continue
            reuse = self.prefixes.begin(row.keys, row.request.boundaries, len(row.prompt) - 1, row.reading)
            row.admit(reuse, self._slots)
            if self._speculator is not None:
                self._speculator.admit(row, reuse.caches[self._slots :])
            self._make_room()
            self._report(row)
        if not self._rows and not self._embeddings.busy:
            self._hindered.pause(self._waiting)

    def _may_begin(self, row: Row) -> bool:
        """Whether a waiting row may begin now; one that can't even be asked is over, or it would be asked for ever."""
        try:
            return self._hindered.may_begin(row, self._rows)
        except Exception as error:  # whatever it is, the others go on
            log.error("row %s cannot begin", row.id, exc_info=error)
            self._waiting.remove(row)
            self.outbox.append(Failed(row.id, *described(error)))
            return False

    def _make_room(self) -> None:
        """Stored prefixes live in what no row has reserved."""
        if self.limits.cache_bytes and self.limits.prefix_bytes:
            self.prefixes.shrink(max(self.limits.cache_bytes - self._reserved, 0))

    def _report(self, row: Row) -> None:
        """Say how much of a prompt was known, and where it left what is stored."""
        used = prefix_used(row) if self.limits.prefix_bytes else None
        if used is not None:
            self.outbox.append(used)

    def _build(self) -> Flight | None:
        """The next forward, if any row has something to compute."""
        decoding = [row for row in self._rows if row.phase is Phase.DECODING and row.sampled < row.max_new]
        running = [row for row in decoding if row.slot is not None]
        if len(running) != len(decoding):
            running += [row for row in decoding if row.slot is None]
        chunks = plan_chunks(self._rows, self._budget(decoding=bool(running)))
        if not running and not chunks:
            self._pipeline.latest = None
            return None
        crossed = (self._generated + len(running)) // CLEAR_EVERY > self._cleared_at
        flight = self._pipeline.build(running, chunks, settle=crossed)
        if crossed:
            self._cleared_at = (self._generated + len(running)) // CLEAR_EVERY
        for chunk in flight.chunks:
            if not chunk.row.prompt_left:
                chunk.row.start_decoding()
                self._share(chunk.row)
        if crossed or chunks:
            release_buffers()
        return flight

    def _budget(self, *, decoding: bool) -> int:
        """Prompt tokens of one forward."""
        budget = self.limits.prefill_chunk
        return max(budget // (CHUNK_SHARE if cuda() is None else CUDA_SHARE), 1) if decoding else budget

    def _read_ahead(self) -> None:
        """Tell a model that reads files which prompt tokens the next forward takes, unless rows come or go."""
        if self._reader is None:
            return
        decoding = any(row.phase is Phase.DECODING for row in self._rows)
        chunks = plan_chunks(self._rows, self._budget(decoding=decoding))
        if chunks:
            self._reader.read_ahead([(chunk.row.prompt[: chunk.end], chunk.length) for chunk in chunks])

    def _share(self, row: Row) -> None:
        """Let later rows have the prompt of one that goes on."""
        if row.reuse is not None:
            self.prefixes.share(row.reuse, row.keys)
            self._make_room()

    def _launch_late(self, flight: Flight) -> None:
        """Launch after the read, unless that ended the row that it was for.

        With several rows the caches that are kept would hold its graph, and each of them the buffers of all.
        """
        if flight.wanted or (self.limits.prefix_bytes and len(flight.rows) + len(flight.chunks) > 1):
            flight.launch()
        else:
            self._pipeline.latest = None

    def _read(self, flight: Flight) -> None:
        """Wait for a flight and deliver it: the only place where the host waits for the device."""
        flight.wait()
        for chunk in flight.chunks:
            if chunk.row.phase is not Phase.DONE:
                self._prefilled += chunk.length
                self.outbox.append(PrefillProgress(chunk.row.id, chunk.end, len(chunk.row.prompt)))
                if not chunk.row.generated:
                    chunk.row.prompt_evaluated()
        if flight.sampled is None:
            return
        logprobs = flight.sampled.read_logprobs()
        for i, token in enumerate(flight.sampled.read_tokens()):
            row = flight.rows[i]
            if row.phase is not Phase.DONE:
                if self._speculator is not None:
                    self._speculator.stepped(row)
                self._deliver(row, [token], logprobs and logprobs[i : i + 1])

    def _deliver(self, row: Row, tokens: list[int], logprobs: Sequence[TokenLogprob | None] | None) -> None:
        """Tokens that were read, the last of which may be a stop token."""
        row.outputs += tokens
        stopped = tokens[-1] in row.stop_ids
        said = tokens[:-1] if stopped else tokens
        if row.constraint is not None:
            for token in said:
                row.constraint.advance(token)
            stopped = stopped or row.constraint.complete
        if said:
            row.tokens_read(len(said))
            self._generated += len(said)
            asked = [found for found in (logprobs or [])[: len(said)] if found is not None]
            self.outbox.append(Tokens(row.id, said, asked or None))
        if stopped:
            self._finish(row, "stop")
        elif row.generated == row.max_new:
            self._finish(row, "length")

    def _finish(self, row: Row, reason: str) -> None:
        if self._speculator is not None and row.phase is not Phase.WAITING:
            self._speculator.settle(row)
        self._leave([row])
        self.outbox.append(row.finish(reason))
        if row.reuse is not None:
            try:
                self.prefixes.close(row.reuse, row.all_keys())
            except Exception as error:  # the reply is whole, and other rows run on
                log.error("what a row computed cannot be kept", exc_info=error)
                self.prefixes.abandon(row.reuse)
        self._make_room()

    def _drop(self, row: Row, error: ArrieroError) -> None:
        """End one row with an error of its own."""
        self._leave([row])
        row.end()
        if row.reuse is not None:
            self.prefixes.abandon(row.reuse)
        self.outbox.append(Failed(row.id, type(error).__name__, str(error)))

    def _leave(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._rows.remove(row)
            self._reserved -= row.reserved
            self.sampler.remove(row.id)

    def _fail(self, error: Exception) -> None:
        """One `Failed` per row in flight; waiting rows stay. Raises when the device itself no longer works."""
        running, texts = len(self._rows), len(self._embeddings.ids)
        log.error("a step failed with %d rows and %d requests for vectors", running, texts, exc_info=error)
        name, message = described(error)
        self.outbox += [Failed(request_id, name, message) for request_id in self._embeddings.drop()]
        failed = list(self._rows)
        self._leave(failed)
        for row in failed:
            row.end()
            if row.reuse is not None:
                self.prefixes.abandon(row.reuse)
            self.outbox.append(Failed(row.id, name, message))
        self._pipeline.latest = None
        mx.clear_cache()
        mx.eval(mx.zeros(1) + 1)
