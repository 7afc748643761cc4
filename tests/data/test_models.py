from __future__ import annotations

import pytest
import torch
from torch import nn

from dovetail.data.models import cnn, lenet5, logistic, mlp, models
from dovetail.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "shape", "num_parameters"),
    [
        (logistic(60, 10), (60,), 610),
        (mlp(64, 10), (1, 8, 8), 64 * 64 + 64 + 64 * 10 + 10),
        (mlp(784, 10, hidden=(200, 200)), (1, 28, 28), 199_210),
        (cnn(1, 28, 10), (1, 28, 28), 16 * 9 + 16 + 32 * 16 * 9 + 32 + 32 * 49 * 10 + 10),
        (cnn(3, 32, 100), (3, 32, 32), 16 * 27 + 16 + 32 * 16 * 9 + 32 + 32 * 64 * 100 + 100),
        (cnn(1, 8, 10), (1, 8, 8), 16 * 9 + 16 + 32 * 16 * 9 + 32 + 32 * 4 * 10 + 10),
        (lenet5(), (1, 28, 28), 61_706),
        (lenet5(3, 32, 10), (3, 32, 32), None),
    ],
)
def test_models_have_their_documented_sizes(
    model: nn.Module, shape: tuple[int, ...], num_parameters: int | None
) -> None:
    output = model(torch.zeros(2, *shape))
    assert output.shape[0] == 2
    if num_parameters is not None:
        assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_models_are_registered_by_name() -> None:
    assert [models.get(name)()(torch.zeros(1, 1, 28, 28)).shape for name in ("cnn", "lenet5", "mlp")] == [(1, 10)] * 3
    assert models.get("logistic") is logistic


def test_images_that_are_too_small_are_rejected() -> None:
    with pytest.raises(ConfigError, match="lenet5: expected images of 28 pixels or more on a side, got 8"):
        lenet5(1, 8, 10)
    with pytest.raises(ConfigError, match="cnn: expected images of 4 pixels or more on a side, got 3"):
        cnn(1, 3, 10)
