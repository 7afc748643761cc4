"""plato's `samplers.base`: the samples of one client."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.data import SubsetRandomSampler

__all__ = ["Sampler"]


class Sampler:
    """The samples of one client; a trainer takes it wherever it takes a sampler.

    Args:
        samples: The indices of the samples.

    Example:
        >>> Sampler([3, 4, 5]).num_samples()
        3
    """

    def __init__(self, samples: Sequence[int] = ()) -> None:
        self.data_samples = samples

    def get(self) -> SubsetRandomSampler:
        """Return a sampler for torch, which draws the samples in random order."""
        return SubsetRandomSampler(self.data_samples)

    def num_samples(self) -> int:
        """Return the number of samples."""
        return len(self.data_samples)
