"""Small models for small datasets: the default models of datasources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from dovetail.errors import ConfigError
from dovetail.registry import Registry

__all__ = ["cnn", "lenet5", "logistic", "mlp", "models"]


def logistic(features: int = 60, classes: int = 10) -> nn.Module:
    """Return logistic regression on flattened inputs.

    Example:
        >>> sum(parameter.numel() for parameter in logistic(60, 10).parameters())
        610
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def mlp(features: int = 784, classes: int = 10, hidden: Sequence[int] = (64,)) -> nn.Module:
    """Return a multilayer perceptron on flattened inputs, with hidden layers of these sizes.

    Example:
        >>> mlp(64, 10, hidden=(64, 32))[-1]
        Linear(in_features=32, out_features=10, bias=True)
    """
    sizes = [features, *hidden]
    inner = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *inner, nn.Linear(sizes[-1], classes))


def cnn(channels: int = 1, size: int = 28, classes: int = 10) -> nn.Module:
    """Return a network of two convolutions with pooling and a linear layer, for square images of at least 4 pixels.

    Example:
        >>> import torch
        >>> cnn(1, 8, 10)(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])
    """
    if size < 4:
        raise ConfigError(f"cnn: expected images of 4 pixels or more on a side, got {size}")
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (size // 4) ** 2, classes),
    )


def lenet5(channels: int = 1, size: int = 28, classes: int = 10) -> nn.Module:
    """Return LeNet-5 with rectifiers, for square images of `size` pixels, at least 28.

    Example:
        >>> import torch
        >>> lenet5()(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """
    # The side of the last feature maps: each pooling halves it, each convolution without padding removes 4 pixels.
    side = (size // 2 - 4) // 2 - 4
    if side < 1:
        raise ConfigError(f"lenet5: expected images of 28 pixels or more on a side, got {size}; cnn takes smaller ones")
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 120, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(120 * side**2, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


models: Registry[Callable[..., nn.Module]] = Registry(
    "model", lambda: {"cnn": cnn, "lenet5": lenet5, "logistic": logistic, "mlp": mlp}
)
