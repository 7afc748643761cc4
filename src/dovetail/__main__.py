"""Command `python -m dovetail`: the same as `dovetail`."""

from __future__ import annotations

from dovetail.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
