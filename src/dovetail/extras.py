"""Optional dependencies: imported where they are used, with an error that names the extra."""

from __future__ import annotations

import importlib
from types import ModuleType

from dovetail.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module, or say which extra to install.

    Args:
        module: The dotted name of the module.
        extra: The extra of Dovetail that brings it.

    Raises:
        MissingExtraError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise MissingExtraError(
            f"{module.partition('.')[0]} is not installed: pip install 'dovetail[{extra}]'"
        ) from error
