"""Model weights in a single file, for other programs and other runs."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, cast

from dovetail.checkpoint.files import DISK, Digest, Files, replacing, write_file
from dovetail.checkpoint.tensors import Block, make_block, read_tensors, stream
from dovetail.errors import CheckpointError, ConfigError, UnknownNameError

if TYPE_CHECKING:
    import torch

ModelFormat = Literal["safetensors", "ckpt"]

_FORMATS: dict[str, ModelFormat] = {
    ".safetensors": "safetensors",
    ".ckpt": "ckpt",
    ".pt": "ckpt",
    ".pth": "ckpt",
    ".bin": "ckpt",
}
_OTHER_FORMATS = {
    ".onnx": "weights are written without their model: call export(path) of a trainer that has loaded them",
    ".npz": "write .safetensors, which safetensors.numpy.load_file reads",
    ".h5": "write .safetensors",
}


def model_format(path: str | os.PathLike[str]) -> ModelFormat:
    """Return the format of a weights file by its suffix; a name without a suffix is safetensors.

    Raises:
        UnknownNameError: Weights are not written to files with this suffix.

    Example:
        >>> model_format("model.pt"), model_format("model.safetensors"), model_format("model")
        ('ckpt', 'safetensors', 'safetensors')
    """
    suffix = Path(path).suffix
    if suffix and suffix.lower() not in _FORMATS:
        raise UnknownNameError(f"suffix of a file of weights ({os.fspath(path)})", suffix, _FORMATS, _OTHER_FORMATS)
    return _FORMATS.get(suffix.lower(), "safetensors")


def export_model(
    path: str | os.PathLike[str],
    state_dict: Mapping[str, Any],
    format: ModelFormat | None = None,
    *,
    files: Files = DISK,
) -> Path:
    """Write a model's weights to the file `path`, completely or not at all. Names and values are unchanged.

    Args:
        path: The file; an existing one is replaced. Missing folders are created.
        state_dict: The result of `model.state_dict()`.
        format: `"safetensors"` (tensors only; each is written in full, also tied ones), or `"ckpt"`, the format of
            `torch.save`. None means the format of the suffix; a suffix of the other format is an error.
        files: The file operations; tests replace them by failing ones.

    Raises:
        CheckpointError: The file could not be written; an existing one is unchanged.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     load_model_file(export_model(f"{directory}/model.safetensors", {"bias": torch.ones(2)}))
        {'bias': tensor([1., 1.])}
    """
    if format not in (None, "safetensors", "ckpt"):
        raise UnknownNameError("model format", format, ["safetensors", "ckpt"])
    target = Path(path)
    if format is not None and _FORMATS.get(target.suffix.lower(), format) != format:
        raise ConfigError(f"{target}: the suffix is not one of format={format!r}: leave format out, or rename the file")
    format = format or model_format(target)
    try:
        with replacing(files, target) as temporary:
            if format == "safetensors":
                write_file(files, temporary, stream(_blocks(state_dict)))
            else:
                _torch_save(files, temporary, state_dict)
    # torch.save reports a full disk as a RuntimeError.
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{target}: the model could not be written: {error}") from error
    return target


def load_model_file(
    path: str | os.PathLike[str], *, map_location: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """Return the weights in a file of safetensors or `torch.save`. If the suffix is unknown, the content decides.

    From a file of `torch.save` only tensors and plain values are loaded (`torch.load` with `weights_only=True`).

    Raises:
        CheckpointError: The file does not exist, is damaged, or does not contain weights by name.
    """
    import torch

    source = Path(path)
    try:
        if _is_safetensors(source):
            with open(source, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                tensors = read_tensors(file, size, str(source), Digest())
            return {name: tensor.to(map_location) for name, tensor in tensors.items()}
        return _weights(source, torch.load(source, map_location=map_location, weights_only=True))
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        # Torch's message has the name of the class that it did not load.
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise CheckpointError(
                f"{source}: the model could not be read: expected safetensors, or torch.save of a model's state_dict()"
            ) from error
        raise CheckpointError(
            f"{source}: the model could not be read: it contains a {found[1]}, but only tensors and plain values are "
            f"ever unpickled; if you trust it, {_convert(source, '.state_dict()', ', weights_only=False')}, or with "
            "['state_dict'] in place of .state_dict() if the file contains a dict"
        ) from error
    # torch.load raises many kinds of errors for a damaged file, from EOFError to AssertionError.
    except Exception as error:
        raise CheckpointError(f"{source}: the model could not be read: {error}") from error


def _is_safetensors(source: Path) -> bool:
    known = _FORMATS.get(source.suffix.lower())
    if known is not None:
        return known == "safetensors"
    with open(source, "rb") as file:
        # Eight bytes of length, then the header. Files of torch.save have another byte in this place.
        return file.read(9)[8:] == b"{"


def _weights(source: Path, loaded: Any) -> dict[str, torch.Tensor]:
    """Return the weights in a file; raise if it is the checkpoint of another program that contains weights."""
    import torch

    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{source}: expected weights by name, as of model.state_dict(), got a {type(loaded).__name__}"
        )
    # Checkpoints of other libraries have the weights one level deeper, under a name such as `state_dict`.
    if not any(isinstance(value, torch.Tensor) for value in loaded.values()):
        for name, value in loaded.items():
            if isinstance(value, Mapping) and any(isinstance(it, torch.Tensor) for it in value.values()):
                raise CheckpointError(
                    f"{source}: expected weights by name, got a whole checkpoint with the weights under {name!r}; "
                    f"{_convert(source, f'[{name!r}]')}"
                )
    return cast("dict[str, torch.Tensor]", loaded)


def _convert(source: Path, selector: str, options: str = "") -> str:
    return f"save the weights alone by torch.save(torch.load({source.name!r}{options}){selector}, 'weights.pt')"


def _blocks(state_dict: Mapping[str, Any]) -> list[Block]:
    import torch

    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name}: safetensors stores tensors only, got {type(value).__name__}: use format='ckpt'"
            )
    return [make_block(name, tensor) for name, tensor in state_dict.items()]


def _torch_save(files: Files, path: Path, state_dict: Mapping[str, Any]) -> None:
    import torch

    with files.create(path) as file:
        torch.save(state_dict, cast("IO[bytes]", _Sink(files, file)))
        files.sync(file)


class _Sink:
    """The file methods that `torch.save` needs. An unbuffered file may write less than requested, this one does not."""

    def __init__(self, files: Files, file: BinaryIO) -> None:
        self._files, self._file = files, file

    def write(self, data: bytes) -> int:
        self._files.write(self._file, memoryview(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""
