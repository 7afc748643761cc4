"""Manifests of damaged and hostile checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.checkpoint import CheckpointWarning, inspect, latest, list_checkpoints, prune, save
from dovetail.checkpoint.manifest import MANIFEST
from dovetail.checkpoint.store import scan
from dovetail.checkpoint.strict_json import seal
from dovetail.errors import CheckpointError


def _forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a checkpoint, with a valid SHA-256."""
    document = json.loads((path / MANIFEST).read_text())
    del document["sha256"]
    change(document)
    (path / MANIFEST).write_bytes(seal(document))


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


_HUGE = {"$int": "0x" + "f" * 5000}
_CASES: dict[str, Callable[[dict[str, Any]], object]] = {
    "run is a list": lambda d: d["summary"].update(run=[]),
    "run is a dict": lambda d: d["summary"].update(run={"a": 1}),
    "run is NaN": lambda d: d["summary"].update(run={"$float": "7ff8000000000000"}),
    "huge run": lambda d: d["summary"].update(run=_HUGE),
    "huge step": lambda d: d["summary"].update(step=_HUGE),
    "huge batches": lambda d: d["summary"].update(batches={"$int": hex(1 << 64)}),
    "huge metric": lambda d: d["summary"].update(metrics={"loss": _HUGE}),
    "huge number elsewhere": lambda d: d["summary"].update(note=[_HUGE]),
    "metric with a number as its name": lambda d: d["summary"].update(metrics={"$dict": [[1, 0.5]]}),
    "date without a zone": lambda d: d.update(created="2026-01-01T00:00:00"),
    "date beyond the calendar": lambda d: d.update(created="0001-01-01T00:00:00+23:59"),
    "date of the year one": lambda d: d.update(created="0001-01-02T00:00:00+00:00"),
    "deep nesting": lambda d: d["summary"].update(note=_nested(300)),
    "size beyond 64 bits": lambda d: d["files"]["state.json"].update(size=(1 << 64) - 1),
    "size is true": lambda d: d["files"]["state.json"].update(size=True),
    "hash with an escape sequence": lambda d: d["files"]["state.json"].update(sha256="\x1b[2J"),
    "version with an escape sequence": lambda d: d.update(dovetail_version="\x1b[2J"),
    "version of a thousand characters": lambda d: d.update(dovetail_version="1" * 1000),
}


@pytest.mark.parametrize("case", _CASES)
def test_a_manifest_with_an_impossible_value_is_skipped_and_named(tmp_path: Path, case: str) -> None:
    good = save(tmp_path / "good", {"a": 1}, summary={"step": 1, "run": "first"})
    bad = save(tmp_path / "bad", {"a": 2}, summary={"step": 2, "run": "first"})
    _forge(bad, _CASES[case])
    for read in (list_checkpoints, latest):
        with pytest.warns(CheckpointWarning, match=r"bad/manifest\.json"):
            found = read(tmp_path)
        assert found == good if isinstance(found, Path) else [info.path for info in found or []] == [good]
    with pytest.warns(CheckpointWarning, match=r"bad/manifest\.json"):
        assert prune(tmp_path, last=1) == []
    assert bad.exists()


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _elsewhere(file: Path) -> None:
    file.rename(file.parent.parent / "moved")
    file.symlink_to(file.parent.parent / "moved")


def _overflow(file: Path) -> None:
    file.write_bytes(b'{"format": 1e999}')


def _deep(file: Path) -> None:
    file.write_bytes(b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize("damage", [_fifo, _device, _elsewhere, _overflow, _deep])
def test_a_manifest_that_is_not_a_regular_file_is_skipped_and_named(tmp_path: Path, damage: Any) -> None:
    good, bad = save(tmp_path / "good", {}), save(tmp_path / "bad", {})
    damage(bad / MANIFEST)
    with pytest.warns(CheckpointWarning, match=r"bad/manifest\.json"):
        assert latest(tmp_path) == good


@pytest.mark.parametrize(
    ("summary", "sentence"),
    [
        ({"run": ["a"]}, r"summary\.run: expected text or a whole number, got list"),
        ({"step": 1 << 64}, r"summary\.step: expected a whole number of at most 64 bits"),
        ({"metrics": {"loss": 1 << 2000}}, r"summary\.metrics\.loss: expected a number that fits a float"),
        ({"metrics": {1: 0.5}}, r"summary\.metrics: expected names of metrics, got 1"),
        ({"metrics": 0.5}, r"summary\.metrics: expected numbers by name, got float"),
        ({"metrics": {"loss": "0.5"}}, r"summary\.metrics\.loss: expected a number, got str"),
        ({"note": 1 << 5000}, r"summary\.note: expected a whole number of at most 4096 bits"),
    ],
)
def test_a_summary_that_could_not_be_read_is_not_written(
    tmp_path: Path, summary: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        save(tmp_path / "checkpoint", {}, summary=summary)
    assert os.listdir(tmp_path) == []


def test_a_set_aside_folder_cannot_replace_its_parent(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "good", {})
    for name in (".old-..0123abcd", ".old-...0123abcd"):
        (save(tmp_path / "runs" / "other", {})).rename(tmp_path / "runs" / name)
    infos = list_checkpoints(tmp_path / "runs")
    assert [info.path.name for info in infos] == ["good", ".old-..0123abcd", ".old-...0123abcd"]


def test_a_run_that_starts_after_the_clock_was_set_back_is_the_newest(tmp_path: Path) -> None:
    for step in (8, 9):
        path = save(tmp_path / f"before_{step}", {}, summary={"run": "before", "step": step})
        _forge(path, lambda document: document.update(created="2099-01-01T00:00:00+00:00"))
    save(tmp_path / "after_1", {}, summary={"run": "after", "step": 1})
    assert [info.path.name for info in list_checkpoints(tmp_path)] == ["before_8", "before_9", "after_1"]
    assert [info.sequence for info in list_checkpoints(tmp_path)] == [1, 2, 3]
    assert latest(tmp_path) == tmp_path / "after_1"


def test_manifests_without_a_sequence_number_are_ordered_by_time_first(tmp_path: Path) -> None:
    for name, year in (("b", 2031), ("a", 2030), ("c", 2032)):
        path = save(tmp_path / name, {}, summary={"run": name})

        def change(document: dict[str, Any], year: int = year) -> None:
            del document["sequence"]
            document["created"] = f"{year}-01-01T00:00:00+00:00"

        _forge(path, change)
    save(tmp_path / "new", {}, summary={"run": "new"})
    assert [info.path.name for info in list_checkpoints(tmp_path)] == ["a", "b", "c", "new"]


def test_a_hostile_sequence_number_does_not_stop_the_count(tmp_path: Path) -> None:
    path = save(tmp_path / "first", {}, summary={"run": "first"})
    _forge(path, lambda document: document.update(sequence=(1 << 53) - 1))
    save(tmp_path / "second", {}, summary={"run": "second"})
    _fifo(save(tmp_path / "third", {}) / MANIFEST)
    save(tmp_path / "fourth", {}, summary={"run": "fourth"})
    with pytest.warns(CheckpointWarning, match="third"):
        assert latest(tmp_path) == tmp_path / "fourth"


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70).filter(lambda number: len(str(number)) <= 21),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(), max_size=5),
    st.sampled_from(["\ud800", "2026-01-01", "2026-01-01T00:00:00", "9999-12-31T23:59:59-12:00", "1970-01-01T00:00Z"]),
    st.integers(0, 1 << 5000).map(lambda number: {"$int": hex(number)}),
    st.sampled_from(["7ff8000000000000", "7ff0000000000000", "x"]).map(lambda text: {"$float": text}),
    st.text(max_size=3).map(lambda text: {"$bytes": text}),
    st.sampled_from(["$tensor", "$array", "$shard", "$scalar", "$complex", "$what"]).map(lambda tag: {tag: "a"}),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["run", "step", "metrics", "loss", "$int", "\x1b[2J", "\udfff"]), inner),
        st.lists(st.tuples(inner, inner).map(list), max_size=3).map(lambda pairs: {"$dict": pairs}),
        st.lists(inner, max_size=3).map(lambda items: {"$tuple": items}),
    ),
    max_leaves=6,
)
_PLACES = st.sampled_from(
    [
        *(
            (key,)
            for key in ("format", "format_version", "dovetail_version", "created", "sequence", "files", "summary")
        ),
        *(("files", "state.json"), ("files", "state.json", "size"), ("files", "state.json", "sha256"), ("files", "x")),
        *(("summary", key) for key in ("run", "step", "batches", "epoch", "metrics", "other")),
        ("summary", "metrics", "loss"),
    ]
)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        yield


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(place=_PLACES, value=_VALUES)
def test_any_value_in_a_manifest_is_read_or_named(place: tuple[str, ...], value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, _quiet():
        summary = {"step": 1, "run": "first", "metrics": {"loss": 0.5}}
        good, bad = (save(Path(folder) / name, {}, summary=summary) for name in ("good", "bad"))

        def change(document: dict[str, Any]) -> None:
            inner = document
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value

        _forge(bad, change)
        infos, damaged = scan(Path(folder))
        assert {info.path for info in infos} | {bad for error in damaged if str(bad) in str(error)} == {good, bad}
        assert latest(folder) in (good, bad)
        for info in infos:
            assert (info.step, info.metrics, repr(info)) is not None
        with contextlib.suppress(CheckpointError):
            inspect(bad)
        prune(folder, best=1, metric="loss", every=2)
