"""Saving, replacing, listing, verifying and loading checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import checkpoint
from dovetail.checkpoint import CheckpointWarning, inspect, latest, list_checkpoints, load, load_latest, save, verify
from dovetail.checkpoint.files import Files
from dovetail.checkpoint.store import migrate
from dovetail.errors import CheckpointError, ConfigError


def _damage(path: Path) -> None:
    with open(path / "tensors.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def test_a_checkpoint_has_three_files(tmp_path: Path) -> None:
    path = save(tmp_path / "deep" / "er" / "checkpoint", {"a": torch.ones(1), "b": 2})
    assert sorted(os.listdir(path)) == ["manifest.json", "state.json", "tensors.safetensors"]
    assert os.listdir(path.parent) == ["checkpoint"]


def test_saving_returns_the_given_path(tmp_path: Path) -> None:
    assert save(str(tmp_path / "checkpoint"), {}) == tmp_path / "checkpoint"


def test_a_bare_name_is_saved_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save("checkpoint", {"a": 1})
    assert load("checkpoint") == {"a": 1}
    assert latest(".") == Path("checkpoint")


def test_saving_again_replaces_the_checkpoint_without_leftovers(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "checkpoint", {"number": number})
    assert load(tmp_path / "checkpoint") == {"number": 2}
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("precious"),
        lambda path: (path.mkdir(), (path / "thesis.tex").write_text("precious")),
        lambda path: path.symlink_to(path.parent),
    ],
    ids=["file", "directory", "link"],
)
def test_a_folder_that_is_not_a_checkpoint_is_never_replaced(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "target")
    with pytest.raises(CheckpointError, match="target: not a checkpoint of Dovetail, so it is not replaced"):
        save(tmp_path / "target", {})
    assert os.listdir(tmp_path) == ["target"]
    assert (tmp_path / "target").is_symlink() or "precious" in next(
        file.read_text() for file in (tmp_path / "target", *(tmp_path / "target").glob("*")) if file.is_file()
    )


def test_a_damaged_checkpoint_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {"a": 1})
    (path / "manifest.json").unlink()
    assert load(save(path, {"a": 2})) == {"a": 2}


@pytest.mark.parametrize("damage", ["file", "folder", "link", "moved"])
def test_a_damaged_checkpoint_with_foreign_files_is_moved_aside(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "runs"
    path = save(folder / "checkpoint", {"a": 1})
    if damage == "moved":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "link":
        (path / "thesis.tex").symlink_to(tmp_path / "thesis.tex")
    else:
        inner = path / "thesis" if damage == "folder" else path
        inner.mkdir(exist_ok=True)
        (inner / "thesis.tex").write_text("precious")
    kept = sorted(os.listdir(path))
    with pytest.warns(CheckpointWarning, match=r"runs/checkpoint: a damaged checkpoint had this name; it is kept as"):
        save(path, {"a": 2})
    assert load(path) == {"a": 2}
    (aside,) = (each for each in folder.iterdir() if each != path)
    assert aside.name.startswith("checkpoint.damaged-")
    assert sorted(os.listdir(aside)) == kept
    # It is neither listed nor named again.
    assert [info.path for info in list_checkpoints(folder)] == [path]
    assert latest(folder) == path


def test_a_temporary_name_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="reserved for temporary files"):
        save(tmp_path / ".tmp-a.0123abcd", {})


def test_an_unknown_error_policy_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_error: expected 'raise' or 'warn', got 'ignore'"):
        save(tmp_path / "checkpoint", {}, on_error="ignore")  # type: ignore[call-overload] # the mistake under test


def test_map_location_moves_every_tensor(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {"a": torch.ones(2)})
    assert load(path, map_location="meta")["a"].device.type == "meta"


def test_the_manifest_stores_the_summary_of_the_writer(tmp_path: Path) -> None:
    summary = {"epoch": 2, "batches": 70, "metrics": {"loss": 0.25, "accuracy": float("nan")}, "note": "half way"}
    info = inspect(save(tmp_path / "checkpoint", {"a": torch.ones(100)}, summary=summary))
    assert repr(info.summary) == repr(summary)
    assert info.step == 70
    assert info.metrics == {"loss": 0.25}
    assert info.format_version == checkpoint.FORMAT_VERSION
    assert info.created.tzinfo is not None
    assert info.size == sum(file.stat().st_size for file in info.path.iterdir())
    assert info.files.keys() == {"state.json", "tensors.safetensors"}


def test_a_summary_holds_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"summary\.loss: expected a plain number, got a tensor"):
        save(tmp_path / "checkpoint", {}, summary={"loss": torch.ones(())})


def test_a_summary_that_is_not_a_dict_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="summary: expected a dict, got list"):
        save(tmp_path / "checkpoint", {}, summary=[1])  # type: ignore[call-overload] # the mistake under test


def test_a_missing_checkpoint_is_named_in_the_error(tmp_path: Path) -> None:
    for read in (load, verify, inspect):
        with pytest.raises(CheckpointError, match="nowhere: no checkpoint there: the path does not exist"):
            read(tmp_path / "nowhere")


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: no checkpoint there: the path is not a directory"):
        load(tmp_path / "file")


def test_a_symbolic_link_to_a_checkpoint_loads(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"a": 1})
    (tmp_path / "best").symlink_to("checkpoint")
    assert load(tmp_path / "best") == {"a": 1}


def test_loading_without_verification_trusts_the_bytes(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {"a": torch.zeros(1)})
    _damage(path)
    assert load(path, verify=False)["a"].item() != 0
    with pytest.raises(CheckpointError, match=r"checkpoint/tensors\.safetensors: the file is damaged"):
        load(path)


def _with_manifest(path: Path, change: Any) -> None:
    """Write a manifest with a valid checksum, as a forger would."""
    from dovetail.checkpoint.strict_json import seal

    document = json.loads((path / "manifest.json").read_text())
    del document["sha256"]
    change(document)
    (path / "manifest.json").write_bytes(seal(document))


def test_a_newer_format_raises_with_an_upgrade_hint(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {})
    _with_manifest(path, lambda document: document.update(format_version=2, novelty="unknown here"))
    with pytest.raises(CheckpointError, match=r"format version 2 is newer .* upgrade dovetail"):
        load(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.update(format="zip"), "not the manifest of a Dovetail checkpoint"),
        (lambda d: d.update(format_version=0), "not the manifest of a Dovetail checkpoint"),
        (lambda d: d.update(format_version=True), "not the manifest of a Dovetail checkpoint"),
        (lambda d: d.pop("summary"), "a field is missing, unknown or of the wrong type"),
        (lambda d: d.update(more=1), "a field is missing, unknown or of the wrong type"),
        (lambda d: d.update(files=[]), "a field is missing, unknown or of the wrong type"),
        (lambda d: d.update(created="yesterday"), "created: not a date: 'yesterday'"),
        (lambda d: d.update(summary=[]), "the summary is not a dict"),
        (lambda d: d.update(summary={"$tensor": "a"}), "refers to tensor 'a', which is not there"),
        (lambda d: d["files"].pop("state.json"), r"does not list state\.json"),
        (lambda d: d["files"].update({"../../etc/passwd": {}}), "lists '../../etc/passwd', which does not belong"),
        (lambda d: d["files"].update({"/etc/passwd": {}}), "lists '/etc/passwd', which does not belong"),
        (lambda d: d["files"].update({"state.json": {"size": "1"}}), r"state\.json: expected a size and a SHA-256"),
    ],
)
def test_a_manifest_with_invalid_fields_is_rejected(tmp_path: Path, change: Any, sentence: str) -> None:
    path = save(tmp_path / "checkpoint", {})
    _with_manifest(path, change)
    with pytest.raises(CheckpointError, match=f"manifest.json: {sentence}"):
        inspect(path)


def test_older_state_passes_through_every_migration() -> None:
    steps = {1: lambda state: {**state, "one": 1}, 2: lambda state: {**state, "two": state["one"] + 1}}
    assert migrate({}, 1, 3, steps) == {"one": 1, "two": 2}
    assert migrate({}, 2, 2, steps) == {}


def test_checkpoints_are_listed_by_step_then_time(tmp_path: Path) -> None:
    for name, summary in [("c", {"batches": 20}), ("a", {"batches": 100}), ("b", {"batches": 20}), ("d", None)]:
        save(tmp_path / name, {}, summary=summary)
    assert [info.path.name for info in list_checkpoints(tmp_path)] == ["d", "c", "b", "a"]


def test_folders_that_are_not_checkpoints_are_not_listed(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {})
    (tmp_path / "link").symlink_to("checkpoint")
    (tmp_path / "logs").mkdir()
    (tmp_path / "history.csv").touch()
    (tmp_path / ".tmp-checkpoint.0123abcd").mkdir()
    (tmp_path / ".tmp-checkpoint.0123abcd" / "state.json").touch()
    assert [info.path.name for info in list_checkpoints(tmp_path)] == ["checkpoint"]


def test_a_missing_directory_holds_no_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    assert latest(tmp_path / "none") is None
    assert load_latest(tmp_path / "none") is None


def test_a_checkpoint_is_not_a_folder_of_checkpoints(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {"a": 1})
    uses: list[Any] = [list_checkpoints, latest, load_latest, lambda inside: save(inside / "inner", {})]
    for use in uses:
        with pytest.raises(CheckpointError, match=r"checkpoint: is a checkpoint itself: give the folder around it"):
            use(path)
    assert load(path) == {"a": 1}


def test_an_unreadable_checkpoint_warns_and_is_not_listed(tmp_path: Path) -> None:
    save(tmp_path / "good", {})
    (save(tmp_path / "bad", {}) / "manifest.json").unlink()
    with pytest.warns(CheckpointWarning, match=r"skipping a damaged checkpoint: .*bad/manifest\.json") as caught:
        assert [info.path.name for info in list_checkpoints(tmp_path)] == ["good"]
    assert [warning.filename for warning in caught] == [__file__]


def test_the_newest_intact_checkpoint_is_the_latest(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / f"{number}", {"number": torch.tensor(number)}, summary={"step": number})
    _damage(tmp_path / "2")
    with pytest.warns(CheckpointWarning, match=r"2/tensors\.safetensors"):
        assert latest(tmp_path) == tmp_path / "1"
    with pytest.warns(CheckpointWarning, match=r"2/tensors\.safetensors"):
        found = load_latest(tmp_path)
    assert found == (tmp_path / "1", {"number": torch.tensor(1)})


def test_a_save_that_died_between_its_renames_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {"a": 1}, summary={"step": 1})
    path.rename(tmp_path / ".old-checkpoint.0123abcd")
    assert load(path) == {"a": 1}
    assert inspect(path).path == path
    assert latest(tmp_path) == path
    assert [info.path for info in list_checkpoints(tmp_path)] == [path]
    save(path, {"a": 2})
    assert load(path) == {"a": 2}
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_temporaries_of_dead_writers_are_removed_by_the_next_save(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from dovetail.checkpoint.files import DISK, reserve
with reserve(DISK, Path(sys.argv[1]) / "checkpoint") as temporary:
    (temporary / "state.json").touch()
    os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert [name[:5] for name in os.listdir(tmp_path)] == [".tmp-"]
    save(tmp_path / "other", {})
    assert os.listdir(tmp_path) == ["other"]


def test_temporaries_of_living_writers_are_left_alone(tmp_path: Path) -> None:
    class Nested(Files):
        """Saves another checkpoint in the middle of the first one's write."""

        def sync_directory(self, path: Path) -> None:
            if path.name.startswith(".tmp-"):
                save(tmp_path / "other", {"b": 2})
                assert path.is_dir()
            super().sync_directory(path)

    save(tmp_path / "checkpoint", {"a": 1}, files=Nested())
    assert load(tmp_path / "checkpoint") == {"a": 1}
    assert load(tmp_path / "other") == {"b": 2}


def test_names_that_only_look_temporary_are_never_removed(tmp_path: Path) -> None:
    for name in (".tmp-mine", ".old-mine", ".tmp-a.xyz", "tmp-a.0123abcd"):
        (tmp_path / name).mkdir()
    save(tmp_path / "mine", {})
    assert sorted(os.listdir(tmp_path)) == [".old-mine", ".tmp-a.xyz", ".tmp-mine", "mine", "tmp-a.0123abcd"]


def test_writers_and_readers_of_one_name_never_see_half_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    states = [{"tensor": torch.full((1000,), float(number)), "number": number} for number in range(3)]
    save(path, states[0])
    failures: list[BaseException] = []

    def repeat(act: Any) -> None:
        try:
            for _ in range(30):
                act()
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        state = load(path)
        assert torch.equal(state["tensor"], states[state["number"]]["tensor"])

    acts = [lambda: save(path, states[1]), lambda: save(path, states[2]), read, read]
    threads = [threading.Thread(target=repeat, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_full_disk_is_detected_before_writing(tmp_path: Path) -> None:
    class Full(Files):
        def free_space(self, path: Path) -> int:
            return 1_000_000

    save(tmp_path / "checkpoint", {"a": 1})
    with pytest.raises(CheckpointError, match=r"checkpoint: the disk is too full: the checkpoint needs 5,0.* bytes"):
        save(tmp_path / "checkpoint", {"a": torch.ones(1_000_000)}, files=Full())
    assert load(tmp_path / "checkpoint") == {"a": 1}


def test_a_failed_save_may_warn_and_continue(tmp_path: Path) -> None:
    class Broken(Files):
        def make_directory(self, path: Path) -> None:
            raise OSError(5, "Input/output error")

    with pytest.warns(CheckpointWarning, match="checkpoint: the checkpoint could not be written: .*Input/output"):
        assert save(tmp_path / "checkpoint", {}, on_error="warn", files=Broken()) is None


def test_state_that_cannot_be_stored_raises_even_if_errors_only_warn(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot store"):
        save(tmp_path / "checkpoint", {"a": object()}, on_error="warn")


def test_the_checkpoint_module_imports_without_torch(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"a": torch.ones(3)}, summary={"step": 3})
    code = """
import sys
from dovetail import checkpoint
checkpoint.verify(sys.argv[1] + "/checkpoint")
assert checkpoint.inspect(sys.argv[1] + "/checkpoint").step == 3
assert checkpoint.latest(sys.argv[1]).name == "checkpoint"
checkpoint.prune(sys.argv[1], last=1)
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
