from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

from dovetail import Batches, Epochs, Trainer
from dovetail.callbacks import LambdaCallback
from dovetail.errors import ConfigError
from dovetail.trainers import base
from dovetail.trainers.capabilities import MixedPrecision
from dovetail.trainers.capabilities.auto_batch import AutoBatch, find_batch_size, is_out_of_memory
from dovetail.trainers.capabilities.sharded import ShardedDataParallel
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.decorators import AMPTrainer, TrainerDecorator

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(40, 6, generator=GENERATOR, dtype=torch.float64)
Y = (X[:, :3]).argmax(dim=1)

Fitting = Trainer.add_on(AutoBatch)


@pytest.fixture(scope="module", autouse=True)
def _quick_to_collect() -> Iterator[None]:
    """Every failed attempt collects garbage, which would traverse all objects of pytest and torch."""
    # Torch's first optimizer loads its compiler.
    SGD([torch.zeros(1)])
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class AutoBatchLayer(AutoBatch, TrainerDecorator):
    """The capability as a decorator of objects."""


class Limited(nn.Module):
    """Passes its inputs on, but has room for no more than `forward` or `backward` rows at once."""

    def __init__(self, forward: int | None = None, backward: int | None = None) -> None:
        super().__init__()
        self.limits = (forward or 10**9, backward or 10**9)
        self.rows: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.rows.append(len(inputs))
        return Bounded.apply(inputs, self.limits)


class Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, limits: tuple[int, int]) -> Tensor:
        ctx.limit = limits[1]
        if len(inputs) > limits[0]:
            raise torch.OutOfMemoryError("out of memory in forward")
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if len(gradient) > ctx.limit:
            raise torch.OutOfMemoryError("out of memory in backward")
        return gradient.clone(), None


def model_of(**limits: int) -> nn.Sequential:
    torch.manual_seed(0)
    # In backward the last layer has its gradient, and the first one has none, when memory is exhausted.
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Limited(**limits), nn.Linear(8, 3)).double()


def make(kind: Any, model: nn.Module, **options: Any) -> Any:
    settings = {
        "optimizer": partial(SGD, lr=0.1, momentum=0.9),
        "train_dataset": (X, Y),
        "batch_size": 10,
        "drop_last": False,
        "seed": 1,
        "verbose": False,
        **options,
    }
    return kind(model, "cpu", **settings)


def gradients_of(trainer: base.Trainer) -> list[list[Tensor]]:
    """The complete gradients of every update of an epoch."""
    seen: list[list[Tensor]] = []

    def on_gradients(context: Any, optimizer: Any) -> None:
        seen.append([it.grad.clone() for group in optimizer.param_groups for it in group["params"]])

    trainer.context.callbacks.add(LambdaCallback(on_gradients=on_gradients))
    trainer.fit(max_length=Epochs(1))
    return seen


def assert_close(one: list[list[Tensor]], other: list[list[Tensor]], tolerance: float = 1e-12) -> None:
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left, right, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# ------------------------------------------------------------------ the gradient


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}, {"forward": 7, "backward": 2}, {"backward": 1}])
@pytest.mark.parametrize("batch_size", [10, 11])
def test_the_gradient_in_parts_equals_the_gradient_of_the_whole_batch(limits: dict[str, int], batch_size: int) -> None:
    expected = gradients_of(make(Trainer, model_of(), batch_size=batch_size))
    found = gradients_of(make(Fitting, model_of(**limits), batch_size=batch_size))
    assert_close(found, expected)


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}, {"forward": 7, "backward": 2}])
@pytest.mark.parametrize("num_batches", [2, 3])
def test_a_window_keeps_the_gradients_of_earlier_batches_when_a_batch_is_split(
    limits: dict[str, int], num_batches: int
) -> None:
    # The first batch of a window fits, the second does not; the last window is shorter, and so is its last batch.
    sizes = [3, 10, 9, 12, 6]
    batches = list(zip(X.split(sizes), Y.split(sizes), strict=True))
    expected = gradients_of(make(Trainer, model_of(), train_dataset=batches, accumulation_steps=num_batches))
    found = gradients_of(make(Fitting, model_of(**limits), train_dataset=batches, accumulation_steps=num_batches))
    assert_close(found, expected)


def by_items(trainer: Any, batch: Any) -> Mapping[str, Any]:
    """A loss over the samples of class 0 or 1."""
    inputs, targets = batch
    counts = targets < 2
    losses = nn.functional.cross_entropy(trainer.model(inputs), targets, reduction="none")
    return {"loss": (losses * counts).sum() / counts.sum(), "num_items": counts.sum()}


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_parts_of_a_batch_are_weighted_by_their_items(limits: dict[str, int], accumulation: int) -> None:
    options = {"train_step": by_items, "accumulation_steps": accumulation, "batch_size": 20}
    expected = gradients_of(make(Trainer, model_of(), **options))
    found = gradients_of(make(Fitting, model_of(**limits), **options))
    assert_close(found, expected)


def with_one_element(trainer: Any, batch: Any) -> Mapping[str, Any]:
    return {"loss": nn.functional.cross_entropy(trainer.model(batch[0]), batch[1]).reshape(1)}


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}])
def test_a_loss_with_one_element_is_split_as_a_scalar_loss(limits: dict[str, int]) -> None:
    whole, cut = make(Trainer, model_of()), make(Fitting, model_of(**limits), train_step=with_one_element)
    assert_close(gradients_of(cut), gradients_of(whole))
    assert list(cut.context.history.losses) == pytest.approx(list(whole.context.history.losses), abs=1e-12)


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}])
def test_the_loss_and_records_in_parts_equal_the_whole_batch(limits: dict[str, int]) -> None:
    whole, cut = make(Trainer, model_of()), make(Fitting, model_of(**limits))
    expected, found = whole.fit(max_length=Epochs(2)), cut.fit(max_length=Epochs(2))
    assert list(found.losses) == pytest.approx(list(expected.losses), abs=1e-12)
    assert cut.context.progress == whole.context.progress


def test_auto_batch_changes_nothing_if_every_batch_fits() -> None:
    expected = gradients_of(make(Trainer, model_of(), accumulation_steps=2))
    trainer = make(Fitting, model_of(), accumulation_steps=2)
    assert_close(gradients_of(trainer), expected, tolerance=0.0)
    assert trainer.micro_batch_size is None


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}])
def test_decorator_and_add_on_agree_bit_for_bit(limits: dict[str, int]) -> None:
    added = gradients_of(make(Fitting, model_of(**limits)))
    decorated = gradients_of(AutoBatchLayer(make(Trainer, model_of(**limits))))
    assert_close(decorated, added, tolerance=0.0)


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}])
def test_batches_of_step_strategies_are_split(limits: dict[str, int]) -> None:
    def composable(kind: Any, model: nn.Module) -> Any:
        settings: dict[str, Any] = {"train_dataset": (X, Y), "batch_size": 10, "seed": 1, "verbose": False}
        return kind(model, loss_strategy=nn.CrossEntropyLoss(), **settings)

    expected = gradients_of(composable(ComposableTrainer, model_of()))
    found = gradients_of(composable(ComposableTrainer.add_on(AutoBatch), model_of(**limits)))
    assert_close(found, expected)


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}])
def test_an_optimizer_with_a_closure_sees_the_whole_batch(limits: dict[str, int]) -> None:
    whole, cut = model_of(), model_of(**limits)
    for kind, model in ((Trainer, whole), (Fitting, cut)):
        make(kind, model, optimizer=partial(LBFGS, lr=0.1, max_iter=4)).fit(max_length=Batches(2))
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


# ------------------------------------------------------------------ mixed precision


def in_precision(precision: str, order: str, **limits: int) -> base.Trainer:
    options = {"accumulation_steps": 2, "train_dataset": (X.float(), Y)}
    model = model_of(**limits).float()
    if order == "outside":
        return AutoBatchLayer(AMPTrainer(make(Trainer, model, **options), precision=precision))
    if order == "inside":
        return AMPTrainer(AutoBatchLayer(make(Trainer, model, **options)), precision=precision)
    made: base.Trainer = make(Trainer.add_on(AutoBatch, MixedPrecision), model, precision=precision, **options)
    return made


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_auto_batch_may_be_inside_or_outside_mixed_precision(limits: dict[str, int], precision: str) -> None:
    outside, inside, added = (
        gradients_of(in_precision(precision, order, **limits)) for order in ("outside", "inside", "added")
    )
    assert_close(inside, outside, tolerance=0.0)
    assert_close(added, outside, tolerance=0.0)


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_of_parts_are_scaled_as_the_whole_loss(limits: dict[str, int], precision: str) -> None:
    whole = in_precision(precision, "outside")
    cut = in_precision(precision, "outside", **limits)
    assert_close(gradients_of(cut), gradients_of(whole), tolerance=5e-3)


# ------------------------------------------------------------------ sizes


def test_auto_batch_keeps_the_part_size_that_fitted() -> None:
    model = model_of(forward=4)
    trainer = make(Fitting, model)
    trainer.fit(max_length=Epochs(1))
    # Ten rows and five are too many. Of ten, four parts of at most three are made, and then no further attempt fails.
    assert model[2].rows == [10, 5] + [2, 3, 2, 3] * 4
    assert trainer.micro_batch_size == 3


def test_a_resumed_run_splits_from_its_first_batch(tmp_path: Path) -> None:
    trainer = make(Fitting, model_of(forward=4))
    trainer.fit(max_length=Batches(2))
    trainer.save_checkpoint(tmp_path / "state")
    model = model_of(forward=4)
    resumed = make(Fitting, model)
    resumed.load_checkpoint(tmp_path / "state")
    resumed.fit(max_length=Batches(3))
    assert model[2].rows == [2, 3, 2, 3]


def test_a_batch_that_fits_is_not_split() -> None:
    model = model_of(forward=4)
    sizes = [10, 3, 27]
    make(Fitting, model, train_dataset=list(zip(X.split(sizes), Y.split(sizes), strict=True))).fit(
        max_length=Batches(2)
    )
    assert model[2].rows == [10, 5, 2, 3, 2, 3, 3]


# ------------------------------------------------------------------ memory


def test_memory_of_a_failed_attempt_is_freed_before_the_next_one() -> None:
    alive: list[bool] = []
    watched: list[weakref.ref[Tensor]] = []

    class Watched(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            gc.collect()
            alive.append(any(reference() is not None for reference in watched))
            # Held by the graph alone, until its part of backward, which the error comes before.
            doubled = inputs * 2
            watched.append(weakref.ref(doubled))
            return doubled * doubled

    model = nn.Sequential(nn.Linear(6, 3), Watched(), Limited(backward=4)).double()
    make(Fitting, model).fit(max_length=Batches(1))
    # The whole, the first half, and the four parts that fit: a part that is done holds nothing, either.
    assert alive == [False] * 6


@pytest.mark.slow
def test_auto_batch_recovers_from_real_memory_exhaustion() -> None:
    code = """
        import resource
        import torch
        from dovetail import Batches, Trainer
        from dovetail.trainers.capabilities.auto_batch import AutoBatch

        torch.set_num_threads(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 2)).double()
        batch = torch.randn(4000, 8, dtype=torch.float64), torch.randint(0, 2, (4000,))
        expected = torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).item()
        trainer = Trainer.add_on(AutoBatch)(model, "cpu", optim_function="SGD", verbose=False)
        # One layer's outputs are 64 MB, of which a step holds two and their gradients.
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20, resource.RLIM_INFINITY))
        history = trainer.fit([batch], max_length=Batches(1))
        assert abs(history.losses[0] - expected) < 1e-12, (history.losses, expected)
        print(trainer.micro_batch_size)
    """
    if sys.platform != "linux":
        pytest.skip("limits on memory are those of Linux")
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert 1 <= int(run.stdout) < 4000


# ------------------------------------------------------------------ errors


def manual(trainer: Any, batch: Any) -> Mapping[str, Any]:
    inputs, targets = batch
    loss = nn.functional.cross_entropy(trainer.model(inputs), targets)
    trainer.context.backward(loss)
    trainer.context.step()
    return {"loss": loss}


@pytest.mark.parametrize("limits", [{"forward": 4}, {"backward": 4}])
def test_a_step_that_calls_the_optimizer_itself_is_not_split(limits: dict[str, int]) -> None:
    model = model_of(**limits)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make(Fitting, model, train_step=manual).fit(max_length=Batches(1))
    assert any("train_step optimises by itself" in note for note in caught.value.__notes__)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_step_that_calls_the_optimizer_itself_trains_unchanged_if_it_fits() -> None:
    expected = gradients_of(make(Trainer, model_of(), train_step=manual))
    assert_close(gradients_of(make(Fitting, model_of(), train_step=manual)), expected, tolerance=0.0)


def test_a_single_sample_that_does_not_fit_raises_an_error() -> None:
    class Never(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            raise MemoryError

    with pytest.raises(MemoryError) as caught:
        make(Fitting, Never(6, 3)).fit(max_length=Batches(1))
    assert "not even a single sample fits into memory" in caught.value.__notes__


def test_a_batch_that_cannot_be_split_raises_an_error() -> None:
    def packed(trainer: Any, batch: Any) -> Mapping[str, Any]:
        trainer.model(torch.zeros(10, 6, dtype=torch.float64))
        raise AssertionError

    sequence = nn.utils.rnn.pack_sequence([torch.zeros(2, 6)] * 10)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make(Fitting, model_of(forward=4), train_step=packed).fit([sequence], max_length=Batches(1))
    assert any("packed sequence" in note for note in caught.value.__notes__)


def test_auto_batch_rejects_a_sharded_model() -> None:
    with pytest.raises(ConfigError, match="AutoBatch and ShardedDataParallel cannot be combined"):
        make(Trainer.add_on(ShardedDataParallel, AutoBatch), model_of())


def test_errors_other_than_out_of_memory_are_raised_at_once() -> None:
    class Wrong(nn.Linear):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            raise RuntimeError("shapes differ")

    model = Wrong(6, 3)
    with pytest.raises(RuntimeError, match="shapes differ"):
        make(Fitting, model).fit(max_length=Batches(1))
    assert model.calls == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("MPS backend out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_distinguished_from_others(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


# ------------------------------------------------------------------ validation and prediction


def test_validation_in_parts_has_the_metrics_of_the_whole_batch() -> None:
    expected = make(Trainer, model_of()).evaluate((X, Y))
    found = make(Fitting, model_of(forward=4)).evaluate((X, Y))
    assert found == pytest.approx(expected, abs=1e-12)


def test_predictions_in_parts_are_in_order() -> None:
    expected = make(Trainer, model_of()).predict(X)
    torch.testing.assert_close(make(Fitting, model_of(forward=4)).predict(X), expected, rtol=0, atol=1e-12)


def test_validation_does_not_change_the_part_size_of_training() -> None:
    trainer = make(Fitting, model_of(forward=4))
    trainer.evaluate((X, Y))
    assert trainer.micro_batch_size is None


# ------------------------------------------------------------------ find_batch_size


@pytest.mark.parametrize("limits", [{"forward": 23}, {"backward": 23}, {"forward": 1}, {"backward": 39}])
@pytest.mark.parametrize("start", [1, 16, 40])
def test_find_batch_size_returns_the_largest_size_that_fits(limits: dict[str, int], start: int) -> None:
    assert find_batch_size(make(Trainer, model_of(**limits)), start=start) == next(iter(limits.values()))


def test_find_batch_size_tries_no_more_samples_than_the_dataset_has() -> None:
    model = model_of()
    assert find_batch_size(make(Trainer, model)) == 40
    assert max(model[2].rows) == 40


def test_find_batch_size_tries_no_size_above_the_limit() -> None:
    model = model_of()
    assert find_batch_size(make(Trainer, model), limit=24) == 24
    assert max(model[2].rows) == 24


@pytest.mark.parametrize("layer", [lambda trainer: trainer, AutoBatchLayer])
def test_find_batch_size_restores_the_trainer(layer: Any) -> None:
    plain, searched = layer(make(Trainer, model_of(forward=23))), layer(make(Trainer, model_of(forward=23)))
    for trainer in (plain, searched):
        trainer.fit(max_length=Batches(5))
    assert find_batch_size(searched) == 23
    assert searched.options.batch_size == 10
    assert not isinstance(searched, AutoBatch) or searched.micro_batch_size is None
    for trainer in (plain, searched):
        trainer.fit(max_length=Batches(9))
    assert list(plain.history.losses) == list(searched.history.losses)
    for one, other in zip(plain.model.parameters(), searched.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_find_batch_size_ignores_the_splitting_of_auto_batch() -> None:
    assert find_batch_size(make(Fitting, model_of(backward=13))) == 13


def test_find_batch_size_rejects_a_loader_with_a_fixed_batch_size() -> None:
    with pytest.raises(ConfigError, match="the batches have 4 samples"):
        find_batch_size(make(Trainer, model_of()), [(X[:4], Y[:4])] * 3)


def test_find_batch_size_raises_if_one_sample_does_not_fit() -> None:
    class Never(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            raise MemoryError

    with pytest.raises(MemoryError) as caught:
        find_batch_size(make(Trainer, Never(6, 3)))
    assert "not even a single sample fits into memory" in caught.value.__notes__
