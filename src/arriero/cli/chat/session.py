"""The conversation: what was said, what is set, and the loop that asks and answers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import click

from arriero.cli.chat.output import Printer, print_statistics
from arriero.cli.chat.reader import Reader, typed_ahead
from arriero.cli.chat.slash import Leave, run_command
from arriero.cli.client import ApiError, Client
from arriero.cli.pictures import begins_with_picture, take_pictures
from arriero.errors import ArrieroError
from arriero.settings import Settings


@dataclass
class Session:
    """One `arriero run MODEL` without a prompt. Errors are printed and the conversation goes on."""

    client: Client
    model: str
    facts: dict[str, Any]
    """The reply of `/api/show` for the model."""
    settings: Settings
    request: dict[str, Any]
    """Fields sent with every request: `keep_alive`, `think`, `format`."""
    verbose: bool = False
    wrap: bool = True
    hide_thinking: bool = False
    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    reader: Reader | None = None
    """The prompt, once the conversation is open."""

    def loop(self) -> int:
        """Read, ask and print until the person leaves; the exit code."""
        if not self.load(self.model):
            return 1
        self.reader = Reader(self.settings.home / "history.jsonl", keeps=not self.settings.no_history)
        self._replay()
        with typed_ahead():
            return self._converse(self.reader)

    def _converse(self, reader: Reader) -> int:
        while True:
            try:
                text = reader.message()
            except KeyboardInterrupt:
                click.echo("\nUse Ctrl + d or /bye to exit.", err=True)
                continue
            except EOFError:
                click.echo(err=True)
                return 0
            if not text.strip():
                continue
            try:
                if text.startswith("/") and not begins_with_picture(text):
                    run_command(self, text)
                else:
                    self.say(text)
            except Leave:
                return 0
            except KeyboardInterrupt:
                # Ends what the command waited for (a load, a create), not the conversation.
                click.echo(err=True)
            except (ArrieroError, click.ClickException) as error:
                message = error.format_message() if isinstance(error, click.ClickException) else str(error)
                click.echo(f"Error: {message}", err=True)

    def load(self, model: str) -> bool:
        """Load a model and make it the session's; False when it cannot be."""
        try:
            facts = self.client.call("POST", "/api/show", {"model": model})
            self.client.call("POST", "/api/generate", {"model": model, "stream": False, **self._keep_alive()})
        except ApiError as error:
            text = f"Couldn't find model '{model}'" if error.status == 404 else f"Error: {error}"
            click.echo(text, err=True)
            return False
        self.model, self.facts = model, facts
        return True

    def say(self, text: str) -> None:
        """Send a message and print the reply; what had arrived before an interrupt is kept."""
        self.messages.append({"role": "user", **take_pictures(text, self.facts)})
        reply: dict[str, Any] = {"role": "assistant", "content": ""}
        printer = Printer(wrap=self.wrap, hide_thinking=self.hide_thinking)
        final: dict[str, Any] | None = None
        try:
            for chunk in self.client.stream("POST", "/api/chat", self._body()):
                message = chunk.get("message") or {}
                # Kept before it is shown: an interrupt between the two must not lose what was seen.
                reply["content"] += message.get("content") or ""
                if thinking := message.get("thinking"):
                    reply["thinking"] = reply.get("thinking", "") + thinking
                printer.thinking(message.get("thinking") or "")
                printer.content(message.get("content") or "")
                if chunk.get("done"):
                    final = chunk
        except KeyboardInterrupt:
            # Leaving the stream closes the connection, which is how a request is cancelled.
            sys.stdout.write("\n")
        finally:
            printer.end()
            if reply["content"] or reply.get("thinking"):
                self.messages.append(reply)
            elif final is None:
                # Nothing was answered: the message can be sent again without standing there twice.
                self.messages.pop()
        if final is None:
            return
        if dropped := (final.get("truncated") or {}).get("dropped_messages"):
            click.echo(f"(the oldest {dropped} messages no longer fit the context and were left out)", err=True)
        if self.verbose:
            print_statistics(final)

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": self.model, "messages": system + self.messages, **self.request}
        if self.options:
            body["options"] = self.options
        return body

    def _keep_alive(self) -> dict[str, Any]:
        return {"keep_alive": self.request["keep_alive"]} if "keep_alive" in self.request else {}

    def _replay(self) -> None:
        for message in self.facts.get("messages") or []:
            prefix = ">>> " if message.get("role") == "user" else ""
            click.echo(f"{prefix}{message.get('content', '')}", err=not sys.stdout.isatty())
