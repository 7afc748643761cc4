"""plato's data sources, at the paths from which its users import them."""

from dovetail.compat.plato.datasources.base import DataSource

__all__ = ["DataSource"]
