"""Trainer for one model in one process."""

from __future__ import annotations

import time
from html import escape
from typing import Any

from dovetail.errors import ConfigError
from dovetail.trainers.processes import train_in_process
from dovetail.trainers.reuse import fit_new_run
from dovetail.trainers.single_process import SingleProcessTrainer
from dovetail.units import counted


class Trainer(SingleProcessTrainer):
    """Train one model in one process.

    All arguments have defaults that suit a classifier. To change a part, pass an argument, or override a method in a
    subclass: a verb (`train_step`, `test_step`, `train_epoch`, `val_epoch`, …), `get_optimizer`, `get_loss_criterion`,
    `get_lr_scheduler` or `get_train_loader`. Options are read and assigned on `trainer.options`.
    The classes in `dovetail.compat` add the names that users of lernomatic, zae-engine and plato know.

    With `max_concurrency=n`, `train` runs in a spawned process, at most n of which run at once. Afterwards the trainer
    is in the state of a run in its own process; see `dovetail.trainers.processes.train_in_process`.

    Args:
        model: A module, or a class or function that builds one.
        device: A name, a `torch.device`, a list of them (the first is used), or `"auto"`: the
            accelerator of this machine, else the CPU.
        mode: `"train"` or `"test"`; only `dovetail.compat.zae_engine.Trainer` uses it.
        optimizer: An optimizer, a callable of the parameters such as `partial(AdamW, lr=1e-3)`, a name in
            `torch.optim`, or a list of optimizers.
        scheduler: A value of the option `lr_scheduler`.
        criterion: A value of the option `loss_function`.
        callbacks: Callbacks, as instances or classes.
        metrics: Metrics of validation and test: a mapping or list of torchmetrics objects and functions of outputs and
            targets. The default is the accuracy if the loss is a classification loss.
        loss_strategy: A strategy that replaces the criterion. `optimizer_strategy`, `training_step_strategy`,
            `lr_scheduler_strategy`, `model_update_strategy`, `data_loader_strategy` and `testing_strategy` replace
            the other parts. A method that a subclass overrides takes precedence over a strategy.
        train_step: Called as `train_step(trainer, batch)` in place of the default.
        test_step: Called as `test_step(trainer, batch)` in place of the default.
        options: See `TrainerOptions`.

    Example:
        >>> import torch
        >>> from dovetail import Epochs
        >>> x = torch.randn(64, 4); y = (x.sum(dim=1) > 0).long()
        >>> trainer = Trainer(torch.nn.Linear(4, 2), optim_function="SGD", learning_rate=0.5, verbose=False, seed=0)
        >>> history = trainer.fit((x, y), (x, y), max_length=Epochs(20))
        >>> history.get_latest_metric("valid_accuracy") > 0.9
        True
    """

    _has_defaults = True

    def __repr__(self) -> str:
        context = self.context
        done = counted(context.progress.epoch, "epoch")
        return f"{type(self).__name__}(model={type(context.model).__name__}, device={context.device}, {done} done)"

    def _repr_html_(self) -> str:
        """Return the text of `explain` as HTML, for notebooks."""
        # Notebooks show `pre` in the font of the text, in which the branches of the tree do not meet.
        return f'<pre style="font-family: monospace; line-height: 1.2">{escape(self.explain())}</pre>'

    def train(self, trainset: Any = None, sampler: Any = None) -> float:
        """Train up to `num_epochs` and return the seconds it took; with `max_concurrency`, in a separate process.

        Without arguments, training continues from the current epoch and writes checkpoints and history to
        `checkpoint_dir`. With a `trainset`, it is a new run on this data. The time to start a process does not count.

        Args:
            trainset: Training data of a new run, or None to continue with `train_dataset`.
            sampler: Indices, a torch sampler, or an object with `.get()`; None means all data.
        """
        if self.options.max_concurrency is None:
            return self._train_here(trainset, sampler)
        return self._train_elsewhere(trainset, sampler)

    def _train_here(self, trainset: Any, sampler: Any) -> float:
        if trainset is None and sampler is not None:
            raise ConfigError("sampler: it chooses samples of a trainset; call train(trainset, sampler)")
        started = time.perf_counter()
        if trainset is not None:
            fit_new_run(self, trainset, sampler)
        else:
            # `train()` writes checkpoints by default; `fit` does so only if an option or a period requests them.
            self._saves_by_default = True
            self.fit()
        return time.perf_counter() - started

    def _train_elsewhere(self, trainset: Any, sampler: Any) -> float:
        seconds, _ = train_in_process(self, trainset, sampler)
        return seconds


# PyMarlin's name.
SingleProcess = Trainer
