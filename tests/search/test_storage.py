"""Copies of checkpoints outside of the file system."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

from dovetail.checkpoint.files import digest_of
from dovetail.checkpoint.stored_files import make_stored_manifest
from dovetail.errors import MissingExtraError, UnknownNameError
from dovetail.search.checkpoints import latest_checkpoint
from dovetail.search.storage import pull, push


def write_checkpoint(trial: Path, name: str, steps: int, content: str) -> Path:
    """Write what `core.checkpoint` writes, without torch."""
    checkpoint = trial / name
    (checkpoint / "files" / "inner").mkdir(parents=True)
    (checkpoint / "files" / "inner" / "weights.txt").write_text(content)
    files = {"inner/weights.txt": digest_of(checkpoint / "files" / "inner" / "weights.txt")}
    (checkpoint / "manifest.json").write_bytes(make_stored_manifest({"steps_completed": steps}, files))
    return checkpoint


def contents(trial: Path) -> dict[str, str]:
    return {path.parts[-4]: path.read_text() for path in trial.glob("*/files/inner/weights.txt")}


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a server on this machine that speaks S3."""
    missing = [name for name in ("s3fs", "moto", "flask") if find_spec(name) is None]
    if missing:
        pytest.skip(f"S3 IS NOT TESTED: {', '.join(missing)} not installed (the extra dev has them)")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/runs/{tmp_path.name}"
    return f"file://{tmp_path}/stored" if request.param == "file" else f"memory://{tmp_path.name}"


def test_a_pushed_checkpoint_can_be_pulled_elsewhere(url: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "here", "first", 1, "one")
    write_checkpoint(tmp_path / "here", "second", 2, "two")
    assert push(tmp_path / "here", url) == ["first", "second"]
    assert pull(url, tmp_path / "there") == tmp_path / "there" / "second"
    assert contents(tmp_path / "there") == {"first": "one", "second": "two"}


def test_a_stored_checkpoint_is_not_sent_again(url: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "first", 1, "one")
    assert push(tmp_path, url) == ["first"]
    write_checkpoint(tmp_path, "second", 2, "two")
    assert push(tmp_path, url) == ["second"]
    assert push(tmp_path, url) == []


def test_a_name_with_new_contents_is_stored_again(url: str, tmp_path: Path) -> None:
    push_of = [push(write_checkpoint(tmp_path, "best", 1, "worse").parent, url)]
    shutil.rmtree(tmp_path / "best")
    push_of.append(push(write_checkpoint(tmp_path, "best", 2, "better").parent, url))
    assert push_of == [["best"], ["best"]]
    pull(url, tmp_path / "there")
    assert contents(tmp_path / "there") == {"best": "better"}


def test_a_checkpoint_removed_by_a_trial_is_removed_from_the_storage(url: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "here", "first", 1, "one")
    push(tmp_path / "here", url)
    write_checkpoint(tmp_path / "here", "second", 2, "two")
    shutil.rmtree(tmp_path / "here" / "first")
    push(tmp_path / "here", url)
    pull(url, tmp_path / "there")
    assert contents(tmp_path / "there") == {"second": "two"}


def test_a_folder_that_lost_all_checkpoints_removes_none(url: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "here", "first", 1, "one")
    push(tmp_path / "here", url)
    (tmp_path / "empty").mkdir()
    assert push(tmp_path / "empty", url) == []
    assert pull(url, tmp_path / "empty") == tmp_path / "empty" / "first"


def test_pulling_from_an_empty_storage_returns_nothing(url: str, tmp_path: Path) -> None:
    assert push(tmp_path / "empty", url) == []
    assert pull(url, tmp_path / "there") is None


def test_a_remote_checkpoint_without_a_completion_marker_is_ignored(url: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "here", "first", 1, "one")
    push(tmp_path / "here", url)
    files, root = fsspec.core.url_to_fs(url)
    (mark,) = files.glob(f"{root}/*.json")
    files.rm_file(mark)
    assert pull(url, tmp_path / "there") is None
    assert contents(tmp_path / "there") == {}
    # Its writer comes back, and does it again.
    assert push(tmp_path / "here", url) == ["first"]
    assert pull(url, tmp_path / "there") == tmp_path / "there" / "first"


def test_a_damaged_remote_checkpoint_is_skipped_for_the_one_before_it(url: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "here", "first", 1, "one")
    write_checkpoint(tmp_path / "here", "second", 2, "two")
    push(tmp_path / "here", url)
    files, root = fsspec.core.url_to_fs(url)
    (damaged,) = files.glob(f"{root}/second-*/files/inner/weights.txt")
    files.pipe_file(damaged, b"owt")
    assert pull(url, tmp_path / "there") == tmp_path / "there" / "first"
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["first"]


def test_a_trial_continues_from_the_pulled_checkpoint(url: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "here", "first", 1, "one")
    push(tmp_path / "here", url)
    pull(url, tmp_path / "there")
    found = latest_checkpoint(tmp_path / "there")
    assert found is not None
    assert (found.reference, found.steps) == ("first", 1)


def test_a_missing_storage_package_is_named(tmp_path: Path) -> None:
    # Google's is not among the extras of the tests.
    with pytest.raises(MissingExtraError, match="gs:// cannot be used: "):
        push(tmp_path, "gs://bucket/trial_1")


def test_an_unknown_storage_kind_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"'memroy'.*'memory'"):
        push(tmp_path, "memroy://place")
