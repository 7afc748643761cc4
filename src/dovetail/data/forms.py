"""Conversion of data frames, arrays, dictionaries of columns, lists of samples and Hugging Face datasets."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from dovetail.data.batches import find_target, split_batch
from dovetail.data.columns import Columns
from dovetail.errors import DataError, UnknownNameError

_logger = logging.getLogger("dovetail.data")

Role = Literal["inputs", "target", "weight"]


class _Column(Protocol):
    """A series of pandas or polars."""

    @property
    def dtype(self) -> Any: ...

    def to_numpy(self) -> Any: ...


class _Frame(Protocol):
    """A data frame of pandas or polars."""

    @property
    def columns(self) -> Iterable[Any]: ...

    def __getitem__(self, name: Any) -> _Column: ...

    def __len__(self) -> int: ...


@dataclass(kw_only=True)
class DataForm:
    """Settings of the conversion of a user's data to tensors.

    Attributes:
        target: The column, or the list of columns, with the targets; None means the first of the names `labels`,
            `label`, `target`, `targets` and `y` that the data has.
        sample_weight: The column with the weights of the samples. True means that the last item of a tuple holds them;
            False means no weights.
        needs_target: True if data without targets is an error.
        dtype: The type of floating-point columns and arrays; None leaves arrays unchanged.
        target_type: The type of the targets: `classes` converts whole numbers to int64, `numbers` converts arrays of
            them to `dtype`. None leaves whole numbers unchanged.
        collates: True if the user's function forms the batches. Lists then hold samples, which are not converted.
        features: The names of the columns that are inputs, in the order of the model; None means all others, in their
            order. Converting a frame sets this.
    """

    target: str | Sequence[str] | None = None
    sample_weight: str | bool = False
    needs_target: bool = False
    dtype: torch.dtype | None = None
    target_type: Literal["classes", "numbers"] | None = None
    collates: bool = False
    features: list[Any] | None = None

    def convert(self, data: Any) -> Any:
        """Return data that a loader can read: tensors, a dataset, or the same object if it is one already.

        Raises:
            DataError: The data has no target, unequal lengths, columns that are not numbers, or missing values.

        Example:
            >>> import pandas
            >>> frame = pandas.DataFrame({"a": [1, 2], "b": [0.5, 1.5], "label": [0, 1]})
            >>> DataForm(target="label").convert(frame)
            (tensor([[1.0000, 0.5000],
                    [2.0000, 1.5000]]), tensor([0, 1]))
        """
        if isinstance(data, (Tensor, np.ndarray)):
            return self._tensor(data, "inputs", "the data")
        if isinstance(data, tuple):
            return self._tuple(data)
        if (kind := _foreign(data)) is not None:
            return self._foreign(data, *kind)
        if isinstance(data, Mapping):
            return self._mapping(data)
        if isinstance(data, list) and self._has_samples(data):
            return data if self.collates else self._list(data)
        return data

    # ------------------------------------------------------------------ containers

    def _tuple(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        count = len(data)
        weight = count - 1 if self.sample_weight and count > 2 else count
        roles: list[Role] = ["inputs"] * count
        if weight < count:
            roles[weight] = "weight"
        if weight > 1:
            roles[weight - 1] = "target"
        return tuple(
            self._tensor(item, role, f"item {number} of the tuple")
            for number, (item, role) in enumerate(zip(data, roles, strict=True), start=1)
        )

    def _mapping(self, data: Mapping[Any, Any]) -> Columns:
        if not data:
            raise DataError("data: expected a dictionary of arrays, got an empty one")
        target = self._target_of(list(data))
        tensors = {}
        for name, values in data.items():
            role: Role = "target" if name == target else "weight" if name == self.sample_weight else "inputs"
            if isinstance(values, (list, tuple)):
                values = _array_of(values, f"the entry {name!r}")
            tensors[name] = self._tensor(values, role, f"the entry {name!r}")
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(lengths.values())) != 1:
            shown = ", ".join(f"{length} in {name!r}" for name, length in lengths.items())
            raise DataError(f"data: expected arrays with the same number of samples, got {shown}")
        return Columns(tensors)

    def _has_samples(self, data: list[Any]) -> bool:
        """Return whether a list holds samples and not batches: the target of its first item is one number."""
        if self.collates:
            return True
        if not data or not isinstance(data[0], (tuple, list, Mapping)):
            return False
        if isinstance(data[0], Mapping) or not self.sample_weight:
            target = split_batch(data[0], self._key())[1]
        else:
            target = data[0][-1]
        if isinstance(target, (Tensor, np.ndarray)):
            return target.ndim == 0
        return isinstance(target, (bool, int, float, np.generic))

    def _list(self, data: list[Any]) -> Any:
        """Return the columns of a list of samples."""
        first = data[0]
        if isinstance(first, Mapping):
            if other := next((it for it in data if it.keys() != first.keys()), None):
                raise DataError(
                    f"data: expected dictionaries with the keys {sorted(first)}, got one with {sorted(other)}"
                )
            return self._mapping({name: _array_of([it[name] for it in data], f"the entry {name!r}") for name in first})
        if other := next((it for it in data if len(it) != len(first)), None):
            raise DataError(f"data: expected samples of {len(first)} items, got one of {len(other)}")
        columns = (
            _array_of(values, f"item {number} of the samples")
            for number, values in enumerate(zip(*data, strict=True), start=1)
        )
        return self._tuple(tuple(columns))

    def _foreign(self, data: Any, library: str, kind: str) -> Any:
        """Return the data of an object of pandas, polars or Hugging Face."""
        if library == "datasets":
            if kind in ("DatasetDict", "IterableDatasetDict"):
                names = list(data)
                raise DataError(f"data: a {kind} holds several datasets: give one of them, such as data[{names[0]!r}]")
            # Otherwise numbers are collated in float64, and a list in a sample becomes a list of tensors.
            is_plain = data._formatting is None if kind == "IterableDataset" else data.format["type"] is None
            return data.with_format("torch") if is_plain and not self.collates else data
        if kind == "LazyFrame":
            raise DataError("data: a LazyFrame holds no rows yet: give frame.collect()")
        if kind == "Series":
            return self._tensor(data, "inputs", "the series")
        return self._frame(data, library)

    def _frame(self, frame: _Frame, library: str) -> tuple[Tensor, ...]:
        names = list(frame.columns)
        target = self._target_of(names)
        targets = [] if target is None else [target] if isinstance(target, str) else list(target)
        weight = self.sample_weight if self.sample_weight in names else None
        if self.sample_weight is True:
            raise DataError(f"sample_weight: expected the name of a column of the DataFrame, got True; {_shown(names)}")
        features = [name for name in names if name not in targets and name != weight]
        if self.features is None:
            self.features = features
        elif set(features) != set(self.features):
            missing = [name for name in self.features if name not in features]
            added = [name for name in features if name not in self.features]
            raise DataError(
                f"data: the model was trained with the columns {self.features}; this DataFrame "
                + " and ".join(f"{verb} {found}" for verb, found in (("lacks", missing), ("also has", added)) if found)
            )
        parts = [self._matrix(frame, self.features, library)]
        if isinstance(target, str):
            parts.append(self._tensor(_numbers(frame[target], target, library), "target", f"the column {target!r}"))
        elif targets:
            columns = np.stack([_numbers(frame[name], name, library) for name in targets], axis=1)
            parts.append(self._tensor(columns, "target", f"the columns {targets}"))
        if weight is not None:
            parts.append(self._tensor(_numbers(frame[weight], weight, library), "weight", f"the column {weight!r}"))
        return tuple(parts)

    def _matrix(self, frame: _Frame, names: Sequence[Any], library: str) -> Tensor:
        """Return columns as one matrix of floating-point numbers."""
        if not names:
            raise DataError("data: the DataFrame has no columns besides the target and the weights")
        dtype = self.dtype or torch.get_default_dtype()
        # NumPy has no bfloat16, and float16 is too coarse for a conversion in two steps.
        matrix = np.empty((len(frame), len(names)), np.float64 if dtype == torch.float64 else np.float32)
        for number, name in enumerate(names):
            matrix[:, number] = _numbers(frame[name], name, library)
        return torch.from_numpy(matrix).to(dtype)

    def _target_of(self, names: Sequence[Any]) -> Any:
        """Return the name or names of the target column; None if there is none and none is needed."""
        if self.target is None:
            if (found := find_target(names)) is not None or not self.needs_target:
                return found
            raise DataError(f"data: which column is the target? Give Trainer(…, target=…); {_shown(names)}")
        wanted = [self.target] if isinstance(self.target, str) else list(self.target)
        missing = [name for name in wanted if name not in names]
        if not missing:
            return self.target
        if self.needs_target:
            raise UnknownNameError("column", missing[0], map(str, names))
        # Data for a prediction may have no targets, or only some of them.
        return [name for name in wanted if name in names] or None

    def _key(self) -> str | None:
        return self.target if isinstance(self.target, str) else None

    # ------------------------------------------------------------------ types

    def _tensor(self, values: Any, role: Role, place: str) -> Any:
        """Return an array, a series or a frame as a tensor; anything else unchanged, for the loader's own error."""
        if (kind := _foreign(values)) is not None and kind[0] != "datasets":
            if kind[1] == "DataFrame":
                columns = list(values.columns)
                if role == "inputs":
                    return self._matrix(values, columns, kind[0])
                values = np.stack([_numbers(values[name], name, kind[0]) for name in columns], axis=1)
            elif kind[1] == "Series":
                values = _numbers(values, place, kind[0])
        is_array = isinstance(values, np.ndarray) and values.dtype.kind in "biuf"
        if is_array:
            values = as_tensor(values)
        return self._cast(values, role, place, is_array=is_array) if isinstance(values, Tensor) else values

    def _cast(self, tensor: Tensor, role: Role, place: str, *, is_array: bool) -> Tensor:
        wanted = self._type_of(tensor, role, place, is_array=is_array)
        if wanted == tensor.dtype:
            return tensor
        if tensor.is_floating_point():
            _logger.info("%s is converted from %s to %s, the type of the model", place, tensor.dtype, wanted)
        return tensor.to(wanted)

    def _type_of(self, tensor: Tensor, role: Role, place: str, *, is_array: bool) -> torch.dtype:
        if role == "weight":
            return self.dtype or torch.get_default_dtype()
        if self.dtype is None or tensor.is_complex():
            return tensor.dtype
        if not tensor.is_floating_point():
            if role == "inputs" or self.target_type is None:
                return tensor.dtype
            if self.target_type == "classes":
                return torch.int64
        elif role == "target" and self.target_type == "classes" and tensor.ndim == 1 and self.needs_target:
            raise DataError(
                f"{place} holds targets of type {tensor.dtype}, but cross entropy needs class numbers: convert them to "
                "int64, or give criterion='MSELoss' or another loss; if it holds a weight for each sample, give "
                "sample_weight=True"
            )
        # A tensor of torch has the type that the user chose.
        return self.dtype if is_array else tensor.dtype


def are_tensors(data: Any) -> bool:
    """Return whether data is a tuple of tensors, so that it needs no conversion.

    Example:
        >>> are_tensors((torch.zeros(2), torch.zeros(2))), are_tensors((torch.zeros(2), np.zeros(2)))
        (True, False)
    """
    if type(data) is not tuple:
        return False
    # A loop, because a generator makes a call for every item, and a federation builds many loaders.
    for item in data:
        if not isinstance(item, Tensor):
            return False
    return len(data) > 0


def as_tensor(array: Any) -> Tensor:
    """Return an array of numbers as a tensor, which shares its memory if possible.

    Example:
        >>> as_tensor(np.arange(3)[::-1])
        tensor([2, 1, 0])
    """
    # Torch does not support foreign byte orders and negative strides, and warns about read-only arrays.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def _foreign(data: Any) -> tuple[str, str] | None:
    """Return the library and the kind of an object of pandas, polars or datasets; None for any other object."""
    # A library that made an object is imported already.
    for library, kinds in _KINDS.items():
        module = sys.modules.get(library)
        for kind in () if module is None else kinds:
            if isinstance(data, getattr(module, kind, ())):
                return library, kind
    return None


_KINDS = {
    "pandas": ("DataFrame", "Series"),
    "polars": ("DataFrame", "Series", "LazyFrame"),
    "datasets": ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict"),
}


def _numbers(column: _Column, name: Any, library: str) -> Any:
    """Return a column as an array of numbers.

    Raises:
        DataError: The column holds other values than numbers, or some are missing.
    """
    shown = name if isinstance(name, str) and name.startswith(("item ", "the ")) else f"the column {name!r}"
    array = np.asarray(column.to_numpy())
    if array.dtype.kind == "O" and library == "pandas":
        is_numeric = sys.modules["pandas"].api.types.is_numeric_dtype(column.dtype)
        array = np.asarray(column, dtype=np.float64) if is_numeric else array
    if array.dtype.kind not in "biuf" or array.ndim != 1:
        raise DataError(
            f"data: expected numbers, but {shown} has the type {column.dtype}: leave it out, or convert it to numbers "
            "(categories: to their codes)"
        )
    if array.dtype.kind == "f" and (missing := int(np.isnan(array).sum())):
        raise DataError(f"data: {shown} has {missing} missing values (NaN): fill them, or leave out their rows")
    return array


def _array_of(values: Sequence[Any], place: str) -> Any:
    """Return the values of all samples as one tensor or array."""
    shapes = {tuple(value.shape) for value in values if isinstance(value, (Tensor, np.ndarray))}
    try:
        if len(shapes) <= 1:
            if isinstance(values[0], Tensor):
                return torch.stack(list(values))
            array = np.asarray(values)
            if array.dtype.kind in "biuf":
                return array
    except (TypeError, ValueError, IndexError):
        # Lists of unequal length, or a mixture of types.
        pass
    found = f"shapes such as {' and '.join(map(str, sorted(shapes)[:2]))}" if len(shapes) > 1 else repr(values[0])[:60]
    raise DataError(
        f"data: {place} cannot be joined to one array of numbers, got {found}; give collate_fn=…, which builds a "
        "batch from a list of samples"
    )


def _shown(names: Sequence[Any]) -> str:
    few = list(names[:12])
    return f"the columns are {', '.join(map(repr, few))}{', …' if len(names) > 12 else ''}"
