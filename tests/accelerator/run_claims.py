"""Claims about whole runs on the pretend device: reading ahead, resuming, files, random states and observers."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pretend_device
import pytest
import torch
from pretend_device import NAME, PretendDevice, PretendTensor
from styles import NUM_BATCHES, Net, make_batches, make_optimizer
from torch import Tensor, nn
from torch.utils.data import Dataset

from dovetail import Batches, Epochs, Trainer, accelerators
from dovetail.accelerator_checks import _no_waits
from dovetail.callbacks import Callback, Timer
from dovetail.clients import simple
from dovetail.data import DataLoader, to_device
from dovetail.errors import ConfigError
from dovetail.federated.config import ClientsConfig
from dovetail.federated.data.sources import GeneratedData
from dovetail.servers import fedavg
from dovetail.tracking import FolderLogger, Tracker
from dovetail.trainers import AutoBatchTrainer, CompiledTrainer, DDPTrainer, TimedTrainer, WholePass, seed_everything
from dovetail.trainers.devices import as_device
from dovetail.trainers.randomness import rng_state, set_rng_state
from dovetail.trainers.whole_step.comparing import remember_randomness


def make_trainer(device: str = NAME, model: nn.Module | None = None, **options: Any) -> Trainer:
    settings = {"seed": 1, "verbose": False, "print_every": 10**6, **options}
    return Trainer(Net(None) if model is None else model, device, optimizer=make_optimizer, **settings)


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in trainer.model.state_dict().items()}


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} differs"


class NoisyRows(Dataset[Any]):
    """Samples with random noise, which their worker draws; one of them may be broken."""

    def __init__(self, broken: int = -1) -> None:
        columns = zip(*make_batches(), strict=True)
        self.x, self.y = (torch.cat(column) for column in columns)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.broken:
            raise ValueError("broken sample")
        return self.x[index] + 0.1 * torch.randn(6), self.y[index]


def the_device_notices_waits_and_mixed_devices() -> None:
    with PretendDevice() as device:
        x = torch.ones(3).to(NAME)
        assert [(event.kind, event.waits) for event in device.events] == [("to_device", True)]
        device.events.clear()
        torch.ones(3).pin_memory().to(NAME, non_blocking=True)
        # Memory that is not pinned: torch would wait in spite of `non_blocking`.
        torch.ones(3).to(NAME, non_blocking=True)
        x.sum().item()
        x[x > 0]
        x.tolist()
        x.cpu()
        torch.accelerator.current_stream().record_event().synchronize()
        torch.accelerator.synchronize()
        assert [event.waits for event in device.events] == [False, *[True] * 7]
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)


def the_device_notices_a_stream_that_does_not_wait() -> None:
    with PretendDevice():
        side, current = torch.Stream(device=NAME), torch.accelerator.current_stream()
        with side:
            x = torch.ones(3).pin_memory().to(NAME, non_blocking=True)
            copied = side.record_event()
            x.add_(1)
        with pytest.raises(RuntimeError, match="without waiting"):
            x + 1
        current.wait_event(copied)
        # The event is older than the addition.
        with pytest.raises(RuntimeError, match="without waiting"):
            x + 1
        current.wait_stream(side)
        x + 1
        with side:
            x = torch.ones(3).pin_memory().to(NAME, non_blocking=True)
        current.wait_stream(side)
        with pytest.raises(RuntimeError, match="without `record_stream`"):
            x + 1
        x.record_stream(current)
        x + 1


def auto_selects_the_device() -> None:
    assert as_device("auto") == torch.device(NAME)
    assert as_device(None, 1) == torch.device(NAME, 1)
    assert accelerators.is_here(torch.device(NAME, 1))
    assert not accelerators.is_here(torch.device(NAME, 2))
    assert not accelerators.is_here(torch.device("cuda"))
    assert accelerators.collective_backend(NAME) == "gloo"


def a_process_that_is_shown_one_device_uses_it() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in accelerators._VISIBLE:
            patch.delenv(name, raising=False)
        assert accelerators.device_of_process(NAME, 1) == torch.device(NAME, 1)
        patch.setenv("CUDA_VISIBLE_DEVICES", "3")
        # It still sees two devices.
        assert accelerators.device_of_process(NAME, 1) == torch.device(NAME, 1)
        patch.setattr(pretend_device, "NUM_DEVICES", 1)
        assert accelerators.device_of_process(NAME, 1) == torch.device(NAME, 0)
        patch.delenv("CUDA_VISIBLE_DEVICES")
        # All processes of this machine share one device, which is an error.
        assert accelerators.device_of_process(NAME, 1) == torch.device(NAME, 1)
        patch.setenv("LOCAL_RANK", "1")
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(ConfigError, match="LOCAL_RANK is 1, and this process sees 1 device"):
            DDPTrainer(make_trainer()).fit(make_batches())


def random_states_of_the_device_are_saved_and_restored() -> None:
    with PretendDevice():
        seed_everything(3)
        state = rng_state()
        drawn = [torch.rand(4, device=NAME).cpu() for _ in range(2)]
        set_rng_state(state)
        again = [torch.rand(4, device=NAME).cpu() for _ in range(2)]
        seed_everything(3)
        fresh = torch.rand(4, device=NAME).cpu()
    assert len(state[NAME]) == 2
    assert torch.equal(drawn[0], again[0])
    assert torch.equal(drawn[1], again[1])
    assert torch.equal(drawn[0], fresh)
    # The generator of the CPU draws nothing for the device.
    assert torch.equal(state["torch"], torch.get_rng_state())


def a_comparison_of_steps_restores_the_random_states_of_the_device() -> None:
    with PretendDevice():
        restore = remember_randomness([torch.empty(1), torch.empty(1, device=NAME)])
        drawn = torch.rand(4).tolist(), torch.rand(4, device=NAME).tolist()
        restore()
        assert (torch.rand(4).tolist(), torch.rand(4, device=NAME).tolist()) == drawn


def the_next_batch_is_copied_before_the_step() -> None:
    # The second callback has `on_step_start`, but does not change the batch.
    for callbacks in ([], [Timer(flops=True)]):
        with PretendDevice() as device:
            counts: list[tuple[int, int]] = []

            class Marked(Net):
                def forward(self, x: Tensor) -> Any:
                    copies = sum(event.kind == "to_device" for event in device.events)
                    # Parameters are copied once.
                    counts.append((copies - len(list(self.parameters())), x.size(0)))  # noqa: B023 - of this turn
                    return super().forward(x)

            model = Marked(None)
            trainer = make_trainer(model=model, criterion=nn.CrossEntropyLoss(), callbacks=callbacks)
            trainer.fit(make_batches(), max_length=Epochs(1))
            streams = device.recorded_streams
        # At the start of step n, the batches 1 to n + 1 were copied, two tensors each.
        assert counts == [(2 * min(number + 2, NUM_BATCHES), 8) for number in range(NUM_BATCHES)]
        assert streams == 2 * NUM_BATCHES
        assert all(timer.flops_per_sample > 0 for timer in callbacks)


def evaluation_and_prediction_copy_without_waiting_and_read_once() -> None:
    batches = make_batches()
    cpu = make_trainer("cpu", metrics={"accuracy": accuracy})
    with PretendDevice() as device:
        trainer = make_trainer(metrics={"accuracy": accuracy})
        # Once before, because metrics are checked in the first pass.
        trainer.evaluate(batches)
        start = len(device.events)
        means = trainer.evaluate(batches)
        events = device.events[start:]
        assert means == cpu.evaluate(batches) == cpu.evaluate(batches)
        assert [event.cause for event in events if event.waits] == ["tolist"]
        start = len(device.events)
        predictions = trainer.predict(batches)
        assert not [event for event in device.events[start:] if event.waits]
        assert isinstance(predictions, PretendTensor)
        assert torch.equal(predictions.cpu(), cpu.predict(batches))


def every_kind_of_metric_reads_once() -> None:
    class OwnStep(Trainer):
        def test_step(self, batch: Any) -> dict[str, Tensor]:
            outputs = self.model(batch[0])
            return {"loss": outputs.square().mean(), "output": outputs, "target": batch[1]}

    with_ignored = [(x, y.where(torch.arange(8) > 2, -100)) for x, y in make_batches()]
    probabilities = [(x, nn.functional.one_hot(y, 3).float()) for x, y in make_batches()]
    root: Any = WholePass(lambda outputs, targets: outputs.square().mean().sqrt())
    scores = {"metrics": ["mae", "mse", "rmse", "r2"], "criterion": nn.MSELoss()}
    labels = {"metrics": ["accuracy", "f1", "mcc"], "criterion": nn.BCEWithLogitsLoss()}
    cases: list[tuple[type[Trainer], Any, dict[str, Any]]] = [
        (Trainer, with_ignored, {"metrics": ["accuracy", "f1", "precision", "recall", "mcc"]}),
        (Trainer, make_batches(), {"metrics": {"root": root}}),
        (OwnStep, make_batches(), {}),
        (Trainer, probabilities, {}),
        (Trainer, probabilities, scores),
        (Trainer, probabilities, labels),
    ]
    with PretendDevice() as device:
        for kind, batches, options in cases:
            assert reads_of_a_second_pass(device, kind, batches, options) == 1, options
        # torchmetrics selects the points of the curve of each class; no batch adds a read.
        for name, number in (("auroc", 8 + 3 * 3), ("average_precision", 8 + 2 * 3)):
            for length in (2, NUM_BATCHES):
                options = {"metrics": [name]}
                assert reads_of_a_second_pass(device, Trainer, with_ignored[:length], options) == number


def reads_of_a_second_pass(device: PretendDevice, kind: type[Trainer], batches: Any, options: dict[str, Any]) -> int:
    """Return how often the host waits in a second evaluation, after a comparison of its numbers with the CPU's."""
    models = [Net(None, dropout=0.0), Net(None, dropout=0.0)]
    settings: dict[str, Any] = {"verbose": False, "print_every": 10**6, **options}
    expected = kind(models[0], "cpu", **settings).evaluate(batches)
    trainer = kind(models[1], NAME, **settings)
    assert trainer.evaluate(batches) == expected
    device.events.clear()
    assert trainer.evaluate(batches) == expected
    assert all(math.isfinite(value) for value in expected.values())
    return sum(event.waits for event in device.events)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float().mean()


def a_resumed_run_with_workers_is_exact(stop: int = 3) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(NoisyRows(), batch_size=8, shuffle=True, num_workers=2, seed=4)

    with PretendDevice(), tempfile.TemporaryDirectory() as folder:
        whole = make_trainer()
        whole.fit(loader(), max_length=Epochs(2))
        first = make_trainer(checkpoint_dir=folder)
        first.fit(loader(), max_length=Batches(stop))
        second = make_trainer(checkpoint_dir=folder)
        second.fit(loader(), max_length=Epochs(2), resume="auto")
        continued = make_trainer()
        given = loader()
        continued.fit(given, max_length=Batches(stop))
        assert continued.context.progress.batches == stop
        continued.fit(given, max_length=Epochs(2))
        assert_equal(weights(whole), weights(second))
        assert_equal(weights(whole), weights(continued))


def a_run_resumed_from_every_batch_is_exact() -> None:
    columns = tuple(torch.cat(column) for column in zip(*make_batches(), strict=True))
    expected = make_trainer("cpu", batch_size=8)
    expected.fit(columns, max_length=Epochs(2))
    with PretendDevice(), tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"batch_size": 8, "checkpoint_dir": folder, "keep_last": 100}
        whole = make_trainer(**options)
        whole.fit(columns, max_length=Epochs(2), checkpoint_period=Batches(1))
        assert_equal(weights(expected), weights(whole))
        found = sorted(it for it in Path(folder).iterdir() if it.is_dir() and "iter" in it.name)
        assert len(found) == 2 * NUM_BATCHES
        for path in found:
            resumed = make_trainer(batch_size=8)
            resumed.fit(columns, max_length=Epochs(2), resume=path)
            assert_equal(weights(expected), weights(resumed))


def an_error_of_the_loader_is_raised_at_its_batch() -> None:
    notes = []
    for device, num_workers in (("cpu", 0), (NAME, 0), ("cpu", 2), (NAME, 2)):
        seen: list[int] = []

        class Counter(Callback):
            def on_step_end(self, context: Any, output: Any) -> None:
                seen.append(context.progress.batches)  # noqa: B023 - the list of this turn

        with PretendDevice():
            loader = DataLoader(NoisyRows(broken=8 * 3), batch_size=8, num_workers=num_workers)
            with pytest.raises(ValueError, match="broken sample") as caught:
                make_trainer(device, callbacks=[Counter()]).fit(loader, max_length=Epochs(1))
        notes.append(caught.value.__notes__)
        assert seen == [1, 2, 3]
    assert (notes[0], notes[2]) == (notes[1], notes[3])


def a_loader_that_draws_random_numbers_is_not_read_ahead() -> None:
    """The order of the random numbers of loader and step is the same on every device."""
    drawn: dict[str, list[float]] = {}
    for device in ("cpu", NAME):
        numbers = drawn[device] = []

        def batches() -> Iterator[Any]:
            for batch in make_batches():
                numbers.append(torch.rand(()).item())  # noqa: B023 - the list of this turn
                yield batch

        def train_step(trainer: Any, batch: Any) -> Tensor:
            numbers.append(-torch.rand(()).item())  # noqa: B023 - the list of this turn
            return nn.functional.cross_entropy(trainer.model(batch[0]), batch[1])

        with PretendDevice():
            trainer = make_trainer(device, Net(None, dropout=0.0), train_step=train_step)
            trainer.fit(batches(), max_length=Epochs(1))
    assert drawn["cpu"] == drawn[NAME]
    assert len(drawn["cpu"]) == 2 * NUM_BATCHES


def a_hook_that_changes_the_batch_is_respected() -> None:
    class Zeros(Callback):
        def on_step_start(self, context: Any, batch: Any) -> None:
            batch[0].zero_()

    trained = {}
    for device in ("cpu", NAME):
        with PretendDevice():
            trainer = make_trainer(device, callbacks=[Zeros()])
            trainer.fit(make_batches(), max_length=Epochs(1))
            trained[device] = weights(trainer)
    assert_equal(trained["cpu"], trained[NAME])


def files_move_between_devices() -> None:
    with PretendDevice(), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(checkpoint_dir=f"{folder}/ck")
        trainer.fit(make_batches(), max_length=Epochs(1))
        for name in ("model.safetensors", "model.pt"):
            trainer.save_model(f"{folder}/{name}")
            for device in ("cpu", NAME):
                other = make_trainer(device)
                other.load_model(f"{folder}/{name}")
                assert_equal(weights(trainer), weights(other))
        # `device_map` continues a run of the accelerator on the CPU, and the other way round.
        for start, target in ((NAME, "cpu"), ("cpu", NAME)):
            mapped = make_trainer(start, Net(None, dropout=0.0), checkpoint_dir=f"{folder}/ck", device_map=target)
            mapped.fit(make_batches(), max_length=Epochs(2), resume="auto")
            assert {it.device.type for it in mapped.model.parameters()} == {target}
            state = mapped.context.optimizers[0].state.values()
            assert {it["momentum_buffer"].device.type for it in state} == {target}


def observers_see_the_numbers_of_the_cpu() -> None:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for device in ("cpu", NAME):
            files = FolderLogger(f"{folder}/{device}", format="csv")
            trainer = make_trainer(device, callbacks=[Tracker(files, histograms_every=3)], print_every=2)
            with PretendDevice():
                history = trainer.fit(make_batches(), make_batches(), max_length=Epochs(2))
                assert device in str(trainer.explain())
            rows[device] = {name: history.get_metric_values(name) for name in sorted(history.get_metric_names())}
    assert rows["cpu"] == rows[NAME]


def a_named_metric_follows_the_device_of_the_trainer() -> None:
    batches = make_batches()
    expected = make_trainer("cpu", metrics=["f1", "auroc"]).evaluate(batches)
    with PretendDevice():
        trainer = make_trainer("cpu", metrics=["f1", "auroc"])
        for device in ("cpu", NAME, "cpu"):
            trainer.context.device = torch.device(device)
            assert trainer.evaluate(batches) == expected


def layers_run_on_the_device() -> None:
    expected = make_trainer("cpu")
    expected.fit(make_batches(), max_length=Epochs(1))
    with PretendDevice():
        timed = TimedTrainer(make_trainer())
        timed.fit(make_batches(), max_length=Epochs(1))
        assert_equal(weights(expected), weights(timed))
        sized = AutoBatchTrainer(make_trainer())
        sized.fit(make_batches(), max_length=Epochs(1))
        assert_equal(weights(expected), weights(sized))


def batches_of_every_structure_arrive() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    batch = {"x": torch.ones(2, 3), "pair": (torch.zeros(2), "text"), "packed": packed, "n": 3}
    with PretendDevice() as device:
        moved = make_trainer()
        moved.fit(make_batches(), max_length=Batches(1))
        start = len(device.events)
        there = moved.to_device(batch)
        assert {there["x"].device.type, there["pair"][0].device.type, there["packed"].data.device.type} == {NAME}
        assert there["pair"][1] == "text"
        assert to_device(there, torch.device(NAME, 0)) is there
        assert not [event for event in device.events[start:] if event.waits]


def a_compiled_step_that_cannot_be_compiled_is_trained_eagerly() -> None:
    expected = make_trainer("cpu")
    expected.fit(make_batches(), max_length=Epochs(1))
    with PretendDevice():
        trainer = CompiledTrainer(make_trainer(), mode="step")
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            trainer.fit(make_batches(), max_length=Epochs(1))
        assert_equal(weights(expected), weights(trainer))


def a_federation_waits_for_nothing_in_a_step_and_has_the_bits_of_the_cpu() -> None:
    expected, metrics, _ = federated("cpu")
    with PretendDevice() as device:
        found, found_metrics, steps = federated(NAME, device)
        events = list(device.events)
        assert_equal(weights(expected.trainer), weights(found.trainer))
    assert found_metrics == metrics
    # Two rounds of two clients, each with two epochs.
    assert len(steps) == 8
    assert not [event for marks in steps for event in events[marks[0] : marks[-1]] if event.waits]


def federated(place: str, device: PretendDevice | None = None) -> tuple[Any, list[Any], list[list[int]]]:
    """Return a server after two rounds, its metrics, and how many transfers there were after each step, by epoch."""
    steps: list[list[int]] = []

    class Marks(Callback):
        def on_epoch_start(self, context: Any) -> None:
            steps.append([])

        def on_step_end(self, context: Any, output: Any) -> None:
            steps[-1].append(len(device.events) if device is not None else 0)

    def samples(client_id: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8 * (4 + client_id % 10), 6, generator=torch.Generator().manual_seed(client_id))
        return x, x[:, :3].argmax(dim=1)

    trainer = make_trainer(place, callbacks=[Marks()], batch_size=8, num_epochs=2)
    server = fedavg.Server(
        model=lambda: Net(None),
        datasource=GeneratedData(4, samples, make_test=lambda client_id: samples(client_id + 10)),
        trainer=trainer,
        rounds=2,
        clients=ClientsConfig(total_clients=4, per_round=2, do_test=True),
    )
    records = server.run(simple.Client(trainer=trainer))
    assert not any(record.faults for record in records)
    return server, [record.metrics for record in records], steps


def batches_are_copied_without_blocking_if_memory_can_be_pinned() -> None:
    with PretendDevice():
        assert [accelerators.can_pin(name) for name in (NAME, "cpu", "meta", "mps")] == [True, False, False, False]


def the_doctor_finds_a_step_that_waits() -> None:
    class Reading(Callback):
        def on_update(self, context: Any) -> None:
            float(next(context.model.parameters()).detach().sum())

    with PretendDevice():
        status, _, numbers = _no_waits(torch.device(NAME, 0), callbacks=[Reading()])
    assert (status, numbers["waits"]) == ("problem", numbers["steps"])
    # The notice of the mode itself is no wait.
    with PretendDevice():
        status, _, numbers = _no_waits(torch.device(NAME, 0))
    assert (status, numbers["waits"], numbers["messages"]) == ("ok", 0, [])
    with PretendDevice(reports_waits=False):
        status, found, _ = _no_waits(torch.device(NAME, 0))
    assert (status, found) == ("note", "not measured: the sync debug mode does not report a read of a value")


RUN_CLAIMS = {
    claim.__name__.replace("_", " "): claim
    for claim in (
        the_device_notices_waits_and_mixed_devices,
        the_device_notices_a_stream_that_does_not_wait,
        auto_selects_the_device,
        a_process_that_is_shown_one_device_uses_it,
        random_states_of_the_device_are_saved_and_restored,
        a_comparison_of_steps_restores_the_random_states_of_the_device,
        the_next_batch_is_copied_before_the_step,
        evaluation_and_prediction_copy_without_waiting_and_read_once,
        every_kind_of_metric_reads_once,
        a_resumed_run_with_workers_is_exact,
        a_run_resumed_from_every_batch_is_exact,
        an_error_of_the_loader_is_raised_at_its_batch,
        a_loader_that_draws_random_numbers_is_not_read_ahead,
        a_hook_that_changes_the_batch_is_respected,
        files_move_between_devices,
        observers_see_the_numbers_of_the_cpu,
        a_named_metric_follows_the_device_of_the_trainer,
        layers_run_on_the_device,
        batches_of_every_structure_arrive,
        a_compiled_step_that_cannot_be_compiled_is_trained_eagerly,
        a_federation_waits_for_nothing_in_a_step_and_has_the_bits_of_the_cpu,
        batches_are_copied_without_blocking_if_memory_can_be_pinned,
        the_doctor_finds_a_step_that_waits,
    )
}
