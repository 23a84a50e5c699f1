"""Every error that a user can meet, as one tree.

A message says what was asked, what was found and what to do, in one or two sentences. The server maps classes to
HTTP status codes in one place (`server/errors.py`); the command line prints `Error: <message>`.
"""

from __future__ import annotations


class ArrieroError(Exception):
    """Base of all errors whose text is written for a user."""


class InvalidRequest(ArrieroError):
    """A request that cannot be honoured as written: unknown option, wrong type, missing field (400)."""


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the context window and truncation was not allowed or cannot help (400)."""


class UnsupportedFeature(InvalidRequest):
    """The request asks for something that this model or this version does not do (400)."""


class Unauthorized(ArrieroError):
    """The server wants an API key and the request has none, or another (401)."""


class Forbidden(ArrieroError):
    """The request's origin or host is not allowed (403)."""


class NotFound(ArrieroError):
    """A model, blob or path that does not exist (404)."""


class Cancelled(ArrieroError):
    """The client went away while its request was queued or loading (499)."""


class ServerBusy(ArrieroError):
    """The queue is full (503)."""


class OutOfMemory(ArrieroError):
    """A model or a request that cannot fit the memory budget, with both figures (500)."""


class LoadError(ArrieroError):
    """A model that cannot be loaded (500)."""


class CheckpointError(LoadError):
    """A checkpoint that is malformed, incomplete or of an unknown layout; names the file and the tensor."""


class UnsupportedArchitecture(LoadError):
    """A checkpoint of an architecture that we do not know; lists the known ones."""


class RunnerCrashed(ArrieroError):
    """The runner process ended while a request was in flight (500); the next request starts a new one."""


class TemplateError(InvalidRequest):
    """A chat template that cannot be parsed or rendered with this conversation (400)."""


class StoreError(ArrieroError):
    """A damaged or unwritable model store (500)."""


class RegistryError(ArrieroError):
    """A registry, or the network to it, that refused, failed or answered what cannot be accepted (500)."""


class ModelfileError(InvalidRequest):
    """A Modelfile that cannot be parsed; the message starts with `(line N, column M)`."""


class ServerUnreachable(ArrieroError):
    """The command line found no server at its address."""
