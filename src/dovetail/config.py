"""Configuration files: YAML with plain values only, and the line and column of each value.

This module does not import torch, because the command line reads files before it needs tensors.
"""

from __future__ import annotations

import copy
import math
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.units import TrainUnit, parse_unit

__all__ = ["Config", "hyperparameters", "load_config", "locate", "parse_config", "parse_scalar"]

# Far beyond any configuration. PyYAML reads about 20,000 keys and values in a second, and the checks take as long.
_MAX_BYTES = 1 << 18
_MAX_DEPTH = 64
_MAX_VALUES = 10_000
_MAX_DIGITS = 100
_MAX_INCLUDES = 8

# The message for users of plato, whose settings are a global object.
_NO_GLOBAL_CONFIG = (
    "settings are no global object here; write config['epochs'] in the hooks of a trainer, context.config['epochs'] in "
    "a strategy, self.config.trainer.rounds in a server, and read_federated(path) of "
    "dovetail.federated.servers.reading for those of a file"
)

_SEARCHED = ("categorical", "double", "int", "log")


class Config(dict[str, Any]):
    r"""The values of a file, with the line and column of each.

    Example:
        >>> config = parse_config("name: demo\nhyperparameters:\n  lr: 1e-3\n", "experiment.yaml")
        >>> config["hyperparameters"]["lr"], config.where("hyperparameters", "lr")
        (0.001, 'experiment.yaml:3:3')
    """

    def __init__(self, values: Mapping[str, Any] | None = None, file: str = "", place: _Place | None = None) -> None:
        if values is None or place is None:
            raise ConfigError(f"Config(): {_NO_GLOBAL_CONFIG}")
        super().__init__(values)
        self._file = file
        self._place = place

    def where(self, *keys: str | int) -> str:
        """Return the place of a key as `file:line:column`; of its section if the key is missing.

        Args:
            keys: The path from the top: names, and numbers for the items of a list.
        """
        place = self._place
        for key in keys:
            if key not in place.parts:
                break
            place = place.parts[key]
        return f"{place.file or self._file}:{place.line}:{place.column}"

    def __getattr__(self, name: str) -> Any:
        # plato's users read settings as attributes of a global `Config`.
        raise AttributeError(f"Config has no attribute {name!r}: {_NO_GLOBAL_CONFIG}")


def load_config(path: str | os.PathLike[str], *, includes: bool = False) -> Config:
    """Return the mapping of a YAML file in UTF-8.

    Names and numbers are read as in YAML 1.2: `1e-3` is a number, `no`, `on` and dates are text. Tags, duplicate keys,
    keys that are not text, and huge files, also through aliases, are rejected.

    Args:
        path: The file.
        includes: Whether a value `!include other.yml` is replaced by the content of that file, which must be in the
            folder of this file or below it.

    Raises:
        ConfigError: The file is invalid; the message starts with file, line and column.
    """
    file = os.fspath(path)
    text = _read_text(path, file)
    return _parse(text, file, (Path(file).resolve(),) if includes else ())


def _read_text(path: str | os.PathLike[str], file: str) -> str:
    """Return the text of a file; raise if it is too long or not UTF-8."""
    with Path(path).open("rb") as stream:
        # One byte more than allowed is enough to see that the file is too long.
        content = stream.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{file}: expected a file of at most {_MAX_BYTES} bytes, got more")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8")
        raise ConfigError(f"{file}:{_position(before)}: expected text in UTF-8, got another encoding") from error


def parse_config(text: str, name: str = "config") -> Config:
    """Return the mapping of a YAML text, as `load_config` does; places start with `name` instead of a file."""
    return _parse(text, name, ())


def _parse(text: str, name: str, files: tuple[Path, ...]) -> Config:
    document = _Reader(text, name, files).document()
    if not isinstance(document.value, dict):
        place = document.place
        raise ConfigError(
            f"{name}:{place.line}:{place.column}: expected 'key: value' lines, got {_kind(document.value)}"
        )
    return Config(document.value, name, document.place)


def parse_scalar(text: str) -> Any:
    """Return one value as in a configuration file: a number, true or false, null, or text.

    Example:
        >>> [parse_scalar(text) for text in ("1e-3", "64", "true", "relu", "'64'")]
        [0.001, 64, True, 'relu', '64']
    """
    try:
        value = _Reader(text, "value").document().value
    except ConfigError as error:
        raise ConfigError(f"expected one value such as 1e-3, true or relu, got {text!r}: quote it") from error
    if isinstance(value, (dict, list)):
        raise ConfigError(f"expected one value such as 1e-3, true or relu, got {_kind(value)}: {text!r}")
    return value


def locate(config: Mapping[str, Any], *keys: str | int) -> str:
    """Return the start of a message about a key: its place, if `config` is from a file, and its dotted name.

    Example:
        >>> locate(parse_config("searcher: {name: grid}", "experiment.yaml"), "searcher", "name")
        'experiment.yaml:1:12: searcher.name'
        >>> locate({"searcher": {"name": "grid"}}, "searcher", "name")
        'searcher.name'
    """
    dotted = ".".join(map(str, keys))
    return f"{config.where(*keys)}: {dotted}" if isinstance(config, Config) else dotted


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constant hyperparameters of an experiment's configuration, each as its value.

    A hyperparameter is a bare value, `{type: const, val: x}`, or a mapping of further ones.

    Raises:
        ConfigError: One of them has to be chosen by a search.

    Example:
        >>> hyperparameters({"hyperparameters": {"lr": 0.1, "net": {"width": {"type": "const", "val": 64}}}})
        {'lr': 0.1, 'net': {'width': 64}}
    """
    section = config.get("hyperparameters")
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{locate(config, 'hyperparameters')}: expected 'name: value' lines, got {_kind(section)}")
    return {name: _constant(config, ("hyperparameters", name), value) for name, value in section.items()}


def names_trial_class(text: str) -> bool:
    """Return whether an entrypoint is a trial class and not a script or a command.

    Example:
        >>> names_trial_class("model_def:MyTrial"), names_trial_class("train.py")
        (True, False)
    """
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text) is not None


def trial_length(config: Mapping[str, Any]) -> TrainUnit | None:
    """Return how long a trial trains by its experiment's configuration; None means that it has no length.

    The length is `searcher.max_length`, or else the time at which the searcher ends the best trials.

    Example:
        >>> trial_length({"searcher": {"max_length": {"epochs": 3}}})
        Epochs(3)
        >>> trial_length({"searcher": {"time_metric": "batches", "max_time": 500}})
        Batches(500)
    """
    searcher = config.get("searcher")
    if not isinstance(searcher, Mapping):
        return None
    length, unit, time = (searcher.get(name) for name in ("max_length", "time_metric", "max_time"))
    if length is None and unit in ("batches", "epochs", "records") and time is not None:
        length = {unit: time}
    # A bare number counts batches.
    given: Any = {"batches": length} if isinstance(length, int) else length
    return None if given is None else parse_unit(given, "searcher.max_length")


def _constant(config: Mapping[str, Any], keys: tuple[str, ...], value: Any) -> Any:
    """Return the value of a hyperparameter, or of a mapping of them; raise if a search must choose it."""
    if not isinstance(value, Mapping):
        return copy.deepcopy(value)
    if "type" not in value:
        return {name: _constant(config, (*keys, name), part) for name, part in value.items()}
    here, kind = locate(config, *keys), str(value["type"])
    if kind in _SEARCHED:
        raise ConfigError(f"{here}: type {kind!r} needs a search; a single run needs a value, such as '{keys[-1]}: 1'")
    if kind != "const":
        raise UnknownNameError(f"type of hyperparameter ({here})", kind, ("const", *_SEARCHED))
    if value.keys() != {"type", "val"}:
        raise ConfigError(
            f"{here}: expected the keys 'type' and 'val' of a constant, got {', '.join(map(repr, value))}"
        )
    return copy.deepcopy(value["val"])


# Reading


@dataclass(frozen=True, slots=True)
class _Place:
    """The line and column of a key or an item, counted from 1, and the places of its parts.

    `file` is empty unless the value is from an included file.
    """

    line: int
    column: int
    parts: Mapping[str | int, _Place] = field(default_factory=dict)
    file: str = ""

    def within(self, file: str) -> _Place:
        """Return the same place in an included file."""
        parts = {key: part.within(file) for key, part in self.parts.items()}
        return _Place(self.line, self.column, parts, self.file or file)


@dataclass(frozen=True, slots=True)
class _Part:
    """A value of the document, with its size and depth, which its aliases repeat."""

    value: Any
    place: _Place
    num_values: int = 1
    depth: int = 1


class _Reader:
    """Builds mappings, lists and scalars from the events of PyYAML's safe parser.

    `files` are the file that was asked for, and those that include each other down to this one; empty if files cannot
    be included.
    """

    def __init__(self, text: str, name: str, files: tuple[Path, ...] = ()) -> None:
        self._text = text
        self._name = name
        self._files = files
        self._events = yaml.parse(text, Loader=yaml.SafeLoader)
        self._anchors: dict[str, _Part] = {}
        self._num_values = 0

    def document(self) -> _Part:
        """Return the only document of the text; its value is None if the text is empty."""
        try:
            # The events of a text are: stream start, document start, the value, document end, stream end.
            next(self._events)
            if isinstance(next(self._events), yaml.StreamEndEvent):
                return _Part(None, _Place(1, 1))
            document = self._part(next(self._events), 1)
            next(self._events)
            if not isinstance(after := next(self._events), yaml.StreamEndEvent):
                self._refuse(after, "expected one document, got a second one")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            assert mark is not None
            sentence = " ".join(filter(None, (error.problem, error.context)))
            for end in ("'<stream end>'", repr("\0")):
                sentence = sentence.replace(end, "the end of the text")
            raise ConfigError(f"{self._name}:{mark.line + 1}:{mark.column + 1}: {sentence}") from error
        except yaml.reader.ReaderError as error:
            where = _position(self._text[: error.position])
            character = self._text[error.position]
            raise ConfigError(f"{self._name}:{where}: the character {character!r} is not allowed") from error
        return document

    def _part(self, event: Any, depth: int) -> _Part:
        """Return the value that starts with an event: a scalar, a list, a mapping, an alias or an included file."""
        if depth > _MAX_DEPTH:
            self._refuse(event, f"expected at most {_MAX_DEPTH} levels, got more")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, depth)
        if event.tag == "!include" and self._files:
            return self._included(event, depth)
        # A tag can name a Python class, so no other tag is accepted.
        if event.tag is not None:
            self._refuse(event, f"expected a plain value, got the tag {event.tag!r}")
        self._count(event, 1)
        if isinstance(event, yaml.ScalarEvent):
            part = _Part(self._scalar(event), _place(event))
        elif isinstance(event, yaml.SequenceStartEvent):
            part = self._list(event, depth)
        else:
            part = self._mapping(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = part
        return part

    def _included(self, event: Any, depth: int) -> _Part:
        """Return the content of another file; links cannot lead out of the folder of the first one."""
        wanted = event.value if isinstance(event, yaml.ScalarEvent) else ""
        relative = Path(wanted)
        if not wanted or relative.is_absolute() or ".." in relative.parts:
            self._refuse(event, f"!include: expected a file below the folder of this file, got {wanted or 'nothing'!r}")
        # Resolved, because a symbolic link could lead out of the folder.
        path = (self._files[-1].parent / relative).resolve()
        if not path.is_relative_to(self._files[0].parent):
            self._refuse(event, f"!include: {wanted!r} leads out of the folder of the configuration")
        # `_files` is the chain of files from the first one to this one, so a cycle is found here.
        if path in self._files:
            self._refuse(event, f"!include: {wanted!r} includes itself")
        if len(self._files) > _MAX_INCLUDES:
            self._refuse(event, f"!include: expected at most {_MAX_INCLUDES} files that include each other, got more")
        if not path.is_file():
            self._refuse(event, f"!include: there is no file {wanted!r}")
        name = os.fspath(Path(self._name).parent / relative)
        try:
            text = _read_text(path, name)
        except OSError as error:
            self._refuse(event, f"!include: {wanted!r} cannot be read: {error.strerror}")
        part = _Reader(text, name, (*self._files, path)).document()
        if depth + part.depth - 1 > _MAX_DEPTH:
            self._refuse(event, f"expected at most {_MAX_DEPTH} levels, got more")
        self._count(event, part.num_values)
        return _Part(part.value, part.place.within(name), part.num_values, part.depth)

    def _alias(self, event: Any, depth: int) -> _Part:
        """Return a copy of the value that an alias refers to."""
        # An anchor is stored when its value is complete, so a value cannot contain itself.
        part = self._anchors.get(event.anchor)
        if part is None:
            self._refuse(event, f"expected an anchor &{event.anchor} that ends before *{event.anchor}, got none")
        if depth + part.depth - 1 > _MAX_DEPTH:
            self._refuse(event, f"expected at most {_MAX_DEPTH} levels, got more")
        # An alias costs one line and repeats all values of its anchor: nested aliases grow exponentially.
        self._count(event, part.num_values)
        # Copied, so that a change of one value does not change the other.
        return _Part(copy.deepcopy(part.value), part.place, part.num_values, part.depth)

    def _list(self, start: Any, depth: int) -> _Part:
        parts = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            parts.append(self._part(event, depth + 1))
        places = {number: part.place for number, part in enumerate(parts)}
        return _joined([part.value for part in parts], _place(start, places), parts)

    def _mapping(self, start: Any, depth: int) -> _Part:
        """Return a mapping with the places of its keys; the entries after `<<` are defaults."""
        values: dict[str, Any] = {}
        places: dict[str | int, _Place] = {}
        parts: list[_Part] = []
        merged: list[tuple[str, Any, _Place]] | None = None
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event)
            # A quoted "<<" is an ordinary key.
            is_merge = key == "<<" and event.style is None
            if merged is not None if is_merge else key in values:
                self._refuse(event, f"the key {key!r} occurs twice")
            part = self._part(next(self._events), depth + 1)
            parts.append(part)
            if is_merge:
                merged = self._merged(event, part)
            else:
                values[key] = part.value
                places[key] = _place(event, part.place.parts)
        # Keys of the mapping itself take precedence over merged ones, in any order.
        for key, value, place in merged or []:
            values.setdefault(key, value)
            places.setdefault(key, place)
        return _joined(values, _place(start, places), parts, num_keys=len(parts))

    def _merged(self, event: Any, part: _Part) -> list[tuple[str, Any, _Place]]:
        """Return the entries of one mapping or a list of mappings, the defaults of the mapping around."""
        if isinstance(part.value, dict):
            sources: list[tuple[Any, _Place]] = [(part.value, part.place)]
        else:
            items = part.value if isinstance(part.value, list) else [None]
            sources = [(item, part.place.parts.get(number, part.place)) for number, item in enumerate(items)]
        if not all(isinstance(source, dict) for source, _ in sources):
            self._refuse(event, f"expected a mapping or a list of them after '<<', got {_kind(part.value)}")
        return [(key, value, place.parts[key]) for source, place in sources for key, value in source.items()]

    def _key(self, event: Any) -> str:
        """Return the key of a mapping, which must be text."""
        if not isinstance(event, yaml.ScalarEvent) or event.tag is not None:
            self._refuse(event, "expected text as a key, got something else")
        self._count(event, 1)
        key = self._scalar(event)
        if not isinstance(key, str):
            self._refuse(
                event, f"expected text as a key, got {event.value or 'nothing'}: write {event.value!r} in quotes"
            )
        return key

    def _scalar(self, event: Any) -> Any:
        """Return the number, word or text of a scalar by the rules of YAML 1.2."""
        text: str = event.value
        # Quoted text is never a number or a word such as true.
        if event.style is not None:
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            if len(text) > _MAX_DIGITS:
                self._refuse(event, f"expected a number of at most {_MAX_DIGITS} digits, got {len(text)}")
            return int(text, 0 if text.startswith(("0x", "0o")) else 10)
        if _FLOAT.fullmatch(text):
            if math.isinf(number := float(text)):
                self._refuse(event, f"expected a number that fits a float, got {text}; infinity is .inf")
            return number
        return text

    def _count(self, event: Any, number: int) -> None:
        self._num_values += number
        if self._num_values > _MAX_VALUES:
            self._refuse(event, f"expected at most {_MAX_VALUES:,} keys and values, counting aliases, got more")

    def _refuse(self, event: Any, sentence: str) -> NoReturn:
        place = _place(event)
        raise ConfigError(f"{self._name}:{place.line}:{place.column}: {sentence}")


_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INTEGER = re.compile(rf"[-+]?{_DIGITS}|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?")
# The words of YAML 1.2, which does not include yes, no, on and off.
_WORDS = {
    form(word): value
    for word, value in (
        *(("", None), ("~", None), ("null", None), ("true", True), ("false", False)),
        *((".inf", math.inf), ("+.inf", math.inf), ("-.inf", -math.inf), (".nan", math.nan)),
    )
    for form in (str.lower, str.title, str.upper)
} | {".NaN": math.nan}


def _place(event: Any, parts: Mapping[Any, _Place] | None = None) -> _Place:
    return _Place(event.start_mark.line + 1, event.start_mark.column + 1, parts or {})


def _joined(value: Any, place: _Place, parts: list[_Part], num_keys: int = 0) -> _Part:
    return _Part(
        value,
        place,
        num_keys + 1 + sum(part.num_values for part in parts),
        1 + max((part.depth for part in parts), default=0),
    )


def _position(before: str) -> str:
    """Return the line and column after a text."""
    return f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else reprlib.repr(value)
