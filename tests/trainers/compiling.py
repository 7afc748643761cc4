"""Check whether this machine can compile steps."""

from __future__ import annotations

import pytest

from dovetail.trainers.whole_step import CannotCompileError, check_compiler

try:
    check_compiler()
    _IS_THERE = True
except CannotCompileError:
    _IS_THERE = False

needs_compiler = pytest.mark.skipif(not _IS_THERE, reason="there is NO C++ COMPILER: compiled steps are not tested")
