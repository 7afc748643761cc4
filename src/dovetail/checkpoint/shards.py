"""Sharded tensors in checkpoints: each process writes its own parts, and any number of processes reads them.

`torch.distributed.checkpoint` plans which process writes which part, and which stored parts a reader needs. Its own
file format is not used, because its index is a pickle. Here the parts of a process are a safetensors file, and the
index is JSON:

    {"tensors": {"model.weight": {
        "dtype": "float32", "shape": [4, 2],
        "parts": [{"file": "shard-00000-of-00002.safetensors", "offsets": [0, 0], "sizes": [2, 2]}, …]}}}

The name of a part in its file consists of the name of the tensor and its offsets: `model.weight@0.0`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.checkpoint.manifest import is_shard_file, shard_file
from dovetail.checkpoint.strict_json import dump_json, parse_json
from dovetail.checkpoint.tensors import DTYPES, MAX_ELEMENTS, Block, TensorFile, dtype_name, make_block
from dovetail.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem


class Peers(Protocol):
    """The processes that write and read checkpoints together, seen from one of them."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of all processes, in the order of the ranks."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a zero tensor of which this process holds its part."""


class RunPeers(Peers, Protocol):
    """The processes of a run, which may also write checkpoints in a thread."""

    def in_background(self) -> Peers:
        """Return the same processes for a thread, over connections of its own; all processes must call this."""


def run_in_all_processes(peers: Peers, work: Callable[[], Any]) -> list[Any]:
    """Call a function in every process and return all results. An error in one process is raised in all.

    Raises:
        CheckpointError: The error of this process, or else of the first process that failed.
    """
    result, problem = None, None
    try:
        result = work()
    except CheckpointError as error:
        problem = error
    # A process that failed must take part, too; otherwise the others would wait for it.
    everyone = peers.exchange({"result": result, "problem": None if problem is None else str(problem)})
    if problem is not None:
        raise problem
    for rank, each in enumerate(everyone):
        if each["problem"] is not None:
            raise CheckpointError(f"{each['problem']} (rank {rank})")
    return [each["result"] for each in everyone]


def plan_shards(shards: Mapping[str, torch.Tensor], peers: Peers) -> tuple[list[Block], bytes]:
    """Plan which process writes which parts; every process calls this with the same names.

    Returns:
        The blocks that this process writes to its file, and the index of all files.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    # The names are flat already.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(shards), is_coordinator=peers.rank == 0)
    plans = run_in_all_processes(peers, lambda: [_described(item) for item in planner.create_local_plan().items])
    # Every process computes the same plan from the same descriptions, so the plan need not be sent.
    chosen, _ = planner.create_global_plan([_save_plan(plan, shards) for plan in plans])
    tensors: dict[str, Any] = {
        name: {"dtype": dtype_name(tensor), "shape": list(tensor.shape), "parts": []} for name, tensor in shards.items()
    }
    for rank, plan in enumerate(chosen):
        for item in plan.items:
            name, offsets, sizes = _described(item)
            part = {"file": shard_file(rank, peers.size), "offsets": offsets, "sizes": sizes}
            tensors[name]["parts"].append(part)
    blocks = [_block(item, planner.resolve_data(item)) for item in planner.finish_plan(chosen[peers.rank]).items]
    return blocks, dump_json({"tensors": tensors})


def parse_index(text: bytes, files: Iterable[str], where: str) -> Index:
    """Return the index of shards; it may only refer to files of the checkpoint.

    Raises:
        CheckpointError: The text was not made by `plan_shards`.
    """
    shard_files = {file for file in files if is_shard_file(file)}
    match parse_json(text, where):
        case {"tensors": dict(tensors), **rest} if not rest:
            return Index({name: _stored(name, entry, shard_files, where) for name, entry in tensors.items()})
    raise CheckpointError(f"{where}: expected an object of tensors")


def read_shards(
    index: Index, directory: Path, name: Path, zeros: Callable[[Sequence[int], torch.dtype], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of an index, whole or divided into other parts than the stored ones.

    `zeros` creates a tensor. If several processes hold it, only the part of this process is read.

    Raises:
        CheckpointError: A file does not contain what the index describes.
    """
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    # The planner compares these tensors with the stored parts to find out what this process needs.
    tensors = {key: zeros(stored.shape, getattr(torch, stored.dtype)) for key, stored in index.tensors.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), index.as_metadata(), is_coordinator=True)
    with ExitStack() as stack:
        opened: dict[str, TensorFile] = {}
        for item in planner.create_local_plan().items:
            key, offset = item.storage_index.fqn, item.storage_index.offset
            stored = index.tensors[key]
            assert offset is not None
            part = stored.part_at(offset)
            if part.file not in opened:
                file = stack.enter_context(open(directory / part.file, "rb", buffering=0))
                opened[part.file] = TensorFile(file, os.fstat(file.fileno()).st_size, str(name / part.file))
            values = _read(opened[part.file], name / part.file, key, stored.dtype, part, item)
            # A view of the result: copying into it fills the result.
            target = planner.resolve_tensor(item)
            target.detach().copy_(values)
            planner.commit_tensor(item, target)
    return tensors


@dataclass(frozen=True, slots=True)
class Part:
    """A box-shaped part of a tensor, and its file."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor and its stored parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def part_at(self, offsets: Sequence[int]) -> Part:
        """Return the part with these offsets."""
        return next(part for part in self.parts if part.offsets == tuple(offsets))


@dataclass(frozen=True, slots=True)
class Index:
    """The index of all tensors that are stored in parts."""

    tensors: dict[str, Stored]

    def as_metadata(self) -> Metadata:
        """Return the index in the form that torch's planners use."""
        import torch
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, stored.dtype)),
                    torch.Size(stored.shape),
                    [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in stored.parts],
                )
                for name, stored in self.tensors.items()
            }
        )


def _described(item: WriteItem) -> tuple[str, list[int], list[int]]:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return item.index.fqn, list(chunk.offsets), list(chunk.sizes)


def _save_plan(described: list[Any], shards: Mapping[str, torch.Tensor]) -> SavePlan:
    """Return the plan of a process from its description. Parts without elements are not written."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    return SavePlan(
        [
            WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    TensorProperties(dtype=shards[name].dtype),
                    shards[name].size(),
                ),
            )
            for name, offsets, sizes in described
            if math.prod(sizes)
        ]
    )


def _block(item: WriteItem, values: Any) -> Block:
    name, offsets, sizes = _described(item)
    # A tensor without dimensions is stored as a row of one element.
    return make_block(_part_name(name, offsets), values.reshape(sizes or [1]))


def _read(file: TensorFile, where: Path, key: str, dtype: str, part: Part, item: Any) -> torch.Tensor:
    """Return the section of a stored part that a reader needs."""
    name, shape = _part_name(key, part.offsets), list(part.sizes) or [1]
    if file.shape(name) != (dtype, shape):
        raise CheckpointError(f"{where}: does not contain the part of {key!r} at {list(part.offsets)}")
    begins, lengths = list(item.storage_offsets) or [0], list(item.lengths) or [1]
    # Only the needed rows are read from the file; other dimensions are cut in memory.
    values = file.rows(name, begins[0], lengths[0])
    for dimension in range(1, len(begins)):
        values = values.narrow(dimension, begins[dimension], lengths[dimension])
    return values.reshape(list(item.lengths))


def _stored(name: str, entry: Any, files: set[str], where: str) -> Stored:
    """Return the description of one tensor in an index; raise if its parts do not make up the tensor."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "parts": [*entries], **rest} if (
            dtype in DTYPES
            and not rest
            and _are_lengths(shape)
            # Count a zero as one: otherwise a product of 0 would accept absurd lengths.
            and math.prod(length or 1 for length in shape) < MAX_ELEMENTS
        ):
            parts = tuple(_part(part, shape, files) for part in entries)
            found = [part for part in parts if part is not None]
            boxes = {part.offsets for part in found}
            # The sizes of all parts add up to the tensor, so none is missing.
            if len(boxes) == len(parts) and sum(math.prod(part.sizes) for part in found) == math.prod(shape):
                return Stored(dtype, tuple(shape), tuple(found))
    raise CheckpointError(f"{where}: describes tensor {name!r} in an invalid form")


def _part(entry: Any, shape: list[int], files: set[str]) -> Part | None:
    """Return the description of one part; None if it is invalid or outside of the tensor."""
    match entry:
        case {"file": str(file), "offsets": [*offsets], "sizes": [*sizes], **rest} if (
            not rest
            and file in files
            and _are_lengths(offsets)
            and _are_lengths(sizes)
            and len(offsets) == len(sizes) == len(shape)
            and all(begin + size <= whole for begin, size, whole in zip(offsets, sizes, shape, strict=True))
        ):
            return Part(file, tuple(offsets), tuple(sizes))
    return None


def _are_lengths(numbers: list[Any]) -> bool:
    # Not `isinstance`: true and false of JSON are whole numbers for Python.
    return len(numbers) <= 64 and all(type(number) is int and 0 <= number < MAX_ELEMENTS for number in numbers)


def _part_name(name: str, offsets: Sequence[int]) -> str:
    return f"{name}@{'.'.join(map(str, offsets))}"
