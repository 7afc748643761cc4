"""Strict JSON of checkpoints: one meaning per text, and parsing in linear time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from dovetail.errors import CheckpointError

# The longest whole number that a checkpoint contains has 20 digits and a sign. Parsing digits takes
# quadratic time.
_MAX_DIGITS = 21


def dump_json(value: object, *, indent: int | None = None) -> bytes:
    """Return `value` as JSON, in ASCII bytes."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode()


def parse_json(text: bytes, where: str) -> Any:
    """Return the value of `text`.

    Raises:
        CheckpointError: The text is not JSON, repeats a key, is nested too deeply or has a number with too many digits.
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON: {error}") from error


def seal(document: Mapping[str, Any]) -> bytes:
    """Return an object as JSON that contains its own SHA-256."""
    digest = sha256(dump_json(document, indent=2)).hexdigest()
    return dump_json({**document, "sha256": digest}, indent=2) + b"\n"


def unseal(text: bytes, where: str) -> dict[str, Any]:
    """Return the object of a text that `seal` returned, with its SHA-256.

    Raises:
        CheckpointError: The text is not JSON, or differs from the output of `seal` for its content.
    """
    document = parse_json(text, where)
    # The text has exactly one valid form, so that a changed space is detected, too.
    if not isinstance(document, dict) or _sealed_again(document) != text:
        raise CheckpointError(f"{where}: the file is damaged: its content does not match its own SHA-256")
    return document


def _sealed_again(document: Mapping[str, Any]) -> bytes | None:
    try:
        return seal({key: value for key, value in document.items() if key != "sha256"})
    except (ValueError, RecursionError):
        return None  # a number such as 1e999, or nesting that only the parser accepts


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
