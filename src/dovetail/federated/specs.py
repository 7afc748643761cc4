"""Objects from a configuration: a name with arguments is checked, converted and built."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Integral, Real
from types import SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dovetail.checks import Check, Problem, Refused, check_items, flag, one_of, whole
from dovetail.errors import ConfigError, MissingExtraError, UnknownNameError
from dovetail.registry import Registry

T = TypeVar("T")


def build(registry: Registry[Callable[..., T]], spec: str | Mapping[str, Any]) -> T:
    """Return the object of a registered name, or of a mapping of one name to its arguments.

    Example:
        >>> numbers = Registry("number", lambda: {"power": lambda base, exponent=2: base**exponent})
        >>> build(numbers, {"power": {"base": 3}})
        9
    """
    return make_builder(registry, spec)()


def make_builder(registry: Registry[Callable[..., T]], spec: str | Mapping[str, Any]) -> Callable[[], T]:
    """Return a function without arguments that builds the object; its name and arguments are checked now.

    Raises:
        ConfigError: The name is unknown, or an argument is unknown, missing or of another type.
    """
    name, maker, given = _resolve(registry, spec)
    arguments, refused = _converted(maker, given)
    if refused:
        raise ConfigError(f"{registry.kind} {name!r}: {refused[0][0]}: {refused[0][1]}")
    return partial(maker, **arguments)


def spec_problems(registry: Registry[Callable[..., Any]], spec: str | Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the mistakes of a specification, each with the keys that lead to it.

    The object is built, so that it checks its arguments itself. An extra that is not installed is not a mistake.

    Example:
        >>> numbers = Registry("number", lambda: {"power": lambda base, exponent=2: base**exponent})
        >>> [problem.sentence for problem in spec_problems(numbers, {"power": {"bse": 3}})]
        ["unknown argument of number 'power' 'bse': did you mean 'base'? (known: base, exponent)"]
    """
    try:
        name, maker, given = _resolve(registry, spec)
    except ConfigError as error:
        yield Problem((), str(error))
        return
    arguments, refused = _converted(maker, given)
    yield from (Problem((name, argument), sentence) for argument, sentence in refused)
    if not refused:
        yield from build_problems(partial(maker, **arguments), arguments, (name,))


def build_problems(
    make: Callable[[], Any], arguments: Iterable[str], above: tuple[str | int, ...] = ()
) -> Iterator[Problem]:
    """Yield the `ConfigError` of building an object as a problem; a message `argument: …` gives the argument as key.

    Example:
        >>> from dovetail.federated.robust import TrimmedMean
        >>> list(build_problems(lambda: TrimmedMean(share=2), ["share"]))
        [Problem(keys=('share',), sentence='expected a number from 0 and below 0.5, got 2')]
    """
    try:
        make()
    except MissingExtraError:
        return
    except ConfigError as error:
        argument, colon, sentence = str(error).partition(": ")
        if colon and argument in arguments:
            yield Problem((*above, argument), sentence)
        else:
            yield Problem(above, str(error))


def _resolve(registry: Registry[Callable[..., T]], spec: Any) -> tuple[str, Callable[..., T], Mapping[str, Any]]:
    """Return the name, the maker and the given arguments of a specification; their names are checked."""
    if isinstance(spec, str):
        spec = {spec: {}}
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ConfigError(f"{registry.kind}: expected a name, or one name with its arguments, got {spec!r}")
    ((name, given),) = spec.items()
    maker = registry.get(name)
    # YAML reads `krum:` without arguments as null.
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
    return name, maker, arguments


def _converted(maker: Callable[..., Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the arguments as their annotated types, and the names of the invalid ones with a sentence each."""
    checks, arguments, refused = checks_of(maker), {}, []
    for argument, value in given.items():
        try:
            arguments[argument] = checks[argument](value) if argument in checks else value
        except Refused as refusal:
            refused.append((argument, f"{refusal}, got {value!r}"))
    return arguments, refused


# Checks from annotations


def checks_of(maker: Callable[..., Any]) -> dict[str, Check]:
    """Return a check for every argument of a class or function that has an annotation, by name.

    Example:
        >>> def power(base: float, exponent: int = 2) -> float:
        ...     return base**exponent
        >>> checks_of(power)["exponent"](3.0)
        3
    """
    function: Any = inspect.getattr_static(maker, "__init__") if isinstance(maker, type) else maker
    hints: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        # An annotation may name a type that is imported for the type checker only.
        with suppress(NameError, TypeError):
            alone = SimpleNamespace(__annotations__={name: annotation})
            hints |= get_type_hints(alone, globalns=function.__globals__)
    return {name: partial(_checked, hint) for name, hint in hints.items() if name != "return"}


def _checked(hint: Any, value: Any) -> Any:
    """Return the value as the annotated type, or raise `Refused` with what was expected."""
    if get_origin(hint) not in (Union, UnionType):
        return _as(hint, value)
    options = get_args(hint)
    # In the order of the annotation: for `int | float`, a whole number stays one.
    for option in options:
        try:
            return _as(option, value)
        except Refused:
            continue
    raise Refused(f"expected {' or '.join(dict.fromkeys(map(_described, options)))}")


def _as(hint: Any, value: Any) -> Any:
    origin = get_origin(hint) or hint
    if hint in _CHECKS:
        return _CHECKS[hint](value)
    if origin is Literal:
        if all(isinstance(known, str) for known in get_args(hint)):
            return one_of(*get_args(hint))(value)
        # 1 == True in Python, but not in a file.
        if any(value == known and type(value) is type(known) for known in get_args(hint)):
            return value
    elif origin in (Sequence, list, tuple):
        if isinstance(value, (list, tuple)):
            return type(value)(check_items(value, partial(_checked, (get_args(hint) or (Any,))[0])))
    elif origin is Callable:
        if callable(value):
            return value
    elif not isinstance(origin, type) or isinstance(value, origin):
        return value
    raise Refused(f"expected {_described(hint)}")


def _described(hint: Any) -> str:
    origin = get_origin(hint) or hint
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if origin in (Sequence, list, tuple):
        return f"a list with {_described((get_args(hint) or (Any,))[0])} as every item"
    return _WORDS.get(origin, getattr(origin, "__name__", str(origin)))


def _real(value: Any) -> float:
    """Accept numbers, also infinite ones, which some classes use for "no bound"."""
    try:
        found = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        found = math.nan
    if math.isnan(found):
        raise Refused("expected a number")
    return found


def _integer(value: Any) -> int:
    # Numbers of numpy are whole, too.
    is_foreign = isinstance(value, Integral) and not isinstance(value, int)
    checked: int = _WHOLE(int(value) if is_foreign else value)
    return checked


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused("expected text")
    return value


def _nothing(value: Any) -> None:
    if value is not None:
        raise Refused("expected null")


_WHOLE = whole()
_CHECKS: dict[Any, Check] = {int: _integer, float: _real, bool: flag, str: _string, type(None): _nothing}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Mapping: "'key: value' lines",
    Callable: "a function",
    Any: "anything",
}
