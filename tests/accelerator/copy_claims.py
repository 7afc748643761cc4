"""Claims about the copies of batches of any layout, class and place to the pretend device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import NAME, PretendDevice
from run_claims import assert_equal, make_trainer, weights
from styles import Net, make_batches, make_optimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dovetail import Epochs, Trainer, pytorch
from dovetail.accelerators import send
from dovetail.data import to_device

DEVICE = torch.device(NAME, 0)


def waits(device: PretendDevice) -> list[str]:
    return [event.cause for event in device.events if event.waits]


def the_device_pins_and_copies_as_torch_does() -> None:
    with PretendDevice() as device:
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.ones(1).expand(4).pin_memory()
        pinned = torch.randn(8, 10).pin_memory()
        assert pinned[:, :3].is_pinned()
        assert torch.randn(8, 10)[:, :3].pin_memory().stride() == (10, 1)
        # CUDA copies only whole ranges of pinned memory without waiting.
        for has_gaps, source in ((False, pinned), (False, pinned.t()), (True, pinned[:, :3]), (True, pinned[::2])):
            device.events.clear()
            source.to(NAME, non_blocking=True)
            torch.empty(source.shape, device=NAME).copy_(source, non_blocking=True)
            assert [event.waits for event in device.events] == [has_gaps, has_gaps], source.stride()
        with pytest.raises(RuntimeError, match="cannot pin"):
            pinned.to(NAME).pin_memory()


def tensors_of_every_layout_are_copied_without_waiting() -> None:
    images = torch.randn(4, 2, 6, 6)
    with PretendDevice() as device:
        tensors = {
            "expanded": torch.ones(1).expand(4),
            "expanded mask": torch.ones(1, 5, dtype=torch.bool).expand(8, 5),
            "expanded rows": torch.randn(1, 3).expand(4, 3),
            "columns": torch.randn(8, 10)[:, :3],
            "every second": torch.randn(8)[::2],
            "columns of pinned memory": torch.randn(8, 10).pin_memory()[:, :3],
            "transposed": torch.randn(4, 3).t(),
            "channels last": images.to(memory_format=torch.channels_last),
            "every second row of channels last": images.to(memory_format=torch.channels_last)[:, :, ::2],
            "no rows": torch.randn(4, 3)[:0, :2],
            "a number": torch.tensor(3),
            "no gaps": torch.randn(4, 3),
        }
        for name, tensor in tensors.items():
            expected = tensor.clone()
            moved = send(tensor, DEVICE)
            assert not waits(device), name
            assert torch.equal(moved.cpu(), expected), name
            # The layout that a blocking copy has.
            assert moved.stride() == tensor.to(NAME).stride(), name
            device.events.clear()


def a_run_with_expanded_and_strided_batches_waits_for_nothing() -> None:
    wide = torch.randn(24, 12, generator=torch.Generator().manual_seed(1))
    label = torch.ones(1, dtype=torch.long)
    batches = [(part[:, ::2], label.expand(len(part))) for part in wide.split(8)]  # type: ignore[no-untyped-call]
    expected = make_trainer("cpu")
    expected.fit(batches, max_length=Epochs(1))
    with PretendDevice() as device:
        trainer = make_trainer()
        trainer.fit(batches, max_length=Epochs(1))
        assert_equal(weights(expected), weights(trainer))
        device.events.clear()
        predictions = trainer.predict([batch[0] for batch in batches])
        assert waits(device) == []
        assert torch.equal(predictions.cpu(), expected.predict([batch[0] for batch in batches]))
        device.events.clear()
        trainer.evaluate(batches)
        # One read for all numbers of a validation.
        assert waits(device) == ["tolist"]


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(2, 3, 1)

    def forward(self, x: Tensor) -> Any:
        assert x.is_contiguous(memory_format=torch.channels_last)
        return self.layer(x).mean((2, 3))


class Images:
    """Batches that are computed on a device, or on the device and the host."""

    def __init__(self, device: str, device_of_labels: str) -> None:
        self.devices = device, device_of_labels

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(3)
        for _ in range(len(self)):
            images = torch.randn(8, 2, 4, 4, generator=generator).to(self.devices[0])
            labels = torch.randint(3, (8,), generator=generator).to(self.devices[1])
            yield images * 2 + 1, labels


def images_on_the_device_become_channels_last_after_they_are_computed() -> None:
    options: dict[str, Any] = {"memory_format": "channels_last", "criterion": nn.CrossEntropyLoss()}
    columns = [torch.cat(column) for column in zip(*Images("cpu", "cpu"), strict=True)]
    for device_of_labels in (NAME, "cpu"):
        expected = make_trainer("cpu", Conv(), **options)
        expected.fit(Images("cpu", "cpu"), max_length=Epochs(1))
        with PretendDevice():
            generated, loaded = make_trainer(model=Conv(), **options), make_trainer(model=Conv(), **options)
            generated.fit(Images(NAME, device_of_labels), max_length=Epochs(1))
            dataset = TensorDataset(columns[0].to(NAME), columns[1].to(device_of_labels))
            loaded.fit(DataLoader(dataset, 8), max_length=Epochs(1))
            assert_equal(weights(expected), weights(generated))
            assert_equal(weights(expected), weights(loaded))


class Graph:
    """A batch of a user's class, which is moved as a new object."""

    def __init__(self, nodes: Tensor, labels: Tensor) -> None:
        self.nodes, self.labels = nodes, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        moved = (it.to(device, non_blocking=non_blocking) for it in (self.nodes, self.labels))
        return type(self)(*moved)

    def pin_memory(self) -> Any:
        return type(self)(self.nodes.pin_memory(), self.labels.pin_memory())


class GraphInPlace(Graph):
    """A batch that is pinned and moved in place, as the graphs of torch_geometric."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        self.nodes, self.labels = (it.to(device, non_blocking=non_blocking) for it in (self.nodes, self.labels))
        return self

    def pin_memory(self) -> Any:
        self.nodes, self.labels = self.nodes.pin_memory(), self.labels.pin_memory()
        return self


class GraphTrainer(Trainer):
    def train_step(self, batch: Any) -> Any:
        graph = batch["graph"] if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(self.model(graph.nodes), graph.labels)

    test_step = train_step

    def batch_length(self, batch: Any) -> int:
        return len((batch["graph"] if isinstance(batch, dict) else batch).labels)


def batches_with_a_method_to_are_moved_without_waiting() -> None:
    def train(device: str, kind: type[Graph], *, is_nested: bool) -> Any:
        settings: dict[str, Any] = {"optimizer": make_optimizer, "seed": 1, "verbose": False, "print_every": 10**6}
        trainer = GraphTrainer(Net(None), device, **settings)
        graphs = [kind(*batch) for batch in make_batches()]
        # The second epoch gets objects that are on the device already, if they were moved in place.
        trainer.fit([{"graph": it, "name": "a"} for it in graphs] if is_nested else graphs, max_length=Epochs(2))
        return trainer

    for kind in (Graph, GraphInPlace):
        for is_nested in (False, True):
            expected = train("cpu", kind, is_nested=is_nested)
            with PretendDevice() as device:
                trainer = train(NAME, kind, is_nested=is_nested)
                assert_equal(weights(expected), weights(trainer))
                device.events.clear()
                moved = trainer.to_device([kind(*make_batches()[0]), torch.zeros(2)])
                assert moved[0].nodes.device == moved[1].device == DEVICE
                assert waits(device) == []


def a_packed_sequence_is_copied_without_waiting() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    with PretendDevice() as device:
        moved = to_device({"x": packed}, DEVICE, non_blocking=True)["x"]
        assert moved.data.device == DEVICE
        assert to_device(moved, DEVICE, non_blocking=True) is moved
        assert waits(device) == []


def data_of_a_trial_is_moved_without_waiting() -> None:
    values = (torch.ones(2), np.ones(2), Graph(torch.ones(2), torch.ones(2)))
    with PretendDevice() as device:
        tensor, array, graph = pytorch.to_device(values, NAME)
        assert {it.device for it in (tensor, array, graph.nodes, graph.labels)} == {DEVICE}
        assert waits(device) == []


COPY_CLAIMS = {
    claim.__name__.replace("_", " "): claim
    for claim in (
        the_device_pins_and_copies_as_torch_does,
        tensors_of_every_layout_are_copied_without_waiting,
        a_run_with_expanded_and_strided_batches_waits_for_nothing,
        images_on_the_device_become_channels_last_after_they_are_computed,
        batches_with_a_method_to_are_moved_without_waiting,
        a_packed_sequence_is_copied_without_waiting,
        data_of_a_trial_is_moved_without_waiting,
    )
}
