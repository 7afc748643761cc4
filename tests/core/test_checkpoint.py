from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint import CheckpointWarning
from dovetail.core import CheckpointContext, DistributedContext, DownloadMode, storage_directory
from dovetail.errors import CheckpointError, ConfigError, UnknownNameError


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointContext:
    return CheckpointContext(tmp_path / "storage")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "a.bin").write_bytes(bytes(range(256)) * 10_000)
    (folder / "deep" / "deeper" / "b.txt").write_text("b")
    (folder / "manifest.json").write_text("the user's own")
    (folder / "empty").touch()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(checkpoints: CheckpointContext, text: str = "x", **metadata: Any) -> str:
    with checkpoints.store_path(metadata) as (path, storage_id):
        (path / "file").write_text(text)
    return storage_id


def names(checkpoints: CheckpointContext) -> list[str]:
    return sorted(os.listdir(checkpoints.directory))


# ------------------------------------------------------------------ there and back


def test_an_uploaded_checkpoint_is_restored_and_downloaded(
    checkpoints: CheckpointContext, source: Path, tmp_path: Path
) -> None:
    storage_id = checkpoints.upload(source, {"steps_completed": 3, "note": ("a", 1)})
    assert str(uuid.UUID(storage_id, version=4)) == storage_id
    with checkpoints.restore_path(storage_id) as path:
        assert contents(path) == contents(source)
    checkpoints.download(storage_id, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(source)
    assert checkpoints.get_metadata(storage_id) == {"steps_completed": 3, "note": ("a", 1)}
    assert names(checkpoints) == [storage_id]


@pytest.mark.parametrize("mode", [*DownloadMode, "NO_SHARED_DOWNLOAD"])
def test_every_download_mode_downloads_all_files(
    mode: Any, checkpoints: CheckpointContext, source: Path, tmp_path: Path
) -> None:
    storage_id = checkpoints.upload(source)
    checkpoints.download(storage_id, tmp_path / "copy", mode)
    assert contents(tmp_path / "copy") == contents(source)
    with checkpoints.restore_path(storage_id, download_mode=mode) as path:
        assert contents(path) == contents(source)


def test_an_unknown_download_mode_is_rejected(checkpoints: CheckpointContext, tmp_path: Path) -> None:
    mode: Any = "SHARED"
    with pytest.raises(ValueError, match="'SHARED' is not a valid DownloadMode"):
        checkpoints.download(stored(checkpoints), tmp_path / "copy", mode)


def test_restore_path_has_all_files_for_any_selector(checkpoints: CheckpointContext) -> None:
    storage_id = stored(checkpoints)
    with (
        pytest.warns(UserWarning, match="the selector has no effect") as caught,
        checkpoints.restore_path(storage_id, selector=lambda name: False) as path,
    ):
        assert contents(path) == {"file": b"x"}
    assert caught[0].filename == __file__


def test_a_selector_matches_the_relative_path(checkpoints: CheckpointContext, source: Path, tmp_path: Path) -> None:
    storage_id = checkpoints.upload(source, selector=lambda path: path.startswith(("a", "deep/")))
    with checkpoints.restore_path(storage_id) as path:
        assert sorted(contents(path)) == ["a.bin", "deep/deeper/b.txt"]
    checkpoints.download(storage_id, tmp_path / "copy", selector=lambda path: path.endswith(".txt"))
    assert sorted(contents(tmp_path / "copy")) == ["deep/deeper/b.txt"]


def test_a_link_in_an_uploaded_folder_is_stored_as_its_target(
    checkpoints: CheckpointContext, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "inner").symlink_to(source / "deep")
    (tmp_path / "linked" / "one").symlink_to(source / "a.bin")
    with checkpoints.restore_path(checkpoints.upload(tmp_path / "linked")) as path:
        assert sorted(contents(path)) == ["inner/deeper/b.txt", "one"]


def test_a_download_keeps_other_files_and_replaces_equal_names(checkpoints: CheckpointContext, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "other").write_text("other")
    checkpoints.download(stored(checkpoints, "new"), tmp_path)
    assert ((tmp_path / "file").read_text(), (tmp_path / "other").read_text()) == ("new", "other")


def test_a_checkpoint_may_be_empty(checkpoints: CheckpointContext) -> None:
    with checkpoints.store_path({"done": True}) as (_, storage_id):
        pass
    assert checkpoints.get_metadata(storage_id) == {"done": True}
    with checkpoints.restore_path(storage_id) as path:
        assert contents(path) == {}


def test_a_deleted_checkpoint_cannot_be_found(checkpoints: CheckpointContext, source: Path) -> None:
    storage_id = checkpoints.upload(source)
    checkpoints.delete(storage_id)
    assert names(checkpoints) == []
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        checkpoints.delete(storage_id)


def test_the_latest_checkpoint_is_the_one_stored_last(checkpoints: CheckpointContext) -> None:
    assert checkpoints.latest() is None
    first, second = stored(checkpoints, kind="a"), stored(checkpoints, kind="b")
    (checkpoints.directory / "metrics.jsonl").touch()
    assert checkpoints.latest() == second
    assert checkpoints.latest(lambda metadata: metadata["kind"] == "a") == first
    assert checkpoints.latest(lambda metadata: "steps_completed" in metadata) is None


# ------------------------------------------------------------------ whole or not at all


def test_an_error_in_the_block_stores_nothing(checkpoints: CheckpointContext) -> None:
    with pytest.raises(ZeroDivisionError), checkpoints.store_path() as (path, _):
        (path / "half").write_text("x")
        1 / 0  # noqa: B018
    assert names(checkpoints) == []


def test_a_reader_sees_no_checkpoint_before_the_block_ends(checkpoints: CheckpointContext) -> None:
    with checkpoints.store_path() as (path, storage_id):
        (path / "file").write_text("x")
        assert checkpoints.latest() is None
        with pytest.raises(CheckpointError, match="no checkpoint there"):
            checkpoints.get_metadata(storage_id)
    assert checkpoints.latest() == storage_id


_KILLED = """
import os, signal, sys
from dovetail.core import CheckpointContext
with CheckpointContext(sys.argv[1]).store_path() as (path, _):
    (path / "deep").mkdir()
    (path / "deep" / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("forking")
def test_leftovers_of_a_killed_process_are_removed_by_the_next_one(
    checkpoints: CheckpointContext,
) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(checkpoints.directory)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(names(checkpoints)) == 1
    assert checkpoints.latest() is None
    storage_id = stored(checkpoints)
    assert names(checkpoints) == [storage_id]


# ------------------------------------------------------------------ damage


def files_of(checkpoints: CheckpointContext, storage_id: str) -> Path:
    return checkpoints.directory / storage_id / "files"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_changed_byte_is_detected_and_its_file_named(
    checkpoints: CheckpointContext, source: Path, tmp_path: Path
) -> None:
    storage_id = checkpoints.upload(source)
    flip(files_of(checkpoints, storage_id) / "a.bin")
    sentence = re.escape(f"{storage_id}/files/a.bin: the file is damaged")
    with pytest.raises(CheckpointError, match=sentence), checkpoints.restore_path(storage_id):
        raise AssertionError
    with pytest.raises(CheckpointError, match=sentence):
        checkpoints.download(storage_id, tmp_path / "copy")
    assert "a.bin" not in contents(tmp_path / "copy")
    assert not [name for name in contents(tmp_path / "copy") if name.endswith(".tmp")]


def test_a_missing_added_or_linked_file_is_named(checkpoints: CheckpointContext, source: Path) -> None:
    storage_id = checkpoints.upload(source)
    folder = files_of(checkpoints, storage_id)
    shutil.move(folder / "a.bin", folder / "c.bin")
    with pytest.raises(CheckpointError, match=r"a\.bin: the file is missing"):
        checkpoints.get_metadata(storage_id)
    shutil.copy(folder / "c.bin", folder / "a.bin")
    with pytest.raises(CheckpointError, match=r"c\.bin: a file that does not belong to the checkpoint"):
        checkpoints.get_metadata(storage_id)
    (folder / "c.bin").unlink()
    (folder / "a.bin").unlink()
    (folder / "a.bin").symlink_to(source / "a.bin")
    with pytest.raises(CheckpointError, match=r"a\.bin: the file is missing"):
        checkpoints.get_metadata(storage_id)


def test_every_changed_byte_of_a_manifest_is_detected(checkpoints: CheckpointContext) -> None:
    storage_id = stored(checkpoints, steps_completed=3)
    manifest = checkpoints.directory / storage_id / "manifest.json"
    whole = manifest.read_bytes()
    for place in range(len(whole)):
        manifest.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json: "):
            checkpoints.get_metadata(storage_id)


@pytest.mark.parametrize("damaged", ["file", "manifest"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(checkpoints: CheckpointContext, damaged: str) -> None:
    first, second = stored(checkpoints), stored(checkpoints)
    place = checkpoints.directory / second
    flip(place / "files" / "file" if damaged == "file" else place / "manifest.json")
    with pytest.warns(CheckpointWarning, match=f"skipped a damaged checkpoint: .*{second}"):
        assert checkpoints.latest() == first


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("storage_id", ["../other", "a/b", "", ".", "..", "/etc", ".tmp-a.01234567", 3])
def test_an_id_that_is_a_path_is_rejected(checkpoints: CheckpointContext, storage_id: Any) -> None:
    for use in (checkpoints.get_metadata, checkpoints.delete, lambda it: checkpoints.download(it, "copy")):
        with pytest.raises(ConfigError, match="storage_id: expected the id of a checkpoint, one name without '/'"):
            use(storage_id)


def test_an_unknown_checkpoint_id_is_named(checkpoints: CheckpointContext) -> None:
    with (
        pytest.raises(CheckpointError, match="storage/unknown: no checkpoint there"),
        checkpoints.restore_path("unknown"),
    ):
        raise AssertionError


def test_a_missing_folder_is_named(checkpoints: CheckpointContext, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing: expected a folder to store, got none"):
        checkpoints.upload(tmp_path / "missing")
    with pytest.raises(ConfigError, match="ckpt_dir: expected a folder, got None"):
        checkpoints.upload(None)
    assert names(checkpoints) == []


def test_links_are_not_stored(checkpoints: CheckpointContext, tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="deep/link: expected a file or a folder to store, got a link"),
        checkpoints.store_path() as (path, _),
    ):
        (path / "deep").mkdir()
        (path / "deep" / "link").symlink_to(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ([1, 2], "metadata: expected a dict, got list"),
        ({"steps_completed": "3"}, "steps_completed: expected a whole number, got '3'"),
        ({"steps_completed": True}, "steps_completed: expected a whole number, got True"),
        ({"model": object()}, "metadata.model: cannot store a builtins.object"),
    ],
)
def test_metadata_that_cannot_be_stored_are_rejected_before_the_block(
    checkpoints: CheckpointContext, metadata: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=sentence), checkpoints.store_path(metadata):
        raise AssertionError
    assert not checkpoints.directory.exists()


def test_a_single_process_of_several_cannot_store_for_all(tmp_path: Path) -> None:
    second = CheckpointContext(tmp_path, DistributedContext(rank=1, size=2, local_rank=1, local_size=2))
    with pytest.raises(ConfigError, match="rank 1 stores a checkpoint: only rank 0 may do this"), second.store_path():
        raise AssertionError


@pytest.mark.parametrize(
    ("storage", "folder"),
    [
        ("a/b", "a/b"),
        (Path("a"), "a"),
        ({"type": "shared_fs", "host_path": "/a", "storage_path": "b"}, "/a/b"),
        ({"host_path": "/a", "save_trial_best": 1}, "/a"),
        ({"type": "directory", "container_path": "/c"}, "/c"),
    ],
)
def test_storage_is_a_path_or_the_mapping_of_determined(storage: Any, folder: str) -> None:
    assert storage_directory(storage) == Path(folder)


def test_unsupported_storage_is_rejected() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown type of checkpoint_storage 's3' \(known: directory, shared_fs"
    ):
        storage_directory({"type": "s3", "bucket": "b"})
    with pytest.raises(ConfigError, match="expected 'container_path: PATH' with type 'directory'"):
        storage_directory({"type": "directory", "host_path": "/a"})
