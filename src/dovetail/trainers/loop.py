"""Training loop: `fit`, `evaluate` and `predict` for any trainer. Only this module loops over training batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from dovetail.callbacks.base import Report
from dovetail.data import concat
from dovetail.data.batches import with_class_of
from dovetail.data.named_sets import named_sets
from dovetail.errors import DataError
from dovetail.history import History
from dovetail.runtime.signals import stop_on_signals
from dovetail.trainers import saving
from dovetail.trainers.context import Plan, Stage, TrainingContext, clear_gradients
from dovetail.trainers.diagnosis import (
    FirstBatch,
    as_output,
    check_default_loss,
    check_metrics,
    check_output,
    check_pass,
    check_repeatable,
    check_tokens,
    explain_backward,
    judge_first_batch,
    update_metric,
    warn_of_no_data,
)
from dovetail.trainers.interruption import raise_if_signalled
from dovetail.trainers.metrics import (
    SYNCHRONISED,
    Meter,
    WholePass,
    compute_metrics,
    include_means,
    read_together,
)
from dovetail.trainers.named_metrics import NamedMetric
from dovetail.trainers.run_scope import evaluating, lend_data, reading_set, running, set_data
from dovetail.trainers.window import Lookahead
from dovetail.units import Batches, Epochs, Progress, Tokens, TrainUnit, counted

if TYPE_CHECKING:
    from dovetail.trainers.base import Trainer

# Seconds after which the loop reports even if the reporting period has not ended, so that a display is not frozen.
_SLOWEST_REPORT = 1.0


def fit(
    trainer: Trainer,
    train_data: Any = None,
    val_data: Any = None,
    *,
    resume: str | Path | None = None,
    **requested: Any,
) -> History:
    """Train until the planned length is reached or a stop is requested, and return the history.

    The order of all calls:

        setup, resume
        on_train_start                           # strategies first; then a new run builds its optimizers
        validation, if it is requested before the first step
        until max_length or stop:
            on_epoch_start
            for batch in batches("train"):
                on_step_start
                to_device
                train_step                       # may call context.backward and context.step itself
                backward                         # unless train_step did
                if the window closes:            # every batch, without accumulation
                    clip_gradients, on_gradients, optimizer_step
                if an optimizer really stepped:
                    scheduler_step("update"), on_update
                after_step
                on_step_end
                every reporting period: losses to the host, on_report
                validation due? checkpoint due? length reached? stop requested?
            validation due?
            scheduler_step("epoch")
            on_epoch_end
            checkpoint due?
        validation and checkpoint, if they are planned and not up to date
        on_train_end
        teardown

    Args:
        trainer: The outermost layer.
        train_data: Training data; None means the data that the trainer already has.
        val_data: Validation data; None means the data that the trainer already has.
        resume: `"auto"`, the path of a checkpoint, or None.
        requested: `max_length`, `validation_period` and `checkpoint_period`; `trainer.plan` completes them.
    """
    context = trainer.context
    set_data(context, train=train_data, valid=val_data)
    context.run.plan = plan = trainer.plan(**requested)
    # A stop request of an earlier run must not end this one.
    context.run.stop_reason, context.run.signal, context.run.stop_request = None, None, None
    with running(trainer, "train"), saving.EndingJournal(trainer), stop_on_signals(context):
        callbacks, progress = context.callbacks, context.progress
        if context.run.base is not None and context.model is not None:
            # Before a checkpoint changes the buffers.
            context.run.base.note(context.model, again=progress.batches == 0)
        if resume is not None:
            saving.resume(trainer, resume)
            # Plan again: the plan may depend on the restored state.
            context.run.plan = plan = trainer.plan(**requested)
        elif plan.max_length.reached(progress):
            warnings.warn(
                f"nothing to train: {plan.max_length} is reached already ({counted(progress.epoch, 'epoch')}, "
                f"{counted(progress.batches, 'batch', 'batches')} done); max_length counts from the start",
                UserWarning,
                stacklevel=3,
            )
        check_repeatable(context, plan)
        # A resumed run keeps the identifier of its checkpoints, which `saving.resume` has restored.
        if progress.batches == 0 or not context.run.id:
            context.run.id = uuid4().hex
        # After the resume, so that the file receives the restored history.
        saving.start_history(trainer)
        context.run.checked = progress.copy()
        for on_train_start in callbacks.on_train_start:
            on_train_start(context)
        # A callback may have requested a stop in one process only; all processes must agree before the first batch.
        trainer.settle()
        # `validated_at` is 0 if this run resumes from the checkpoint after its first validation, which is not repeated.
        if plan.validates_first and plan.validate is not None and progress.batches == 0 != context.run.validated_at:
            _validate(trainer)
            saving.checkpoint(trainer, due=False)
        while context.run.stop_reason is None and not plan.max_length.reached(progress):
            run_epoch(trainer, plan)
        # A run that a signal stopped saves at once, without a validation.
        if context.run.signal is None and plan.validate is not None and context.run.validated_at != progress.batches:
            _validate(trainer)
        saving.checkpoint(trainer, due=plan.save is not None or context.run.signal is not None, final=True)
        # The last checkpoint may still be written in the background; its failure must end this call with an error.
        saving.finish(trainer)
        context.history.sync()
        # After the checkpoint, from which the next run resumes. An interrupted run does not call `on_train_end`.
        raise_if_signalled(context)
        for on_train_end in callbacks.on_train_end:
            on_train_end(context)
    return context.history


def run_epoch(trainer: Trainer, plan: Plan) -> None:
    """Run one epoch, or the rest of it, and the validation, schedule and checkpoint at its end."""
    context = trainer.context
    progress, callbacks = context.progress, context.callbacks
    context.run.is_in_epoch = True
    # A resumed epoch keeps the restored meter, and its `on_epoch_start` was called before the checkpoint.
    if progress.batch == 0:
        context.run.meter.reset()
        context.run.validated_at = -1
        for on_epoch_start in callbacks.on_epoch_start:
            on_epoch_start(context)
    _train_mode(context.model)
    context.run.interrupted = False
    # The batches before this epoch, also if the epoch is resumed in its middle.
    before = progress.batches - progress.batch
    means = trainer.train_epoch() or {}
    # The epoch is not complete: it is neither counted nor recorded, and a later `fit` continues it.
    if context.run.interrupted:
        trainer.settle()
        return
    if context.process.has_peers and trainer._customized_by("train_epoch"):
        means = _of_first_process(trainer, means)
    if progress.batches == before and not isinstance(plan.max_length, Epochs):
        # Otherwise the run would never end.
        raise DataError(
            f"max_length: {plan.max_length} is never reached, because an epoch counted no batch; check the training "
            "data, and that your train_epoch counts its batches, or give a number of epochs"
        )
    # Read before `scheduler_step("epoch")` changes it: the history has the rate that this epoch was trained with.
    rates = {"lr": context.optimizers[0].param_groups[0]["lr"]} if context.optimizers else {}
    progress.epoch += 1
    progress.batch = 0
    context.run.is_in_epoch = False
    metrics = {f"train_{name}": value for name, value in means.items()}
    context.history.record("train", {**means, **rates}, **_position(progress))
    # The epoch is counted by now, so that validation, hooks and checkpoint refer to its end.
    validates, saves = _due(context)
    # Validated inside of the epoch, after its last batch: the weights are the same.
    if context.run.validated_at == progress.batches:
        metrics.update(context.run.validation)
    elif validates:
        metrics.update(_validate(trainer))
    trainer.scheduler_step("epoch", metrics)
    for on_epoch_end in callbacks.on_epoch_end:
        on_epoch_end(context, metrics)
    trainer.settle()
    saving.checkpoint(trainer, due=saves)


def train_epoch(context: TrainingContext) -> dict[str, float]:
    """Run one pass over the training data, from the position of `context.progress`, and return the mean metrics."""
    trainer, run = _outermost(context), context.run
    plan, window, meter, notes = run.plan, run.window, run.meter, run.batch
    progress, callbacks, optimizers, stepped = context.progress, context.callbacks, context.optimizers, notes.stepped
    assert plan is not None
    # Bound once: attribute lookups are most of the loop's overhead for a tiny step.
    to_device, batch_length = trainer.to_device, trainer.batch_length
    train_step = _in_precision(context, trainer.train_step)
    scheduler_step, after_step = trainer.scheduler_step, trainer.after_step
    on_step_start, on_update, on_step_end = callbacks.on_step_start, callbacks.on_update, callbacks.on_step_end

    # Before the length is read, because a sampler may have another length in every epoch.
    batches = trainer.batches("train")
    # The last batch of an epoch must close its window. Data without a length is therefore read one batch ahead.
    total = trainer.num_batches("train")
    accumulates = window.size > 1
    lookahead = Lookahead(batches) if accumulates and total is None else None
    # A window never spans two epochs, and a window that an error interrupted is not continued.
    window.closes = True
    # Periods in whole epochs are checked by `run_epoch`. If there are no others, a batch skips these checks.
    acts_inside = plan.acts_inside
    until_report, report_by = plan.report, monotonic() + _SLOWEST_REPORT
    is_first = True

    notes.number = progress.batch
    for batch in lookahead or batches:
        for hook in on_step_start:
            hook(context, batch)
        batch = to_device(batch)
        run.num_items = notes.num_samples = notes.num_records = batch_length(batch)
        if accumulates:
            is_last = lookahead.is_last if lookahead is not None else progress.batch + 1 == total
            window.start_batch(is_last=is_last or _ends_after(plan.max_length, progress))
        # Not in every batch: the gradients of the batches of a window add up.
        if window.opens:
            for optimizer in optimizers:
                clear_gradients(optimizer)
        # `context.backward` sets `optimized`: the step then controls the update, and the loop does not repeat it.
        notes.optimized = notes.uses_criterion = False
        notes.num_tokens = 0

        output = train_step(batch)
        # Inline, because a call of `as_output` would be noticeable in a tiny step.
        output = {"loss": output} if isinstance(output, Tensor) else output
        # Before the update, so that a step without a usable loss is reported as such, and not by torch's `backward`.
        if is_first:
            _check_first(trainer, batch, output)
            is_first = False
        notes.num_tokens = output.get("num_tokens", 0)
        _optimize(trainer, batch, output)
        # Not for every batch: the window may be open, and a gradient scaler may have skipped the step.
        if stepped:
            progress.updates += 1
            scheduler_step("update")
            for update_hook in on_update:
                update_hook(context)
        after_step(output)
        # After `after_step`, which may read `context.run.updated`.
        stepped.clear()

        meter.add(output, notes.num_samples)
        progress.batch += 1
        progress.batches += 1
        progress.records += notes.num_records
        # Not in place, and not copied to the host: the tokens may be a tensor of the device.
        run.uncounted_tokens = run.uncounted_tokens + notes.num_tokens
        for end_hook in on_step_end:
            end_hook(context, output)
        until_report -= 1
        if until_report == 0 or monotonic() > report_by:
            until_report, report_by = plan.report, monotonic() + _SLOWEST_REPORT
            _report(context)

        # After the last batch, read the loader to its end: its generator may draw a random number there.
        # Do not stop, validate or save inside of a window, nor while a compiled call is ahead: it has already made the
        # updates of later batches, so that weights and counters do not belong together.
        if window.closes and not notes.is_ahead and progress.batch != total:
            if acts_inside:
                _act(trainer)
            if run.stop_reason is not None or (acts_inside and plan.max_length.reached(progress)):
                run.interrupted = True
                break
        # At the end, so that an error in reading the next batch is reported with its number.
        notes.number = progress.batch

    _report(context)
    check_pass(progress, total, is_complete=window.closes)
    if progress.batch == 0:
        warn_of_no_data("training")
        return {"loss": math.nan}
    return {} if run.interrupted else trainer.reduce(meter).compute()


def _check_first(trainer: Trainer, batch: Any, output: Any) -> None:
    """Check the first batch of an epoch, and the default loss at the start of a run."""
    context = trainer.context
    optimized, plan = context.run.batch.optimized, context.run.plan
    check_output(output, optimized=optimized, optimizers=() if optimized else context.optimizers)
    assert plan is not None
    check_tokens(plan, output)
    if context.progress.batches == 0 and not optimized:
        check_default_loss(context, batch, output["loss"], partial(_predict_quietly, trainer))


def _predict_quietly(trainer: Trainer, batch: Any) -> Any:
    with evaluating(trainer.context, "train"):
        return _in_precision(trainer.context, trainer.predict_step)(batch)


def _in_precision(context: TrainingContext, verb: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a verb that computes in the precision of the run. Bound once per pass, so full precision costs nothing."""
    return verb if context.precision is None else context.precision.applied_to(verb)


def _optimize(trainer: Trainer, batch: Any, output: Mapping[str, Any]) -> None:
    """Call backward, and step if the window closes; if `train_step` did both itself, make its deferred steps."""
    context = trainer.context
    run = context.run
    window = run.window
    if run.batch.optimized:
        # Steps that were requested earlier in the window, and not again for its last batch.
        if window.size > 1 and window.closes and (waiting := window.take_deferred()):
            context.step(*waiting)
        return
    if "num_items" in output:
        run.num_items = output["num_items"]
    loss = output["loss"]
    try:
        trainer.backward(loss if window.size == 1 else loss * window.weight(run.num_items, first_of_batch=True))
    except RuntimeError as error:
        if (explained := explain_backward(error)) is error:
            raise
        raise explained from error
    if window.closes:
        # LBFGS computes the loss several times in one step.
        if run.needs_closure:
            run.closure = partial(_recompute, context, batch)
        # Gradients stay until the next window opens, so that hooks after the step can read them.
        context.step(zero_grad=False)


def _act(trainer: Trainer) -> None:
    """Validate and save if a period ends inside an epoch; periods that end with the epoch are left to `run_epoch`."""
    validates, saves = _due(trainer.context)
    if validates:
        _report(trainer.context)
        _validate(trainer)
        # An overridden `val_epoch` may have left the model in evaluation mode.
        _train_mode(trainer.context.model)
        trainer.settle()
    if validates or saves:
        _report(trainer.context)
        saving.checkpoint(trainer, due=saves)


def _due(context: TrainingContext) -> tuple[bool, bool]:
    """Return whether a validation and a checkpoint are due since the last call."""
    plan, before, now = context.run.plan, context.run.checked, context.progress
    assert plan is not None
    # Only then, because a tensor of the device is waited for.
    if type(plan.max_length) is Tokens or type(plan.validate) is Tokens or type(plan.save) is Tokens:
        context.run.count_tokens(now)
    due = (
        plan.validate is not None and plan.validate.due(before, now),
        plan.save is not None and plan.save.due(before, now),
    )
    context.run.checked = now.copy()
    return due


def _report(context: TrainingContext) -> None:
    """Copy the collected losses to the host, in one transfer for many batches, and call `on_report`."""
    meter = context.run.meter
    if not len(meter):
        return
    context.run.count_tokens(context.progress)
    losses = meter.flush().get("loss", [])
    context.history.extend_losses(losses)
    if context.callbacks.on_report:
        report = Report(meter.compute(), losses, context.progress.batches - len(losses))
        for hook in context.callbacks.on_report:
            hook(context, report)


def _validate(trainer: Trainer) -> dict[str, float]:
    """Run a validation pass inside training, record it, and return its metrics by their full names."""
    context = trainer.context
    for on_validation_start in context.callbacks.on_validation_start:
        on_validation_start(context)
    means = trainer.val_epoch()
    if context.process.has_peers and trainer._customized_by("val_epoch"):
        means = _of_first_process(trainer, means or {})
    context.run.validated_at = context.progress.batches
    if means:
        context.history.record("valid", means, **_position(context.progress))
    context.run.validation = metrics = {f"valid_{name}": float(value) for name, value in (means or {}).items()}
    for on_validation_end in context.callbacks.on_validation_end:
        on_validation_end(context, metrics)
    if context.run.saver is not None:
        context.run.saver.consider(metrics)
    return metrics


def val_epoch(context: TrainingContext) -> dict[str, float]:
    """Run one validation pass and return its mean metrics."""
    return _evaluate_pass(_outermost(context), "valid")


def evaluate(trainer: Trainer, data: Any = None, stage: Stage = "test") -> dict[str, float]:
    """Return the metrics of one pass over `data`; the state of training does not change."""
    context = trainer.context
    if stage == "train":
        # Read them as test data: a training pass starts at `progress` and would move the position in the data.
        data, stage = context.run.data.get("train") if data is None else data, "test"
        if data is None:
            raise DataError("no train data: pass it to the call, or train_dataset=… to the trainer")
    with lend_data(context, stage, data), running(trainer, stage):
        return _evaluate_pass(trainer, stage)


def predict(trainer: Trainer, data: Any = None) -> Any:
    """Return the predictions for `data`, joined over its batches."""
    context = trainer.context
    with lend_data(context, "predict", data), running(trainer, "predict"), evaluating(context, "predict"):
        to_device, predict_step = trainer.to_device, _in_precision(context, trainer.predict_step)
        parts = [predict_step(to_device(batch)) for batch in trainer.batches("predict")]
        example = parts[0] if parts else None
        return concat([with_class_of(example, part) for part in trainer.gather(parts)])


def _evaluate_pass(trainer: Trainer, stage: Stage) -> dict[str, float]:
    """Return the mean metrics over the data of a stage; with several data sets, their names come first."""
    context = trainer.context
    sets = named_sets(context.run.data.get(stage))
    if sets is None:
        return _evaluate_set(trainer, stage)
    means = {}
    for name, data in sets.items():
        with reading_set(context, stage, name, data):
            means.update({f"{name}_{metric}": value for metric, value in _evaluate_set(trainer, stage).items()})
    return means


def _evaluate_set(trainer: Trainer, stage: Stage) -> dict[str, float]:
    """Run one pass over the data of a stage without training, and return its mean metrics by name."""
    context = trainer.context
    meter, first = Meter(), FirstBatch(Meter())
    num_batches = 0
    with evaluating(context, stage):
        to_device, batch_length = trainer.to_device, trainer.batch_length
        test_step = _in_precision(context, trainer.test_step)
        metrics = dict(context.run.metrics)
        for metric in metrics.values():
            metric.reset()
        for batch in trainer.batches(stage):
            batch = to_device(batch)
            context.run.batch.uses_criterion = False
            output = as_output(test_step(batch))
            meter.add(output, batch_length(batch))
            if num_batches == 0:
                check_metrics(context, metrics, output, first)
            for metric in metrics.values():
                update_metric(metric, output)
            for on_test_step_end in context.callbacks.on_test_step_end:
                on_test_step_end(context, output)
            num_batches += 1
            # Otherwise a long pass would collect the losses of all of its batches on the device.
            if num_batches % 256 == 0:
                meter.flush()
        read_together(metrics, [meter, first.flags])
        judge_first_batch(metrics, first)
        # Before `reduce`, which sums the meter over the processes.
        include_means(metrics, meter)
        means = trainer.reduce(meter).compute()
        for metric in metrics.values():
            # Sums over processes are useless for a metric that is not a mean, so its inputs or states are collected.
            if isinstance(metric, (WholePass, NamedMetric)):
                metric.gather(trainer.gather)
        if not means:
            source = context.run.data.get(stage)
            if isinstance(source, Iterator):
                raise DataError(
                    f"the {stage} data is a {type(source).__name__} without batches: it can be read only once; give a "
                    "list, a loader or a dataset"
                )
            warn_of_no_data(stage)
            return {"loss": math.nan, **dict.fromkeys(metrics, math.nan)}
        values = compute_metrics(metrics, means)
        # No message for the others, whose values are the same everywhere.
        if any(not isinstance(metric, SYNCHRONISED) for metric in metrics.values()):
            values = _of_first_process(trainer, values)
        return values


def _of_first_process(trainer: Trainer, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the first process of the run.

    A metric object or an epoch of the user may measure only the batches of its process. Callbacks and checkpoints would
    then decide differently in each process: weights would differ, and collective calls would never return.
    """
    first: dict[str, Any] = trainer.gather([dict(values)])[0]
    return first


def _recompute(context: TrainingContext, batch: Any) -> Tensor:
    """Compute forward and backward of a batch again, for an optimizer that evaluates the loss several times."""
    trainer = _outermost(context)
    with torch.enable_grad():
        for optimizer in context.optimizers:
            clear_gradients(optimizer)
        # Without autocast: mixed precision and an optimizer with a closure are rejected together.
        loss: Tensor = as_output(trainer.train_step(batch))["loss"]
        trainer.backward(loss)
    return loss


def _ends_after(max_length: TrainUnit, progress: Progress) -> bool:
    """Return whether training reaches its planned length with the running batch."""
    return isinstance(max_length, Batches) and progress.batches + 1 >= max_length.length


def _train_mode(model: nn.Module | None) -> None:
    # Only if the root is in evaluation mode: a submodule that the user put in evaluation mode stays there.
    if model is not None and not model.training:
        model.train()


def _position(progress: Progress) -> dict[str, int]:
    return {"epoch": progress.epoch, "batches": progress.batches, "updates": progress.updates}


def _outermost(context: TrainingContext) -> Trainer:
    assert context.run.trainer is not None, "a pass over the data runs inside fit, evaluate or predict"
    return context.run.trainer
