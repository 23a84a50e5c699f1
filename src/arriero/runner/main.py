"""A runner process from start to end: load, answer, exit. The main thread does all array work."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import mlx.core as mx
import msgspec

from arriero.errors import ArrieroError, LoadError, OutOfMemory
from arriero.kernels.device import on_cpu
from arriero.runner.caches.linear import growth
from arriero.runner.channel import Channel
from arriero.runner.encoder_engine import EncoderEngine
from arriero.runner.engine import Engine, Limits
from arriero.runner.load import LoadedEncoder, load, warm_up, warm_up_encoder
from arriero.runner.memory import default_prefix_bytes, is_out_of_memory, memory_bytes, wire_weights
from arriero.runner.messages import (
    Cancel,
    Embed,
    Limit,
    LoadFailed,
    Loading,
    Ready,
    RunnerConfig,
    Status,
    Submit,
    ToRunner,
    Vocabulary,
)
from arriero.runner.parent import bind_to_parent
from arriero.runner.prefix.disk import DiskTier
from arriero.runner.prefix.fingerprint import fingerprint, identity
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.controller import Depths, EveryRound
from arriero.runner.speculation.opening import make_speculator, open_draft

log = logging.getLogger(__name__)

STATUS_SECONDS = 0.1
"""How old the published figures may get while rows run."""


class Interrupted(Exception):
    """The server went away or asked for the end while the model was loading."""


def main(arguments: list[str]) -> int:
    """Run with the configuration in the first argument, or on standard input for `-`; returns the exit status."""
    # Bytes: JSON is UTF-8 whatever the locale says.
    text = arguments[0] if arguments and arguments[0] != "-" else sys.stdin.buffer.read()
    config = msgspec.json.decode(text, type=RunnerConfig)
    logging.basicConfig(stream=sys.stderr, level=config.log_level, format="%(levelname)s %(name)s: %(message)s")
    parent = config.parent_pid or os.getppid()
    bind_to_parent(parent)
    channel = Channel(config.endpoint, parent)

    def stop(number: int, frame: FrameType | None) -> None:
        channel.interrupt()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    channel.start()
    try:
        engine = start(config, channel)
        if engine is None:
            return 1
        try:
            serve(engine, channel)
            engine.close()
        finally:
            channel.send(engine.drain())
        return 0
    except Interrupted:
        return 0
    finally:
        channel.close()


def start(config: RunnerConfig, channel: Channel) -> Engine | EncoderEngine | None:
    """Load and warm up, telling the server; None when the model cannot be loaded."""
    started = time.monotonic()
    try:
        engine, ready = _load(config, channel, started)
    except ArrieroError as error:
        channel.send([LoadFailed(type(error).__name__, str(error))])
    except Interrupted:
        raise
    except Exception as error:
        log.exception("the load failed")
        kind = OutOfMemory if is_out_of_memory(error) else LoadError
        channel.send([LoadFailed(kind.__name__, f"the model cannot be loaded: {type(error).__name__}: {error}")])
    else:
        _publish(engine, channel)
        channel.send([ready])
        return engine
    return None


def serve(engine: Engine | EncoderEngine, channel: Channel) -> None:
    """Answer until the server goes or wants the end."""
    published = time.monotonic()
    while not channel.closed:
        for message in channel.receive(block=not engine.busy):
            _handle(engine, message)
        if engine.busy:
            engine.step()
        channel.send(engine.drain())
        now = time.monotonic()
        if now - published > STATUS_SECONDS or not engine.busy:
            _publish(engine, channel)
            published = now


def _load(config: RunnerConfig, channel: Channel, started: float) -> tuple[Engine | EncoderEngine, Ready]:
    def report(progress: Loading) -> None:
        if channel.closed:
            raise Interrupted
        channel.send([progress])

    files = _files(config)
    loaded = load(config.source, config.dtype, report, config.prefill, partial(open_draft, config))
    if isinstance(loaded, LoadedEncoder):
        report(Loading(loaded.weight_bytes, loaded.weight_bytes, "warm-up"))
        return _encoder(config, loaded, started)
    facts, draft = loaded.model.facts, loaded.draft
    context = min(config.context_length, facts.context_length) or facts.context_length
    limits = Limits(
        context_length=context,
        max_rows=config.max_rows or (8 if on_cpu() else 16),
        prefill_chunk=config.prefill_chunk or (512 if on_cpu() else 2048),
        cache_bytes=max(config.memory_limit - loaded.weight_bytes, 1) if config.memory_limit else 0,
        prefix_bytes=default_prefix_bytes() if config.prefix_bytes < 0 else config.prefix_bytes,
    )
    report(Loading(loaded.weight_bytes, loaded.weight_bytes, "warm-up"))

    def engine(limits: Limits, disk: DiskTier | None = None, depths: Depths | None = None) -> Engine:
        sampler = Sampler(facts.vocab_size, context)
        speculator = make_speculator(config, loaded.model, sampler, draft, depths)
        return Engine(loaded.model, sampler, limits, disk=disk, speculator=speculator)

    warm_up(engine(replace(limits, prefix_bytes=0), depths=EveryRound()))
    wire_weights()
    disk = _disk(config, files, str(loaded.dtype), "" if draft is None else draft.facts.architecture)
    mx.reset_peak_memory()
    ready = engine(limits, disk)
    step, ahead = growth()
    return ready, Ready(
        architecture=facts.architecture,
        context_length=context,
        vocab_size=facts.vocab_size,
        weight_bytes=loaded.weight_bytes,
        cache_bytes_per_token=facts.cache_bytes_per_token + (draft.facts.cache_bytes_per_token if draft else 0),
        cache_step=step,
        cache_ahead=ahead,
        cache_bytes_fixed=facts.cache_bytes_fixed + (draft.facts.cache_bytes_fixed if draft else 0) + ready.row_bytes,
        round_bytes=ready.round_bytes,
        max_rows=limits.max_rows,
        device=device_name(),
        dtype=str(loaded.dtype).removeprefix("mlx.core."),
        load_seconds=time.monotonic() - started,
    )


def _encoder(config: RunnerConfig, loaded: LoadedEncoder, started: float) -> tuple[EncoderEngine, Ready]:
    """The engine of an encoder, which has answered once."""
    facts = loaded.encoder.facts
    context = min(config.context_length, facts.context_length) or facts.context_length
    chunk = config.prefill_chunk or (512 if on_cpu() else 8192)
    engine = EncoderEngine(loaded.encoder, Limits(context_length=context, prefill_chunk=chunk))
    warm_up_encoder(engine)
    wire_weights()
    mx.reset_peak_memory()
    return engine, Ready(
        architecture=facts.architecture,
        context_length=context,
        vocab_size=facts.vocab_size,
        weight_bytes=loaded.weight_bytes,
        cache_bytes_per_token=0,
        max_rows=64,
        device=device_name(),
        dtype=str(loaded.dtype).removeprefix("mlx.core."),
        load_seconds=time.monotonic() - started,
    )


def _files(config: RunnerConfig) -> str:
    """What the files of the model and its draft are now; '' where nobody asks, or they can't be read."""
    try:
        return identity(config.source, config.draft) if config.prefix_folder else ""
    except OSError as error:
        log.debug("the model's files cannot be identified: %s", error)
        return ""


def _disk(config: RunnerConfig, files: str, dtype: str, draft: str) -> DiskTier | None:
    """Where stored prefixes outlive this process; None, and a warning, when the folder can't be used.

    `files` is what the model's files were before they were loaded.
    """
    if not config.prefix_folder:
        return None
    try:
        if _files(config) != files:
            log.warning("prefixes are not kept on disk: the model's files were changed while they were loaded")
            return None
        name = fingerprint(config.source, dtype, device_name(), config.prefill, draft, config.draft)
        return DiskTier(Path(config.prefix_folder) / name, config.prefix_folder_bytes)
    except OSError as error:
        log.warning("prefixes are not kept on disk, %s cannot be used: %s", config.prefix_folder, error)
        return None


def device_name() -> str:
    """`cpu` or `gpu`, and the chip's name."""
    kind = "cpu" if on_cpu() else "gpu"
    name = str(mx.device_info().get("device_name", "")).strip()
    return f"{kind} ({name})" if name else kind


def _handle(engine: Engine | EncoderEngine, message: ToRunner) -> None:
    if isinstance(message, Submit):
        engine.submit(message)
    elif isinstance(message, Cancel):
        engine.cancel(message.id)
    elif isinstance(message, Vocabulary):
        engine.learn(message)
    elif isinstance(message, Embed):
        engine.embed(message)
    elif isinstance(message, Limit):
        engine.limit(message.context_length, message.cache_bytes)


def _publish(engine: Engine | EncoderEngine, channel: Channel) -> None:
    counts = engine.counts()
    channel.publish(
        Status(
            id="",
            rows_running=counts.rows_running,
            rows_waiting=counts.rows_waiting,
            memory_bytes=memory_bytes(),
            peak_bytes=mx.get_peak_memory(),
            cache_bytes=counts.cache_bytes,
            snapshot_bytes=counts.snapshot_bytes,
            tokens_generated=counts.tokens_generated,
            tokens_prefilled=counts.tokens_prefilled,
            speculation=engine.speculation,
            draft_rounds=counts.draft_rounds,
            drafts_judged=counts.drafts_judged,
            drafts_accepted=counts.drafts_accepted,
        )
    )
