"""All backends that need nothing else do what every backend must; the one for Ray is in tests/integration."""

from __future__ import annotations

from dovetail.federated.backends import Auto, Backend, Process, Sequential
from dovetail.federated.backends.contract import BackendContract


class TestSequential(BackendContract):
    def make(self) -> Backend:
        return Sequential()


class TestOneProcess(BackendContract):
    def make(self) -> Backend:
        return Process(num_workers=1)


class TestTwoProcesses(BackendContract):
    def make(self) -> Backend:
        return Process(num_workers=2)


class TestAuto(BackendContract):
    def make(self) -> Backend:
        return Auto()
