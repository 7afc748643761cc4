"""Name patterns that select the layers of a model that stay with a client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from dovetail.errors import ConfigError, expect

__all__ = ["LayerNames", "as_patterns", "last_layers", "local_names", "matching"]


# Patterns of layers, as a user gives them.
LayerNames = str | Sequence[str] | None


def matching(names: Iterable[str], patterns: Sequence[str], argument: str = "layers") -> frozenset[str]:
    """Return the names that patterns choose: by an exact dotted prefix, or by `*`, `?` and `[…]`.

    Args:
        names: The names of a model's state, such as `fc1.weight`.
        patterns: `fc1` selects `fc1.weight` and not `fc10.weight`; `features.*.weight` has a wildcard.
        argument: The name of the argument in messages.

    Raises:
        ConfigError: A pattern chooses nothing.

    Example:
        >>> sorted(matching(["fc1.weight", "fc1.bias", "fc10.weight"], ["fc1"]))
        ['fc1.bias', 'fc1.weight']
    """
    every = list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in every if _chooses(pattern, name)}
        if not found:
            raise ConfigError(f"{argument}: {pattern!r} matches nothing; the model has {', '.join(every)}")
        chosen |= found
    return frozenset(chosen)


def local_names(
    model: nn.Module, local: Sequence[str] = (), global_: Sequence[str] = (), num_local_layers: int = 1
) -> frozenset[str]:
    """Return the entries of a model's state that stay with a client.

    Args:
        model: The model.
        local: Patterns of the entries that stay.
        global_: Patterns of the entries that are sent. If only one of both is given, all other entries are of the
            other kind. If both are given, they must select every entry once.
        num_local_layers: Without patterns, the number of last layers with parameters that stay.

    Raises:
        ConfigError: Nothing or everything would stay, an entry is selected by none or both, or the two names of one
            tensor are separated.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> sorted(local_names(model))
        ['2.bias', '2.weight']
        >>> sorted(local_names(model, global_=["2"]))
        ['0.bias', '0.weight']
    """
    every = list(model.state_dict())
    if not local and not global_:
        local = last_layers(model, num_local_layers)
    stays = matching(every, local, "local_layer_names") if local else frozenset()
    goes = matching(every, global_, "global_layer_names") if global_ else frozenset()
    if both := sorted(stays & goes):
        raise ConfigError(f"local_layer_names and global_layer_names both choose {both[0]!r}")
    if local and global_ and (neither := [name for name in every if name not in stays | goes]):
        raise ConfigError(f"neither local_layer_names nor global_layer_names chooses {neither[0]!r}; give one of them")
    stays = stays if local else frozenset(every) - goes
    parameters = {name for name, _ in model.named_parameters()}
    if not stays & parameters or parameters <= stays:
        which = "everything" if parameters <= stays else "nothing"
        raise ConfigError(f"local_layer_names: {which} of the model would stay with clients; it has {', '.join(every)}")
    _refuse_torn(model, stays)
    return stays


def last_layers(model: nn.Module, number: int) -> list[str]:
    """Return the names of the last modules that hold parameters themselves."""
    expect(number >= 1, "num_local_layers", "a whole number that is at least 1", number)
    holding = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    if len(holding) <= number:
        raise ConfigError(
            f"num_local_layers: expected fewer than the {len(holding)} layers with parameters that the model has, got "
            f"{number}"
        )
    return holding[-number:]


def as_patterns(given: LayerNames) -> tuple[str, ...]:
    """Return patterns of what a user gives: one, several, or none.

    Example:
        >>> as_patterns("head"), as_patterns(None)
        (('head',), ())
    """
    if given is None:
        return ()
    # In a file, the layer "2" of a `Sequential` is the number 2.
    return (str(given),) if isinstance(given, (str, int)) else tuple(map(str, given))


def _chooses(pattern: str, name: str) -> bool:
    if name == pattern or name.startswith(f"{pattern}."):
        return True
    if not any(wild in pattern for wild in "*?["):
        return False
    # A wildcard may match a module too, so that `block?` selects all entries of `block1`.
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: length + 1]), pattern) for length in range(len(parts)))


def _refuse_torn(model: nn.Module, stays: frozenset[str]) -> None:
    """Raise if one name of a tensor stays and another one is sent."""
    known: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = known.setdefault(id(parameter), name)
        if (name in stays) != (other in stays):
            raise ConfigError(f"local_layer_names: {other!r} and {name!r} are one tensor; name both, or neither")
