"""Global settings of torch and Inductor that determine the code of a step."""

from __future__ import annotations

import sys
from typing import Any

import torch


def settings_of_torch() -> tuple[Any, ...]:
    """Return the global settings that change what a trace or its compiled code computes."""
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.mha.get_fastpath_enabled(),
        # An autocast around the run. The one of `context.precision` is a part of the step.
        [(kind, torch.get_autocast_dtype(kind)) for kind in _DEVICES if torch.is_autocast_enabled(kind)],
    )


_DEVICES = ("cpu", "cuda", "mps", "xpu")


def settings_of_inductor() -> list[tuple[str, str]] | None:
    """Return the names and values of Inductor's settings that a program changed; None if one has no exact text.

    Environment variables, which set the defaults, are not included.

    Example:
        >>> from torch._inductor import config
        >>> with config.patch(max_fusion_size=7):
        ...     settings_of_inductor()
        [('max_fusion_size', '7')]
    """
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None:
        # Its import takes seconds, and nothing can have changed it.
        return []
    changed = changed_settings(config)
    if not all(map(_is_plain, changed.values())):
        return None
    return [(name, repr(changed[name])) for name in sorted(changed)]


def changed_settings(config: Any) -> dict[str, Any]:
    """Return the settings in a configuration of torch that differ from their defaults and may change compiled code."""
    # Names that torch leaves out of the keys of its own caches, because they do not change the code. They contain its
    # custom passes, which do.
    ignored = (*(name for name in config._cache_config_ignore_prefix if not name.endswith("pass")), *_WRITTEN)
    # A setting that was changed and reset does not count, as it does for torch's own comparison.
    return {
        name: value
        for name, value in config._get_dict(readonly_values=True).items()
        if value != config._config[name].default and not name.startswith(ignored)
    }


# Inductor writes into these while it compiles.
_WRITTEN = ("aot_inductor.metadata", "aot_inductor.serialized")


def _is_plain(value: Any) -> bool:
    """Return whether the text of a value is the same in every process."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, (str, int, float, bool, bytes, type(None)))
