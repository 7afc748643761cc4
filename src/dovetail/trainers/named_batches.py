"""Batches with names: keys passed to `forward`, losses that models compute themselves, and the items of a loss."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.data.batches import TARGET_KEYS, find_target
from dovetail.errors import DataError
from dovetail.trainers.catalog import is_torch_loss
from dovetail.trainers.diagnosis import no_targets
from dovetail.trainers.modules import entry_of
from dovetail.trainers.strategies.base import LossCriterionStrategy
from dovetail.trainers.strategies.loss_criterion import DefaultLossCriterionStrategy

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext

# The label that cross entropy and the models of transformers leave out.
_MASK = -100
# The kinds of losses for which transformers shifts the labels; None is its default kind.
_SHIFTED = (None, "ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")
# Entries of an output that are no predictions.
_NO_PREDICTIONS = ("loss", "num_items", "past_key_values")


@dataclass(slots=True)
class NamedBatch:
    """A batch of named values, prepared for one call of the model.

    Keys that are parameters of `forward` are passed by name. The labels are among them if `forward` has a parameter for
    them and the user did not choose a loss; if the outputs then have a loss, it is the loss of the batch. Other keys
    are left out, with one warning. A single input needs no matching name.

    Attributes:
        inputs: The arguments of `forward` by name, or the only input.
        targets: The value under the key of the targets; None if the batch has none.
        num_items: The labels that the loss is a mean of, without masked ones; None means the samples.
        num_tokens: The tokens of the batch; None if it has no `input_ids`.
        criterion: The loss of the trainer, for outputs without a loss.
        uses_own_loss: True if a loss in the outputs takes precedence over the criterion.
        context: The context of the run.
    """

    inputs: Any
    targets: Any
    num_items: Any
    num_tokens: Tensor | int | None
    criterion: Any
    uses_own_loss: bool
    context: TrainingContext

    def loss(self, outputs: Any, targets: Any) -> Any:
        """Return the loss of the outputs: the model's own, or the trainer's criterion of logits and targets.

        Raises:
            DataError: The model returns no loss, and the batch has no targets.
        """
        own = entry_of(outputs, "loss") if self.uses_own_loss else None
        if (num_items := entry_of(outputs, "num_items")) is not None:
            self.num_items = num_items
        if own is not None:
            self.context.run.batch.uses_criterion = False
            loss = own
        elif targets is None and is_torch_loss(self.criterion):
            raise DataError(no_targets(self.context, _NO_LOSS.format(type(self.context.model).__name__)))
        else:
            loss = self.criterion(self.scores(outputs), targets)
        if isinstance(self.num_items, Tensor):
            # The mean over no label at all is NaN. With weight zero it must not reach the gradients.
            loss = torch.where(self.num_items > 0, loss, 0.0)
        return loss

    def scores(self, outputs: Any) -> Any:
        """Return what metrics and the criterion receive: the logits, or outputs without logits unchanged.

        A user's loss function receives the outputs unchanged. The classes of logits are in dimension 1 for a criterion,
        as torch expects. If the model computes the loss, they stay in the dimension that the model chose.
        """
        logits = entry_of(outputs, "logits")
        if logits is None or not (self.uses_own_loss or _takes_logits(self.criterion)):
            return outputs
        has_loss = self.uses_own_loss and entry_of(outputs, "loss") is not None
        return logits if has_loss else _classes_second(logits, self.targets)

    def train_output(self, loss: Any) -> dict[str, Any]:
        """Return the output of a training step."""
        counts = {"num_items": self.num_items, "num_tokens": self.num_tokens}
        return {"loss": loss, **{name: count for name, count in counts.items() if count is not None}}

    def test_output(self, outputs: Any) -> dict[str, Any]:
        """Return the output of a test step: the loss, its items, and outputs and targets for metrics."""
        output = {"loss": self.loss(outputs, self.targets), "output": self.scores(outputs)}
        if self.targets is not None:
            output["target"] = self.targets
        return output if self.num_items is None else {**output, "num_items": self.num_items}


def named_batch(context: TrainingContext, criterion: Any, batch: Any, target: Any = None) -> NamedBatch | None:
    """Return a batch of named values, prepared for the model of a run; None if the batch is not a mapping.

    Args:
        context: The context of the run.
        criterion: The loss of the trainer.
        batch: The batch.
        target: The key of the targets; None means the first of the usual names.

    Raises:
        DataError: No key of the batch is a parameter of `forward`, and there are several inputs.
    """
    if not isinstance(batch, Mapping):
        return None
    model = context.model
    assert model is not None
    is_chosen = not context.run.loss_is_default or bool(context.config.get("loss_criterion"))
    function, is_bound = _forward_of(model)
    plan = _plan(function, is_bound, type(model).__name__, tuple(batch), is_chosen, target)
    targets = None if plan.target is None else batch[plan.target]
    mask = _mask_of(criterion) if is_chosen else _MASK
    counted = batch.get("shift_labels", targets)
    named = {name: batch[key] for name, key in plan.passed}
    if "position_ids" in named and _caches(model):
        # With a cache, transformers ignores positions that start again, and attends across packed sequences.
        named.setdefault("use_cache", False)
    return NamedBatch(
        inputs=batch[plan.single] if plan.single is not None else named,
        targets=targets,
        num_items=None if mask is None else _count(counted, mask, not is_chosen and _shifts(model, counted is targets)),
        num_tokens=_num_tokens(batch),
        criterion=criterion,
        uses_own_loss=not is_chosen,
        context=context,
    )


def predictions_of(outputs: Any) -> Any:
    """Return the outputs of a model without loss and caches, in the same structure.

    Example:
        >>> predictions_of({"loss": 1.0, "logits": 2.0})
        {'logits': 2.0}
    """
    if not isinstance(outputs, Mapping):
        return outputs
    left_out = [name for name in _NO_PREDICTIONS if name in outputs]
    if left_out and dataclasses.is_dataclass(type(outputs)):
        both: Any = outputs
        return dataclasses.replace(both, **dict.fromkeys(left_out))
    return {name: value for name, value in outputs.items() if name not in left_out} if left_out else outputs


# ---------------------------------------------------------------------- names

_NO_LOSS = "{} returns no loss for it; give the labels under 'labels', or a train_step and test_step that need none"


@dataclass(frozen=True)
class _Plan:
    """How the keys of a batch reach `forward`.

    Attributes:
        passed: Pairs of a parameter and the key whose value it gets.
        single: The key of the only input, which is passed by position; None means by name.
        target: The key of the targets, or None.
    """

    passed: tuple[tuple[str, str], ...]
    single: str | None
    target: str | None


@lru_cache(maxsize=128)
def _plan(
    function: Any, is_bound: bool, model: str, keys: tuple[str, ...], is_chosen: bool, chosen_target: Any
) -> _Plan:
    """Return the plan for batches with given keys; cached, so that the warning comes once."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1 if is_bound else 0 :]
        takes_all = any(it.kind is it.VAR_KEYWORD for it in parameters)
    except (TypeError, ValueError):
        # A function in another language, such as the forward of a scripted module, has no signature.
        parameters, takes_all, is_chosen = [], True, True
    named = {it.name: it for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)}
    target = chosen_target if chosen_target in keys else find_target(keys)
    inputs = [key for key in keys if key != target]
    passed = {key: key for key in inputs if key in named or takes_all}
    if not passed and len(inputs) == 1:
        return _Plan((), inputs[0], target)
    if not passed and inputs:
        raise DataError(
            f"no key of the batch ({_quoted(inputs)}) is a parameter of {model}.forward, which takes "
            f"{_quoted(list(named)) or 'nothing by name'}: rename keys, give pairs (inputs, targets), or a train_step"
        )
    if unknown := [key for key in inputs if key not in passed]:
        warnings.warn(
            f"{_quoted(unknown)} of the batch: {model}.forward has no such parameter, so it is not passed on",
            UserWarning,
            stacklevel=2,
        )
    if target is not None:
        # "label" goes to a parameter "labels", too.
        name = next((name for name in (target, *TARGET_KEYS) if name in named), target if takes_all else None)
        is_needed = name in named and named[name].default is inspect.Parameter.empty
        if name is not None and (is_needed or not is_chosen):
            passed[name] = target
    return _Plan(tuple(passed.items()), None, target)


def _forward_of(model: nn.Module) -> tuple[Any, bool]:
    """Return the function behind `model.forward`, and whether its first parameter is the model."""
    # A module that `torch.compile` returned accepts any name, so use the signature of the module inside.
    forward = model._modules.get("_orig_mod", model).forward  # type: ignore[union-attr]  # it is a module
    return (forward.__func__, True) if inspect.ismethod(forward) else (forward, False)


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))


# ---------------------------------------------------------------------- losses and their items


def _takes_logits(criterion: Any) -> bool:
    """Return whether a loss is one of torch or of this library; a user's loss gets the outputs unchanged."""
    if is_torch_loss(criterion):
        return True
    strategy = getattr(criterion.func, "__self__", None) if isinstance(criterion, partial) else None
    if isinstance(strategy, DefaultLossCriterionStrategy):
        return strategy.loss_fn is None or is_torch_loss(strategy.loss_fn)
    return isinstance(strategy, LossCriterionStrategy) and type(strategy).__module__.startswith("dovetail.")


def _classes_second(scores: Any, targets: Any) -> Any:
    """Return scores with the classes in dimension 1, as torch expects; models of transformers have them last."""
    if not isinstance(scores, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return scores
    return scores.movedim(-1, 1) if scores.ndim > 2 and scores.shape[:-1] == targets.shape else scores


def _mask_of(criterion: Any) -> int | None:
    """Return the label that a loss of torch leaves out of its mean; None if the loss is no plain mean over labels."""
    if isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)) and criterion.reduction == "mean":
        return None if criterion.weight is not None else criterion.ignore_index
    return _MASK if criterion in (nn.functional.cross_entropy, nn.functional.nll_loss) else None


def _count(labels: Any, mask: int, shifts: bool) -> Tensor | None:
    """Return the number of labels that are not masked; None if labels are not numbers of classes."""
    if not isinstance(labels, Tensor) or not labels.ndim or labels.is_floating_point() or labels.dtype == torch.bool:
        return None
    return (labels[..., 1:] if shifts and labels.ndim > 1 else labels).ne(mask).sum()


def _shifts(model: Any, are_labels: bool) -> bool:
    """Return whether a model of transformers compares each output with the label of the following token."""
    # A model of peft contains the model that computes the loss.
    if (inner := getattr(model, "get_base_model", None)) is not None:
        model = inner()
    config = getattr(model, "config", None)
    if not are_labels or config is None or getattr(config, "is_encoder_decoder", False):
        return False
    return getattr(model, "loss_type", "") in _SHIFTED and _calls_loss_function(_forward_of(model)[0])


@lru_cache(maxsize=128)
def _calls_loss_function(function: Any) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def _caches(model: Any) -> bool:
    """Return whether the configuration of a model of transformers enables its cache."""
    return getattr(getattr(model, "config", None), "use_cache", False) is True


def _num_tokens(batch: Mapping[str, Any]) -> Tensor | int | None:
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.sum()
    return ids.numel() if isinstance(ids, Tensor) else None
