"""Loading PyTorch trials from checkpoints."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from dovetail import checkpoint as store
from dovetail.core import DistributedContext
from dovetail.errors import CheckpointError, ConfigError
from dovetail.pytorch.context import PyTorchTrialContext
from dovetail.pytorch.hyperparameters import Hyperparameters
from dovetail.pytorch.trial import PyTorchTrial
from dovetail.trainers.frozen import with_base

_Trial = TypeVar("_Trial", bound=PyTorchTrial)


def load_trial_from_checkpoint_path(
    path: str | Path,
    trial_class: type[_Trial] | None = None,
    trial_kwargs: Mapping[str, Any] | None = None,
    torch_load_kwargs: Mapping[str, Any] | None = None,
) -> _Trial:
    """Return a trial with the hyperparameters and the weights of a checkpoint, for inspection or prediction.

    Args:
        path: The checkpoint.
        trial_class: The class of the trial. It is required: names in files are never imported.
        trial_kwargs: Further arguments of its constructor.
        torch_load_kwargs: Not accepted, because checkpoints are not read with `torch.load`.
    """
    if torch_load_kwargs:
        raise ConfigError("torch_load_kwargs: expected None, because checkpoints are not read with torch.load here")
    state = store.load(path)
    own = _own(state, Path(path))
    if trial_class is None:
        named = own.get("trial_class", "unknown")
        raise ConfigError(f"trial_class: names in files are not imported: give the class (it was {named})")
    # One process and no folder: the trial is inspected or predicts, and writes nothing.
    context = PyTorchTrialContext(
        hparams=own["hparams"], config=own["experiment_config"], distributed=DistributedContext(), verbose=False
    )
    return _build(context, trial_class, Path(path), state, trial_kwargs or {})


def checkpoint_of(root: Path | None, trial_id: int) -> Path:
    """Return the best checkpoint of a trial, or else its newest checkpoint.

    Args:
        root: The folder that contains the trials' folders, if known. Folders of experiments are searched as well.
        trial_id: The number of the trial.
    """
    home = Path(os.environ.get("DOVETAIL_HOME") or ".dovetail")
    places = [] if root is None else [root / f"trial_{trial_id}"]
    # Trials of experiments have numbers that are unique in the folder of all experiments.
    places += home.glob(f"experiments/*/trials/trial_{trial_id}")
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None and root is None:
        raise ConfigError(
            "trial_id: there is no folder of checkpoints to search: init(checkpoint_dir=…), or give a path"
        )
    if folder is None:
        raise CheckpointError(
            f"trial {trial_id} has no checkpoints: there is no folder {places[0]}, nor one of an experiment in {home}"
        )
    # The name under which the trainer keeps the checkpoint of the best validation.
    best = folder / "best_ck"
    found = best if best.is_dir() else store.latest(folder)
    if found is None:
        raise CheckpointError(f"trial {trial_id} has no checkpoints in {folder}")
    return found


def load_into(context: PyTorchTrialContext, trial_class: type[_Trial], path: Path, kwargs: Mapping[str, Any]) -> _Trial:
    """Build a trial and load its weights from a checkpoint. A context without hyperparameters uses the checkpoint's."""
    state = store.load(path)
    if not context.unnoticed_hparams:
        # Copy the context: the next checkpoint may have other hyperparameters.
        context = copy.copy(context)
        context.unnoticed_hparams = Hyperparameters(_own(state, path)["hparams"])
    return _build(context, trial_class, path, state, kwargs)


def _build(
    context: PyTorchTrialContext,
    trial_class: type[_Trial],
    path: Path,
    state: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> _Trial:
    own = _own(state, path)
    trial = context.build_trial(trial_class, **kwargs)
    # The models that the constructor has wrapped, with a copy of the given context.
    models = trial.made_with.models
    if len(models) != own["num_models"]:
        raise CheckpointError(f"{path} holds {own['num_models']} models, {trial_class.__name__} has {len(models)}")
    # The same form as in `TrialTrainer`, because the names in the checkpoint depend on it.
    model = models[0] if len(models) == 1 else nn.ModuleList(models)
    try:
        model.load_state_dict(with_base(state, model)["model"])
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit {trial_class.__name__}: {error}") from error
    return trial


def _own(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    own = state.get("trial")
    if not isinstance(own, dict):
        raise CheckpointError(f"{path} is the checkpoint of a trainer, not of a trial")
    return own
