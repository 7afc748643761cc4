from __future__ import annotations

import errno
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail import checkpoint
from dovetail.checkpoint.files import DISK, Files, write_file
from dovetail.checkpoint.manifest import make_manifest
from dovetail.checkpoint.shards import parse_index, run_in_all_processes
from dovetail.errors import CheckpointError

SHARD = "shard-00000-of-00001.safetensors"


class Alone:
    """A group of one process."""

    rank, size = 0, 1

    def __init__(self, mesh: Any = None) -> None:
        self._mesh = mesh

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(message)]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        from torch.distributed.tensor import Shard, zeros

        return zeros(*shape, dtype=dtype, device_mesh=self._mesh, placements=[Shard(0)])


class Answered(Alone):
    """A group in which the other processes have already sent their values."""

    def __init__(self, *others: dict[str, Any]) -> None:
        super().__init__()
        self._others = others

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(message), *self._others]


@pytest.fixture(scope="module")
def peers() -> Iterator[Alone]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield Alone(init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


@pytest.fixture
def saved(peers: Alone, tmp_path: Path) -> Path:
    """A checkpoint with a tensor in parts, a whole one and a number."""
    part = peers.zeros([3, 2], torch.float64)
    part.to_local().copy_(torch.arange(6.0, dtype=torch.float64).view(3, 2))  # type: ignore[attr-defined]
    return checkpoint.save(tmp_path / "saved", {"part": part, "whole": torch.ones(2), "number": 7}, peers=peers)


def rewritten(path: Path, file: str, content: bytes) -> Path:
    """The same checkpoint with another file in it, and a manifest that agrees."""
    (path / file).write_bytes(content)
    (path / "manifest.json").unlink()
    contents = {it.name: it.read_bytes() for it in path.iterdir()}
    for name in contents:
        (path / name).unlink()
    written = {name: write_file(DISK, path / name, [data]) for name, data in contents.items()}
    write_file(DISK, path / "manifest.json", [make_manifest(written, {})])
    return path


def test_a_sharded_tensor_is_loaded_whole(saved: Path) -> None:
    state = checkpoint.load(saved)
    assert type(state["part"]) is Tensor
    assert torch.equal(state["part"], torch.arange(6.0, dtype=torch.float64).view(3, 2))
    assert state["number"] == 7


def test_processes_that_load_together_get_their_shards(saved: Path, peers: Alone) -> None:
    from torch.distributed.tensor import DTensor

    part = checkpoint.load(saved, peers=peers)["part"]
    assert isinstance(part, DTensor)
    assert torch.equal(part.to_local(), torch.arange(6.0, dtype=torch.float64).view(3, 2))


def test_the_shard_index_is_readable_json(saved: Path) -> None:
    part = {"file": SHARD, "offsets": [0, 0], "sizes": [3, 2]}
    expected = {"tensors": {"part": {"dtype": "float64", "shape": [3, 2], "parts": [part]}}}
    assert json.loads((saved / "shards.json").read_text()) == expected


def test_verification_reads_the_shards(saved: Path) -> None:
    checkpoint.verify(saved)
    content = bytearray((saved / SHARD).read_bytes())
    content[-1] ^= 1
    (saved / SHARD).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{SHARD}: the file is damaged"):
        checkpoint.verify(saved)


def test_a_missing_shard_is_named(saved: Path) -> None:
    (saved / SHARD).unlink()
    with pytest.raises(CheckpointError, match=rf"{SHARD}: the file is missing"):
        checkpoint.load(saved)


def test_shards_cannot_be_saved_by_one_process_alone(peers: Alone, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weight: several processes hold parts of it and must save together"):
        checkpoint.save(tmp_path / "alone", {"weight": peers.zeros([2], torch.float32)})


def test_a_saved_sharded_checkpoint_is_replaced(saved: Path, peers: Alone) -> None:
    checkpoint.save(saved, {"part": peers.zeros([2, 2], torch.float32)}, peers=peers)
    assert torch.equal(checkpoint.load(saved)["part"], torch.zeros(2, 2))
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


class FullDisk(Files):
    """Refuses one file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create(self, path: Path) -> BinaryIO:
        if path.name == self._name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


@pytest.mark.parametrize("file", [SHARD, "shards.json", "state.json", "manifest.json"])
def test_a_full_disk_keeps_the_previous_sharded_checkpoint(saved: Path, peers: Alone, file: str) -> None:
    with pytest.warns(checkpoint.CheckpointWarning, match="No space left on device"):
        found = checkpoint.save(
            saved, {"part": peers.zeros([9], torch.float32)}, on_error="warn", files=FullDisk(file), peers=peers
        )
    assert found is None
    assert checkpoint.load(saved)["number"] == 7
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_a_failure_in_another_process_is_raised_here() -> None:
    others = Answered({"result": 1, "problem": None}, {"result": None, "problem": "the disk is full"})
    with pytest.raises(CheckpointError, match=r"the disk is full \(rank 2\)"):
        run_in_all_processes(others, lambda: 0)


def test_every_process_gets_all_results() -> None:
    assert run_in_all_processes(Answered({"result": 1, "problem": None}), lambda: 0) == [0, 1]


class Malicious:
    """Creates a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_a_pickled_index_is_never_executed(saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    rewritten(saved, "shards.json", pickle.dumps(Malicious(marker)))
    with pytest.raises(CheckpointError, match=r"shards\.json: not valid JSON"):
        checkpoint.load(saved)
    assert not marker.exists()


def test_an_index_that_differs_from_the_file_is_rejected(saved: Path) -> None:
    text = (saved / "shards.json").read_text().replace("[3,2]", "[2,3]")
    rewritten(saved, "shards.json", text.encode())
    with pytest.raises(CheckpointError, match=rf"{SHARD}: does not contain the part of 'part' at \[0, 0\]"):
        checkpoint.load(saved)


def part(**changes: Any) -> dict[str, Any]:
    return {"file": SHARD, "offsets": [0], "sizes": [4], **changes}


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [4], "parts": [part()], **changes}


def test_a_well_formed_index_is_read() -> None:
    index = parse_index(json.dumps({"tensors": {"w": tensor()}}).encode(), [SHARD], "there")
    assert index.tensors["w"].part_at([0]).sizes == (4,)


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"tensors": []},
        {"tensors": {}, "more": 1},
        {"tensors": {"w": 1}},
        {"tensors": {"w": tensor(dtype="object")}},
        {"tensors": {"w": tensor(shape=[-4])}},
        {"tensors": {"w": tensor(shape=[4.0])}},
        {"tensors": {"w": tensor(shape=[True] * 4)}},
        {"tensors": {"w": tensor(shape=[1 << 60, 0], parts=[])}},
        {"tensors": {"w": tensor(shape=[1] * 65, parts=[part(offsets=[0] * 65, sizes=[1] * 65)])}},
        {"tensors": {"w": tensor(more=1)}},
        {"tensors": {"w": tensor(parts=[])}},
        {"tensors": {"w": tensor(parts=[part(), part()])}},
        {"tensors": {"w": tensor(parts=[part(sizes=[3])])}},
        {"tensors": {"w": tensor(parts=[part(offsets=[1])])}},
        {"tensors": {"w": tensor(parts=[part(offsets=[-1])])}},
        {"tensors": {"w": tensor(parts=[part(offsets=[])])}},
        {"tensors": {"w": tensor(parts=[part(file="../" + SHARD)])}},
        {"tensors": {"w": tensor(parts=[part(file="tensors.safetensors")])}},
        {"tensors": {"w": tensor(parts=[part(file="shard-00001-of-00002.safetensors")])}},
        {"tensors": {"w": tensor(parts=[part(more=1)])}},
    ],
)
def test_an_invalid_index_is_rejected(document: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^there: "):
        parse_index(json.dumps(document).encode(), [SHARD, "tensors.safetensors"], "there")


def test_training_may_change_shards_as_soon_as_a_background_write_has_started(peers: Alone, tmp_path: Path) -> None:
    part = peers.zeros([3, 2], torch.float64)
    local: Tensor = part.to_local()  # type: ignore[attr-defined]
    local.fill_(2.0)
    gate = Event()

    class Waiting(Alone):
        def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
            gate.wait(60)
            return super().exchange(message)

    with checkpoint.AsyncWriter() as writer:
        writer.submit(tmp_path / "saved", {"part": part}, peers=Waiting(peers._mesh))
        local.zero_()
        gate.set()
    assert torch.equal(checkpoint.load(tmp_path / "saved")["part"], torch.full([3, 2], 2.0, dtype=torch.float64))
