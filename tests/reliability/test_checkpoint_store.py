"""Checkpoints against power cuts, damage, full and broken disks, and hostile files.

`DOVETAIL_TORTURE=1` runs the same code at full size: 2,000 damages and 50 sizes of disk.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import forked
import numpy as np
import pytest
import torch

from dovetail.checkpoint import CheckpointWarning, inspect, latest, load, load_latest, save, verify
from dovetail.checkpoint.files import DISK, Digest, Files, sweep
from dovetail.checkpoint.manifest import make_manifest
from dovetail.checkpoint.strict_json import seal
from dovetail.errors import CheckpointError

pytestmark = pytest.mark.full_size

_TORTURE = os.environ.get("DOVETAIL_TORTURE") == "1"
_DAMAGES = 2000 if _TORTURE else 200
_DISK_SIZES = 50 if _TORTURE else 8
_FILES = ("manifest.json", "state.json", "tensors.safetensors")


def _state(number: int, size: int = 300) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    tensors = {name: torch.randn(size, generator=generator) for name in ("weight", "bias")}
    return {**tensors, "number": number, "rng": random.Random(number).getstate()}


def _number(state: dict[str, Any]) -> int:
    """Return which state this is, having checked that it is so in every part."""
    expected = _state(state["number"], len(state["weight"]))
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in ("weight", "bias"))
    assert state["rng"] == expected["rng"]
    return int(state["number"])


# --- Power cuts ---------------------------------------------------------------------------------------------


class PowerCut(BaseException):
    """The machine is off. Nothing in the library may catch this and continue."""


@dataclass(eq=False)
class _File:
    live: bytes = b""
    durable: bytes = b""


@dataclass(eq=False)
class _Directory:
    live: dict[str, _File | _Directory] = field(default_factory=dict)
    durable: dict[str, _File | _Directory] = field(default_factory=dict)


class CachedDisk(Files):
    """A disk behind a page cache, whose power is cut after a number of operations.

    Everything also happens on the real disk, below `root`. Beside it a model keeps what a power cut would leave: of
    a file the bytes, of a directory the names, that were there when it was last fsynced.
    """

    def __init__(self, root: Path, operations: float = math.inf, honest: bool = True) -> None:
        self.root, self.operations, self.honest = root, operations, honest
        self.count = 0
        self._open: dict[BinaryIO, _File] = {}
        self._tree = self._read(root)

    def make_directory(self, path: Path) -> None:
        self._spend()
        super().make_directory(path)
        self._parent(path).live[path.name] = _Directory()

    def create(self, path: Path) -> BinaryIO:
        self._spend()
        file = super().create(path)
        self._open[file] = _File()
        self._parent(path).live[path.name] = self._open[file]
        return file

    def write(self, file: BinaryIO, data: memoryview) -> None:
        # The power may fail in the middle, too.
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            self._spend()
            super().write(file, part)
            self._open[file].live += bytes(part)

    def sync(self, file: BinaryIO) -> None:
        self._spend()
        if self.honest:
            self._open[file].durable = self._open[file].live

    def sync_directory(self, path: Path) -> None:
        self._spend()
        directory = self._parent(path / "x")
        directory.durable = dict(directory.live)

    def rename(self, source: Path, target: Path) -> None:
        self._spend()
        super().rename(source, target)
        self._parent(target).live[target.name] = self._parent(source).live.pop(source.name)

    def remove_file(self, path: Path) -> None:
        self._spend()
        super().remove_file(path)
        self._parent(path).live.pop(path.name, None)

    def remove_directory(self, path: Path) -> None:
        self._spend()
        super().remove_directory(path)
        self._parent(path).live.pop(path.name, None)

    def lock(self, path: Path) -> int:
        if self.count > self.operations:
            raise PowerCut
        return super().lock(path)

    def after_power_cut(self, target: Path, names: str, unsynced: str) -> Path:
        """Write what the disk holds after a power cut.

        Args:
            target: Where to.
            names: Which names are there: the `"durable"` ones only, or all that were `"live"`.
            unsynced: What became of bytes that were not fsynced: they are `"lost"`, or `"zeros"` took their place.
        """
        self._write(self._tree, target, names, unsynced)
        return target

    def _spend(self) -> None:
        self.count += 1
        if self.count > self.operations:
            raise PowerCut

    def _parent(self, path: Path) -> _Directory:
        directory = self._tree
        for name in path.parent.relative_to(self.root).parts:
            found = directory.live[name]
            assert isinstance(found, _Directory)
            directory = found
        return directory

    def _read(self, path: Path) -> _Directory:
        entries: dict[str, _File | _Directory] = {}
        for entry in path.iterdir():
            content = b"" if entry.is_dir() else entry.read_bytes()
            entries[entry.name] = self._read(entry) if entry.is_dir() else _File(content, content)
        return _Directory(entries, dict(entries))

    def _write(self, directory: _Directory, target: Path, names: str, unsynced: str) -> None:
        target.mkdir()
        for name, node in (directory.durable if names == "durable" else directory.live).items():
            if isinstance(node, _Directory):
                self._write(node, target / name, names, unsynced)
            else:
                missing = len(node.live) - len(node.durable) if unsynced == "zeros" else 0
                (target / name).write_bytes(node.durable + bytes(missing))


def _disks_after(disk: CachedDisk, scratch: Path) -> Iterator[Path]:
    """Yield what the next process finds: after `kill -9`, and after each kind of power cut."""
    yield disk.root
    for number, (names, unsynced) in enumerate(itertools.product(("durable", "live"), ("lost", "zeros"))):
        yield disk.after_power_cut(scratch / str(number), names, unsynced)


class _Alone:
    """The one process of a group that saves together."""

    rank, size = 0, 1

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(message)]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


def _cut_everywhere(
    tmp_path: Path, prepare: Callable[[Path], object], peers: _Alone | None = None
) -> Iterator[tuple[int, bool, Path]]:
    """Save state 2 once per file operation, cut after it, and yield every disk that may be left."""
    for operations in itertools.count():
        root = tmp_path / str(operations) / "disk"
        root.mkdir(parents=True)
        prepare(root)
        disk = CachedDisk(root, operations)
        try:
            save(root / "checkpoint", _state(2), summary={"step": 2}, files=disk, peers=peers)
            finished = True
        except PowerCut:
            finished = False
        for left in _disks_after(disk, root.parent):
            yield operations, finished, left
        if finished:
            return


@pytest.mark.parametrize("peers", [None, _Alone()], ids=["alone", "together"])
def test_a_replacement_cut_after_any_file_operation_leaves_old_or_new_state(
    tmp_path: Path, peers: _Alone | None
) -> None:
    numbers = []
    cuts = _cut_everywhere(tmp_path, lambda root: save(root / "checkpoint", _state(1), peers=peers), peers)
    for operations, finished, disk in cuts:
        number = _number(load(disk / "checkpoint"))
        assert latest(disk) == disk / "checkpoint"
        assert number == 2 if finished else number in (1, 2)
        assert number == 1 or operations > 0
        numbers.append(number)
        # The next save starts from the leftovers, and removes them.
        save(disk / "checkpoint", _state(3), summary={"step": 3})
        assert _number(load(disk / "checkpoint")) == 3
        assert os.listdir(disk) == ["checkpoint"]
    assert set(numbers) == {1, 2}
    assert len(numbers) > 100


def test_a_first_save_cut_after_any_file_operation_leaves_nothing_or_all(tmp_path: Path) -> None:
    found = set()
    for _, finished, disk in _cut_everywhere(tmp_path, lambda root: None):
        loaded = load_latest(disk)
        found.add(None if loaded is None else _number(loaded[1]))
        assert loaded is not None or not finished
    assert found == {None, 2}


def test_a_save_cut_after_any_file_operation_leaves_other_checkpoints_alone(tmp_path: Path) -> None:
    for _, _, disk in _cut_everywhere(tmp_path, lambda root: save(root / "first", _state(1), summary={"step": 1})):
        assert _number(load(disk / "first")) == 1
        loaded = load_latest(disk)
        assert loaded is not None
        assert _number(loaded[1]) in (1, 2)


def test_a_save_into_a_new_directory_is_durable_when_it_returns(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = CachedDisk(tmp_path / "disk")
    save(disk.root / "deep" / "er" / "checkpoint", _state(1), files=disk)
    left = disk.after_power_cut(tmp_path / "left", "durable", "lost")
    assert _number(load(left / "deep" / "er" / "checkpoint")) == 1


def test_the_simulated_disk_detects_a_missing_fsync(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = CachedDisk(tmp_path / "disk", honest=False)
    save(disk.root / "checkpoint", _state(1), files=disk)
    left = disk.after_power_cut(tmp_path / "left", "durable", "zeros")
    with pytest.raises(CheckpointError):
        load(left / "checkpoint")


# --- Damage -------------------------------------------------------------------------------------------------


def _flip(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    # The first bytes hold lengths and headers: as likely as all the rest.
    position = chance.randrange(min(len(data), chance.choice([8, 200, len(data)])))
    data[position] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def _truncate(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def _extend(file: Path, chance: random.Random) -> None:
    with open(file, "ab") as target:
        target.write(chance.choice([b"\0", b" ", b"\n", b"{}"]))


def _clear_page(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    begin = chance.randrange(len(data))
    data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))
    file.write_bytes(data)


def _remove(file: Path, chance: random.Random) -> None:
    file.unlink()


def _link(file: Path, chance: random.Random) -> None:
    file.rename(file.parent.parent / "moved")
    file.symlink_to(file.parent.parent / "moved")


def _exchange(file: Path, chance: random.Random) -> None:
    shutil.copy(file.parent.parent / "1" / file.name, file)


def _rename(file: Path, chance: random.Random) -> None:
    other = file.with_name(chance.choice([name for name in _FILES if name != file.name]))
    (first, second) = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)


_DAMAGE = [_flip, _flip, _flip, _flip, _truncate, _extend, _clear_page, _remove, _link, _exchange, _rename]


def test_every_damage_is_detected_named_and_skipped(tmp_path: Path) -> None:
    chance = random.Random(0)
    for number in (0, 1, 2):
        save(tmp_path / "whole" / str(number), _state(number), summary={"step": number})
    for index in range(_DAMAGES):
        damage, name = _DAMAGE[index % len(_DAMAGE)], _FILES[index // len(_DAMAGE) % len(_FILES)]
        disk = tmp_path / "disk"
        shutil.copytree(tmp_path / "whole", disk)
        damage(disk / "2" / name, chance)
        case = f"damage {index}: {damage.__name__} {name}"
        # Another manifest is a good one that others do not match.
        blamed = _FILES if damage in (_exchange, _rename) else (name,)
        for read in (load, verify):
            with pytest.raises(CheckpointError) as raised:
                read(disk / "2")
            assert any(str(disk / "2" / file) in str(raised.value) for file in blamed), case
        with pytest.warns(CheckpointWarning, match=str(disk / "2")):
            loaded = load_latest(disk)
        assert loaded is not None, case
        assert _number(loaded[1]) == 1, case
        shutil.rmtree(disk)


def test_every_changed_bit_of_the_manifest_is_detected(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {})
    whole = (path / "manifest.json").read_bytes()
    step = 1 if _TORTURE else 7
    for bit in range(0, 8 * len(whole), step):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (path / "manifest.json").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"checkpoint/manifest\.json"):
            inspect(path)


def test_an_extra_file_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {})
    (path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint/notes\.txt: a file that does not belong"):
        load(path)


# --- Disks that are full or broken --------------------------------------------------------------------------


class Unaware(Files):
    """Does not look for free space, so that the write itself meets the end of the disk."""

    def free_space(self, path: Path) -> int:
        return 1 << 60


def _fill(disk: Path) -> bool:
    """Save a small and then a large checkpoint under one name; return whether there was room for both."""
    save(disk / "checkpoint", _state(1), files=Unaware())
    failure = _failure_of_saving(disk / "checkpoint", _state(2, 20_000), Unaware())
    if failure is not None:
        assert isinstance(failure.__cause__, OSError)
        assert failure.__cause__.errno in (errno.ENOSPC, errno.EFBIG)
        assert str(disk / "checkpoint") in str(failure)
    assert _number(load(disk / "checkpoint")) == (2 if failure is None else 1)
    assert os.listdir(disk) == ["checkpoint"]
    return failure is None


def _failure_of_saving(path: Path, state: dict[str, Any], files: Files) -> CheckpointError | None:
    try:
        save(path, state, files=files)
    except CheckpointError as error:
        return error
    return None


def _mount(disk: Path, size: int) -> bool:
    disk.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _sizes(first: int, last: int) -> list[int]:
    return [first + (last - first) * index // (_DISK_SIZES - 1) for index in range(_DISK_SIZES)]


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    disk, outcomes = tmp_path / "disk", set()
    for size in _sizes(49_152, 262_144):
        if not _mount(disk, size):
            pytest.skip("mounting is not allowed here; the test with a limit on files covers this")
        try:
            outcomes.add(_fill(disk))
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    assert outcomes == {False, True}


def test_a_file_size_limit_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    outcomes = set()
    for size in _sizes(16_384, 180_000):
        disk = tmp_path / str(size)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            outcomes.add(_fill(disk))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcomes == {False, True}


class Breaking(CachedDisk):
    """A disk of which one operation fails."""

    def __init__(self, root: Path, failing: int, code: int) -> None:
        super().__init__(root)
        self._failing, self._code = failing, code

    def _spend(self) -> None:
        super()._spend()
        if self.count == self._failing:
            raise OSError(self._code, os.strerror(self._code))


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EROFS, errno.ENOSPC], ids=errno.errorcode.get)
def test_an_error_of_any_file_operation_is_raised_and_keeps_a_checkpoint(tmp_path: Path, code: int) -> None:
    raised = 0
    for failing in itertools.count(1):
        root = tmp_path / str(failing)
        save(root / "checkpoint", _state(1), summary={"step": 1})
        disk = Breaking(root, failing, code)
        failure = _failure_of_saving(root / "checkpoint", _state(2), disk)
        if failure is not None:
            assert os.strerror(code) in str(failure)
            assert isinstance(failure.__cause__, OSError)
            raised += 1
        assert _number(load(root / "checkpoint")) in ({2} if failure is None else {1, 2})
        save(root / "checkpoint", _state(3))
        assert _number(load(root / "checkpoint")) == 3
        assert os.listdir(root) == ["checkpoint"]
        if disk.count < failing:
            break
    assert raised > 15


def test_a_permanently_failing_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    class Dead(Files):
        def write(self, file: BinaryIO, data: memoryview) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def remove_file(self, path: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

    save(tmp_path / "checkpoint", _state(1))
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path / "checkpoint", _state(2), files=Dead())
    assert latest(tmp_path) == tmp_path / "checkpoint"
    assert _number(load(tmp_path / "checkpoint")) == 1


# --- Hostile files ------------------------------------------------------------------------------------------


class _Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/dovetail-was-here",)


_PICKLE = pickle.dumps(_Exploit())


def _forge(path: Path, state: bytes = b"{}", tensors: bytes = b"\x02\0\0\0\0\0\0\0{}", **changes: Any) -> Path:
    """Write a checkpoint whose checksums are right and whose contents are the attacker's."""
    path.mkdir(parents=True)
    digests = {"state.json": Digest(), "tensors.safetensors": Digest()}
    for (name, digest), content in zip(digests.items(), (state, tensors), strict=True):
        (path / name).write_bytes(content)
        digest.update(content)
    document = json.loads(make_manifest({name: digest.stored for name, digest in digests.items()}, {}))
    del document["sha256"]
    (path / "manifest.json").write_bytes(seal({**document, **changes}))
    return path


def _safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _hostile_states() -> list[bytes]:
    trees: list[Any] = [
        {"$import": "os"},
        {"$class": "os.system"},
        {"$scalar": ["object", "00" * 8]},
        {"$scalar": ["O", "00" * 8]},
        {"$scalar": ["float32", "00"]},
        {"$scalar": [["float32"], "00000000"]},
        {"$int": "__import__('os')"},
        {"$int": 7},
        {"$float": "00"},
        {"$bytes": "?"},
        {"$tuple": "abc"},
        {"$tuple": [1], "other": 2},
        {"$dict": [[[], 1]]},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": 7},
        {"$counter": [[{"a": 1}, 2]]},
        {"$tensor": "nowhere"},
        {"$tensor": ["a"]},
        {"$array": "../../etc/passwd"},
        {"$complex": {"a": 1}},
        {"$complex": 7},
        {"$tuple": [1, 2]},
    ]
    texts = [json.dumps({"value": tree}).encode() for tree in trees[:-1]] + [json.dumps(trees[-1]).encode()]
    nested = b'{"a":' + b'{"$tuple":[' * 2000 + b"]}" * 2000 + b"}"
    shallow = b'{"a":' + b"[" * 400 + b"]" * 400 + b"}"
    long = b'{"a":' + b"9" * 1_000_000 + b"}"
    return [*texts, _PICKLE, b"", b"\xff", b"{" * 100_000, b"[" * 100_000, nested, shallow, long,
            b'{"a": 1, "a": 2}', b'{"a": NaN}', b"[1]", b"null", b'{"a": 1} trailing']  # fmt: skip


def _hostile_tensors(scratch: Path) -> list[bytes]:
    torch.save({"a": torch.ones(2)}, scratch / "zip.pt")
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return [
        _PICKLE,
        (scratch / "zip.pt").read_bytes(),
        _safetensors({}, length=(1 << 64) - 1),
        _safetensors({}, length=1 << 40),
        _safetensors({"a": {**entry, "shape": [1 << 60]}}, bytes(4)),
        _safetensors({"a": {**entry, "shape": [1 << 60], "data_offsets": [0, 1 << 62]}}, bytes(4)),
        _safetensors({"a": {**entry, "shape": [0, 1 << 62], "data_offsets": [0, 0]}}),
        _safetensors({"a": {**entry, "dtype": "os.system"}}, bytes(4)),
        _safetensors({"a": {**entry, "data_offsets": [-4, 0]}}, bytes(4)),
        _safetensors({"a": entry}, bytes(4)),
    ]


def _hostile(root: Path) -> list[Path]:
    numbers = itertools.count()

    def place() -> Path:
        return root / f"{next(numbers):03}"

    cases = [_forge(place(), state=state) for state in _hostile_states()]
    cases += [_forge(place(), tensors=tensors) for tensors in _hostile_tensors(root)]
    file = {"size": 1, "sha256": "0" * 64}
    for name in ("../outside", "/etc/passwd", "a/../../b", "..", "data.pkl"):
        files = {name: file, "state.json": file, "tensors.safetensors": file}
        cases.append(_forge(place(), files=files))
    cases.append(_forge(place(), files={"state.json": {**file, "size": 1 << 80}, "tensors.safetensors": file}))
    cases.append(_forge(place(), summary={"$import": "os"}))
    cases.append(_forge(place(), format_version=10**18))
    for name in _FILES:
        for target in ("/etc/passwd", "/dev/zero"):
            cases.append(_forge(place()))
            (cases[-1] / name).unlink()
            (cases[-1] / name).symlink_to(target)
        cases.append(_forge(place()))
        (cases[-1] / name).unlink()
        os.mkfifo(cases[-1] / name)
    for content in (_PICKLE, b"[" * 100_000, b"{}", b" " * (17 << 20)):
        cases.append(_forge(place()))
        (cases[-1] / "manifest.json").write_bytes(content)
    cases.append(_forge(place()))
    (cases[-1] / "data.pkl").write_bytes(_PICKLE)
    return cases


_WATCH = """
import json, os, sys, warnings
import numpy, torch
from dovetail import checkpoint
from dovetail.errors import CheckpointError

root, good, *cases = json.load(sys.stdin)
root = os.path.realpath(root)
warnings.simplefilter("ignore")
for read in (checkpoint.load, checkpoint.verify, checkpoint.inspect):
    read(good)
events, watching = [], True
_FORBIDDEN = ("exec", "compile", "import", "marshal", "pickle", "socket", "subprocess", "ctypes", "code",
              "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.mkdir")

def watch(event, arguments):
    if not watching:
        return
    outside = event == "open" and not os.path.realpath(str(arguments[0])).startswith(root)
    if outside or event.startswith(_FORBIDDEN):
        events.append([event, repr(arguments)[:200]])

sys.addaudithook(watch)
loaded, unclear = [], []
for case in cases:
    for read in (checkpoint.load, checkpoint.verify, checkpoint.inspect):
        try:
            read(case)
            if read is checkpoint.load:
                loaded.append(case)
        except CheckpointError as error:
            if not str(error).startswith(case + "/"):
                unclear.append(str(error))
checkpoint.latest(root)
watching = False
json.dump({"events": events, "loaded": loaded, "unclear": unclear}, sys.stdout)
"""


def _watch(root: Path, cases: list[Path]) -> dict[str, Any]:
    good = save(root / "good", {"tensor": torch.ones(2), "scalar": np.float32(1)})
    finished = subprocess.run(
        [sys.executable, "-c", _WATCH],
        input=json.dumps([str(path) for path in (root, good, *cases)]),
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def test_hostile_checkpoints_are_rejected_without_side_effects(tmp_path: Path) -> None:
    cases = _hostile(tmp_path)
    assert len(cases) > 60
    assert _watch(tmp_path, cases) == {"events": [], "loaded": [], "unclear": []}
    assert not Path("/tmp/dovetail-was-here").exists()


def test_class_and_module_names_are_loaded_as_strings(tmp_path: Path) -> None:
    text = {"__class__": "os.system", "__reduce__": ["posix", "system"], "py/object": "subprocess.Popen"}
    case = _forge(tmp_path / "names", state=json.dumps(text).encode())
    assert _watch(tmp_path, [case]) == {"events": [], "loaded": [str(case)], "unclear": []}
    assert load(case) == text


# --- Several processes --------------------------------------------------------------------------------------

_SHARE = """
import sys, warnings
import torch
from pathlib import Path
from dovetail.checkpoint import latest, load, save

warnings.simplefilter("error")
path, number = Path(sys.argv[1]), int(sys.argv[2])
for _ in range(100):
    if number:
        save(path, {"tensor": torch.full((1000,), number), "number": number})
    else:
        state = load(path)
        assert torch.equal(state["tensor"], torch.full((1000,), state["number"]))
        assert latest(path.parent) == path
"""


@pytest.mark.slow
def test_processes_that_share_one_name_never_see_half_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "shared" / "checkpoint", {"tensor": torch.full((1000,), 9), "number": 9})
    writers_and_readers = [1, 2, 3, 0, 0]
    script = tmp_path / "share.py"
    script.write_text(_SHARE)
    with (tmp_path / "log.txt").open("w") as log:
        processes = [
            forked.start(script, path, number, folder=tmp_path, stdout=log, stderr=log)
            for number in writers_and_readers
        ]
        codes = [process.wait() for process in processes]
    assert codes == [0, 0, 0, 0, 0], (tmp_path / "log.txt").read_text()
    assert os.listdir(path.parent) == ["checkpoint"]


# --- Old formats --------------------------------------------------------------------------------------------

_GOLDEN = Path(__file__).parent / "golden"


def test_the_golden_checkpoint_of_format_1_still_loads() -> None:
    state = load(_GOLDEN / "v1")
    weight = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert torch.equal(state["model"]["weight"], weight)
    assert torch.equal(state["model"]["tied"], weight)
    assert torch.equal(state["model"]["transposed"], weight.T)
    assert state["model"]["scalar"].item() == -0.5
    assert state["optimizer"]["state"][0]["step"].item() == 7
    assert state["optimizer"]["state"][0]["lr"] == 1e-3
    assert state["optimizer"]["groups"] == [{"params": [0], "nan": None}]
    assert {name: str(tensor.dtype) for name, tensor in state["dtypes"].items()} == {
        name: f"torch.{name}" for name in state["dtypes"]
    }
    assert len(state["dtypes"]) == 8
    assert all(tensor[:2].tolist() == [0, 1] for tensor in state["dtypes"].values())
    assert state["rng"] == {"python": (3, (1, 4294967295, 1208925819614629174706176), None), "bytes": b"\x00\xff"}
    assert state["numpy"]["array"].dtype == np.int16
    assert state["numpy"]["array"].tolist() == [0, 1, 2, 3]
    assert repr(state["numpy"]["scalar"]) == repr(np.float32(1.5))
    assert repr(state["numbers"]) == "[inf, nan, -0.0, 0.1, True, 'text ü']"
    assert state["$odd"] == {"$key": (), 1.5: []}


def test_the_summary_of_the_golden_checkpoint_of_format_1_is_read() -> None:
    info = inspect(_GOLDEN / "v1")
    assert info.format_version == 1
    assert info.summary == {"step": 7, "epoch": 1, "metrics": {"loss": 0.25}}


# --- Memory -------------------------------------------------------------------------------------------------

_MEASURE = """
import resource, sys
import torch
from dovetail.checkpoint import save

save(sys.argv[1] + "/warm", {"a": torch.ones(10).T, "b": torch.ones(4, 4).T})
large = [torch.empty(15_000_000).fill_(index) for index in range(3)]
state = {"large": large, "transposed": torch.empty(3000, 5000).fill_(7).T}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save(sys.argv[1] + "/large", state)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_saving_240_megabytes_adds_less_than_a_tenth_to_peak_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert inspect(tmp_path / "large").size > 240_000_000
    assert int(finished.stdout) * 1024 < 24_000_000


_KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from dovetail.checkpoint.files import DISK, reserve

ready, started = os.pipe()
with reserve(DISK, Path(sys.argv[1])):
    orphan = os.fork()
    if orphan:
        # Wait until the orphan runs: only then the functions that follow a fork have been called in it.
        os.read(ready, 1)
        print(orphan, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    os.write(started, b"x")
    # The orphan lives until the test closes its standard input.
    os.close(1)
    os.read(0, 1)
    os._exit(0)
"""


def test_a_forked_process_does_not_keep_the_lock_of_a_killed_writer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED_WRITER, str(tmp_path / "ck")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        orphan = int(writer.stdout.readline())
        assert writer.wait(timeout=60) == -signal.SIGKILL
        os.kill(orphan, 0)
        assert len(os.listdir(tmp_path)) == 1
        sweep(DISK, tmp_path)
        assert os.listdir(tmp_path) == []
