"""What one process of a group does in `test_overlap.py`: `python overlap_ranks.py FOLDER`, with torchrun's variables.

Every case trains twice: with one message for all gradients, which is sent after the backward pass, and with a message
for each few parameters, which are sent during the pass. Both must give the same bits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail import Batches, Epochs
from dovetail.callbacks import Callback
from dovetail.distributed import PeerError
from dovetail.trainers import AMPTrainer, DDPTrainer, PowerSGD, TimedTrainer, Trainer, TrainerDecorator

CASES: dict[str, Callable[..., Any]] = {}
SMALL = 64  # Bytes of a message: a few parameters.
SETTINGS: dict[str, Any] = {
    "optim_function": "SGD",
    "learning_rate": 0.3,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "seed": 3,
    "drop_last": False,
    "verbose": False,
    "batch_size": 6,
}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def rank() -> int:
    return int(os.environ["RANK"])


def data(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 5, generator=generator)
    return inputs, (inputs.sum(dim=1) > 0).long()


def hook(tensor: Any, function: Callable[[Tensor], Any]) -> None:
    """Call a function with the gradient of a tensor."""
    tensor.register_hook(function)


def after_gradient(parameter: Any, function: Callable[[Tensor], Any]) -> None:
    """Call a function with a parameter that has its gradient."""
    parameter.register_post_accumulate_grad_hook(function)


class Net(nn.Module):
    """Four layers; `early` is the number of messages that were sent before the first layer had its gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        sizes = [5, 6, 6, 6, 2]
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.layers = nn.ModuleList(layers)
        self.trainer: list[Any] = []
        self.early: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layers[0](inputs)
        if hidden.requires_grad and self.trainer:
            hook(hidden, self._count)
        for layer in list(self.layers)[1:]:
            hidden = layer(hidden.tanh())
        return hidden

    def _count(self, gradient: Tensor) -> None:
        self.early.append(sum(it._num_sent for it in self.trainer[0]._exchanges.overlapping))


def flat(module: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()]).tolist()


def both(
    source: Any,
    make: Callable[[], Net] = Net,
    wrap: Callable[[Any], Any] = lambda trainer: trainer,
    inner: Callable[..., Any] = Trainer,
    epochs: int = 2,
    **settings: Any,
) -> dict[str, Any]:
    """Return the weights after training with one message and with many, and the number of early messages."""
    found = []
    settings = {name: value for name, value in {**SETTINGS, **settings}.items() if value is not None}
    for size in (2**20, SMALL):
        module = make()
        layer = DDPTrainer(inner(module, "cpu", **settings), bucket_size=size)
        module.trainer.append(layer)
        trainer = wrap(layer)
        history = trainer.fit(source, max_length=Epochs(epochs))
        found.append([flat(module), list(history.losses), trainer.context.progress.state_dict(), module.early])
    return {"one": found[0][:3], "many": found[1][:3], "before": sum(found[0][3]), "early": found[1][3]}


@case
def even(folder: Path) -> Any:
    return both(data(48))


@case
def uneven_and_timed(folder: Path) -> Any:
    return both(data(53), wrap=TimedTrainer, gradient_clip=0.05)


@case
def windows_that_end_early(folder: Path) -> Any:
    # The last window of an epoch is short, so that its gradients are rescaled.
    return both(data(53), accumulation_steps=3, gradient_clip=0.1)


@case
def idle_inside_a_window(folder: Path) -> Any:
    return both(data(42), accumulation_steps=2)


@case
def less_data_than_processes(folder: Path) -> Any:
    return both(data(3), epochs=4)


def counting(trainer: Any, batch: Any) -> dict[str, Any]:
    inputs, targets = batch
    kept = targets == 1
    losses = nn.functional.cross_entropy(trainer.model(inputs), targets, reduction="none")
    return {"loss": (losses * kept).sum() / kept.sum().clamp(min=1), "num_items": kept.sum()}


@case
def counted_items(folder: Path) -> Any:
    return both(data(53), train_step=counting)


@case
def counted_items_in_windows(folder: Path) -> Any:
    return both(data(53), train_step=counting, accumulation_steps=2)


@case
def float16(folder: Path) -> Any:
    return both(
        data(53),
        wrap=lambda trainer: AMPTrainer(trainer, precision="fp16", init_scale=2.0**24),
        accumulation_steps=2,
        gradient_clip=0.1,
    )


class TwoParts(Trainer):
    """Two optimizers: one for the second half of the model, one for the first."""

    def get_optimizer(self, model: Any) -> Any:
        parts = (model.layers[2:], model.layers[:2])
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.5) for part in parts]


# No options of optimizers, which the class makes itself.
OWN_RATES: dict[str, Any] = dict.fromkeys(("optim_function", "learning_rate", "momentum", "weight_decay"))


@case
def two_optimizers(folder: Path) -> Any:
    return both(data(53), inner=TwoParts, **OWN_RATES)


class Meddles(Callback):
    """Changes gradients of the second optimizer, in one process, between the steps of the two."""

    def on_gradients(self, context: Any, optimizer: Any) -> None:
        if optimizer is context.optimizers[0] and rank() == 1 and context.progress.updates == 3:
            for parameter in context.optimizers[1].param_groups[0]["params"]:
                parameter.grad.mul_(2.0)


@case
def gradients_changed_after_they_were_sent(folder: Path) -> Any:
    return both(data(53), inner=TwoParts, **OWN_RATES, callbacks=[Meddles()])


def by_hand(trainer: Any, batch: Any) -> dict[str, Any]:
    inputs, targets = batch
    loss = nn.functional.cross_entropy(trainer.model(inputs), targets)
    trainer.context.backward(loss, retain_graph=True)
    for parameter in trainer.model.parameters():
        parameter.grad.data.mul_(0.5)
    trainer.context.backward(0.1 * loss.square())
    trainer.context.step()
    return {"loss": loss.detach()}


@case
def two_passes_by_hand(folder: Path) -> Any:
    return both(data(53), train_step=by_hand)


def by_hand_in_turns(trainer: Any, batch: Any) -> Any:
    """Rank 0 leaves the first half of its steps to the loop; rank 1 makes all of them by hand."""
    if rank() == 0 and trainer.context.progress.batches < 4:
        return {"loss": nn.functional.cross_entropy(trainer.model(batch[0]), batch[1])}
    return by_hand(trainer, batch)


@case
def by_hand_in_one_process_only(folder: Path) -> Any:
    return both(data(53), train_step=by_hand_in_turns)


class Branches(Net):
    """Uses a layer for some batches only, which are not the same in all processes, and one layer never."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs + self.sometimes(inputs) if inputs.sum() > 0 else outputs


class BranchesFirst(Branches):
    """The same with the layer that is used sometimes at the end of the backward pass."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        parameters = list(super().parameters(recurse))
        yield from [*parameters[-4:], *parameters[:-4]]


@case
def unused_parameters(folder: Path) -> Any:
    return both(data(53), Branches)


@case
def unused_parameters_in_the_last_messages(folder: Path) -> Any:
    return both(data(53), BranchesFirst)


def hooked(scale: Callable[[nn.Parameter], Any]) -> Callable[[], Net]:
    def make() -> Net:
        module = Net()
        for parameter in module.parameters():
            scale(parameter)
        return module

    return make


@case
def hooks_of_gradients(folder: Path) -> Any:
    return both(data(53), hooked(lambda parameter: hook(parameter, lambda gradient: gradient * 0.5)))


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data.mul_(0.5)


@case
def hooks_of_parameters(folder: Path) -> Any:
    return both(data(53), hooked(lambda parameter: after_gradient(parameter, halve)))


class Halves(TrainerDecorator):
    """Changes the gradients before they are averaged, unseen by autograd."""

    def clip_gradients(self, optimizer: Any) -> None:
        for parameter in self.context.model.parameters():  # type: ignore[union-attr]
            halve(parameter)
        super().clip_gradients(optimizer)


@case
def a_layer_that_changes_gradients(folder: Path) -> Any:
    return both(data(53), wrap=Halves)


class HalvesInside(Trainer):
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        for parameter in self.model.parameters():
            halve(parameter)


@case
def a_backward_pass_that_changes_gradients(folder: Path) -> Any:
    return both(data(53), inner=HalvesInside)


class Freezes(Callback):
    def on_epoch_start(self, context: Any) -> None:
        context.model.layers[1].requires_grad_(context.progress.epoch != 1)


@case
def freezing(folder: Path) -> Any:
    return both(data(53), epochs=3, callbacks=[Freezes()])


class StopsAlone(Callback):
    def on_step_end(self, context: Any, output: Any) -> None:
        if rank() == 1 and context.progress.batches == 3:
            context.stop("enough")


@case
def stop_requests(folder: Path) -> Any:
    return both(data(53), callbacks=[StopsAlone()])


@case
def plain_torch(folder: Path) -> Any:
    """The weights of a loop that is written by hand: Σ w·g / Σ w, over the batches of both processes."""
    inputs, targets = data(53)
    batches = list(zip(torch.split(inputs, 6), torch.split(targets, 6), strict=True))
    module = Net()
    trainer = DDPTrainer(Trainer(module, "cpu", **SETTINGS), bucket_size=SMALL)
    module.trainer.append(trainer)
    trainer.fit(batches, max_length=Epochs(1))
    expected = Net()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.3, momentum=0.9)
    for step in range(0, len(batches), 2):
        sums: list[Tensor | float] = [0.0] * 8
        pair = batches[step : step + 2]
        for x, y in pair:
            expected.zero_grad()
            nn.functional.cross_entropy(expected(x), y).backward()  # type: ignore[no-untyped-call]
            sums = [
                total + parameter.grad * len(x)
                for total, parameter in zip(sums, expected.parameters(), strict=True)
                if parameter.grad is not None
            ]
        for parameter, total in zip(expected.parameters(), sums, strict=True):
            parameter.grad = total / sum(len(x) for x, _ in pair)  # type: ignore[assignment]
        optimizer.step()
    return {"trained": flat(module), "expected": flat(expected), "early": module.early}


# ------------------------------------------------------------------ compression


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, inputs: Tensor) -> Any:
        return self.layers(inputs)


def compressed(
    folder: Path | None,
    compression: Any,
    length: Any,
    size: int = 2000,
    make: Callable[[], Wide] = Wide,
    callbacks: Iterable[Callback] = (),
    **fit: Any,
) -> Any:
    module = make()
    places = {} if folder is None else {"checkpoint_dir": folder, "save_every": 5}
    settings: dict[str, Any] = {**SETTINGS, "learning_rate": 0.1, "callbacks": list(callbacks), **places}
    trainer = DDPTrainer(Trainer(module, "cpu", **settings), bucket_size=size, compression=compression)
    history = trainer.fit(data(240), max_length=length, **fit)
    return flat(module), sum(history.losses[-5:])


@case
def compression(folder: Path) -> Any:
    kinds = {"none": None, "bf16": "bf16", "fp16": "fp16", "powersgd": PowerSGD(rank=2, warm_up=3)}
    return {name: compressed(None, kind, Epochs(3)) for name, kind in kinds.items()}


@case
def compression_with_one_message(folder: Path) -> Any:
    kinds = {"bf16": "bf16", "fp16": "fp16", "powersgd": PowerSGD(rank=2, warm_up=3)}
    return {name: compressed(None, kind, Epochs(3), size=2**20) for name, kind in kinds.items()}


@case
def compression_resumed(folder: Path) -> Any:
    found = {}
    for name, kind in {"fp16": "fp16", "powersgd": PowerSGD(rank=2, warm_up=3)}.items():
        place = folder / name
        whole = compressed(place / "whole", kind, Epochs(1))
        compressed(place / "halves", kind, Batches(9))
        halves = compressed(place / "halves", kind, Epochs(1), resume="auto")
        found[name] = [whole[0], halves[0]]
    return found


class Spare(Wide):
    """Has a parameter without gradients in every bucket, so that freezing it changes only the buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ParameterList([torch.zeros(100) for _ in range(3)])

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        found = list(super().parameters(recurse))
        rest, spare = found[:-3], found[-3:]
        for number, parameter in enumerate(rest):
            yield parameter
            yield from spare[number // 2 : number // 2 + number % 2]


class FreezesSpare(Callback):
    def on_step_start(self, context: Any, batch: Any) -> None:
        context.model.spare.requires_grad_(context.progress.batches != 7)


@case
def compression_after_freezing(folder: Path) -> Any:
    settings: dict[str, Any] = {"length": Batches(12), "make": Spare}
    kinds = {"bf16": "bf16", "fp16": "fp16", "powersgd": PowerSGD(rank=2, warm_up=3)}
    return {
        name: [compressed(None, kind, callbacks=its, **settings)[0] for its in ([], [FreezesSpare()])]
        for name, kind in kinds.items()
    }


@case
def enough_ranks_lose_nothing(folder: Path) -> Any:
    """PowerSGD of the full rank of each update omits only rounding: 12 samples have a gradient of rank 12."""
    return [compressed(None, kind, Batches(6), size=2**20)[0] for kind in (None, PowerSGD(rank=12, warm_up=0))]


# ------------------------------------------------------------------ the end


@case
def a_process_that_ends_inside_backward(folder: Path) -> Any:
    module = Net()

    class Ends(Callback):
        def on_step_start(self, context: Any, batch: Any) -> None:
            if rank() == 1 and context.progress.batches == 3:
                hook(dict(module.named_parameters())["layers.1.weight"], lambda gradient: finish())

    trainer = DDPTrainer(Trainer(module, "cpu", **SETTINGS, callbacks=[Ends()]), bucket_size=SMALL)
    started = time.monotonic()
    try:
        trainer.fit(data(48), max_length=Epochs(2))
    except PeerError as error:
        return [str(error), time.monotonic() - started]
    return None


RESULTS: dict[str, Any] = {}


def finish() -> None:
    Path(sys.argv[1], f"{rank()}.json").write_text(json.dumps(RESULTS), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, function in CASES.items():
        place = Path(sys.argv[1], "places", name)
        place.mkdir(parents=True, exist_ok=True)
        RESULTS[name] = function(place)
    finish()
