"""Views of the page, built with nicegui."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.ui.pages import compare, downloads, experiment, federation, run, runs
from dovetail.ui.pages.frame import Site

if TYPE_CHECKING:
    from fastapi import FastAPI

    from dovetail.ui.library import Library

__all__ = ["add_pages"]


def add_pages(application: FastAPI, library: Library, *, read_only: bool = False) -> None:
    """Register all views and downloads."""
    site = Site(library, read_only)
    for view in (runs, compare, run, experiment, federation):
        view.add(site)
    downloads.add(application, site)
