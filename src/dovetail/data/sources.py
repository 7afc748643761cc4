"""Conversion of datasets, arrays and iterables to loaders of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from types import FunctionType
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Sampler, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dovetail.data.columns import Columns
from dovetail.data.forms import DataForm, are_tensors, as_tensor
from dovetail.data.loader import DataLoader
from dovetail.data.packing import PackedRows
from dovetail.data.streams import as_stream_loader
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


def is_in_memory(data: Any) -> bool:
    """Return whether samples are in memory and need no computation, so that workers would only copy them.

    Example:
        >>> import torch
        >>> is_in_memory(Subset(TensorDataset(torch.arange(3)), [0, 2]))
        True
    """
    # Exact classes: a subclass may transform the samples.
    if type(data) is Subset:
        return is_in_memory(data.dataset)
    if type(data) is ConcatDataset:
        return all(map(is_in_memory, data.datasets))
    return type(data) in (Columns, TensorDataset, PackedRows, list, tuple)


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
    form: DataForm | None = None,
) -> Iterable[Any]:
    """Return an iterable of batches for data of any supported form.

    Args:
        data: A torch `Dataset`, or any other object with samples by index, such as one of Hugging Face; a tensor or
            NumPy array; a tuple of them with equal first dimension, or a dictionary of them; a data frame of pandas or
            polars; a list of samples, such as pairs with one number as the target; or an iterable of batches (any
            loader, any other list), which is returned unchanged, without the options below. A stream,
            of one of the libraries that `as_stream` recognizes or with the methods of `Stream`, is read by a
            `StreamLoader`.
        batch_size: Samples per batch.
        shuffle: Whether to draw a new order every epoch. Ignored for a stream and for a torch sampler.
        drop_last: Whether to leave out a last batch that is not full.
        num_workers: Number of processes that read samples; none are used for data in memory, such as tensors and lists.
        seed: Makes the order a function of seed and epoch; see `DataLoader`.
        sampler: Which samples to use: indices (in this order, unless `shuffle`), a torch sampler, or an object whose
            `get()` returns one of these. `None` means all samples.
        collate_fn: A function that converts a list of samples to a batch.
        pin_memory: Whether batches are in pinned memory if there is an accelerator.
        num_replicas: Number of ranks that share the batches.
        rank: The rank of this process among them.
        form: How frames, dictionaries and arrays become tensors, such as which column is the target; `None` means by
            the usual names, and the types of the arrays.

    Raises:
        DataError: `data` or `sampler` has none of the forms above, or there are no samples to shuffle.

    Example:
        >>> import torch
        >>> loader = as_loader((torch.zeros(5, 2), torch.arange(5)), batch_size=3, sampler=[4, 2, 0, 1])
        >>> [labels.tolist() for _, labels in loader]
        [[4, 2, 0], [1]]
    """
    # Mappings and data frames have a method `get` as well, but are no sources of samplers.
    if sampler is not None and isinstance(sampler, SamplerSource) and not isinstance(sampler, (Mapping, _Table)):
        sampler = sampler.get()
    if not are_tensors(data):
        data = (form or DataForm(collates=collate_fn is not None)).convert(data)
    dataset: Dataset[Any]
    if isinstance(data, (tuple, Tensor, np.ndarray)):
        # In memory, so workers would only copy the data between processes.
        dataset = _tensor_dataset(data if isinstance(data, tuple) else (data,))
        num_workers = 0
    elif isinstance(data, Dataset) or (holds_samples(data, collate_fn) and not isinstance(data, _Table)):
        dataset = data
        # A function of the user may take long, and then profits from a worker.
        num_workers = 0 if collate_fn is None and is_in_memory(data) else num_workers
    elif isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping, _Table)):
        if sampler is not None:
            raise DataError(f"sampler: a {type(data).__name__} holds batches already; give the dataset instead")
        return as_stream_loader(data) or data
    else:
        raise DataError(
            "data: expected a Dataset, a DataFrame, a tensor or array, a tuple or dictionary of those, a list of "
            f"samples, or an iterable of batches, got {_shown(data)}"
        )
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise DataError(f"sampler: the stream {type(dataset).__name__} has no indices to sample")
        streamed = as_stream_loader(
            dataset,
            batch_size=batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=pin_memory,
        )
        if streamed is not None:
            return streamed if num_replicas == 1 else streamed.share(rank, num_replicas, seed or 0)
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


def holds_samples(data: Any, collate_fn: Any = None) -> bool:
    """Return whether `data` consists of samples; otherwise it consists of batches, like a list or a loader.

    With a function that forms batches, a list holds samples.

    Example:
        >>> holds_samples(np.zeros(3)), holds_samples([np.zeros(3)])
        (True, False)
    """
    if isinstance(data, (Dataset, tuple, Tensor, np.ndarray)):
        return True
    if isinstance(data, list) and collate_fn is not None:
        return True
    # A list is a sequence of batches. An object with indices that is no sequence is a dataset, as in Hugging Face.
    return isinstance(data, _Indexed) and not isinstance(data, (Sequence, Mapping))


def is_one_shot(data: Any) -> bool:
    """Return whether `data` can be iterated only once, like Python's generators and iterators.

    An object of a class in Python whose `__iter__` returns the object itself may restart, so the result is False for
    it.

    Example:
        >>> is_one_shot(iter([1, 2])), is_one_shot([1, 2])
        (True, False)
    """
    if isinstance(data, _BaseDataLoaderIter):
        return True
    return isinstance(data, Iterator) and not isinstance(type(data).__iter__, FunctionType)


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
    """Return a tensor from a tensor or a numeric array, without a copy if possible."""
    if isinstance(array, np.ndarray) and array.dtype.kind in "biufc":
        array = as_tensor(array)
    if not isinstance(array, Tensor) or not array.ndim:
        raise DataError(
            "data: expected tensors or numeric arrays with samples along their first dimension, "
            f"got {_shown(array)}; put ready batches into a list"
        )
    return array


def _indices(sampler: Any, dataset: Dataset[Any]) -> Sequence[int]:
    """Return the indices of a sampler that is a sequence or an array; raise if one is outside of the dataset."""
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
