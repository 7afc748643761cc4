"""Meshes of processes: copies of a model, parts of a copy, and parts of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# From the outermost to the innermost: consecutive ranks differ in the last coordinate.
DIMENSIONS = ("replicate", "shard", "tensor")


def mesh_sizes(mesh: Mapping[str, int] | None, num_processes: int) -> dict[str, int]:
    """Return the sizes of the dimensions of a mesh for a number of processes; a size of -1 is computed.

    Dimensions of size 1 are left out, except `shard`.

    Raises:
        ConfigError: The sizes do not multiply to the number of processes.

    Example:
        >>> mesh_sizes({"replicate": -1, "shard": 2}, 6)
        {'replicate': 3, 'shard': 2}
        >>> mesh_sizes({"replicate": 1, "shard": 2, "tensor": 2}, 4)
        {'shard': 2, 'tensor': 2}
    """
    if mesh is None:
        return {"shard": num_processes}
    known = math.prod(size for size in mesh.values() if size != -1)
    sizes = {name: num_processes // known if size == -1 else size for name, size in mesh.items()}
    if math.prod(sizes.values()) != num_processes:
        raise ConfigError(
            f"mesh: {dict(mesh)} does not divide {num_processes} processes; the sizes must multiply to "
            f"{num_processes}, and one of them may be -1"
        )
    return {name: size for name, size in sizes.items() if size > 1 or name == "shard"}


def check_mesh(mesh: Any) -> dict[str, int]:
    """Return the sizes of a mesh in the order of its dimensions; raise if they are not counts."""
    if (
        not isinstance(mesh, Mapping)
        or not mesh
        or not mesh.keys() <= set(DIMENSIONS)
        or any(
            isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1) for size in mesh.values()
        )
        or list(mesh.values()).count(-1) > 1
    ):
        raise ConfigError(
            "mesh: expected the sizes of 'replicate', 'shard' and 'tensor', such as {'replicate': 2, 'shard': 4}, of "
            f"which one may be -1, got {mesh!r}"
        )
    return {name: mesh.get(name, 1) for name in DIMENSIONS}


def check_same_mesh(mesh: DeviceMesh, sizes: Mapping[str, int]) -> None:
    """Raise if the mesh over which a model is divided has other sizes than the requested one."""
    names = mesh.mesh_dim_names or ()
    present = dict(zip(names, mesh.shape, strict=False))
    # A mesh of the user's own script may have other names.
    if names and set(names) <= set(DIMENSIONS) and present != sizes:
        raise ConfigError(
            f"mesh: this model is already divided over the mesh {present}, and this run requests {dict(sizes)}; give "
            f"mesh={present}, or load the weights into a new model"
        )


def show_mesh(mesh: Mapping[str, int]) -> str:
    """Return a mesh as text.

    Example:
        >>> show_mesh({"replicate": 2, "shard": -1, "tensor": 1})
        'replicate 2 × shard (the rest) × tensor 1'
    """
    return " × ".join(f"{name} {'(the rest)' if size == -1 else size}" for name, size in mesh.items())
