"""Text of values and of Python code that is equal in every process, for the keys of compiled code on disk."""

from __future__ import annotations

import builtins
import dataclasses
import dis
import sys
from abc import ABCMeta
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from operator import attrgetter
from types import BuiltinFunctionType, CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn


class UnknownTextError(Exception):
    """A value has no text that is the same in every process, or code reads such a value."""


def spell(value: Any) -> list[str] | None:
    """Return texts that are equal only for equal values and equal code; None if a value has no such text.

    Of torch, of the trainers of this library and of some pure modules of Python, the name of a function or class is
    its text: the key has their versions. Other code, such as the module of a user, is spelled out: the bytecode of
    functions and methods, their defaults and closures, and every global that they read by name, at any depth.

    Args:
        value: Nested lists, tuples and dictionaries of numbers, texts, types and functions.

    Example:
        >>> spell(["step", 1]) == spell(["step", 1]), spell(["step", 1]) == spell(["step", 1.0])
        (True, False)
        >>> spell([lambda it: it + 1]) == spell([lambda it: it + 2])
        False
        >>> spell([object()]) is None
        True
    """
    speller = _Speller()
    try:
        speller.value(value)
    except (UnknownTextError, RecursionError):
        # Functions that call each other in a long chain are nested too deeply.
        return None
    return speller.parts


class _Speller:
    def __init__(self) -> None:
        self.parts: list[str] = []
        # With the objects, so that their ids stay theirs.
        self._seen: dict[tuple[int, bool], tuple[int, Any]] = {}

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind in _SEQUENCES or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            self.parts.append(f"{kind.__name__} {len(value)}")
            if kind not in _SEQUENCES:
                # A named tuple may have methods.
                self._class(kind, is_made=True)
            self._all(value)
        elif kind is dict:
            self.parts.append(f"dict {len(value)}")
            self._all(each for item in value.items() for each in item)
        elif isinstance(value, type):
            # The attributes of a module are inputs of the trace, so it does not matter how they were computed.
            self._class(value, is_made=not issubclass(value, nn.Module))
        elif kind is FunctionType:
            self._function(value)
        elif kind is BuiltinFunctionType:
            self._builtin(value)
        elif kind is partial:
            self.parts.append("partial")
            self._all((value.func, value.args, value.keywords))
        elif kind is ModuleType and _is_known(value.__name__):
            self.parts.append(f"module {value.__name__}")
        elif kind in _PLAIN:
            self.parts.append(f"{kind.__name__} {value!r}")
        elif kind is frozenset:
            # The order of a set of texts differs between processes.
            self.parts.append(f"frozenset {sorted(map(repr, value))}")
            self._all(sorted(value, key=repr))
        else:
            raise UnknownTextError(kind.__name__)

    def _all(self, values: Iterable[Any]) -> None:
        for each in values:
            self.value(each)

    def _is_new(self, value: Any, *, is_made: bool = True) -> bool:
        """Return False for a function or class that the text has already, and append a reference to it."""
        key = id(value), is_made
        if key in self._seen:
            self.parts.append(f"seen {self._seen[key][0]}")
            return False
        self._seen[key] = len(self._seen), value
        return True

    def _function(self, function: FunctionType) -> None:
        # `__module__` may be that of a function that this one wraps.
        module = str(function.__globals__.get("__name__"))
        if self._is_named(function, module, function.__qualname__) or not self._is_new(function):
            return
        self.parts.append(f"function {function.__name__}")
        self._code(function.__code__, function.__globals__)
        self.value(function.__defaults__)
        self.value(function.__kwdefaults__)
        self.value(vars(function))
        for cell in function.__closure__ or ():
            try:
                self.value(cell.cell_contents)
            except ValueError:
                self.parts.append("empty")

    def _builtin(self, function: BuiltinFunctionType) -> None:
        owner = function.__self__
        module = owner.__name__ if isinstance(owner, ModuleType) else str(function.__module__)
        is_method = not isinstance(owner, ModuleType) and owner is not None
        if is_method or not _is_known(module) or (module == "builtins" and function.__name__ in _OPEN):
            raise UnknownTextError(function.__name__)
        self.parts.append(f"builtin {module} {function.__qualname__}")

    def _is_named(self, value: Any, module: str, name: str) -> bool:
        """Append the name of known code, and return False for other code."""
        if not _is_known(module):
            return False
        try:
            found = attrgetter(name)(sys.modules[module])
        except (KeyError, AttributeError):
            return False
        if found is not value:
            return False
        self.parts.append(f"code {module} {name}")
        return True

    def _class(self, kind: type[Any], *, is_made: bool) -> None:
        if kind.__module__ == "builtins" and not kind.__flags__ & _MADE_BY_PYTHON:
            # Some have a name that is not in the module, such as the class of None.
            self.parts.append(f"class {kind.__name__}")
            return
        if self._is_named(kind, kind.__module__, kind.__qualname__):
            if _is_replaced(vars(kind).get("forward")):
                self.value(kind.forward)
            return
        if not self._is_new(kind, is_made=is_made):
            return
        meta = type(kind)
        if meta not in (type, ABCMeta) and not _is_known(meta.__module__):
            raise UnknownTextError(meta.__name__)
        self.parts.append(f"class {kind.__name__} {len(kind.__mro__)}")
        for base in kind.__mro__[1:]:
            self._class(base, is_made=is_made)
        is_dataclass, is_named_tuple = "__dataclass_params__" in vars(kind), "_fields" in vars(kind)
        if is_dataclass:
            self._fields(kind)
        for name, value in vars(kind).items():
            is_skipped = name in _SKIPPED or (name == "__init__" and not is_made)
            is_generated = (is_dataclass and _is_generated(name, value)) or (is_named_tuple and _is_of_tuple(value))
            if not is_skipped and not is_generated:
                self.parts.append(f"attribute {name}")
                self._attribute(value)

    def _fields(self, kind: Any) -> None:
        """Append what determines the methods that `dataclass` has generated."""
        self.parts.append(repr(kind.__dataclass_params__))
        for each in dataclasses.fields(kind):
            self.parts.append(f"field {each.name} {each.init} {each.compare} {each.kw_only}")
            for value in (each.default, each.default_factory):
                if value is not dataclasses.MISSING:
                    self.value(value)

    def _attribute(self, value: Any) -> None:
        if isinstance(value, (staticmethod, classmethod)):
            self.parts.append(type(value).__name__)
            self.value(value.__func__)
        elif type(value) is property:
            self._all((value.fget, value.fset, value.fdel))
        elif not isinstance(value, (MemberDescriptorType, GetSetDescriptorType)):
            self.value(value)

    def _code(self, code: CodeType, names: Mapping[str, Any]) -> None:
        """Append the bytecode of a function and everything that it reads by name."""
        if not _HIDING.isdisjoint(code.co_names):
            raise UnknownTextError(code.co_name)
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        variables = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        self.parts.append(f"{code.co_code.hex()} {counts} {variables} {getattr(code, 'co_exceptiontable', b'').hex()}")
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(constant, names)
            elif type(constant) in (complex, type(...)):
                self.parts.append(repr(constant))
            else:
                self.value(constant)
        instructions = [it for it in dis.get_instructions(code) if it.opname != "EXTENDED_ARG"]
        for number, instruction in enumerate(instructions, start=1):
            is_foreign = instruction.opname == "IMPORT_NAME" and not _is_known(instruction.argval)
            if is_foreign or instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise UnknownTextError(instruction.argval)
            if instruction.opname in _GLOBALS:
                self._global(instruction.argval, names, islice(instructions, number, None))

    def _global(self, name: str, names: Mapping[str, Any], following: Iterator[dis.Instruction]) -> None:
        """Append what a global name stands for; if it is a module, also what is read from it."""
        if name not in names:
            # It is a builtin, or missing.
            self.parts.append(f"name {name}")
            if hasattr(builtins, name):
                self.value(getattr(builtins, name))
            return
        value = names[name]
        self.parts.append(f"name {name}")
        while isinstance(value, ModuleType):
            instruction = next(following, None)
            is_read = instruction is not None and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
            is_found = instruction is not None and is_read and instruction.argval in vars(value)
            if _is_known(value.__name__):
                self.value(value)
                if instruction is None or not is_found:
                    return
                value = vars(value)[instruction.argval]
                if type(value) is not ModuleType and not _is_replaced(value):
                    return
            elif instruction is None or not is_found:
                raise UnknownTextError(value.__name__ if instruction is None else str(instruction.argval))
            else:
                value = vars(value)[instruction.argval]
        if isinstance(value, type):
            # It may be called.
            self._class(value, is_made=True)
        else:
            self.value(value)


def _is_generated(name: str, value: Any) -> bool:
    """Return whether `dataclass` has made a method from the fields of a class; its code has no file."""
    # A program of `python -c` has no file either.
    if type(value) is not FunctionType or name not in _OF_FIELDS:
        return False
    return value.__code__.co_filename == "<string>" or value.__globals__.get("__name__") in ("dataclasses", "reprlib")


def _is_replaced(value: Any) -> bool:
    """Return whether a function in known code has been replaced by one of the user."""
    return type(value) is FunctionType and not _is_known(str(value.__globals__.get("__name__")))


def _is_of_tuple(value: Any) -> bool:
    """Return whether `namedtuple` has made an attribute from the names of the fields."""
    function = getattr(value, "__func__", value)
    if type(function) is FunctionType:
        module = str(function.__globals__.get("__name__"))
        return module == "collections" or module.startswith("namedtuple_")
    return type(value) is _tuplegetter


def _is_known(module: str) -> bool:
    """Return whether a module is fixed by its name, because the key of compiled code has its version."""
    return module.partition(".")[0] in _KNOWN or f"{module}.".startswith("dovetail.trainers.")


_KNOWN = frozenset(
    {
        *("torch", "builtins", "abc", "collections", "contextlib", "copy", "dataclasses", "functools", "itertools"),
        *("math", "numbers", "operator", "types", "typing", "warnings", "__future__"),
    }
)
_SEQUENCES = frozenset({list, tuple, torch.Size})
# The type of the attributes by which a named tuple reads its fields.
_tuplegetter = type(vars(namedtuple("_Pair", ("first", "second")))["first"])
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, torch.device})
# The flag of classes that Python code has created (Py_TPFLAGS_HEAPTYPE).
_MADE_BY_PYTHON = 1 << 9
# Builtin functions that read more than their arguments.
_OPEN = frozenset({"__import__", "compile", "eval", "exec", "globals", "input", "locals", "open"})
# Attributes by which code reads other code: operations that the user has registered, and globals of functions.
_HIDING = frozenset({"ops", "__globals__", "__builtins__", "__code__"})
# Methods that `dataclass` writes.
_OF_FIELDS = frozenset(
    {
        *("__init__", "__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__replace__"),
        *("__setattr__", "__delattr__", "__getstate__", "__setstate__"),
    }
)
# Instructions that read a global name.
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
# Attributes of every class that do not change what its methods compute.
_SKIPPED = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__"),
        *("__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__"),
        *(
            "__dataclass_fields__",
            "__dataclass_params__",
            "__parameters__",
            "__orig_bases__",
            "__abstractmethods__",
            "_abc_impl",
            "_backward_cls",
        ),
    }
)
