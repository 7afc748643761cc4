"""Cost of a client beyond its steps, in numbers that are the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import needs_compiler
from counting import code_called
from torch import Tensor, nn

from dovetail.algorithms import FedAvg
from dovetail.callbacks import Callback
from dovetail.clients.simple import Client
from dovetail.federated.data.sources import Datasource
from dovetail.federated.messages import Task, Update
from dovetail.runtime.signals import install_handlers_once
from dovetail.trainers import CompiledTrainer
from dovetail.trainers.base import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import LossCriterionStrategy, SGDOptimizerStrategy, ShuffleDataLoaderStrategy
from dovetail.trainers.whole_step import Backend

pytestmark = pytest.mark.usefixtures("compiler_cache")


class Sizes(Datasource):
    """Clients with as many samples as their list says."""

    def __init__(self, *sizes: int, features: int = 4) -> None:
        self.num_clients = len(sizes)
        generator = torch.Generator().manual_seed(0)
        self._data = [
            (torch.randn(size, features, generator=generator), torch.randint(3, (size,), generator=generator))
            for size in sizes
        ]

    def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        return self._data[client_id - 1]


def make_client(data: Datasource, model: nn.Module, trainer: Trainer) -> Client:
    client = Client(trainer=trainer)
    client.prepare(model, data, FedAvg())
    return client


def make_trainer(num_epochs: int = 3, **settings: Any) -> ComposableTrainer:
    return ComposableTrainer(
        num_epochs=num_epochs,
        batch_size=8,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9),
        data_loader_strategy=ShuffleDataLoaderStrategy(),
        device="cpu",
        verbose=False,
        **settings,
    )


def make_model(features: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))


def ask(client: Client, model: nn.Module, client_id: int, round_number: int = 1) -> Update:
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return client.work(Task(round_number, client_id, weights, seed=100 * round_number + client_id), {})[0]


def calls(run: Callable[[], Any]) -> int:
    return code_called(run).total()


def test_a_client_of_one_step_makes_at_most_500_python_calls_beyond_the_step() -> None:
    model = make_model()
    client = make_client(Sizes(8, 8), model, make_trainer(num_epochs=1))
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = client.datasource.train_data(1)

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(2):
        ask(client, model, 1)
        step()
    with install_handlers_once():
        number = calls(lambda: ask(client, model, 2)) - calls(step)
    assert number <= 500, f"{number} calls around the step"


def test_the_calls_per_client_do_not_grow_with_the_number_of_clients() -> None:
    model = make_model()
    client = make_client(Sizes(8, 8, 8), model, make_trainer(num_epochs=1))
    ask(client, model, 1)
    before = calls(lambda: ask(client, model, 2))
    for number in range(2, 20):
        ask(client, model, 1, number)
    assert calls(lambda: ask(client, model, 2)) == before


# ------------------------------------------------------------------ one graph for all clients


COMPILED = [needs_compiler, pytest.mark.slow, pytest.mark.torture]


@pytest.mark.parametrize(
    ("backend", "steps_per_call"),
    [("eager", 1), ("eager", 2), *(pytest.param("inductor", number, marks=COMPILED) for number in (1, 2))],
)
def test_compiled_clients_share_one_graph_and_equal_eager_ones(backend: Backend, steps_per_call: int) -> None:
    model, data = make_model(), Sizes(40, 19, 7, 33, 8, 27)
    eager = make_client(data, model, make_trainer())
    layered = CompiledTrainer(make_trainer(), steps_per_call=steps_per_call, backend=backend)
    compiled = make_client(data, model, layered)
    for client_id in range(1, data.num_clients + 1):
        expected, found = ask(eager, model, client_id), ask(compiled, model, client_id)
        torch.testing.assert_close(found.delta, expected.delta, rtol=0, atol=1e-5)
        assert found.num_updates == expected.num_updates
    trainer: Any = compiled.trainer
    assert trainer.graphs == 1


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=COMPILED)])
def test_a_compiled_client_does_not_depend_on_earlier_clients(backend: Backend) -> None:
    model, data = make_model(), Sizes(40, 19, 33, 27)
    client = make_client(data, model, CompiledTrainer(make_trainer(num_epochs=10), backend=backend))
    forward = {client_id: ask(client, model, client_id).delta for client_id in (1, 2, 3, 4)}
    other = make_client(data, model, CompiledTrainer(make_trainer(num_epochs=10), backend=backend))
    for client_id in (4, 2, 1, 3, 2):
        torch.testing.assert_close(ask(other, model, client_id).delta, forward[client_id], rtol=0, atol=0)


def test_a_graph_reads_the_per_client_tensors_of_a_strategy() -> None:
    class NearTheStart(LossCriterionStrategy):
        """Cross entropy, and the distance from the initial weights of the run."""

        def on_train_start(self, context: Any) -> None:
            self.start = [it.detach().clone() for it in context.model.parameters()]

        def compute_loss(self, outputs: Any, labels: Any, context: Any) -> Tensor:
            parts = [(it - s).square().sum() for it, s in zip(context.model.parameters(), self.start, strict=True)]
            return nn.functional.cross_entropy(outputs, labels) + 5e-3 * torch.stack(parts).sum()

    first, second = make_model(), make_model()
    with torch.no_grad():
        # So near that no comparison of losses could distinguish the two starts.
        for value in second.parameters():
            value.add_(1e-2)
    data = Sizes(40, 24)
    eager = make_client(data, first, make_trainer(loss_strategy=NearTheStart()))
    compiled = make_client(data, first, CompiledTrainer(make_trainer(loss_strategy=NearTheStart()), backend="eager"))
    for model, client_id in ((first, 1), (second, 2), (first, 2)):
        expected, found = ask(eager, model, client_id), ask(compiled, model, client_id)
        torch.testing.assert_close(found.delta, expected.delta, rtol=0, atol=1e-6)
    trainer: Any = compiled.trainer
    assert trainer.graphs == 1


def test_a_tensor_with_an_unknown_holder_makes_later_clients_eager() -> None:
    weight, held = torch.tensor([1.0, 2.0, 3.0]), [[torch.tensor([1.0, 2.0, 3.0])]]

    def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, weight)

    def weighted_by_held(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, held[0][0])

    model, data = make_model(), Sizes(24, 24)

    def ask_two(loss: Any) -> Any:
        client = make_client(data, model, CompiledTrainer(make_trainer(loss_strategy=loss), backend="eager"))
        ask(client, model, 1)
        weight.copy_(torch.tensor([3.0, 2.0, 1.0]))
        held[0][0] = weight
        return ask(client, model, 2).delta

    with pytest.warns(UserWarning, match="model, batch and strategies do not have in the same form"):
        expected = ask_two(weighted_by_held)
    weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    # Warnings are errors: the graph of the first client reads the variable.
    torch.testing.assert_close(ask_two(weighted), expected, rtol=0, atol=1e-6)


class Steeper(Callback):
    """Changes a layer for every second client."""

    def on_train_start(self, context: Any) -> None:
        context.model[1].negative_slope = 0.5 if context.client_id % 2 == 0 else 0.01


def test_a_layer_changed_for_a_client_is_detected_every_time() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 3)), Sizes(24, 24)
    eager = make_client(data, model, make_trainer(callbacks=[Steeper()]))
    compiled = make_client(data, model, CompiledTrainer(make_trainer(callbacks=[Steeper()]), backend="eager"))
    with pytest.warns(UserWarning, match="a setting of the model, its loss or the configuration has changed"):
        found = [ask(compiled, model, client_id).delta for client_id in (1, 2, 2, 1, 2)]
    expected = [ask(eager, model, client_id).delta for client_id in (1, 2, 2, 1, 2)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_step_of_known_strategies_is_checked_only_for_the_first_client(is_known: bool) -> None:
    def somebodys(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels)

    model, data = make_model(), Sizes(24, 24)
    settings = {} if is_known else {"loss_strategy": somebodys}
    client = make_client(data, model, CompiledTrainer(make_trainer(**settings), backend="eager"))
    ask(client, model, 1)
    found = code_called(lambda: ask(client, model, 2))
    assert found[nn.Linear.forward.__code__] == (0 if is_known else 2)
