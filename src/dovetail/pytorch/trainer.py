"""Trainer of PyTorch trials, with the arguments of Determined's `Trainer.fit`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, InvalidHP
from dovetail.info import TEST_MODE
from dovetail.pytorch.adapter import AT_THE_END, CheckpointPolicy, FitOptions, Period, TrialTrainer
from dovetail.pytorch.context import PyTorchTrialContext, current_checkpoint, section
from dovetail.pytorch.trial import PyTorchTrial
from dovetail.trainers.base import Trainer as AnyTrainer
from dovetail.trainers.decorators import AMPTrainer, DDPTrainer
from dovetail.units import Batches, parse_unit


class Trainer:
    """Trains a trial.

    Args:
        trial: The trial to train.
        context: The context that `pytorch.init` returned.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from dovetail import pytorch
        >>> class Still(pytorch.PyTorchTrial):
        ...     def __init__(self, context):
        ...         self.context = context
        ...         self.model = context.wrap_model(nn.Linear(1, 1))
        ...         self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.0))
        ...     def train_batch(self, batch, epoch_idx, batch_idx):
        ...         return self.model(batch).square().mean()
        ...     def build_training_data_loader(self):
        ...         return pytorch.DataLoader(torch.ones(8, 1), batch_size=4)
        >>> with pytorch.init(hparams={}, checkpoint_dir=None, verbose=False) as context:
        ...     trial = Still(context)
        ...     pytorch.Trainer(trial, context).fit(max_length=pytorch.Epoch(1))
        {}
    """

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        self.adapter = TrialTrainer(trial, context)
        self.context = self.adapter.trial_context
        self._profiles = False

    @property
    def layers(self) -> AnyTrainer:
        """The trial's trainer in the layers for the precision and the processes of the context."""
        trainer: AnyTrainer = self.adapter
        # Either order of these two layers gives the same bits.
        if self.context.distributed.size > 1:
            trainer = DDPTrainer(trainer)
        precision = self.context.experimental.amp
        return trainer if precision is None else AMPTrainer(trainer, precision=precision)

    def configure_profiler(self, enabled: bool = True, **settings: Any) -> None:
        """Profile every `fit` from now on, as its `profiling_enabled` does.

        Args:
            enabled: Whether to profile.
            settings: Settings of Determined's system profiler, which does not exist here: each gives a warning.
        """
        for name in settings:
            warnings.warn(f"configure_profiler: {name} is ignored", UserWarning, stacklevel=2)
        self._profiles = enabled

    def fit(
        self,
        checkpoint_period: Period = None,
        validation_period: Period = None,
        max_length: Period = None,
        reporting_period: Period = Batches(100),  # noqa: B008 - a value
        checkpoint_policy: CheckpointPolicy | None = None,
        latest_checkpoint: str | Path | None = None,
        step_zero_validation: bool | None = None,
        test_mode: bool = False,
        profiling_enabled: bool | None = None,
        *,
        min_checkpoint_period: Period = None,
        min_validation_period: Period = None,
        train_data: Any = None,
        val_data: Any = None,
    ) -> dict[str, Any]:
        """Train and return the metrics of the last validation; an empty dict if the trial does not validate.

        None means the value of the same name in the experiment configuration, if it has one.

        Args:
            checkpoint_period: How often a checkpoint is written, such as `Epoch(1)`; None means at the end.
            validation_period: How often to validate; None means at the end.
            max_length: The length of the whole training; None means `searcher.max_length` of the configuration.
            reporting_period: How often training metrics are averaged and reported.
            checkpoint_policy: `best` also stores the checkpoint of the best validation, by the searcher's metric;
                `all` writes one after every validation; `none` does neither. `best` by default.
            latest_checkpoint: The checkpoint to resume from, or `"auto"` for the newest one of the trial; None
                means the launcher's checkpoint. A script without a launcher then starts from scratch.
            step_zero_validation: Whether to validate before the first batch; False by default.
            test_mode: Run only one training batch, one validation batch and one checkpoint; `experiment create
                --test` sets this, too.
            profiling_enabled: Whether to profile the first steps and write the result to the trial's folder; None
                means `profiling.enabled` of the configuration, which is False by default.
            min_checkpoint_period: Another name of `checkpoint_period`.
            min_validation_period: Another name of `validation_period`.
            train_data: Training batches in place of those that the trial builds.
            val_data: Validation batches in place of those that the trial builds.
        """
        config = self.context.get_experiment_config()
        validation = _either(validation_period, min_validation_period, "validation_period", config)
        saving = _either(checkpoint_period, min_checkpoint_period, "checkpoint_period", config)
        length = max_length if max_length is not None else section(config, "searcher").get("max_length")
        # `dovetail experiment create --test` sets the variable, so that the script needs no change.
        test_mode = test_mode or bool(os.environ.get(TEST_MODE))
        if test_mode:
            # Without periods, validation and checkpoint follow after the only batch.
            length, validation, saving = Batches(1), None, None
        if length is None:
            raise ConfigError(
                "max_length: the length of the training is missing: give fit(max_length=Epoch(10)), or "
                "searcher.max_length in the configuration"
            )
        policy = checkpoint_policy or config.get("checkpoint_policy", "best")
        if policy not in ("best", "all", "none"):
            raise ConfigError(f"checkpoint_policy: expected 'best', 'all' or 'none', got {policy!r}")
        if step_zero_validation is None:
            step_zero_validation = bool(config.get("perform_initial_validation", False))
        if profiling_enabled is None:
            profiling_enabled = bool(section(config, "profiling").get("enabled", False))
        # Used twice: by the layers to resume, and by the adapter for the arguments of `on_trial_startup`.
        source = current_checkpoint(self.context, latest_checkpoint)
        self.adapter.fit_options = FitOptions(
            reporting=parse_unit(reporting_period or AT_THE_END, "reporting_period"),
            policy=policy,
            validates_first=step_zero_validation,
            is_test=test_mode,
            profiles=profiling_enabled or self._profiles,
            source=None if source is None else Path(source),
        )
        try:
            self.layers.fit(
                train_data,
                val_data,
                max_length=length,
                validation_period=validation,
                checkpoint_period=saving,
                resume=source,
            )
        except InvalidHP:
            # The search then replaces the trial instead of restarting it.
            self.adapter.report_invalid()
            raise
        # These have the trial's names and include metrics that are not numbers; the history has numbers only.
        return self.adapter.validation_metrics()

    def predict(self, data: Any) -> Any:
        """Return the trial's predictions for `data`."""
        return self.layers.predict(data)


def _either(period: Period, other: Period, name: str, config: Mapping[str, Any]) -> Period:
    """Return a period by either of its names, or the one of the configuration, where 0 means no period."""
    if period is not None and other is not None:
        raise ConfigError(f"{name} and min_{name} are the same: give one of them")
    found = period if period is not None else other
    if found is not None:
        return parse_unit(found, name)
    stated = config.get(f"min_{name}")
    unit = None if stated is None else parse_unit(stated, f"min_{name}")
    return None if unit is None or unit.value == 0 else unit
