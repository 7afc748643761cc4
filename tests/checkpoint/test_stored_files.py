"""Checkpoints with files of a script."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.files import digest_of
from dovetail.checkpoint.stored_files import (
    FILES,
    make_stored_manifest,
    read_stored_files,
    verify_stored_files,
)
from dovetail.checkpoint.strict_json import seal, unseal
from dovetail.errors import CheckpointError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint with two files."""
    place = tmp_path / "ck"
    (place / FILES / "inner").mkdir(parents=True)
    (place / FILES / "a").write_text("one")
    (place / FILES / "inner" / "b").write_text("two")
    files = {name: digest_of(place / FILES / name) for name in ("a", "inner/b")}
    (place / "manifest.json").write_bytes(make_stored_manifest({"steps_completed": 3}, files))
    return place


def change(place: Path, **fields: Any) -> None:
    """Change fields of a manifest, with a SHA-256 that fits."""
    path = place / "manifest.json"
    document = unseal(path.read_bytes(), "here")
    del document["sha256"]
    path.write_bytes(seal({**document, **fields}))


def test_written_files_round_trip(place: Path) -> None:
    content = verify_stored_files(place)
    assert (content.metadata, sorted(content.files)) == ({"steps_completed": 3}, ["a", "inner/b"])
    assert abs((datetime.now(timezone.utc) - content.created).total_seconds()) < 600


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"created": 3}, "a field is missing or of the wrong type"),
        ({"created": "soon"}, "created: not a date"),
        ({"created": "9999-12-31T23:59:59-23:59"}, "created: not a date"),
        ({"files": []}, "a field is missing or of the wrong type"),
        ({"files": {"a": {"size": "3", "sha256": "x"}}}, "a: expected a size and a SHA-256"),
        ({"files": {"a": {"size": -1, "sha256": "x"}}}, "a: expected a size and a SHA-256"),
        ({"files": {"../manifest.json": {"size": 1, "sha256": "x"}}}, "the file is missing"),
        ({"metadata": [1]}, "the metadata is not a dict"),
        ({"format_version": 2}, "not the manifest of stored files"),
    ],
)
def test_an_invalid_manifest_raises_a_one_sentence_error(place: Path, fields: dict[str, Any], words: str) -> None:
    change(place, **fields)
    with pytest.raises(CheckpointError, match=words):
        read_stored_files(place)


def test_a_changed_size_is_detected_without_reading_the_file(place: Path) -> None:
    (place / FILES / "a").write_text("longer")
    with pytest.raises(CheckpointError, match="a: the file is damaged: 6 bytes instead of 3"):
        read_stored_files(place)


def test_changed_content_of_the_same_size_is_detected(place: Path) -> None:
    (place / FILES / "a").write_text("two")
    read_stored_files(place)
    with pytest.raises(CheckpointError, match="its SHA-256 is not the one in the manifest"):
        verify_stored_files(place)


@pytest.mark.parametrize("name", ["extra", "a"])
def test_a_fifo_is_rejected_without_blocking(place: Path, name: str) -> None:
    (place / FILES / name).unlink(missing_ok=True)
    os.mkfifo(place / FILES / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_stored_files(place)


@pytest.mark.parametrize("part", ["", FILES, "manifest.json"])
def test_a_link_in_place_of_a_stored_file_is_rejected(place: Path, part: str) -> None:
    moved = place.parent / "moved"
    (place / part).rename(moved)
    (place / part).symlink_to(moved)
    with pytest.raises(CheckpointError, match="expected a "):
        read_stored_files(place)
