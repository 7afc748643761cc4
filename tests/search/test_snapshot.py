"""Copies of code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dovetail.checkpoint import save
from dovetail.errors import ConfigError
from dovetail.search.snapshot import IgnoreRules, take_snapshot


def _make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def test_a_snapshot_has_all_files_unchanged(tmp_path: Path) -> None:
    _make(tmp_path / "code", "train.py", "package/__init__.py", ".hidden")
    (tmp_path / "code" / "empty").mkdir()
    (tmp_path / "code" / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "code" / "run.sh").chmod(0o755)
    size = take_snapshot(tmp_path / "code", tmp_path / "copy")
    assert _names(tmp_path / "copy") == [".hidden", "package/__init__.py", "run.sh", "train.py"]
    assert (tmp_path / "copy" / "package" / "__init__.py").read_text() == "package/__init__.py"
    assert (tmp_path / "copy" / "empty").is_dir()
    assert os.access(tmp_path / "copy" / "run.sh", os.X_OK)
    assert size == sum((tmp_path / "copy" / name).stat().st_size for name in _names(tmp_path / "copy"))


def test_some_folders_are_never_copied(tmp_path: Path) -> None:
    _make(tmp_path / "code", "train.py", ".git/HEAD", "a/__pycache__/x.pyc", ".dovetail/store.db", "data/manifest.json")
    save(tmp_path / "code" / "runs" / "ck_1", {"weight": 1})
    _make(tmp_path / "code", "here/home/store.db")
    take_snapshot(tmp_path / "code", tmp_path / "copy", leave_out=[tmp_path / "code" / "here" / "home"])
    assert _names(tmp_path / "copy") == ["data/manifest.json", "train.py"]


def test_a_snapshot_inside_the_folder_does_not_copy_itself(tmp_path: Path) -> None:
    _make(tmp_path, "train.py")
    take_snapshot(tmp_path, tmp_path / "copies" / "code")
    assert _names(tmp_path / "copies" / "code") == ["train.py"]


def test_both_ignore_files_are_used(tmp_path: Path) -> None:
    _make(tmp_path / "code", "train.py", "a.bin", "b.csv", "keep.csv", "data/x", "src/data/y")
    (tmp_path / "code" / ".detignore").write_text("# data\n*.bin\n/data/\n\n")
    (tmp_path / "code" / ".dovetailignore").write_text("*.csv\n!keep.csv\n.*ignore\n")
    take_snapshot(tmp_path / "code", tmp_path / "copy")
    assert _names(tmp_path / "copy") == ["keep.csv", "src/data/y", "train.py"]


@pytest.mark.parametrize(
    ("pattern", "ignored", "kept"),
    [
        ("*.pt", ["a.pt", "x/y/a.pt"], ["a.pts", "pt"]),
        ("/*.pt", ["a.pt"], ["x/a.pt"]),
        ("runs/*.pt", ["runs/a.pt"], ["x/runs/a.pt", "runs/b/a.pt"]),
        ("**/runs", ["runs", "a/b/runs"], ["runs2"]),
        ("runs/**", ["runs/a", "runs/a/b"], ["runs", "x/runs/a"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["a/xb"]),
        ("/**", ["a", "a/b"], []),
        ("a**c", ["abc", "ac"], ["ab/c"]),
        ("data?", ["data1"], ["data", "data/1"]),
        ("[a-c].py", ["a.py", "x/c.py"], ["d.py"]),
        ("[!a].py", ["b.py"], ["a.py"]),
        ("a.py ", ["a.py"], ["a.py "]),
        (r"\#a", ["#a"], ["a"]),
        (r"\!a", ["!a"], ["a"]),
        ("a+b(c)", ["a+b(c)"], ["aab(c)"]),
    ],
)
def test_ignore_patterns_have_the_meaning_of_git(pattern: str, ignored: list[str], kept: list[str]) -> None:
    rules = IgnoreRules.parse([pattern])
    assert [name for name in ignored if not rules.ignores(name)] == []
    assert [name for name in kept if rules.ignores(name)] == []


def test_a_pattern_with_a_trailing_slash_matches_only_folders(tmp_path: Path) -> None:
    rules = IgnoreRules.parse(["build/"])
    assert rules.ignores("a/build", is_folder=True)
    assert not rules.ignores("a/build")


@pytest.mark.parametrize("line", ["", "   ", "# *", "/", "!", "!/"])
def test_comments_and_empty_lines_ignore_nothing(line: str) -> None:
    assert IgnoreRules.parse([line]).patterns == []


def test_an_invalid_pattern_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the pattern '\[z-a\]' of \.detignore or \.dovetailignore is invalid"):
        IgnoreRules.parse(["[z-a]"])


def test_links_are_copied_as_links_to_their_target(tmp_path: Path) -> None:
    _make(tmp_path / "code", "package/a.py")
    _make(tmp_path, "data/rows")
    (tmp_path / "code" / "inside.py").symlink_to("package/a.py")
    (tmp_path / "code" / "data").symlink_to("../data")
    (tmp_path / "code" / "loop").symlink_to(".")
    take_snapshot(tmp_path / "code", tmp_path / "elsewhere" / "copy")
    copy = tmp_path / "elsewhere" / "copy"
    assert os.readlink(copy / "inside.py") == "package/a.py"
    assert (copy / "data" / "rows").read_text() == "data/rows"
    assert (copy / "loop").resolve() == copy.resolve()


def test_special_files_are_skipped(tmp_path: Path) -> None:
    _make(tmp_path / "code", "train.py")
    os.mkfifo(tmp_path / "code" / "pipe")
    take_snapshot(tmp_path / "code", tmp_path / "copy")
    assert _names(tmp_path / "copy") == ["train.py"]


def test_a_snapshot_that_is_too_large_is_rejected_with_the_largest_file(tmp_path: Path) -> None:
    _make(tmp_path / "code", "train.py")
    (tmp_path / "code" / "data").mkdir()
    (tmp_path / "code" / "data" / "rows.bin").write_bytes(bytes(3 << 20))
    with pytest.raises(ConfigError) as raised:
        take_snapshot(tmp_path / "code", tmp_path / "copy", max_bytes=2 << 20)
    assert str(raised.value) == (
        f"context directory {str(tmp_path / 'code')!r} has 3.0 MB; at most 2.0 MB can be copied for an experiment; "
        "the largest is 'data/rows.bin' with 3.0 MB: list what trials do not need in .detignore or .dovetailignore, "
        "and give data by their path"
    )
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(("name", "what"), [("nowhere", "does not exist"), ("file", "is not a folder")])
def test_a_path_that_is_not_a_folder_is_rejected(tmp_path: Path, name: str, what: str) -> None:
    _make(tmp_path, "file")
    with pytest.raises(ConfigError, match=f"expected a folder with the code, but .*{name}' {what}"):
        take_snapshot(tmp_path / name, tmp_path / "copy")
