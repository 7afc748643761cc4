"""From what a configuration says of a piece to the piece."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.registry import Registry

__all__ = ["build", "prepared"]

T = TypeVar("T")


def build(registry: Registry[Callable[..., T]], spec: str | Mapping[str, Any]) -> T:
    """Make the piece of a name, or of a mapping of one name to its arguments.

    Example:
        >>> numbers = Registry("number", lambda: {"power": lambda base, exponent=2: base**exponent})
        >>> build(numbers, {"power": {"base": 3}})
        9
    """
    return prepared(registry, spec)()


def prepared(registry: Registry[Callable[..., T]], spec: str | Mapping[str, Any]) -> Callable[[], T]:
    """Return what makes the piece, once its name and arguments are found to be good.

    Raises:
        ConfigError: They are not.
    """
    if isinstance(spec, str):
        spec = {spec: {}}
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ConfigError(f"{registry.kind}: expected a name, or one name with its arguments, got {spec!r}")
    ((name, given),) = spec.items()
    maker = registry.get(name)
    arguments = {} if given is None else given
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{registry.kind} {name!r}: expected its arguments by name, got {given!r}")
    accepted = inspect.signature(maker).parameters.values()
    known = [each.name for each in accepted if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted)
    for argument in arguments:
        if argument not in known and not takes_any:
            if not known:
                raise ConfigError(f"{registry.kind} {name!r} takes no arguments, got {argument!r}")
            raise UnknownNameError(f"argument of {registry.kind} {name!r}", str(argument), known)
    missing = [each.name for each in accepted if each.name in known and each.default is each.empty]
    missing = [argument for argument in missing if argument not in arguments]
    if missing:
        raise ConfigError(f"{registry.kind} {name!r} needs {', '.join(missing)}")
    return partial(maker, **arguments)
