"""Recognition of streams: objects of known libraries, and objects that have the methods of a stream."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch.utils.data as torch_data
from torch.utils.data import IterableDataset

from dovetail.data.streams.hugging_face import HuggingFaceStream
from dovetail.data.streams.lit_data import LitDataStream
from dovetail.data.streams.loader import StreamLoader
from dovetail.data.streams.mosaic import MosaicStream
from dovetail.data.streams.protocol import Stream, UnsuitableStreamError
from dovetail.data.streams.web_dataset import WebDatasetStream

# The module and the class of each library's dataset, and its adapter. A module that is not imported is not needed.
_ADAPTERS: tuple[tuple[str, str, Callable[[Any], Stream[Any]]], ...] = (
    ("datasets", "IterableDataset", HuggingFaceStream),
    ("litdata", "StreamingDataset", LitDataStream),
    ("streaming", "StreamingDataset", MosaicStream),
    ("webdataset", "DataPipeline", WebDatasetStream),
)


# Datasets without an adapter that divide their samples among processes.
_OTHERS = (("litdata", "CombinedStreamingDataset"), ("litdata", "ParallelStreamingDataset"))


def as_stream(data: Any) -> Stream[Any] | None:
    """Return the samples of a library's dataset as a stream; None if `data` is not a stream of any kind.

    Warns and returns None for a dataset of a known library whose epochs do not have each sample once.

    Args:
        data: A `datasets.IterableDataset`, a `StreamingDataset` of litData or MosaicML, a pipeline of webdataset, or an
            object with the methods of `Stream`.

    Raises:
        DataError: A part of a dataset is given, not the whole one.
    """
    for module, name, adapter in _ADAPTERS:
        if _is_a(data, module, name):
            try:
                return adapter(data)
            except UnsuitableStreamError as error:
                warnings.warn(f"a resumed run may lose or repeat samples: {error}", stacklevel=4)
                return None
    return data if isinstance(data, Stream) and not isinstance(data, type) else None


def divides_itself(loader: Any) -> bool:
    """Return whether a loader's dataset divides its samples among processes, and has no adapter that prevents it."""
    dataset = getattr(loader, "dataset", loader)
    known = [*_OTHERS, *((module, name) for module, name, _ in _ADAPTERS)]
    return any(_is_a(dataset, module, name) for module, name in known)


def as_stream_loader(data: Any, **options: Any) -> StreamLoader | None:
    """Return a loader of batches for a stream, or for a torch loader of one; None if `data` is neither.

    Args:
        data: A stream that holds samples if it is a torch `IterableDataset`, else batches; or a torch `DataLoader` of
            such a dataset, whose settings are kept.
        options: Arguments of `StreamLoader` for a stream of samples.
    """
    if _is_a(data, "webdataset", "WebLoader") and len(data.pipeline) == 1:
        (data,) = data.pipeline
    if isinstance(data, torch_data.DataLoader):
        if not isinstance(data.dataset, IterableDataset) or (stream := as_stream(data.dataset)) is None:
            return None
        return StreamLoader(
            stream,
            data.batch_size,
            num_workers=data.num_workers,
            collate_fn=data.collate_fn,
            drop_last=data.drop_last,
            pin_memory=data.pin_memory,
            prefetch_factor=data.prefetch_factor,
            note=_note(stream),
        )
    stream = as_stream(data)
    if stream is None:
        return None
    if not isinstance(data, IterableDataset):
        return StreamLoader(stream, None, note=_note(stream))
    return StreamLoader(stream, note=_note(stream), **options)


def _is_a(data: Any, module: str, name: str) -> bool:
    """Return whether `data` is an object of a class of a module; False if the module is not imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(data, kind)


def _note(stream: Stream[Any]) -> str | None:
    return cast("str | None", getattr(stream, "note", None))
