"""Batches sliced from tensors in memory, without reading single samples.

Random numbers are drawn from the same generators, and at the same times, as by torch's samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.utils.data as torch_data
from torch import Generator, Tensor
from torch.utils.data import Dataset, RandomSampler, SequentialSampler, Subset, SubsetRandomSampler, TensorDataset

from dovetail.data.columns import Columns

# Batches are slices of a copied run of samples. About a megabyte per copy was fastest in measurements: one copy of
# a whole epoch of MNIST takes five times as long, because all of its memory pages are new to the process; one copy
# per batch takes up to seven times as long if batches are tiny.
_RUN_BYTES = 1 << 20
_RUN_BATCHES = 128
_ALIGNMENT = 64


def rows_in_memory(loader: torch_data.DataLoader[Any]) -> Rows | None:
    """Return the samples of `loader` as rows of tensors, or `None` if torch has to read them one by one."""
    if loader.batch_size is None or loader.collate_fn is not torch_data.default_collate:
        return None
    sampler = loader.sampler
    dataset: Dataset[Any] = loader.dataset
    chosen: Tensor | None = None
    # Exact classes: a subclass may choose or order the samples in another way.
    if type(sampler) is SubsetRandomSampler:
        chosen = _row_numbers(sampler.indices, dataset)
        if chosen is None:
            return None
    elif type(sampler) is RandomSampler:
        # With these settings torch draws something else than one permutation of all rows.
        if sampler.replacement or len(sampler) != len(sampler.data_source) or _reads_other(sampler, dataset):
            return None
    elif type(sampler) is not SequentialSampler or _reads_other(sampler, dataset):
        return None
    while type(dataset) is Subset:
        outer = _row_numbers(dataset.indices, dataset.dataset)
        if outer is None:
            return None
        chosen = outer if chosen is None else outer[chosen]
        dataset = dataset.dataset
    names: tuple[str, ...] | None = None
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
    elif type(dataset) is Columns:
        names, tensors = tuple(dataset.columns), tuple(dataset.columns.values())
    else:
        return None
    return Rows(tensors, chosen, names) if all(map(_is_plain, tensors)) else None


@dataclass(frozen=True, slots=True)
class Rows:
    """Samples that are rows of tensors.

    Attributes:
        tensors: One tensor per field of a sample.
        chosen: The rows that are samples; `None` means all rows in their order.
        names: The names of the fields, for batches that are dictionaries; `None` for batches that are lists.
    """

    tensors: tuple[Tensor, ...]
    chosen: Tensor | None
    names: tuple[str, ...] | None = None

    def order(self, sampler: object) -> Tensor | None:
        """Draw the rows of one epoch as `sampler` would; `None` means all rows in their order."""
        if not isinstance(sampler, (RandomSampler, SubsetRandomSampler)):
            return self.chosen
        generator = sampler.generator
        # As in torch: a `RandomSampler` draws a seed from the global generator and the permutation from a new one, a
        # `SubsetRandomSampler` draws the permutation from the global one.
        if generator is None and isinstance(sampler, RandomSampler):
            generator = Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order = torch.randperm(len(sampler), generator=generator)
        return order if self.chosen is None else self.chosen[order]

    def share(self, order: Tensor | None, batch_size: int, num_replicas: int, rank: int) -> Tensor:
        """Return the rows of batches `rank`, `rank + num_replicas`, and so on of `order`."""
        if order is None:
            order = torch.arange(self.tensors[0].size(0))
        num_full, remainder = divmod(len(order), batch_size)
        full = order[: len(order) - remainder].view(num_full, batch_size)
        own = full[rank::num_replicas].flatten()
        # The last, shorter batch belongs to the rank that follows the rank of the last full one.
        return torch.cat([own, order[len(order) - remainder :]]) if num_full % num_replicas == rank else own

    def batches(
        self,
        draw_order: Callable[[], Tensor | None],
        close_order: Callable[[], None],
        *,
        batch_size: int,
        drop_last: bool,
        start: int,
        pin_memory: bool,
    ) -> Iterator[Any]:
        """Yield the rows in batches, starting with batch `start`.

        `draw_order` is called for the first batch and returns the rows to use; None means all. `close_order` is called
        after the last full batch.
        """
        order = draw_order()
        count = self.tensors[0].size(0) if order is None else len(order)
        end = count - count % batch_size
        bytes_per_batch = batch_size * sum(tensor[:1].nbytes for tensor in self.tensors)
        length = batch_size * min(_RUN_BATCHES, max(1, _RUN_BYTES // max(1, bytes_per_batch)))
        for first in range(start * batch_size, end, length):
            runs = self._copied(order, first, min(first + length, end), pin_memory)
            columns = [_cut(run, batch_size) for run in runs]
            for batch in zip(*columns, strict=True):
                yield list(batch) if self.names is None else dict(zip(self.names, batch, strict=True))
        close_order()
        # Unless the skipped batches include the last, shorter one.
        if start * batch_size <= end < count and not drop_last:
            rest = self._copied(order, end, count, pin_memory)
            yield rest if self.names is None else dict(zip(self.names, rest, strict=True))

    def _copied(self, order: Tensor | None, first: int, last: int, pin_memory: bool) -> list[Tensor]:
        """Return copies of some rows of all tensors, in the given order."""
        # Always a copy, like torch's collation: changing a batch in place must not change the dataset.
        if order is None:
            contiguous = torch.contiguous_format
            rows = [tensor[first:last].clone(memory_format=contiguous) for tensor in self.tensors]
        else:
            indices = order[first:last]
            rows = [tensor.index_select(0, indices) for tensor in self.tensors]
        return [row.pin_memory() for row in rows] if pin_memory else rows


def _cut(run: Tensor, batch_size: int) -> Sequence[Tensor]:
    """Divide copied rows into batches that can be changed independently."""
    # Ordinary views share one version counter: changing a batch in place would then break the backward pass of
    # other batches.
    batches = torch.unsafe_split(run, batch_size)
    # Torch's batches start at an aligned address. With other addresses matrix products round differently.
    if batches and batches[0].nbytes % _ALIGNMENT:
        return [batch.clone() for batch in batches]
    return batches


def _reads_other(sampler: RandomSampler | SequentialSampler, dataset: Dataset[Any]) -> bool:
    source: object = sampler.data_source
    return source is not dataset


def _row_numbers(indices: Sequence[int], dataset: Dataset[Any]) -> Tensor | None:
    """Return `indices` into `dataset` as a tensor of non-negative numbers; `None` if they are not whole numbers."""
    numbers = np.array(indices)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        return None
    rows = torch.from_numpy(numbers.astype(np.int64))
    return torch.where(rows < 0, rows + len(cast(Sized, dataset)), rows)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether slicing a tensor gives the batches that torch's collation would build."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_nested
        and not tensor.is_quantized
    )
