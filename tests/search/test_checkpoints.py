"""Checkpoints of trials, as the runner sees them."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint import CheckpointWarning
from dovetail.checkpoint.strict_json import seal
from dovetail.core import CheckpointContext
from dovetail.search.checkpoints import checkpoints_of, latest_checkpoint, remove_surplus


@pytest.mark.parametrize(
    "manifest",
    [
        # A file of another kind, such as a web page.
        '{"name": "app", "icons": []}',
        "[]",
        "null",
        "not JSON",
        # Of ours, and damaged.
        '{"format": "dovetail-files"}',
        '{"format": "dovetail-files", "created": 3, "metadata": []}',
        '{"format": "dovetail-files", "created": "2026-01-01", "metadata": {}}',
        '{"format": "dovetail-files", "created": "2026-01-01", "metadata": {}, "files": {"a": {"size": 1}}}',
    ],
)
def test_a_trial_folder_that_is_not_a_checkpoint_is_ignored(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "pages" / "files").mkdir(parents=True)
    (tmp_path / "pages" / "files" / "a").touch()
    (tmp_path / "pages" / "manifest.json").write_text(manifest)
    assert latest_checkpoint(tmp_path) is None
    rules = {"experiment_best": 0, "trial_best": 0, "trial_latest": 1}
    assert remove_surplus({tmp_path: {}}, [tmp_path], **rules, smaller_is_better=True) == []
    assert (tmp_path / "pages" / "manifest.json").exists()


def _stored(trial: Path, name: str, files: dict[str, bytes], changes: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint of files as a script does, with a manifest that is changed and sealed again."""
    place = trial / name
    (place / "files").mkdir(parents=True)
    for file, content in files.items():
        (place / "files" / file).write_bytes(content)
    entries = {file: {"size": len(content), "sha256": sha256(content).hexdigest()} for file, content in files.items()}
    document = {
        "format": "dovetail-files",
        "format_version": 1,
        "created": "2026-01-01T00:00:00+00:00",
        "metadata": {"steps_completed": 1},
        "files": entries,
        **(changes or {}),
    }
    (place / "manifest.json").write_bytes(seal(document))
    return place


def test_a_checkpoint_name_that_leaves_the_folder_is_never_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    entry = {"size": 6, "sha256": sha256(b"secret").hexdigest()}
    for number, name in enumerate(["../../../secret", str(secret)]):
        _stored(tmp_path / "trial", f"ck{number}", {}, {"files": {name: entry}})
    assert latest_checkpoint(tmp_path / "trial") is None


@pytest.mark.parametrize("kind", ["fifo", "device", "link", "folder"])
@pytest.mark.parametrize("place", ["manifest.json", "files/a"])
def test_a_special_file_is_rejected_without_blocking(tmp_path: Path, kind: str, place: str) -> None:
    path = _stored(tmp_path, "ck", {"a": b"a"}) / place
    content = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    assert latest_checkpoint(tmp_path) is None
    rules = {"experiment_best": 0, "trial_best": 0, "trial_latest": 0}
    assert remove_surplus({tmp_path: {}}, [tmp_path], **rules, smaller_is_better=True) == []


def test_a_link_to_a_checkpoint_is_neither_used_nor_removed(tmp_path: Path) -> None:
    _stored(tmp_path / "elsewhere", "ck", {"a": b"a"})
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "ck").symlink_to(tmp_path / "elsewhere" / "ck")
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    assert latest_checkpoint(tmp_path / "trial") is None
    rules = {"experiment_best": 0, "trial_best": 0, "trial_latest": 0}
    for trial in (tmp_path / "trial", tmp_path / "linked"):
        assert remove_surplus({trial: {}}, [trial], **rules, smaller_is_better=True) == []
    assert (tmp_path / "elsewhere" / "ck" / "files" / "a").exists()


def test_a_date_without_a_zone_is_local_time(tmp_path: Path) -> None:
    _stored(tmp_path, "old", {"a": b"a"}, {"created": "2020-01-01T00:00:00"})
    _stored(tmp_path, "new", {"a": b"a"}, {"created": "2026-01-01T00:00:00+00:00"})
    _stored(tmp_path, "none", {"a": b"a"}, {"created": "yesterday"})
    assert [checkpoint.path.name for checkpoint in checkpoints_of(tmp_path)] == ["old", "new"]
    context = CheckpointContext(tmp_path)
    with pytest.warns(CheckpointWarning, match="created: not a date"):
        assert context.latest() == "new"


def test_a_foreign_manifest_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "manifest.json").write_text("{}")
    assert checkpoints_of(tmp_path) == []
