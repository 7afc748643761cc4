from __future__ import annotations

import pytest

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.registry import Registry


def test_an_object_is_registered_by_call_or_as_a_decorator() -> None:
    registry: Registry[type] = Registry("thing")

    @registry.register("mine")
    class Mine:
        pass

    registry.register("int", int)
    assert registry.get("mine") is Mine
    assert registry.names() == ["int", "mine"]


def test_a_name_can_be_registered_only_once() -> None:
    registry = Registry("thing", lambda: {"taken": 1})
    with pytest.raises(ConfigError, match="thing 'taken' is registered already"):
        registry.register("taken", 2)


def test_an_unknown_name_suggests_the_nearest() -> None:
    registry = Registry("thing", lambda: {"triangle": 1})
    with pytest.raises(UnknownNameError, match="unknown thing 'triangel': did you mean 'triangle'"):
        registry.get("triangel")


def test_built_in_classes_are_imported_on_lookup() -> None:
    calls: list[int] = []

    def built_in() -> dict[str, int]:
        calls.append(1)
        return {"a": 1}

    registry = Registry("thing", built_in)
    assert calls == []
    assert registry.get("a") == 1
    assert calls == [1]
