"""Export of a trained model to safetensors, torch.export, ONNX, or a folder of Hugging Face."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
import torch.utils.data as torch_data
from torch import Tensor, nn

from dovetail import checkpoint as store
from dovetail.checkpoint.files import DISK, make_parents, replacing
from dovetail.data import DataLoader, batch_length
from dovetail.data.batches import map_leaves, map_tensors
from dovetail.data.generators import find_generators, generator_states, set_generator_states
from dovetail.data.sources import holds_samples, is_one_shot
from dovetail.distributed import is_part, whole
from dovetail.errors import CheckpointError, ConfigError, DataError, UnknownNameError, add_note
from dovetail.extras import require
from dovetail.printing import quiet
from dovetail.trainers.context import Stateful
from dovetail.trainers.randomness import rng_state, set_rng_state

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from dovetail.trainers.single_process import SingleProcessTrainer

__all__ = ["ExportFormat", "export_model"]

ExportFormat = Literal["safetensors", "torch.export", "onnx", "huggingface"]

_FORMATS = ("safetensors", "torch.export", "onnx", "huggingface")
_SUFFIXES = {".safetensors": "safetensors", ".pt2": "torch.export", ".onnx": "onnx"}
_OTHER_NAMES = {
    "pt2": "torch.export",
    "torch": "torch.export",
    "transformers": "huggingface",
    "hf": "huggingface",
    **dict.fromkeys(("ckpt", "pt", "pth"), "torch.save of the weights is trainer.save_model('model.pt')"),
    "torchscript": "torch.export",
}
# The largest message of protobuf, in which ONNX files are written.
_MAX_ONNX_BYTES = 2**31 - 2**24


@runtime_checkable
class _Pretrained(Protocol):
    """A model with the `save_pretrained` of Hugging Face."""

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> Any:
        """Write the model into a folder."""


def export_model(trainer: SingleProcessTrainer, path: str | Path, format: str | None, example: Any) -> Path:
    """Write the model of a trainer for programs without Dovetail, and return the path; `trainer.export` calls this.

    It writes the same weights as `save_model`. In a run of several processes all of them call this, and the first one
    writes. The trainer, its data and its random numbers are unchanged.

    Args:
        trainer: The trainer.
        path: The file, or the folder of `"huggingface"`. An existing file is replaced, missing folders are created.
        format: `"safetensors"` (weights), `"torch.export"` or `"onnx"` (graph and weights, for any batch size), or
            `"huggingface"` (a folder by the model's `save_pretrained`). None means the format of the suffix:
            `.safetensors`, `.pt2` or `.onnx`.
        example: Inputs of the model for `"torch.export"` and `"onnx"`: a tensor, a tuple for several inputs, or a
            dictionary for named ones. Only shapes and dtypes are used. None means the inputs of the first batch of the
            trainer's validation, training or test data.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> from dovetail import Trainer
        >>> trainer = Trainer(nn.Linear(3, 2), "cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(load_file(trainer.export(f"{folder}/model.safetensors")))
        ['bias', 'weight']

    Raises:
        ConfigError: The format does not fit the name, the model or the arguments.
        DataError: The trainer has no data from which an example can be read.
        CheckpointError: The file could not be written; an existing one is unchanged.
    """
    target, model = Path(path), trainer._given_model()
    format = _choose_format(target, format)
    if example is not None and format not in ("torch.export", "onnx"):
        raise ConfigError(f"export: example: format={format!r} needs no example; leave it out")
    if format == "huggingface":
        return write_pretrained(model, target, is_main=trainer.context.process.is_main)
    if target.is_dir():
        raise ConfigError(f"export: {target}: expected the path of a file, got a folder")
    if format == "safetensors":
        # If several processes hold parts of the model, all of them join it.
        weights = {name: whole(value) for name, value in model.state_dict().items()}
        return store.export_model(target, weights, "safetensors") if trainer.context.process.is_main else target
    if _is_sharded(model):
        raise ConfigError(
            f"export: format={format!r} needs the whole model in one process, and this model is sharded; export "
            "'safetensors', and load it into a trainer without shards: trainer.load_model(path)"
        )
    if trainer.context.process.is_main:
        inputs = _inputs(trainer) if example is None else example
        _write_graph(target, format, copy.deepcopy(model).to("cpu").eval(), map_tensors(_as_example(inputs), inputs))
    return target


def _choose_format(target: Path, format: str | None) -> str:
    by_suffix = _SUFFIXES.get(target.suffix.lower())
    if format is None:
        if by_suffix is None:
            suffixes = ", ".join(f"{suffix} ({name})" for suffix, name in _SUFFIXES.items())
            raise ConfigError(
                f"export: {str(target)!r} has none of the suffixes {suffixes}: give a format, such as "
                "format='safetensors' or format='huggingface'"
            )
        return by_suffix
    if format not in _FORMATS:
        raise UnknownNameError("export format", str(format), _FORMATS, _OTHER_NAMES)
    if by_suffix not in (None, format):
        raise ConfigError(
            f"export: {target}: the suffix is the one of format={by_suffix!r}, got format={format!r}: leave format "
            "out, or rename the file"
        )
    return format


def write_pretrained(model: nn.Module, folder: Path, *, is_main: bool) -> Path:
    """Write a model of Hugging Face into a folder; all processes of a run call this, and the first one writes."""
    saving: Any = model
    if not isinstance(saving, _Pretrained):
        raise ConfigError(
            f"export: format='huggingface' needs a model with save_pretrained, and {type(model).__name__} has none; "
            "use 'safetensors', 'torch.export' or 'onnx'"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"export: {folder}: expected a folder for format='huggingface', got a file")
    # The model itself would write its parts. Tied weights are one tensor with several names, so join each tensor once.
    state = model.state_dict(keep_vars=True) if _is_sharded(model) else {}
    joined = {id(value): whole(value.detach()).cpu() for value in state.values()}
    if is_main:
        make_parents(DISK, folder)
        weights = {name: joined[id(value)] for name, value in state.items()}
        saving.save_pretrained(folder, **({"state_dict": weights} if weights else {}))
    return folder


def _is_sharded(model: nn.Module) -> bool:
    return any(map(is_part, model.parameters()))


# ---------------------------------------------------------------------- graphs


def _write_graph(target: Path, format: str, model: nn.Module, inputs: Any) -> None:
    """Trace a model and write the graph with the weights."""
    if format == "onnx":
        require("onnx", "onnx")
        require("onnxscript", "onnx")
        size = sum(value.numel() * value.element_size() for value in model.state_dict().values())
        if size > _MAX_ONNX_BYTES:
            raise ConfigError(
                f"export: an ONNX file holds at most 2 GB, the weights have {size / 2**30:.1f} GB; use 'torch.export'"
            )
    # Both libraries call functions that they deprecate, and the converter also logs and prints.
    with warnings.catch_warnings(), quiet("torch.onnx", "onnxscript", "onnx_ir", level=ERROR):
        warnings.simplefilter("ignore")
        program, shapes = _trace(model, inputs)
        converted: Any = None
        if format == "onnx":
            # The shapes name the dimension of the batch.
            converted = torch.onnx.export(program, dynamo=True, dynamic_shapes=shapes, verbose=False)
    try:
        with replacing(DISK, target) as temporary:
            if converted is not None:
                converted.save(temporary, external_data=False)
            else:
                with open(temporary, "xb") as file:
                    # A file object, because torch expects that a path ends in .pt2.
                    torch.export.save(program, file)
            with open(temporary, "rb") as written:
                DISK.sync(written)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{target}: the model could not be written: {error}") from error


def _trace(model: nn.Module, inputs: Any) -> tuple[ExportedProgram, Any]:
    """Return the graph of a model for any batch size, and the free dimensions of its inputs."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    else:
        args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    rows, batch = batch_length(inputs), torch.export.Dim("batch")

    def dynamic(leaf: Any) -> Any:
        return {0: batch} if _has_rows(leaf, rows) else None

    shapes: Any = map_leaves(dynamic, kwargs or args)
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes), shapes
    except Exception as error:
        add_note(
            error,
            f"torch.export could not trace {type(model).__name__} for any batch size; the weights alone are "
            "trainer.export(path, 'safetensors')",
        )
        raise


def _as_example(inputs: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that maps a tensor of some inputs to zeros with its shape, in a batch of at least two rows.

    The file contains the example, so it must not contain data of the user. A batch of one would be taken as a constant.
    """
    rows = batch_length(inputs)

    def as_zeros(tensor: Tensor) -> Tensor:
        shape = (max(rows, 2), *tensor.shape[1:]) if _has_rows(tensor, rows) else tensor.shape
        return torch.zeros(shape, dtype=tensor.dtype)

    return as_zeros


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == rows


# ---------------------------------------------------------------------- example


def _inputs(trainer: SingleProcessTrainer) -> Any:
    """Return the inputs of the first batch of the trainer's data."""
    for stage in ("valid", "train", "test"):
        source = trainer.context.run.data.get(stage)
        if source is None or is_one_shot(source) or _has_position(source):
            # Reading would consume a batch of the run.
            continue
        with _unchanged_generators(source):
            loader = (
                trainer.get_test_loader(trainer._batch_size(stage), source) if holds_samples(source) else _copy(source)
            )
            for batch in loader:
                return trainer._split(batch)[0]
    raise DataError("export: there is no data to read example inputs from; give them as example=…")


def _has_position(source: Any) -> bool:
    # The position of our own loader is the one of the trainer.
    return isinstance(source, Stateful) and not isinstance(source, DataLoader)


def _copy(loader: Any) -> Any:
    """Return a loader for one batch, in this process, if the loader is torch's; otherwise the data itself."""
    if not isinstance(loader, torch_data.DataLoader):
        return loader
    if not isinstance(loader, DataLoader) and type(loader).__iter__ is not torch_data.DataLoader.__iter__:
        return loader
    # Without its sampler and its workers, whose states belong to the run.
    size = 2 if loader.batch_size is None and loader.batch_sampler is not None else loader.batch_size
    return torch_data.DataLoader(loader.dataset, size, collate_fn=loader.collate_fn)


@contextmanager
def _unchanged_generators(source: Any) -> Iterator[None]:
    """Restore the global random generators, and the generators inside of the data."""
    before, found = rng_state(), find_generators(data=source)
    states = generator_states(found)
    try:
        yield
    finally:
        set_generator_states(found, states)
        set_rng_state(before)
