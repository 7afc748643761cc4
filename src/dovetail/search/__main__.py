"""Command `python -m dovetail.search HOME EXPERIMENT`: runs an experiment in this process."""

from __future__ import annotations

from dovetail.search.runner import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
