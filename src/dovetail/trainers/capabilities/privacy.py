"""Differential privacy for any trainer, with Opacus."""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.utils.data as torch_data
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import RandomSampler, Sampler

from dovetail.data import DataLoader, Share, is_shared_already, iterate_from, num_batches
from dovetail.data.slicing import rows_in_memory
from dovetail.distributed import Group
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.extras import require
from dovetail.runtime.seeds import derive_seed
from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.context import Stage
from dovetail.trainers.fitting import restoring
from dovetail.units import Batches, Epochs, TrainUnit, Updates

if TYPE_CHECKING:
    from dovetail.trainers.single_process import SingleProcessTrainer


# Opacus has a third one, gdp, but warns that it can underestimate epsilon.
_MECHANISMS = ("rdp", "prv")


class DifferentialPrivacy(Capability):
    """Trains with DP-SGD: noise hides the influence of every single sample on the weights.

    The gradient of every sample is clipped to a norm, the clipped gradients are averaged over the update, and Gaussian
    noise is added once per update. The privacy budget spent so far is the metric `epsilon` of every epoch, and
    `trainer.epsilon` at any time. The optimizer and the keys of the model's state do not change, so a trainer without
    privacy can load the checkpoints, and vice versa.

    With `DataParallel`, inside or outside of it, all processes make one update together: the first process adds its
    noise once, and it is counted once. Processes with the same seed train like one process with the whole batches.

    Args:
        noise_multiplier: Standard deviation of the noise divided by `max_grad_norm`; None means the value that reaches
            `target_epsilon`, or 1 without a target.
        max_grad_norm: The largest norm of one sample's gradient.
        delta: The probability that the guarantee fails; None means 1 over the number of samples.
        target_epsilon: Choose the noise that spends this much in the length that the first `fit` plans.
        sample_rate: The share of the samples in one update of all processes; None means that the loader determines it.
        poisson_sampling: Draw every sample into every batch independently, as the accountants assume. Without it
            batches are taken from a shuffled epoch, and epsilon is an approximation.
        accountant: `rdp`, or `prv`, which is tighter and slower.
        noise_seed: The seed of the noise and of Poisson sampling. Only for tests and experiments: the noise can be
            subtracted if the seed is known.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> private = Trainer.add_on(DifferentialPrivacy)
        >>> trainer = private(torch.nn.Linear(4, 2), "cpu", num_epochs=2, verbose=False, noise_multiplier=1.1)
        >>> history = trainer.fit((torch.randn(256, 4), torch.zeros(256, dtype=torch.long)))
        >>> history.get_latest_metric("train_epsilon") == trainer.epsilon
        True
    """

    kind = "differential privacy"
    conflicts: ClassVar[Mapping[str, str]] = {
        "compilation": "a compiled step makes its update without clipping single samples and without noise",
        "batch sizing": "the parts of a batch that is cut would be clipped and counted as batches of their own",
        "sharded data parallel": "a process that holds a part of the parameters cannot compute the norm of a sample's "
        "gradient; use DataParallel",
    }

    noise_multiplier: float | None
    max_grad_norm: float
    delta: float | None
    target_epsilon: float | None
    sample_rate: float | None
    poisson_sampling: bool
    # Opacus has no types: these are its accountant, its hooks and its optimizer, and the handle of `_check_step`.
    _accountant: Any
    _hooks: Any
    _private: Any
    _guard: Any
    _seed: int
    _generator: torch.Generator | None
    _sampling: _Sampling | None
    _delta: float | None
    _names: dict[Tensor, str]
    # The batch of the last backward call, the samples of the running update, and the progress of its gradients.
    _batch: int
    _num_samples: int
    _is_clipped: bool
    _is_private: bool

    def __init__(
        self,
        *args: Any,
        noise_multiplier: float | None = None,
        max_grad_norm: float = 1.0,
        delta: float | None = None,
        target_epsilon: float | None = None,
        sample_rate: float | None = None,
        poisson_sampling: bool = False,
        accountant: Literal["rdp", "prv"] = "rdp",
        noise_seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        if accountant not in _MECHANISMS:
            raise UnknownNameError("accountant", str(accountant), _MECHANISMS)
        if noise_multiplier is not None and target_epsilon is not None:
            raise ConfigError("noise_multiplier and target_epsilon: give one of them, the other follows from it")
        _check_number("noise_multiplier", noise_multiplier, lambda value: value >= 0, "that is not negative")
        for name, value in (("max_grad_norm", max_grad_norm), ("target_epsilon", target_epsilon)):
            _check_number(name, value, lambda value: value > 0, "above 0")
        _check_number("delta", delta, lambda value: 0 < value < 1, "between 0 and 1")
        _check_number("sample_rate", sample_rate, lambda value: 0 < value <= 1, "above 0 and at most 1")
        self.noise_multiplier = 1.0 if noise_multiplier is None and target_epsilon is None else noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.delta = delta
        self.target_epsilon = target_epsilon
        self.sample_rate = sample_rate
        self.poisson_sampling = poisson_sampling
        self._accountant = require("opacus.accountants", "privacy").create_accountant(accountant)
        self._hooks = self._private = self._guard = None
        self._seed = secrets.randbits(63) if noise_seed is None else noise_seed
        self._generator = self._sampling = None
        self._delta = delta
        self._names = {}
        self._batch = -1
        self._num_samples = 0
        self._is_clipped = self._is_private = False
        super().__init__(*args, **kwargs)

    @property
    def epsilon(self) -> float:
        """The privacy budget spent so far; infinite if an update had no noise."""
        history = self._accountant.history
        if not history:
            return 0.0
        if any(noise == 0 for noise, _, _ in history):
            return math.inf
        with _silent(_LOOSE), np.errstate(all="ignore"):
            # The bound can be slightly negative if almost nothing is spent.
            return max(0.0, float(self._accountant.get_epsilon(delta=self._delta)))

    # ------------------------------------------------------------------ once per run

    def setup(self) -> None:
        """Check that model, loss and optimizer allow privacy, and install Opacus' hooks for per-sample gradients."""
        super().setup()
        context = self.context
        if context.stage != "train":
            return
        trainer, model = cast("SingleProcessTrainer", self), context.model
        assert model is not None
        if trainer.options.gradient_clip:
            raise ConfigError(
                "gradient_clip and differential privacy: set only max_grad_norm, which clips every sample's gradient"
            )
        if context.precision is not None and context.precision.scaler is not None:
            raise ConfigError("differential privacy needs gradients that are not scaled: use bf16 in place of fp16")
        if len(context.optimizers) != 1:
            raise ConfigError(
                f"differential privacy needs one optimizer, got {len(context.optimizers)}: the gradient of a sample is "
                "clipped as a whole"
            )
        if self.poisson_sampling and context.run.window.size > 1:
            raise ConfigError(
                "poisson_sampling and accumulation_steps: every update is drawn as a whole; set a larger batch_size"
            )
        if context.process.has_peers:
            first = Group.join(context.device).exchange(self._randomness())[0]
            # Created again, on the device of this process.
            self._generator = None
            self._restore(first)
        _check_model(model)
        _check_criterion(trainer.criterion)
        optimizer = context.optimizers[0]
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._hooks = require("opacus.grad_sample", "privacy").GradSampleHooks(model)
        self._private = require("opacus.optimizers", "privacy").DPOptimizer(
            optimizer,
            noise_multiplier=0.0,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=None,
            loss_reduction="sum",
            generator=self._noise(),
        )
        if not all(parameter in self._names for parameter in self._private.params):
            raise ConfigError("differential privacy: the optimizer has parameters that are not the model's")
        self._guard = optimizer.register_step_pre_hook(self._check_step)
        self._batch, self._is_clipped, self._is_private = -1, False, False

    def teardown(self, error: BaseException | None) -> None:
        """Remove all hooks from the model and the optimizer."""
        try:
            super().teardown(error)
        finally:
            self._remove_hooks()

    def state_dict(self) -> dict[str, Any]:
        """Add the spent budget and the state of the noise generator."""
        own = {
            "spent": [list(entry) for entry in self._accountant.history],
            "noise_multiplier": self.noise_multiplier,
            "delta": self._delta,
            **self._randomness(),
        }
        return {**super().state_dict(), "differential_privacy": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the budget and the noise; warn if updates were made without privacy, which epsilon does not count."""
        super().load_state_dict(state)
        own = state.get("differential_privacy")
        if own is None:
            if self.context.progress.updates:
                warnings.warn(
                    "the checkpoint was written without differential privacy: epsilon counts the updates from here on",
                    UserWarning,
                    stacklevel=2,
                )
            return
        with restoring("differential_privacy"):
            self._accountant.history = [(float(noise), float(rate), int(steps)) for noise, rate, steps in own["spent"]]
            if self.target_epsilon is not None:
                self.noise_multiplier = float(own["noise_multiplier"])
            self._delta = self.delta or float(own["delta"])
            self._restore(own)

    # ------------------------------------------------------------------ once per pass

    def train_epoch(self) -> Mapping[str, float] | None:
        """Add epsilon to the metrics of the epoch."""
        # The batch size may have changed since the last epoch.
        self._sampling = None
        means = super().train_epoch()
        return means if self.context.run.interrupted else {**(means or {}), "epsilon": self.epsilon}

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return the batches; with Poisson sampling, the same number of batches, each drawn from all samples."""
        batches = super().batches(stage)
        if stage != "train" or not self.poisson_sampling:
            return batches
        progress, share, sampling = self.context.progress, self.context.process.share, self._get_sampling()
        loader, core = sampling.loader, cast(Any, self.core)
        # One seed per epoch, so that a resumed epoch draws the same batches.
        generator = torch.Generator().manual_seed(derive_seed(self._seed, progress.epoch, rule="poisson"))
        sampler = require("opacus.utils.uniform_sampler", "privacy").UniformWithReplacementSampler(
            num_samples=sampling.num_samples,
            sample_rate=sampling.rate,
            generator=generator,
            steps=core._data.num_batches(stage, loader),
        )
        drawn: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=sampler if share.num_replicas == 1 else _Part(sampler, share),
            num_workers=0 if rows_in_memory(loader) is not None else loader.num_workers,
            collate_fn=partial(_collate, loader.collate_fn),
            pin_memory=loader.pin_memory,
            generator=generator,
        )
        return iterate_from(drawn, progress.batch)

    # ------------------------------------------------------------------ once per batch

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the loss of a batch; zero for an empty batch of Poisson sampling."""
        if self.poisson_sampling and self.context.run.batch.num_samples == 0:
            # The update is still made, from noise alone: skipping it would reveal that no sample was drawn.
            return {"loss": torch.stack([parameter.sum() for parameter in self._private.params]).sum() * 0.0}
        return super().train_step(batch)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradient of every sample, and store the mean of the clipped gradients in `.grad`."""
        context, parameters = self.context, self._private.params
        num_samples, window = context.run.batch.num_samples, context.run.window
        if isinstance(context.run.num_items, Tensor) or context.run.num_items != num_samples:
            raise ConfigError("differential privacy needs a loss that is the mean over samples: leave out num_items")
        if self._batch == context.progress.batches:
            raise ConfigError(
                "differential privacy differentiates one loss per batch: with a second one a sample would count twice"
            )
        self._batch = context.progress.batches
        if window.opens:
            self._num_samples = 0
        self._num_samples += num_samples
        # Undo the weight of the window: samples are clipped by their unweighted gradients.
        weight = window.weight(num_samples, first_of_batch=False) if window.size > 1 else 1.0
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        with _silent(_FIRST_LAYER):
            super().backward(loss if weight == 1.0 else loss / weight, **kwargs)
        if num_samples:
            self._check_gradients(parameters, num_samples)
            self._private.clip_and_accumulate()
        scale = weight / num_samples if num_samples else 0.0
        for parameter, before in zip(parameters, earlier, strict=True):
            total = parameter.summed_grad if num_samples else torch.zeros_like(parameter)
            parameter.grad = total * scale if before is None else before.add_(total, alpha=scale)
            parameter.summed_grad = None
        self._hooks.set_grad_sample_to_none()
        self._is_clipped = True

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Add the noise of the update to the mean of its clipped gradients."""
        # With several processes another layer has averaged the gradients before: the noise is for the whole update.
        super().clip_gradients(optimizer)
        context, private = self.context, self._private
        if not self._is_clipped or any(it.grad is None or it.grad_sample is not None for it in private.params):
            raise ConfigError(f"differential privacy: {_BYPASSED} instead of loss.backward()")
        sampling, size = (
            self._get_sampling(),
            # A tensor on an accelerator, where an update with noise waits for the device once.
            float(context.run.batch.num_averaged) if context.process.has_peers else self._num_samples,
        )
        if self.poisson_sampling:
            # An update of a fixed size is a mean. With a random size, divide by the expected size: the real one would
            # reveal how many samples were drawn.
            for parameter in private.params:
                # The mean over processes without samples is NaN.
                parameter.grad = parameter.grad * (size / sampling.expected) if size else torch.zeros_like(parameter)
            size = sampling.expected
        assert self.noise_multiplier is not None
        private.noise_multiplier = self.noise_multiplier / size
        for parameter in private.params:
            # A new tensor: Opacus marks tensors to which it added noise, and `.grad` may be reused in every update.
            parameter.summed_grad = parameter.grad.detach()
        private.add_noise()
        for parameter in private.params:
            parameter.summed_grad = None
        self._is_clipped, self._is_private = False, True

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step, and count a real step in the privacy accountant."""
        stepped = super().optimizer_step(optimizer)
        if stepped:
            self._accountant.step(noise_multiplier=self.noise_multiplier, sample_rate=self._get_sampling().rate)
        return stepped

    # ------------------------------------------------------------------ private

    def _noise(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator(self.context.device).manual_seed(self._seed)
        return self._generator

    def _randomness(self) -> dict[str, Any]:
        return {"seed": self._seed, "generator": self._noise().get_state()}

    def _restore(self, randomness: Mapping[str, Any]) -> None:
        self._seed = randomness["seed"]
        self._noise().set_state(randomness["generator"])

    def _remove_hooks(self) -> None:
        if self._guard is not None:
            self._guard.remove()
        if self._hooks is not None:
            self._hooks.cleanup()
            for parameter in self._names:
                vars(parameter).pop("summed_grad", None)
            assert self.context.model is not None
            for module in self.context.model.modules():
                # Remainders of a forward pass that an error interrupted; the next run would use them.
                vars(module).pop("activations", None)
                vars(module).pop("max_batch_len", None)
        self._hooks = self._private = self._guard = None
        self._names = {}
        # The next run may have other data, and other processes to share it with.
        self._sampling = None

    def _get_sampling(self) -> _Sampling:
        """Return how the updates of this epoch are sampled; set delta and noise from it if they were not given."""
        if self._sampling is not None:
            return self._sampling
        context = self.context
        loader = cast("SingleProcessTrainer", self)._loader("train")
        if context.process.has_peers and is_shared_already(loader):
            raise ConfigError(
                "differential privacy and a DistributedSampler, which can repeat samples: give a dataset, or a loader "
                "that shuffles, and the processes share it"
            )
        num_samples, batch_size = _sizes(loader)
        if num_samples is None or batch_size is None:
            if self.poisson_sampling or self.sample_rate is None or self.delta is None:
                raise ConfigError(
                    "differential privacy needs to know how the training data is sampled: give a dataset, or a loader "
                    "with a batch_size that shuffles; or else sample_rate and delta, and no poisson_sampling"
                )
            rate = self.sample_rate
        else:
            num_drawn = batch_size * context.run.window.size * context.process.share.num_replicas
            rate = self.sample_rate or min(1.0, num_drawn / num_samples)
            self._delta = self.delta or 1.0 / num_samples
        self._sampling = _Sampling(loader, rate, num_samples or 0)
        if self.noise_multiplier is None:
            assert context.run.plan is not None
            total = num_batches(loader)
            per_epoch = None if total is None else Share(context.process.share.num_replicas).num_steps(total)
            with _silent(_LOOSE), np.errstate(all="ignore"):
                self.noise_multiplier = require("opacus.accountants.utils", "privacy").get_noise_multiplier(
                    target_epsilon=self.target_epsilon,
                    target_delta=self._delta,
                    sample_rate=rate,
                    steps=_planned_updates(context.run.plan.max_length, per_epoch, context.run.window.size),
                    accountant=self._accountant.mechanism(),
                )
        return self._sampling

    def _check_gradients(self, parameters: Iterable[Any], num_samples: int) -> None:
        """Raise unless the gradients to clip are per-sample gradients of all samples and of nothing else."""
        for parameter in parameters:
            name, found = self._names.get(parameter), getattr(parameter, "grad_sample", None)
            if getattr(parameter, "_forward_counter", 0):
                raise ConfigError(
                    "differential privacy: the model computed something that the loss does not use; compute it under "
                    "torch.no_grad()"
                )
            if found is None:
                raise ConfigError(f"differential privacy: the loss does not depend on {name!r}; freeze it, or use it")
            if isinstance(found, list):
                raise ConfigError(f"differential privacy: {_BYPASSED} instead of loss.backward()")
            if len(found) != num_samples:
                raise ConfigError(
                    f"differential privacy: {name!r} saw {len(found)} samples in a batch of {num_samples}; keep "
                    "samples in the first dimension all through the model"
                )
            tolerance = _TOLERANCE.get(found.dtype, 1e-3)
            # In lower precision the norms would be too inexact for the bound.
            parameter.grad_sample = found = found.to(parameter.dtype)
            if self.context.progress.batch >= _CHECKED_BATCHES:
                continue
            error = torch.linalg.vector_norm(found.mean(dim=0) - parameter.grad, math.inf)
            if error > tolerance * torch.linalg.vector_norm(found, math.inf):
                raise ConfigError(
                    f"differential privacy: the loss depends on {name!r} outside its layer, as a penalty on weights "
                    "does; such a part has no samples to clip (weight_decay of the optimizer is fine)"
                )

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_private:
            raise ConfigError(f"differential privacy: {_BYPASSED} and context.step() instead of optimizer.step()")
        self._is_private = False


@dataclass(frozen=True)
class _Sampling:
    """How updates are sampled from the data.

    Attributes:
        loader: The training data.
        rate: The share of the samples in one update.
        num_samples: The number of samples; 0 if unknown.
    """

    loader: Any
    rate: float
    num_samples: int

    @property
    def expected(self) -> float:
        """The expected number of samples in an update."""
        return self.rate * self.num_samples


class _Part(Sampler[list[int]]):
    """This process's part of batches that all processes draw with the same seed."""

    def __init__(self, batches: Iterable[list[int]], share: Share) -> None:
        self._batches = batches
        self._share = share

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield batch[self._share.rank :: self._share.num_replicas]


_BYPASSED = "the gradients bypassed the trainer; call context.backward(loss)"

# In the first batches of an epoch gradients are compared with the sum over samples, for half the cost of clipping.
_CHECKED_BATCHES = 8

# Tolerance for rounding errors.
_TOLERANCE = {torch.bfloat16: 0.05}

# Torch warns that the inputs of the first layer need no gradient, which is correct here.
_FIRST_LAYER = "Full backward hook is firing"
# Opacus warns that the bound is loose; it is still valid.
_LOOSE = "Optimal order is the"


@contextmanager
def _silent(message: str) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=message)
        yield


def _check_number(name: str, value: float | None, accepts: Callable[[float], bool], what: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not accepts(value)):
        raise ConfigError(f"{name}: expected a number {what}, got {value!r}")


def _check_model(model: nn.Module) -> None:
    """Raise for layers that mix samples, such as BatchNorm, or that store data of samples in buffers."""
    validator = require("opacus.validators", "privacy").ModuleValidator
    for name, module in model.named_modules():
        is_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        # A model in evaluation mode is put into training mode by the loop; a submodule in evaluation mode stays so.
        mixes = isinstance(module, _BatchNorm) and (module.training or not model.training)
        kind = type(module)
        what = f"{name!r} ({kind.__name__})" if name else kind.__name__
        if mixes or (is_trained and validator.VALIDATORS.get(kind, _accept)(module)):
            advice = (
                f"use {type(validator.FIXERS[kind](module)).__name__}" if kind in validator.FIXERS else "replace it"
            )
            raise ConfigError(
                f"differential privacy cannot train {what}: {advice}, or train the model "
                "that opacus.validators.ModuleValidator.fix(model) returns"
            )
        if is_trained and any(True for _ in module.buffers()):
            raise ConfigError(
                f"differential privacy cannot train {what} with its buffers, which are not "
                "private: move them to a module without parameters"
            )


def _accept(module: nn.Module) -> list[Exception]:
    return []


def _check_criterion(criterion: Any) -> None:
    """Raise for losses that are known not to be a mean over samples."""
    if isinstance(criterion, nn.Module) and getattr(criterion, "reduction", "mean") != "mean":
        raise ConfigError(f"differential privacy needs a loss that is the mean over samples, got {criterion}")
    if isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)) and criterion.weight is not None:
        raise ConfigError(
            "differential privacy cannot use class weights: they make the loss of a sample depend on the others"
        )


def _sizes(loader: Any) -> tuple[int | None, int | None]:
    """Return the numbers of samples and of samples per batch, if an epoch reads every sample once, in random order."""
    if not isinstance(loader, torch_data.DataLoader):
        return None, None
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return len(sampler), loader.batch_size
    return None, None


def _planned_updates(length: TrainUnit, per_epoch: int | None, window: int) -> int:
    """Return the number of updates of a planned length."""
    if isinstance(length, Updates):
        return length.length
    if per_epoch is None or not isinstance(length, (Epochs, Batches)):
        raise ConfigError(
            f"target_epsilon: the updates in {length!r} are not known beforehand; give a length in Updates, or Epochs "
            "of data that has a length"
        )
    epochs, rest = (length.length, 0) if isinstance(length, Epochs) else divmod(length.length, per_epoch)
    # An accumulation window never spans two epochs.
    return epochs * math.ceil(per_epoch / window) + math.ceil(rest / window)


def _collate(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return collate(samples) if samples else torch.empty(0)
