"""Claims about devices that lack a precision: bfloat16 only by emulation, or no float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from pretend_device import NAME, PretendDevice, emulated_bfloat16
from run_claims import accuracy, assert_equal, make_trainer, weights
from styles import Net, make_batches
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, NAdam, RAdam, RMSprop

from dovetail import Epochs
from dovetail.accelerators import supports_bfloat16, widest_float
from dovetail.callbacks import EMA
from dovetail.trainers import AMPTrainer, AutoBatchTrainer
from dovetail.trainers.precision import Precision
from dovetail.trainers.whole_step.gradients import AccumulationRule
from dovetail.trainers.whole_step.rules import checked_rule, state_of


def auto_precision_is_float16_if_bfloat16_is_emulated() -> None:
    assert Precision("auto", NAME).dtype is torch.bfloat16
    with emulated_bfloat16(), PretendDevice():
        assert torch.get_device_module(NAME).is_bf16_supported()
        assert not supports_bfloat16(NAME)
        assert Precision("auto", NAME).dtype is torch.float16
        trainer = AMPTrainer(make_trainer(), precision=["bf16", "fp16"])
        trainer.fit(make_batches(), max_length=Epochs(1))
        assert trainer._get_precision().dtype is torch.float16


@contextmanager
def device_without_float64() -> Iterator[None]:
    widest_float.cache_clear()
    try:
        with PretendDevice(has_float64=False):
            yield
    finally:
        widest_float.cache_clear()


def a_device_may_reject_float64() -> None:
    with device_without_float64():
        assert widest_float(NAME) is torch.float32
        x = torch.ones(3).to(NAME)
        for convert in (
            Tensor.double,
            lambda it: it.to("cpu", torch.float64),
            lambda it: it.cpu().double().to(NAME),
        ):
            with pytest.raises(TypeError, match="float64"):
                convert(x)
        assert x.cpu().double().sum() == 3
    with PretendDevice():
        assert widest_float(NAME) is torch.float64


class Limited(Net):
    """A model for a number of samples at once, for which the memory of the device suffices."""

    def __init__(self, limit: int) -> None:
        super().__init__(None, dropout=0.0)
        self.limit = limit

    def forward(self, x: Tensor) -> Any:
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)


def weighted_losses_train_on_a_device_without_float64() -> None:
    batches = make_batches()
    columns = tuple(torch.cat(column) for column in zip(*batches, strict=True))
    sample_weights = torch.linspace(0.5, 2.0, len(columns[0]))
    classes = [1.0, 2.0, 3.0]

    def train(device: str, data: Any, wrap: Any = lambda trainer: trainer, limit: int = 8, **options: Any) -> Any:
        settings = {
            "criterion": nn.CrossEntropyLoss(),
            "batch_size": 8,
            "metrics": {"accuracy": accuracy},
            "accumulation_steps": 2,
            **options,
        }
        trainer = wrap(make_trainer(device, Limited(limit), callbacks=[EMA(0.9)], **settings))
        trainer.fit(data, data, max_length=Epochs(2))
        assert limit == 8 or trainer.micro_batch_size == 4
        return trainer

    cases: dict[str, dict[str, Any]] = {
        "class weights": {"class_weight": classes},
        "balanced": {"class_weight": "balanced"},
        "weights of samples": {"sample_weight": True},
        "ignored targets": {"criterion": nn.CrossEntropyLoss(ignore_index=0)},
        "in parts": {"class_weight": classes, "wrap": AutoBatchTrainer, "limit": 5},
    }
    for name, options in cases.items():
        data: Any = (*columns, sample_weights) if "sample_weight" in options else columns
        expected = weights(train("cpu", data, **options))
        with device_without_float64():
            found = weights(train(NAME, data, **options))
            if isinstance(options.get("class_weight"), list):
                options = {**options, "class_weight": torch.tensor(classes).to(NAME)}
            on_device = weights(train(NAME, tuple(it.to(NAME) for it in data), **options))
        assert_equal(found, on_device)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


def a_whole_step_weights_losses_without_float64() -> None:
    numbers = [torch.tensor(it, dtype=torch.float64) for it in (2.0, 8.0, 0.0, 4.0, 1.0)]
    losses = []
    for name in ("cpu", NAME):
        with device_without_float64():
            loss, num_items = torch.tensor(3.0).to(name), torch.tensor(5).to(name)
            losses.append(AccumulationRule().weighted(loss, {"num_items": num_items}, numbers, (True,)).item())
    # The scale is 2, and the first of 4 batches expects 4 times its 5 items.
    assert losses == [2 * 3.0 / 4] * 2


def optimizers_update_without_float64() -> None:
    def update(name: str, make: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape).to(name)) for shape in ((3, 4), (5,), ())]
        optimizer = make(parameters)
        rule, (group,) = checked_rule(optimizer), optimizer.param_groups
        terms = rule.terms(group)
        states: list[dict[str, Tensor]] = []
        for parameter in parameters:
            slots = rule.slots(optimizer, parameter, terms)
            states.append({slot: state_of(optimizer, parameter, slot) for slot in slots})
        for number in range(4):
            group["lr"] = 0.01 * (1 + number)
            numbers = [torch.tensor(it, dtype=torch.float64) for it in rule.numbers(group)]
            gradients = [torch.randn(it.shape).to(name) for it in parameters]
            with torch.no_grad():
                rule.update(optimizer, group, parameters, gradients, states, numbers, terms)
        host = [{slot: it.cpu() for slot, it in state.items()} for state in states]
        return [it.detach().cpu() for it in parameters], host

    makes: tuple[Any, ...] = (
        partial(SGD, momentum=0.9, weight_decay=0.1),
        partial(AdamW, amsgrad=True, weight_decay=0.1),
        # The number of the step is on the device.
        partial(Adam, weight_decay=0.1, capturable=True),
        partial(Adafactor, weight_decay=0.1),
        partial(NAdam, weight_decay=0.1),
        partial(NAdam, weight_decay=0.1, capturable=True),
        partial(RMSprop, momentum=0.9, centered=True),
        partial(RAdam, weight_decay=0.1, capturable=True),
    )
    for make in makes:
        expected = update("cpu", make)
        with device_without_float64():
            found = update(NAME, make)
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7, msg=f"{make}".__add__)


PRECISION_CLAIMS = {
    claim.__name__.replace("_", " "): claim
    for claim in (
        auto_precision_is_float16_if_bfloat16_is_emulated,
        a_device_may_reject_float64,
        weighted_losses_train_on_a_device_without_float64,
        a_whole_step_weights_losses_without_float64,
        optimizers_update_without_float64,
    )
}
