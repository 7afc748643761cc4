"""State of a single-process trainer: collecting it for a checkpoint, and restoring it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dovetail import checkpoint as store
from dovetail.callbacks import Callback
from dovetail.checkpoint.model_file import model_format
from dovetail.data.batches import map_tensors
from dovetail.distributed import part_of, whole
from dovetail.errors import CheckpointError
from dovetail.trainers.context import TrainingContext, attached_objects
from dovetail.trainers.data_handling import TrainerData
from dovetail.trainers.device_copies import channels_last
from dovetail.trainers.fitting import (
    check_fits,
    check_kind,
    is_library_code,
    kinds_of,
    restore,
    restore_optimizer,
    restoring,
    weights_difference,
)
from dovetail.trainers.frozen import with_base
from dovetail.trainers.randomness import rng_state, set_rng_state
from dovetail.trainers.strategies.bundle import Strategies


def take_state(context: TrainingContext, strategies: Strategies, data: TrainerData) -> dict[str, Any]:
    """Return the state of a trainer whose model and optimizers exist."""
    run, model = context.run, context.model
    assert model is not None
    run.count_tokens(context.progress)
    return {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in context.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in context.schedulers],
        "kinds": kinds_of(context),
        "progress": context.progress.state_dict(),
        "history": context.history.state_dict(),
        "meter": run.meter.state_dict(),
        "callbacks": context.callbacks.state_dict(),
        "strategies": strategies.state_dict(),
        "participants": {name: participant.state_dict() for name, participant in run.participants.items()},
        **{name: attached.state_dict() for name, attached in attached_objects(context).items()},
        "saver": run.saver.state_dict() if run.saver is not None else {"best": None, "owes": False},
        "validated_at": run.validated_at,
        "validation": dict(run.validation),
        "run_id": run.id,
        **data.state_dict(),
        "rng": rng_state(),
    }


def restore_state(
    context: TrainingContext,
    strategies: Strategies,
    data: TrainerData,
    state: Mapping[str, Any],
    memory_format: str | None = None,
) -> None:
    """Restore the state returned by `take_state`.

    Args:
        context: The context of a trainer whose model and optimizers exist.
        strategies: The strategies of the trainer.
        data: The data of the trainer.
        state: The whole state.
        memory_format: The memory format of the trainer; it also applies to the tensors of optimizers.

    Raises:
        CheckpointError: The state belongs to another model or optimizer, and nothing was restored; or a section has an
            unexpected form.
    """
    run, model = context.run, context.model
    assert model is not None
    # First, so that a trainer is unchanged if the checkpoint belongs to another model.
    check_fits(context, state)
    restore(state, "model", model.load_state_dict)
    for number, optimizer in enumerate(context.optimizers):
        optimizer_state = state["optimizers"][number]
        if memory_format is not None:
            optimizer_state = map_tensors(channels_last, optimizer_state)
        restore_optimizer(optimizer, optimizer_state, f"optimizers.{number}")
    present = tuple(it.state_dict() for it in context.schedulers)
    restore(state, "schedulers", partial(_restore_schedulers, context), present)
    restore(state, "progress", context.progress.load_state_dict, context.progress.state_dict())
    restore(state, "history", context.history.load_state_dict, {})
    # The numbers of the meter are first read at the end of the epoch, too late for a clear error.
    restore(state, "meter", _check_meter, {})
    restore(state, "meter", run.meter.load_state_dict)
    restore(state, "strategies", strategies.load_state_dict, {})
    restore_callbacks = partial(context.callbacks.load_state_dict, load=_restore_callback)
    unclaimed = [*restore(state, "callbacks", restore_callbacks, []), *_restore_participants(context, state)]
    if unclaimed:
        warnings.warn(
            f"the checkpoint holds the state of {', '.join(unclaimed)}, which this trainer does not have",
            UserWarning,
            stacklevel=3,
        )
    if run.saver is not None:
        restore(state, "saver", run.saver.load_state_dict, run.saver.state_dict())
    run.validated_at = restore(state, "validated_at", int, 0)
    run.validation = restore(state, "validation", _metrics_by_name)
    run.checked = context.progress.copy()
    run.id = restore(state, "run_id", str, "")
    for name, attached in attached_objects(context).items():
        # A checkpoint without this section restores the empty state.
        restore({name: {}, **state}, name, attached.load_state_dict, {})
    # After the progress, from which the position in the data follows.
    data.load_state_dict(state)
    # Last, because user code that is called above, such as callbacks, may draw random numbers.
    restore(state, "rng", set_rng_state, {})


def save_weights(model: nn.Module, path: str | Path, *, is_main: bool) -> Path:
    """Write only the weights of a model; all processes of a run call this, and the first one writes."""
    format = model_format(path)
    # If several processes hold parts of the model, all of them take part in joining it.
    state = _on_host({name: whole(value) for name, value in model.state_dict().items()})
    return store.export_model(path, state, format=format) if is_main else Path(path)


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights on the CPU, so that `torch.load` reads their file on a machine without the accelerator."""
    copies: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return value
        # Tied weights stay one tensor. A tensor without an address is not compared.
        address = value.data_ptr() or object()
        return copies.setdefault((address, value.shape, value.stride()), value.cpu())

    return {name: copied(value) for name, value in state.items()}


def load_weights(model: nn.Module, path: str | Path, *, strict: bool = True) -> None:
    """Load weights that `save_weights` wrote, or only the weights of a checkpoint.

    Raises:
        CheckpointError: The weights belong to another model; the error names the first difference.
    """
    present = model.state_dict()
    # A checkpoint is a folder, a file of weights is not.
    if Path(path).is_dir():
        weights = with_base(store.load(Path(path)), model)["model"]
    else:
        weights = store.load_model_file(Path(path))
    state = {name: part_of(value, present.get(name)) for name, value in weights.items()}
    try:
        model.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        # Without `strict`, names that only one of them has are allowed.
        names = state.keys() | present.keys() if strict else state.keys() & present.keys()
        difference = weights_difference(_selected(state, names), _selected(present, names))
        if difference is None:
            raise
        raise CheckpointError(f"{path}: the weights do not fit the model: {difference}") from error


def _restore_participants(context: TrainingContext, state: Mapping[str, Any]) -> list[str]:
    """Restore the registered objects, and return the names in the state that the trainer does not have."""
    saved, present = restore(state, "participants", dict, {}), context.run.participants
    for name, participant in present.items():
        if name in saved:
            with restoring(f"participants.{name}"):
                participant.load_state_dict(saved[name])
    return sorted(map(str, saved.keys() - present.keys()))


def _restore_schedulers(context: TrainingContext, states: Sequence[Mapping[str, Any]]) -> None:
    for scheduler, state in zip(context.schedulers, states, strict=True):
        scheduler.load_state_dict(state)


def _restore_callback(name: str, callback: Callback, state: Any) -> None:
    key = f"callbacks.{name}"
    with restoring(key):
        # The state of a user's callback may have any form, and its `state_dict` could fail now.
        if is_library_code(type(callback).load_state_dict):
            check_kind(callback.state_dict(), state, key)
        callback.load_state_dict(state)


def _check_meter(state: Mapping[str, Any]) -> None:
    for name in ("sums", "counts"):
        numbers = state.get(name, {})
        check_kind(dict.fromkeys(numbers, 0.0), numbers, f"meter.{name}")


def _metrics_by_name(state: Mapping[str, Any]) -> dict[str, float]:
    check_kind(dict.fromkeys(state, 0.0), state, "validation")
    return {str(name): float(value) for name, value in state.items()}


def _selected(weights: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if name in names}
