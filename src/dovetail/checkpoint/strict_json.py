"""JSON as a checkpoint writes it: one reading for every text, and no text that costs more than its length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from dovetail.errors import CheckpointError

# The longest whole number that a checkpoint writes as digits has 20 of them and a sign; reading digits
# costs quadratic time.
_MAX_DIGITS = 21


def dump_json(value: object, *, indent: int | None = None) -> bytes:
    """Return `value` as the bytes of an ASCII text."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode()


def parse_json(text: bytes, where: str) -> Any:
    """Return the value of `text`.

    Raises:
        CheckpointError: The text is not JSON, repeats a key, or nests or counts beyond reason.
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON: {error}") from error


def seal(document: Mapping[str, Any]) -> bytes:
    """Return an object as a text that holds its own SHA-256."""
    digest = sha256(dump_json(document, indent=2)).hexdigest()
    return dump_json({**document, "sha256": digest}, indent=2) + b"\n"


def unseal(text: bytes, where: str) -> dict[str, Any]:
    """Return the object that `seal` made a text of, with its SHA-256.

    Raises:
        CheckpointError: The text is not JSON, or is not exactly what `seal` makes of its content.
    """
    document = parse_json(text, where)
    # The text has exactly one form, so that a changed blank is a damage, too.
    if not isinstance(document, dict) or _sealed_again(document) != text:
        raise CheckpointError(f"{where}: the file is damaged: its content does not match its own SHA-256")
    return document


def _sealed_again(document: Mapping[str, Any]) -> bytes | None:
    try:
        return seal({key: value for key, value in document.items() if key != "sha256"})
    except (ValueError, RecursionError):
        return None  # a number such as 1e999, or nesting that only the reader takes


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _constant(name: str) -> float:
    raise ValueError(f"the constant {name}")
