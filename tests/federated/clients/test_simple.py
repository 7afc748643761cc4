"""A client's work: a function of its task, its state and its data, and of nothing else."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from federation import Blobs, Everything, make_model, make_trainer
from torch import nn

from dovetail.algorithms import Algorithm, FedAvg
from dovetail.callbacks import EMA, Callback, EarlyStopping
from dovetail.errors import ConfigError
from dovetail.federated import ClientCallback
from dovetail.federated.clients.simple import Client
from dovetail.federated.clients.weights import load_weights
from dovetail.federated.messages import Task, Update
from dovetail.federated.postprocess import Chain
from dovetail.trainers import SingleProcess
from dovetail.trainers.basic import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.decorators import AMPTrainer, TimedTrainer
from dovetail.trainers.strategies.base import ModelUpdateStrategy


def _started(algorithm: Algorithm | None = None, trainer: Any = None, **options: Any) -> Client:
    client = Client(trainer=make_trainer() if trainer is None else trainer, **options)
    torch.manual_seed(1)
    client.prepare(make_model(), Blobs(own_tests=True), algorithm or FedAvg())
    return client


def _task(client_id: int = 1, round: int = 1, algorithm: Algorithm | None = None, **fields: Any) -> Task:
    torch.manual_seed(1)
    stays = (algorithm or FedAvg()).is_local
    weights = {name: value for name, value in make_model().state_dict().items() if not stays(name)}
    payload = (algorithm or FedAvg()).payload(client_id)
    return Task(round, client_id, weights, seed=17 * client_id + round, payload=payload, **fields)


def _assert_same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def _delta(update: Update) -> dict[str, Any]:
    return dict(update.delta)


def test_a_client_result_does_not_depend_on_earlier_work() -> None:
    algorithm = Everything()
    fresh, used = _started(algorithm), _started(algorithm)
    for other in (5, 2):
        used.work(_task(other, algorithm=algorithm), {})
    (first, state), (second, other_state) = (it.work(_task(3, 2, algorithm), {}) for it in (fresh, used))
    _assert_same(_delta(first), _delta(second))
    _assert_same(state, other_state)


def test_the_received_state_is_not_changed() -> None:
    algorithm = Everything()
    client = _started(algorithm)
    _, state = client.work(_task(1, 1, algorithm), {})
    before = copy.deepcopy(state)
    _, after = client.work(_task(1, 2, algorithm), state)
    _assert_same(state, before)
    assert (before["remembering"]["rounds"], after["remembering"]["rounds"]) == (1, 2)


def test_the_update_of_a_client_is_not_changed_by_the_next_client() -> None:
    algorithm = Everything()
    client = _started(algorithm)
    update, state = client.work(_task(1, 1, algorithm), {})
    before = copy.deepcopy((_delta(update), dict(update.payload), state))
    client.work(_task(2, 1, algorithm), {})
    _assert_same((_delta(update), dict(update.payload), state), before)


def test_the_task_is_not_changed() -> None:
    task = _task()
    before = copy.deepcopy(dict(task.weights))
    _started().work(task, {})
    _assert_same(dict(task.weights), before)


def test_a_difference_is_one_contiguous_buffer_per_dtype() -> None:
    client = Client(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), trainer=make_trainer())
    model: Any = client.model
    task = replace(_task(), weights={name: value.clone() for name, value in model().state_dict().items()})
    client.prepare(model(), Blobs(), FedAvg())
    delta = _delta(client.work(task, {})[0])
    trained = client.trainer.context.model
    assert trained is not None
    _assert_same(delta, {name: value - task.weights[name] for name, value in trained.state_dict().items()})
    assert {value.dtype for value in delta.values()} == {torch.float32, torch.int64}
    assert len({value.untyped_storage().data_ptr() for value in delta.values()}) == 2
    assert all(value.data_ptr() % 64 == 0 for value in delta.values())


def test_local_layers_are_neither_received_nor_sent() -> None:
    algorithm = Everything()
    client = _started(algorithm)
    update, state = client.work(_task(1, 1, algorithm), {})
    assert set(state["model"]) == {"4.weight", "4.bias"}
    assert not any(name.startswith("4.") for name in update.delta)
    heads = [client.work(_task(1, 2, algorithm), it)[1]["model"]["4.bias"] for it in (state, {})]
    assert not torch.equal(*heads)


def test_strategies_see_the_weights_of_the_new_round_at_training_start() -> None:
    seen: list[Any] = []

    class Watch(ModelUpdateStrategy):
        def on_train_start(self, context: Any) -> None:
            first = next(context.model.parameters()).detach().clone()
            seen.append((context.client_id, context.current_round, first, dict(context.client.payload)))

    class Watched(Algorithm):
        def equip(self, strategies: Any) -> dict[str, Any]:
            return {"model_update": Watch()}

    client = _started(Watched())
    for round in (1, 2):
        task = _task(4, round)
        weights = {name: value + round for name, value in task.weights.items()}
        client.work(Task(round, 4, weights, seed=1, payload={"c": round}), {})
        _assert_same(seen[-1][2], weights["0.weight"])
    assert [(it[0], it[1], it[3]) for it in seen] == [(4, 1, {"c": 1}), (4, 2, {"c": 2})]


def test_updates_count_real_steps_and_samples() -> None:
    update, _ = _started().work(_task(2, config={"epochs": 3}), {})
    assert (update.num_samples, update.num_updates) == (16, 12)
    assert update.metrics["loss"] > 0
    assert update.seconds > 0


def test_a_client_can_evaluate_the_model() -> None:
    client = _started()
    update, state = client.work(_task(2, kind="evaluate"), {"kept": 1})
    assert (state, dict(update.delta)) == ({"kept": 1}, {})
    assert 0 <= update.metrics["accuracy"] <= 1
    again, _ = client.work(_task(2, kind="evaluate"), {})
    assert again.metrics == update.metrics


class _Shifted(Callback):
    """Remembers: it trains worse the more it has seen."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_start(self, context: Any) -> None:
        self.seen += 1
        with torch.no_grad():
            next(context.model.parameters()).add_(self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


class _Late(_Shifted):
    """Has nothing to remember at first."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.seen else {}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state.get("seen", 0)


@pytest.mark.parametrize("callback", [_Shifted, _Late, EMA, lambda: EarlyStopping("train_loss", patience=1)])
def test_callback_state_is_not_shared_between_clients(callback: Any) -> None:
    fresh, used = (_started(trainer_callbacks=[callback()]) for _ in range(2))
    used.work(_task(5, config={"epochs": 4}), {})
    _assert_same(_delta(used.work(_task(3), {})[0]), _delta(fresh.work(_task(3), {})[0]))


def test_callbacks_are_called_when_weights_arrive_and_leave() -> None:
    heard: list[Any] = []

    class Listen(ClientCallback):
        def on_inbound_received(self, client: Any, inbound_processor: Any) -> None:
            heard.append(("received", client.client_id, inbound_processor is client.inbound))

        def on_inbound_processed(self, client: Any, data: Any) -> None:
            heard.append(("processed", sorted(data.weights)[0]))

        def on_outbound_ready(self, client: Any, report: Any, outbound_processor: Any) -> None:
            heard.append(("ready", sorted(report.delta)[0], len(outbound_processor)))

    client = Client(trainer=make_trainer(), callbacks=[Listen])
    torch.manual_seed(1)
    inbound, outbound = Chain(["bfloat16"]), Chain(["quantization"])
    client.prepare(make_model(), Blobs(), FedAvg(), inbound=inbound, outbound=outbound)
    packed = inbound.pack(_task().weights, seed=0)
    update, _ = client.work(Task(1, 6, packed), {})
    assert heard == [("received", 6, True), ("processed", "0.bias"), ("ready", "0.bias", 1)]
    assert "0.bias/levels" in update.delta


def test_an_object_that_is_not_a_callback_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected a ClientCallback"):
        Client(callbacks=[print])


def test_a_started_client_can_be_sent_to_another_process() -> None:
    algorithm = Everything()
    client = _started(algorithm)
    sent = pickle.loads(cloudpickle.dumps(client))
    (first, state), (second, other) = (it.work(_task(3, 1, algorithm), {}) for it in (client, sent))
    _assert_same(_delta(first), _delta(second))
    _assert_same(state, other)


class Doubled:
    """An add-on: every loss counts twice."""

    def train_step(self, batch: Any) -> Any:
        output = super().train_step(batch)  # type: ignore[misc]
        return {**output, "loss": 2 * output["loss"]}


_PLAIN: dict[str, Any] = {
    "num_epochs": 1,
    "batch_size": 4,
    "optimizer": partial(torch.optim.SGD, lr=0.1),
    "verbose": False,
}
_TRAINERS: dict[str, Any] = {
    "an instance": lambda: ComposableTrainer(**_PLAIN),
    "a class": lambda: Plain,
    "a function": lambda: lambda: ComposableTrainer(**_PLAIN),
    "one with a model of its own": lambda: ComposableTrainer(nn.Linear(2, 2), **_PLAIN),
    "a basic trainer": lambda: partial(Trainer, **_PLAIN),
    "a single process": lambda: SingleProcess(**_PLAIN),
    "decorated": lambda: TimedTrainer(ComposableTrainer(**_PLAIN)),
    "decorated twice": lambda: TimedTrainer(AMPTrainer(ComposableTrainer(**_PLAIN), precision="fp32")),
}


class Plain(ComposableTrainer):
    def __init__(self) -> None:
        super().__init__(**_PLAIN)


@pytest.mark.parametrize("form", _TRAINERS)
def test_every_kind_of_trainer_gives_the_same_update(form: str) -> None:
    # Basic trainers shuffle in another order.
    kind = {"a basic trainer": Trainer, "a single process": SingleProcess}.get(form, ComposableTrainer)
    clients = [_started(Everything(), trainer) for trainer in (kind(**_PLAIN), _TRAINERS[form]())]
    answers = []
    for client in clients:
        _without_dropout(client)
        update, state = client.work(_task(3, 1, Everything()), {})
        answers.append((_delta(update), state))
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-6)


def _without_dropout(client: Client) -> None:
    # Trainers of different kinds draw other numbers for it.
    model: Any = client.trainer.context.model
    model[2].p = 0.0


def test_add_ons_and_precision_take_effect_in_clients() -> None:
    expected, _ = _started(trainer=ComposableTrainer(**_PLAIN)).work(_task(3), {})
    for trainer in (
        ComposableTrainer.add_on(Doubled)(**_PLAIN),
        AMPTrainer(ComposableTrainer(**_PLAIN), precision="bf16"),
    ):
        update, _ = _started(trainer=trainer).work(_task(3), {})
        assert not torch.equal(update.delta["0.weight"], expected.delta["0.weight"])


def test_an_object_that_is_not_a_trainer_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected a trainer, or a class or function that makes one, got 3"):
        _started(trainer=3)
    with pytest.raises(ConfigError, match="expected a trainer"):
        _started(trainer=dict)


def test_weights_that_do_not_fit_the_model_raise_an_error() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="the model has no 'other'"):
        load_weights(model, {"other": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"'weight' has shape \(1,\), the model's has \(1, 2\)"):
        load_weights(model, {"weight": torch.zeros(1)})
