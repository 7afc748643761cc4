"""The algorithms a second time, in plain NumPy: multinomial logistic regression on clients of unequal sizes.

Only the data, the initial weights and the selected clients of each round are shared with the library.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.algorithms import SCAFFOLD, Algorithm, FedAvg, FedProx
from dovetail.clients import simple
from dovetail.federated.algorithms.feddyn import FedDyn
from dovetail.federated.algorithms.fednova import FedNova
from dovetail.federated.algorithms.server_optimizers import FedAdam
from dovetail.federated.data.sources import Datasource
from dovetail.servers import fedavg
from dovetail.trainers.composable import ComposableTrainer

Matrix = NDArray[np.float64]

ROUNDS, EPOCHS, BATCH, RATE = 5, 2, 4, 0.3
# Of batches of 4 these make 2, 5, 1, 3 and 2 steps in an epoch, some with a last one that is shorter.
SIZES = (7, 20, 3, 12, 5)
N = len(SIZES)


class Skewed(Datasource):
    """Clients that have different numbers of samples, and mostly one class each."""

    num_clients = N

    def __init__(self) -> None:
        random = np.random.default_rng(5)
        self.arrays = []
        for client, size in enumerate(SIZES):
            inputs = random.normal(size=(size, 4)) + random.normal(size=4)
            labels = np.where(random.random(size) < 0.7, client % 3, random.integers(0, 3, size))
            self.arrays.append((inputs, labels))

    def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self.arrays[client_id - 1]
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def num_samples(self, client_id: int) -> int:
        return SIZES[client_id - 1]

    def central_test_data(self) -> None:
        return None


DATA = Skewed()


# ------------------------------------------------------------------ one client


def gradient(w: Matrix, inputs: Matrix, labels: NDArray[np.int64]) -> Matrix:
    """Return the gradient of the mean cross entropy; the last row of w is the bias."""
    x = np.hstack([inputs, np.ones((len(inputs), 1))])
    scores = x @ w
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    return x.T @ shares / len(labels)


def trained(w: Matrix, client: int, added: Callable[[Matrix], Matrix | float] = lambda w: 0.0) -> tuple[Matrix, int]:
    """Return the weights after all local steps of a client, and their number.

    Args:
        w: The weights received by the client.
        client: Counted from 0.
        added: To every gradient, of the present weights.
    """
    inputs, labels = DATA.arrays[client]
    steps = 0
    for _ in range(EPOCHS):
        for first in range(0, len(labels), BATCH):
            batch = slice(first, first + BATCH)
            w = w - RATE * (gradient(w, inputs[batch], labels[batch]) + added(w))
            steps += 1
    return w, steps


# ------------------------------------------------------------------ one federation each


def shares(asked: Sequence[int]) -> Matrix:
    counted = np.array([SIZES[client] for client in asked], dtype=np.float64)
    return counted / counted.sum()


def numpy_fedavg(w: Matrix, rounds: Sequence[Sequence[int]]) -> Matrix:
    for asked in rounds:
        w = sum(p * trained(w, client)[0] for p, client in zip(shares(asked), asked, strict=True))
    return w


def numpy_fedprox(w: Matrix, rounds: Sequence[Sequence[int]], mu: float) -> Matrix:
    for asked in rounds:
        sent = w
        ends = [trained(sent, client, lambda y, sent=sent: mu * (y - sent))[0] for client in asked]
        w = sum(p * end for p, end in zip(shares(asked), ends, strict=True))
    return w


def numpy_scaffold(x: Matrix, rounds: Sequence[Sequence[int]], server_rate: float) -> Matrix:
    """Algorithm 1 of Karimireddy et al., with option II."""
    c, own = np.zeros_like(x), [np.zeros_like(x) for _ in SIZES]
    for asked in rounds:
        moves, changes = [], []
        for client in asked:
            y, steps = trained(x, client, lambda y, i=client, c=c: c - own[i])
            renewed = own[client] - c + (x - y) / (steps * RATE)
            moves.append(y - x)
            changes.append(renewed - own[client])
            own[client] = renewed
        x = x + server_rate * np.mean(moves, axis=0)
        c = c + np.sum(changes, axis=0) / N
    return x


def numpy_feddyn(w: Matrix, rounds: Sequence[Sequence[int]], alpha: float) -> Matrix:
    """Algorithm 1 of Acar et al., in its own letters: g is the gradient at the end of a client's last round."""
    h, own = np.zeros_like(w), [np.zeros_like(w) for _ in SIZES]
    for asked in rounds:
        ends = []
        for client in asked:
            end, _ = trained(w, client, lambda y, g=own[client], w=w: alpha * (y - w) - g)
            own[client] = own[client] - alpha * (end - w)
            ends.append(end)
        h = h - alpha / N * sum(end - w for end in ends)
        w = np.mean(ends, axis=0) - h / alpha
    return w


def numpy_fednova(w: Matrix, rounds: Sequence[Sequence[int]]) -> Matrix:
    for asked in rounds:
        ends = [trained(w, client) for client in asked]
        effective = sum(p * steps for p, (_, steps) in zip(shares(asked), ends, strict=True))
        w = w - effective * sum(p * (w - end) / steps for p, (end, steps) in zip(shares(asked), ends, strict=True))
    return w


def numpy_fedadam(w: Matrix, rounds: Sequence[Sequence[int]], rate: float) -> Matrix:
    m, v = np.zeros_like(w), np.full_like(w, 0.001**2)
    for asked in rounds:
        change = numpy_fedavg(w, [asked]) - w
        m = 0.9 * m + 0.1 * change
        v = 0.99 * v + 0.01 * change**2
        w = w + rate * m / (np.sqrt(v) + 0.001)
    return w


# ------------------------------------------------------------------ both

PAIRS: dict[str, tuple[Callable[[], Algorithm], Callable[..., Matrix]]] = {
    "FedAvg": (FedAvg, numpy_fedavg),
    "FedProx": (partial(FedProx, mu=0.4), partial(numpy_fedprox, mu=0.4)),
    "SCAFFOLD": (partial(SCAFFOLD, server_learning_rate=0.8), partial(numpy_scaffold, server_rate=0.8)),
    "FedDyn": (partial(FedDyn, alpha=0.5), partial(numpy_feddyn, alpha=0.5)),
    "FedNova": (FedNova, numpy_fednova),
    "FedAdam": (partial(FedAdam, 0.05), partial(numpy_fedadam, rate=0.05)),
}


def _run(algorithm: Algorithm, **settings: Any) -> tuple[Matrix, Matrix, list[list[int]]]:
    """Return the weights before and after, with the bias as the last row, and the clients selected in every round."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3).double()
    trainer = ComposableTrainer(
        num_epochs=EPOCHS,
        batch_size=BATCH,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        shuffle=False,
        drop_last=False,
        verbose=False,
    )
    settings = {"rounds": ROUNDS, "total_clients": N, **settings}
    server = fedavg.Server(copy.deepcopy(model), DATA, algorithm, trainer, **settings)
    records = server.run(simple.Client(trainer=trainer))
    asked = [[client_id - 1 for client_id in record.reported] for record in records]
    return _matrix(model.state_dict()), _matrix(server.weights), asked


def _matrix(weights: Any) -> Matrix:
    return np.vstack([weights["weight"].numpy().T, weights["bias"].numpy()])


@pytest.mark.parametrize("backend", ["sequential", "vectorized"])
@pytest.mark.parametrize("per_round", [N, 3], ids=["everyone", "three of five"])
@pytest.mark.parametrize("name", PAIRS)
def test_five_rounds_equal_the_numpy_reference(name: str, per_round: int, backend: str) -> None:
    make, numpy_version = PAIRS[name]
    before, after, asked = _run(make(), per_round=per_round, backend=backend)
    assert [len(clients) for clients in asked] == [per_round] * ROUNDS
    np.testing.assert_allclose(after, numpy_version(before, asked), rtol=0, atol=1e-12)


def test_no_two_algorithms_end_with_equal_weights() -> None:
    """Otherwise the comparison above could not distinguish the algorithms."""
    before, _, asked = _run(FedAvg(), per_round=N)
    ends = [numpy_version(before, asked) for _, numpy_version in PAIRS.values()]
    ends.append(before)
    distances = [np.abs(first - second).max() for at, first in enumerate(ends) for second in ends[:at]]
    assert min(distances) > 1e-3
