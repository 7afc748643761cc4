"""Checks of data, steps and metrics that raise an error instead of training with wrong numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from dovetail.data import split_batch
from dovetail.data.batches import map_tensors
from dovetail.data.named_sets import named_sets
from dovetail.data.sources import is_one_shot
from dovetail.distributed import is_part
from dovetail.errors import ConfigError, DataError, add_note
from dovetail.trainers.context import Plan, TrainingContext
from dovetail.trainers.metrics import Meter, Metric, check_classes
from dovetail.trainers.named_metrics import Perplexity
from dovetail.units import Epochs, Progress, Tokens, counted

# The loss that a configuration names, for a strategy without its own.
_LOSS_KEY = "loss_criterion"
_OUTPUTS = {"output", "target"}


def check_repeatable(context: TrainingContext, plan: Plan) -> None:
    """Raise if a run of several epochs would read data twice that can be read only once."""
    # A length in other units may end within the first epoch.
    if not isinstance(plan.max_length, Epochs) or plan.max_length.length - context.progress.epoch <= 1:
        return
    for stage in ("train", "valid"):
        source = context.run.data.get(stage)
        for each in (named_sets(source) or {"": source}).values():
            if is_one_shot(each) and (stage == "train" or plan.validate is not None):
                raise DataError(
                    f"the {stage} data is a {type(each).__name__}, which can be read only once, but training runs to "
                    f"{plan.max_length}; give a list, a loader or a dataset, or train one epoch"
                )


def check_pass(progress: Progress, total: int | None, *, is_complete: bool) -> None:
    """Raise if a pass over the training data ended inside a window, or had no batches although an earlier one had.

    Args:
        progress: The counters at the end of the pass.
        total: The announced number of batches; None if it is unknown.
        is_complete: False if the accumulation window is still open.
    """
    if not is_complete:
        raise DataError(
            f"the training data ended after {counted(progress.batch, 'batch', 'batches')}, though its length is "
            f"{total}: the last updates would miss batches; give the loader its true length, or none"
        )
    if progress.batch == 0 and progress.batches:
        raise DataError(
            f"the training data has no batches in epoch {progress.epoch + 1}, though it had some before: data such "
            "as an iterator can be read only once; give a list, a loader or a dataset"
        )


def as_output(output: Any) -> Mapping[str, Any]:
    """Return the output of a step by name; a step may return the loss alone.

    Example:
        >>> as_output(torch.tensor(2.0))
        {'loss': tensor(2.)}
    """
    return {"loss": output} if isinstance(output, Tensor) else output


def naming_loss(step: Callable[[Any], Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Return a step whose outputs have names, also if the given step returns the loss alone."""
    return lambda batch: as_output(step(batch))


def check_output(output: Any, *, optimized: bool, optimizers: Iterable[Optimizer] = ()) -> None:
    """Raise if the first output of an epoch has a form with which the loop cannot train.

    Args:
        output: The output of `train_step`.
        optimized: True if the step called `context.backward`.
        optimizers: The optimizers, whose gradients show that the step called `loss.backward()`.
    """
    trained = [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    if not isinstance(output, Mapping) or not (optimized or isinstance(output.get("loss"), Tensor)):
        if trained:
            raise ConfigError(_OWN_BACKWARD)
        shown = sorted(output) if isinstance(output, Mapping) else type(output).__name__
        raise ConfigError(f"train_step: expected the loss, or a dict with a tensor under 'loss', got {shown}")
    if optimized:
        return
    loss = output["loss"]
    if loss.numel() != 1:
        raise ConfigError(
            f"train_step: the loss must be one number, got a tensor of shape {tuple(loss.shape)}; take its mean()"
        )
    if trained and (not loss.requires_grad or _is_differentiated(loss, trained)):
        raise ConfigError(_OWN_BACKWARD)
    if not loss.requires_grad:
        raise ConfigError(
            "train_step: the loss does not depend on any parameter that requires a gradient: look for .detach(), "
            ".item() or torch.no_grad()"
        )


def _is_differentiated(loss: Tensor, trained: list[Tensor]) -> bool:
    """Return whether the gradients of parameters equal those of a loss that can be differentiated again.

    Such a loss was differentiated with `retain_graph=True`, or its graph stores no tensor. Another backward pass would
    double the gradients. Gradients of another loss, such as an auxiliary loss, are not the gradients of this one.
    """
    gradients = [it.grad for it in trained]
    # A loss of a batch in parts (`AutoBatch`) can be differentiated only once. Parts of gradients would be exchanged.
    if type(loss.grad_fn).__name__ == "_DetachedLossBackward" or any(map(is_part, gradients)):
        return False
    try:
        again = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
    except RuntimeError:
        # Backward of the loop explains the error.
        return False
    pairs = zip(gradients, again, strict=True)
    return all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)


def check_tokens(plan: Plan, output: Mapping[str, Any]) -> None:
    """Raise if a length or period is in tokens and the first step of an epoch does not count tokens."""
    for name, unit in (
        ("max_length", plan.max_length),
        ("validation_period", plan.validate),
        ("checkpoint_period", plan.save),
    ):
        if isinstance(unit, Tokens) and "num_tokens" not in output:
            raise ConfigError(
                f"{name}: {unit} is never reached, because no tokens are counted: give batches with 'input_ids', or "
                "return 'num_tokens' from train_step"
            )


def explain_backward(error: RuntimeError) -> Exception:
    """Return the error to raise for a failed backward: a loss that was differentiated before gets a clear message."""
    if "backward through the graph a second time" not in str(error):
        return error
    return ConfigError(f"{_OWN_BACKWARD}; a tensor that is kept from an earlier batch needs .detach()")


_OWN_BACKWARD = (
    "train_step: its loss was differentiated already: return the loss, and leave backward and step to the loop, or "
    "write self.context.backward(loss) and self.context.step() in place of loss.backward() and optimizer.step()"
)


def check_default_loss(context: TrainingContext, batch: Any, loss: Tensor, predict: Callable[[Any], Any]) -> None:
    """Raise if cross entropy, which the user did not choose, does not fit the first batch of a run.

    Args:
        context: The context of the run.
        batch: The first batch.
        loss: Its loss.
        predict: Returns the outputs for a batch. Called only if the loss is 0, as it always is for a single class,
            because it costs a second forward pass.
    """
    is_chosen = not context.run.loss_is_default or context.config.get(_LOSS_KEY)
    # Any loss of a batch without samples is 0.
    if is_chosen or not context.run.batch.uses_criterion or not context.run.batch.num_samples:
        return
    targets = split_batch(batch)[1]
    flag = _check_fits_cross_entropy(predict(batch) if loss.item() == 0 else None, targets)
    if flag is not None and not bool(flag):
        raise _no_probabilities(targets.shape)


def _check_fits_cross_entropy(outputs: Any, targets: Any) -> Tensor | None:
    """Raise if the form of the outputs shows that cross entropy, the default loss, cannot learn from them.

    Returns:
        A flag, on the device: False if the targets are numbers that are no probabilities. None without such numbers.
    """
    # Softmax over one output is always 1, so the loss is 0 and there is no gradient.
    if isinstance(outputs, Tensor) and outputs.ndim > 1 and outputs.shape[1] == 1:
        raise ConfigError(
            f"criterion: the default, cross entropy, learns nothing from one output per sample, got outputs of shape "
            f"{tuple(outputs.shape)}; give criterion='MSELoss', 'BCEWithLogitsLoss', …"
        )
    if isinstance(targets, Tensor) and targets.is_floating_point() and targets.ndim > 1 and targets.numel():
        sums = targets.sum(dim=1)
        return (targets >= 0).all() & torch.isclose(sums, torch.ones_like(sums), atol=0.01).all()
    return None


def _no_probabilities(shape: Sequence[int]) -> ConfigError:
    return ConfigError(
        "criterion: the default, cross entropy, needs class numbers or probabilities that add up to 1 as "
        f"targets, got other numbers of shape {tuple(shape)}; give criterion='MSELoss', 'BCEWithLogitsLoss', …"
    )


@dataclass
class FirstBatch:
    """Checks of the values in the first batch of a pass, which are read with its results.

    Attributes:
        flags: The results of the checks, by name; 0 means that a check failed.
        shape: The shape of the targets.
    """

    flags: Meter
    shape: Sequence[int] = ()


def check_metrics(
    context: TrainingContext, metrics: dict[str, Metric], output: Mapping[str, Any], first: FirstBatch
) -> None:
    """Check the metrics with the first output of a pass, and remove default metrics whose shapes do not fit.

    Checks of values are added to `first`.
    """
    outputs, targets = output.get("output"), output.get("target")
    uses_criterion = context.run.batch.uses_criterion
    if uses_criterion and context.run.loss_is_default and not context.config.get(_LOSS_KEY):
        flag = _check_fits_cross_entropy(outputs, targets)
        if flag is not None and targets is not None:
            first.flags.add({"probabilities": flag}, 1)
            first.shape = targets.shape
    if not context.run.metrics_are_default:
        return
    # The loss of a user's `test_step` is unknown: only outputs and targets show whether it is a classification.
    fits = output.keys() >= _OUTPUTS
    if fits and not uses_criterion:
        flag = check_classes(outputs, targets)
        fits = flag is not None
        first.flags.add({} if flag is None else {"classes": flag}, 1)
    # The scores of tokens have the classes in their last dimension, where the accuracy does not look for them.
    fits = fits and not ("num_items" in output and isinstance(outputs, Tensor) and outputs.ndim > 2)
    for name in list(metrics):
        # A number that `test_step` returns under the same name takes precedence.
        if not fits or name in output:
            del metrics[name]


def judge_first_batch(metrics: dict[str, Metric], first: FirstBatch) -> None:
    """Remove default metrics if the first batch of a pass had no classes; the flags are on the host.

    Raises:
        ConfigError: Cross entropy, which the user did not choose, had targets that are no probabilities.
    """
    if first.flags.sums.get("probabilities") == 0:
        raise _no_probabilities(first.shape)
    if first.flags.sums.get("classes") == 0:
        metrics.clear()


def update_metric(metric: Any, output: Mapping[str, Any]) -> None:
    """Update a metric with the output of `test_step`; raise if outputs or targets are missing."""
    if isinstance(metric, Perplexity):
        return
    try:
        outputs, targets = output["output"], output["target"]
    except KeyError as error:
        raise ConfigError(
            f"metrics need test_step to return 'output' and 'target' besides its numbers, got {sorted(output)}"
        ) from error
    metric.update(outputs, targets)


def no_targets(context: TrainingContext, advice: str) -> str:
    """Return the message about a batch without targets, with advice for the given data."""
    train, valid = (context.run.data.get(stage) for stage in ("train", "valid"))
    arrays = (Tensor, np.ndarray)
    # Two arrays of the same length were probably meant as inputs and targets, `fit(x, y)`.
    if isinstance(train, arrays) and isinstance(valid, arrays) and train.shape[:1] == valid.shape[:1]:
        advice = "give inputs and targets as a pair, fit((x, y))"
    return f"the batch has no targets: {advice}"


def explain_failure(error: Exception, context: TrainingContext, inputs: Any, targets: Any) -> None:
    """Add notes to an error of a step: targets that are missing, and types of data that do not fit the model."""
    if targets is None and isinstance(error, TypeError):
        add_note(error, no_targets(context, "give a loss or a step strategy that needs none"))
    words = str(error)
    if isinstance(error, RuntimeError) and not any(word in words for word in ("dtype", "scalar type", "Long")):
        return
    if isinstance(error, TypeError) and not (isinstance(inputs, tuple) and "positional argument" in words):
        return
    if isinstance(error, TypeError):
        add_note(
            error,
            f"a batch of {len(inputs) + 1} items is {len(inputs)} inputs and the targets; if the last item is a weight "
            "for each sample, give sample_weight=True",
        )
        return
    kinds = {it.dtype for it in _tensors(inputs)}
    weights = {it.dtype for it in context.model.parameters()} if context.model is not None else set()
    labels = {it.dtype for it in _tensors(targets)}
    add_note(
        error,
        f"the inputs have the type {_listed(kinds)}, the model {_listed(weights)}, and the targets {_listed(labels)}: "
        "inputs and model need the same type (x.float()), and class numbers are int64 (y.long())",
    )


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, values)
    return found


def _listed(types: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(it).removeprefix("torch.") for it in types)) or "none"


def warn_of_no_data(stage: str) -> None:
    """Warn that a pass had no data, which explains a NaN in its metrics."""
    warnings.warn(f"the {stage} data is empty: its metrics are NaN", UserWarning, stacklevel=2)
