"""Encoding of nested state as JSON and tensors.

Values that JSON can represent exactly are stored as they are. All others become an object with one `$` key:

| Python | JSON |
| --- | --- |
| whole number beyond 64 bits | `{"$int": "0x…"}` |
| NaN, infinity | `{"$float": "<8 bytes, hexadecimal>"}` |
| bytes | `{"$bytes": "<base64>"}` |
| tuple | `{"$tuple": […]}` |
| dict with keys that are not plain strings | `{"$dict": [[key, value], …]}` |
| Counter | `{"$counter": [[key, value], …]}` |
| numpy scalar | `{"$scalar": ["float32", "<hexadecimal>"]}` |
| tensor, numpy array | `{"$tensor": "<name>"}`, `{"$array": "<name>"}` |
| tensor of which several processes hold parts | `{"$shard": "<name>"}` |
| tensor, numpy array of complex128 | `{"$complex": <its real view>}` |

No other tags exist: no tag can name a class or a module.
"""

from __future__ import annotations

import base64
import math
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.checkpoint.strict_json import dump_json, parse_json
from dovetail.checkpoint.tensors import DTYPES, Block, make_block
from dovetail.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# Reading deeper structures could exhaust Python's stack.
_MAX_DEPTH = 64
# A dict compares keys of equal hash one by one, so n of them need n² comparisons. Text is hashed with a secret number,
# but whole numbers are hashed modulo 2**61 - 1, so a malicious file can contain many keys of equal hash.
_MAX_EQUAL_HASHES = 16
_ACCEPTED = "dict, list, tuple, tensor, numpy array or scalar, number, str, bool, bytes, None"
_SCALARS = (*(name for name in DTYPES if not name.startswith(("bfloat", "float8"))), "complex128")

# A path is a pair of the parent's path and the last key: cheap to extend, converted to text only for names and errors.
_Path = tuple[Any, object]


@dataclass(frozen=True, slots=True)
class Encoded:
    """State in its stored form.

    Attributes:
        text: The JSON text.
        blocks: The tensors that the text refers to.
        shards: Tensors of which this process holds only a part (`torch.distributed.tensor.DTensor`), by name.
    """

    text: bytes
    blocks: list[Block]
    shards: dict[str, torch.Tensor] = field(default_factory=dict)

    def copy(self) -> Encoded:
        """Return a copy that shares no memory with the original tensors."""
        shards = {name: tensor.detach().clone() for name, tensor in self.shards.items()}
        return Encoded(self.text, [block.copy() for block in self.blocks], shards)


def encode(state: Mapping[str, Any]) -> Encoded:
    """Return `state` in its stored form. Tensors are not copied.

    Raises:
        CheckpointError: A value in `state` cannot be stored; the message has its place and its type.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"state: expected a dict, got {type(state).__name__}")
    encoder = _Encoder()
    tree = encoder.value(state, None, 0)
    return Encoded(dump_json(tree), encoder.blocks, encoder.shards)


def encode_plain(value: Mapping[str, Any], what: str) -> Any:
    """Return the JSON tree of a value without tensors."""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{what}: expected a dict, got {type(value).__name__}")
    encoder = _Encoder()
    tree = encoder.value(value, (None, what), 0)
    for name in (*(block.name for block in encoder.blocks), *encoder.shards):
        raise CheckpointError(f"{name}: expected a plain number, got a tensor")
    return tree


def decode(tree: Any, where: str, tensors: Mapping[str, torch.Tensor] | None = None, map_location: Any = "cpu") -> Any:
    """Return the state of a JSON tree and its tensors; `where` is the file, for error messages.

    Raises:
        CheckpointError: The tree was not made by `encode`.
    """
    decoder = _Decoder(dict(tensors or {}), map_location)
    try:
        state = decoder.value(tree, 0)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error.__cause__
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"{where}: malformed value ({error})") from error
    if unused := decoder.tensors.keys() - decoder.used:
        raise CheckpointError(f"{where}: nothing refers to tensor {min(unused)!r}")
    return state


def decode_text(text: bytes, where: str, tensors: Mapping[str, torch.Tensor], map_location: Any) -> Any:
    """Return the state of `Encoded.text` and its tensors."""
    return decode(parse_json(text, where), where, tensors, map_location)


class _Encoder:
    """Converts a state to a JSON tree, and collects its tensors."""

    def __init__(self) -> None:
        import numpy as np
        import torch

        self._np, self._torch = np, torch
        # Do not import it here: this takes a second, and the module is imported already if there is a DTensor.
        self._sharding = sys.modules.get("torch.distributed.tensor")
        self.blocks: list[Block] = []
        self.shards: dict[str, torch.Tensor] = {}
        self._names: dict[object, str] = {}
        # Names in use; the first one is reserved by the safetensors format.
        self._taken = {"__metadata__"}

    def value(self, value: Any, path: _Path | None, depth: int) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{_spell(path)[:80]}…: nested deeper than {_MAX_DEPTH} levels")
        # Before Python's numbers: numpy's float64 is also a float.
        if isinstance(value, self._np.generic):
            return {"$scalar": [self._scalar_name(value, path), value.tobytes().hex()]}
        if isinstance(value, int):
            return value if -(1 << 63) <= value < 1 << 64 else {"$int": hex(value)}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if isinstance(value, list):
            return self._items(value, path, depth)
        if isinstance(value, tuple):
            return {"$tuple": self._items(value, path, depth)}
        if self._sharding is not None and isinstance(value, self._sharding.DTensor):
            return self._shard(value, path)
        if isinstance(value, self._torch.Tensor):
            return self._tensor("$tensor", value, path)
        if type(value) in (self._np.ndarray, self._np.memmap):
            return self._array(value, path)
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": base64.b64encode(value).decode()}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(f"{_spell(path)}: cannot store a {kind} (accepted: {_ACCEPTED})")

    def _items(self, items: list[Any] | tuple[Any, ...], path: _Path | None, depth: int) -> list[Any]:
        return [self.value(item, (path, index), depth + 1) for index, item in enumerate(items)]

    def _mapping(self, mapping: Mapping[Any, Any], path: _Path | None, depth: int) -> Any:
        """Return the JSON object of a mapping, or pairs of keys and values if a key is not plain text."""
        values = [self.value(item, (path, key), depth + 1) for key, item in mapping.items()]
        is_counter = isinstance(mapping, Counter)
        if not is_counter and all(isinstance(key, str) and not key.startswith("$") for key in mapping):
            return dict(zip(mapping, values, strict=True))
        try:
            _check_hashes(mapping)
        except ValueError as error:
            raise CheckpointError(f"{_spell(path)}: cannot store a dict in which {error}") from None
        keys = [self._key(key, path, depth) for key in mapping]
        return {"$counter" if is_counter else "$dict": [list(pair) for pair in zip(keys, values, strict=True)]}

    def _key(self, key: object, path: _Path | None, depth: int) -> Any:
        if isinstance(key, self._torch.Tensor):
            raise CheckpointError(f"{_spell(path)}: cannot store a dict whose keys are tensors")
        return self.value(key, (path, key), depth + 1)

    def _scalar_name(self, value: Any, path: _Path | None) -> str:
        name = str(value.dtype.name)
        if name not in _SCALARS:
            raise CheckpointError(f"{_spell(path)}: cannot store a numpy.{name} (accepted: {', '.join(_SCALARS)})")
        return name

    def _array(self, array: Any, path: _Path | None) -> Any:
        name = self._scalar_name(array, path)
        if name == "complex128":
            array = self._np.require(array, "complex128", ["C"])
            return {"$complex": self._array(array[..., None].view("float64"), path)}
        # torch shares the memory of an array that is writable, aligned and in this machine's byte order.
        array = self._np.require(array, name, ["C", "W", "A"])
        return self._tensor("$array", self._torch.from_numpy(array), path)

    def _tensor(self, tag: str, tensor: torch.Tensor, path: _Path | None) -> Any:
        """Return the reference to a tensor; a view of the same elements is stored once."""
        if tensor.dtype == self._torch.complex128 and tensor.layout is self._torch.strided:
            return {"$complex": self._tensor(tag, self._torch.view_as_real(tensor.detach().resolve_conj()), path)}
        block = make_block(self._unused(_spell(path)), tensor)
        # Tensors with the same elements, such as tied weights, are stored once. The blocks keep their memory alive, so
        # that no address is reused while the keys are compared.
        view = (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        key = (tensor.data_ptr(), view) if tensor.data_ptr() else block.name
        if key not in self._names:
            self._names[key] = block.name
            self._taken.add(block.name)
            self.blocks.append(block)
        return {tag: self._names[key]}

    def _shard(self, tensor: torch.Tensor, path: _Path | None) -> Any:
        name = self._unused(_spell(path))
        self._taken.add(name)
        self.shards[name] = tensor.detach()
        return {"$shard": name}

    def _unused(self, name: str) -> str:
        count, candidate = 1, name
        while candidate in self._taken:
            count += 1
            candidate = f"{name}#{count}"
        return candidate


class _Decoder:
    """Converts a JSON tree and its tensors to the state; every tag has one function."""

    def __init__(self, tensors: dict[str, torch.Tensor], map_location: Any) -> None:
        self.tensors = tensors
        self.used: set[str] = set()
        self._map_location = map_location
        self._moved: dict[str, torch.Tensor] = {}
        self._tags: dict[str, Callable[[Any, int], Any]] = {
            "$int": lambda text, _: int(text, 16),
            "$float": lambda text, _: struct.unpack(">d", bytes.fromhex(text))[0],
            "$bytes": lambda text, _: base64.b64decode(text, validate=True),
            "$tuple": lambda items, depth: tuple(self._items(items, depth)),
            "$dict": lambda pairs, depth: self._pairs(pairs, depth),
            "$counter": lambda pairs, depth: Counter(self._pairs(pairs, depth)),
            "$scalar": lambda pair, _: self._scalar(pair),
            "$tensor": lambda name, _: self._tensor(name),
            "$array": lambda name, _: self._find(name).numpy(),
            # The parts of a shard are already on their device.
            "$shard": lambda name, _: self._find(name),
            "$complex": lambda real, depth: self._complex(real, depth),
        }

    def value(self, node: Any, depth: int) -> Any:
        # A tag such as `$dict` adds levels of JSON to a level of the state.
        if depth > 3 * _MAX_DEPTH:
            raise CheckpointError(f"nested deeper than {3 * _MAX_DEPTH} levels")
        if isinstance(node, list):
            return self._items(node, depth)
        if not isinstance(node, dict):
            return node
        if any(key.startswith("$") for key in node):
            # A tag has no other key beside it: any other number of keys raises.
            ((tag, content),) = node.items()
            return self._tags[tag](content, depth + 1)
        return {key: self.value(item, depth + 1) for key, item in node.items()}

    def _items(self, items: Any, depth: int) -> list[Any]:
        if not isinstance(items, list):
            raise TypeError(f"expected a list, got {type(items).__name__}")
        return [self.value(item, depth + 1) for item in items]

    def _pairs(self, pairs: Any, depth: int) -> dict[Any, Any]:
        items = [self._items(pair, depth) for pair in pairs]
        _check_hashes(key for key, _ in items)
        found = dict(items)
        if len(found) != len(items):
            raise ValueError("a key occurs twice")
        return found

    def _scalar(self, pair: Any) -> Any:
        import numpy as np

        name, text = pair
        if name not in _SCALARS:
            raise ValueError(f"a scalar of {name!r}")
        data = bytes.fromhex(text)
        # Exactly one element, else an error.
        (scalar,) = np.frombuffer(data, dtype=name)
        return scalar

    def _find(self, name: Any) -> torch.Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"refers to tensor {name!r}, which is not there")
        self.used.add(name)
        return self.tensors[name]

    def _tensor(self, name: Any) -> torch.Tensor:
        # Moved once per name, so that tied weights share their memory on the device, too.
        if name not in self._moved:
            self._moved[name] = self._find(name).to(self._map_location)
        return self._moved[name]

    def _complex(self, real: Any, depth: int) -> Any:
        import torch

        value = self.value(real, depth)
        if isinstance(value, torch.Tensor):
            return torch.view_as_complex(value)
        return value.view("complex128")[..., 0]


def _check_hashes(keys: Iterable[Any]) -> None:
    """Raise ValueError if building a dict of these keys could take more than linear time."""
    counts = Counter(hash(key) for key in keys)
    if counts and max(counts.values()) > _MAX_EQUAL_HASHES:
        raise ValueError(f"more than {_MAX_EQUAL_HASHES} keys share one hash")


def _spell(path: _Path | None) -> str:
    keys = []
    while path is not None:
        path, key = path
        keys.append(str(key))
    return ".".join(reversed(keys))
