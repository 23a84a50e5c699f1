"""A Modelfile's instructions → fields of a create request; everything but where the weights come from."""

from __future__ import annotations

import logging
from typing import Any

from arriero.errors import InvalidRequest, ModelfileError
from arriero.modelfile import Modelfile
from arriero.options import OBSOLETE, parse_parameter

log = logging.getLogger(__name__)
_TEXTS = ("template", "system", "renderer", "parser", "requires")


def fields_of(modelfile: Modelfile) -> dict[str, Any]:
    """`template`, `system`, `license`, `parameters`, `messages`, `renderer`, `parser`, `requires`, as far as given.

    Parameters have the types of the option table. Raises ModelfileError with the line of an unknown parameter, of one
    with an unreadable value, and of empty texts where a name must stand.
    """
    fields: dict[str, Any] = {}
    for name in _TEXTS:
        value = modelfile.last(name)
        if value:
            fields[name] = value
    licenses = modelfile.all("license")
    if licenses:
        fields["license"] = licenses
    parameters = _parameters(modelfile)
    if parameters:
        fields["parameters"] = parameters
    if modelfile.messages:
        fields["messages"] = [{"role": role, "content": text} for role, text in modelfile.messages]
    return fields


def _parameters(modelfile: Modelfile) -> dict[str, Any]:
    places = {i.key: (i.line, i.column) for i in modelfile if i.name == "parameter"}
    typed: dict[str, Any] = {}
    for name, texts in modelfile.parameters.items():
        if name in OBSOLETE:
            log.warning("PARAMETER %s has no effect any more and is left out", name)
            continue
        try:
            typed[name] = parse_parameter(name, texts)
        except InvalidRequest as error:
            line, column = places[name]
            raise ModelfileError(f"(line {line}, column {column}): {error}") from None
    return typed
