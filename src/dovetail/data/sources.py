"""Conversion of datasets, arrays and iterables to loaders of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dovetail.data.loader import DataLoader
from dovetail.errors import DataError


@runtime_checkable
class SamplerSource(Protocol):
    """An object that contains a sampler, such as the sampler objects of Plato."""

    def get(self) -> Any:
        """Return a torch sampler, or indices."""


@runtime_checkable
class _Indexed(Protocol):
    """The methods that torch needs from a dataset of any class."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


@runtime_checkable
class _Table(Protocol):
    """Data frames and series of pandas and other libraries. Their brackets take names, not row numbers."""

    def to_numpy(self) -> Any: ...


def as_loader(
    data: Any,
    *,
    batch_size: int,
    shuffle: bool = False,
    drop_last: bool = False,
    num_workers: int = 0,
    seed: int | None = None,
    sampler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
    num_replicas: int = 1,
    rank: int = 0,
) -> Iterable[Any]:
    """Return an iterable of batches for data of any supported form.

    Args:
        data: A torch `Dataset`, or any other object with samples by index, such as one of Hugging Face; a tensor or
            NumPy array; a tuple of them with equal first dimension; or an iterable of batches (any loader, a list),
            which is returned unchanged, without the options below.
        batch_size: Samples per batch.
        shuffle: Whether to draw a new order every epoch. Ignored for a stream and for a torch sampler.
        drop_last: Whether to leave out a last batch that is not full.
        num_workers: Number of processes that read samples; none are used for tensors and arrays.
        seed: Makes the order a function of seed and epoch; see `DataLoader`.
        sampler: Which samples to use: indices (in this order, unless `shuffle`), a torch sampler, or an object whose
            `get()` returns one of these. `None` means all samples.
        collate_fn: A function that converts a list of samples to a batch.
        pin_memory: Whether batches are in pinned memory if there is an accelerator.
        num_replicas: Number of ranks that share the batches.
        rank: The rank of this process among them.

    Raises:
        DataError: `data` or `sampler` has none of the forms above, or there are no samples to shuffle.

    Example:
        >>> loader = as_loader((torch.zeros(5, 2), torch.arange(5)), batch_size=3, sampler=[4, 2, 0, 1])
        >>> [labels.tolist() for _, labels in loader]
        [[4, 2, 0], [1]]
    """
    if sampler is not None and isinstance(sampler, SamplerSource) and not isinstance(sampler, (Mapping, _Table)):
        sampler = sampler.get()
    if isinstance(data, (tuple, Tensor, np.ndarray)):
        dataset: Dataset[Any] = _tensor_dataset(data if isinstance(data, tuple) else (data,))
        num_workers = 0
    elif isinstance(data, Dataset) or (holds_samples(data) and not isinstance(data, _Table)):
        dataset = data
    elif isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping, _Table)):
        if sampler is not None:
            raise DataError(f"sampler: a {type(data).__name__} holds batches already; give the dataset instead")
        return data
    else:
        raise DataError(
            "data: expected a Dataset, a tensor or array, a tuple of those, or an iterable of batches, "
            f"got {_shown(data)}"
        )
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise DataError(f"sampler: the stream {type(dataset).__name__} has no indices to sample")
        shuffle = False
    elif sampler is not None:
        if isinstance(sampler, Sampler):
            shuffle = False
        else:
            chosen = _indices(sampler, dataset)
            # An empty selection is the caller's choice, and torch cannot shuffle it.
            shuffle = shuffle and len(chosen) > 0
            dataset, sampler = Subset(dataset, chosen), None
    try:
        return DataLoader(
            dataset,
            batch_size,
            shuffle,
            sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            seed=seed,
            num_replicas=num_replicas,
            rank=rank,
        )
    except ValueError as error:
        # Torch's message is about a sampler that the user did not create.
        if shuffle and not len(cast(Sized, dataset)):
            raise DataError("data: expected at least one sample, got none") from error
        raise


def holds_samples(data: Any) -> bool:
    """Return whether `data` consists of samples; otherwise it consists of batches, like a list or a loader.

    Example:
        >>> holds_samples(torch.zeros(3)), holds_samples([torch.zeros(3)])
        (True, False)
    """
    if isinstance(data, (Dataset, tuple, Tensor, np.ndarray)):
        return True
    return isinstance(data, _Indexed) and not isinstance(data, (Sequence, Mapping))


def is_one_shot(data: Any) -> bool:
    """Return whether `data` can be iterated only once, like Python's generators and iterators.

    An object of another class whose `__iter__` returns the object itself may restart, so the result is False for it.

    Example:
        >>> is_one_shot(iter([1, 2])), is_one_shot([1, 2])
        (True, False)
    """
    if isinstance(data, _BaseDataLoaderIter):
        return True
    return isinstance(data, Iterator) and type(data).__module__ in ("builtins", "itertools")


def num_batches(loader: Iterable[Any]) -> int | None:
    """Return the number of batches in one pass over `loader`; `None` if it is unknown.

    Example:
        >>> num_batches([1, 2, 3]), num_batches(iter([1, 2, 3]))
        (3, None)
    """
    try:
        return len(loader)  # type: ignore[arg-type]  # asking is the only way: torch's loader of a stream is Sized
    except (TypeError, NotImplementedError):
        return None


def _tensor_dataset(arrays: Sequence[Any]) -> TensorDataset:
    tensors = [_tensor(array) for array in arrays]
    lengths = [str(len(tensor)) for tensor in tensors]
    if len(set(lengths)) != 1:
        found = " and ".join(lengths) or "none"
        raise DataError(f"data: expected arrays with the same number of samples, got {found}")
    return TensorDataset(*tensors)


def _tensor(array: Any) -> Tensor:
    if isinstance(array, np.ndarray) and array.dtype.kind in "biufc":
        # Torch does not support foreign byte orders and negative strides, and warns about read-only arrays.
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        array = torch.from_numpy(np.require(native, requirements=["C", "W"]))
    if not isinstance(array, Tensor) or not array.ndim:
        raise DataError(
            "data: expected tensors or numeric arrays with samples along their first dimension, "
            f"got {_shown(array)}; put ready batches into a list"
        )
    return array


def _indices(sampler: Any, dataset: Dataset[Any]) -> Sequence[int]:
    if not isinstance(sampler, (str, bytes)) and isinstance(sampler, (Sequence, np.ndarray, Tensor)):
        indices = np.asarray(sampler)
        if indices.ndim == 1 and (indices.size == 0 or indices.dtype.kind in "iu"):
            # A dataset can have indices without having a length.
            if isinstance(dataset, Sized):
                beyond = indices[(indices < -len(dataset)) | (indices >= len(dataset))]
                if beyond.size:
                    raise DataError(f"sampler: expected indices of {len(dataset)} samples, got {beyond[0]}")
            return cast(Sequence[int], indices.astype(np.int64).tolist())
    raise DataError(
        f"sampler: expected indices, a torch Sampler or an object whose get() returns one, got {_shown(sampler)}"
    )


def _shown(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and type {value.dtype}"
    if value is None or isinstance(value, (str, bytes, int, float)):
        return repr(value)
    return f"a {type(value).__name__}{', whose to_numpy() is an array' if isinstance(value, _Table) else ''}"
