"""Graphics cards without an import of torch: variables, the folders of drivers, and a process that counts devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail.runtime import cores
from dovetail.runtime.cores import Cards, graphics_cards, torch_build

# A package with the one function that the counting process calls: this machine has no devices.
DEVICES = """
class accelerator:
    @staticmethod
    def device_count():
        return 3
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)
    cores._num_devices.cache_clear()


@pytest.fixture
def three_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch of new processes has three devices."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(DEVICES)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.mark.parametrize(
    ("build", "sign", "variables"),
    [
        ("hip", "dev/kfd", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
        ("xpu", "dev/dri/renderD128", ("ZE_AFFINITY_MASK",)),
        ("cuda", "dev/dxg", ("CUDA_VISIBLE_DEVICES",)),
    ],
)
@pytest.mark.usefixtures("three_devices")
def test_a_process_counts_the_devices_of_a_machine_with_a_sign_of_one(
    build: str, sign: str, variables: tuple[str, ...], tmp_path: Path
) -> None:
    assert graphics_cards(tmp_path, build) == Cards([])
    (tmp_path / sign).parent.mkdir(parents=True)
    (tmp_path / sign).touch()
    assert graphics_cards(tmp_path, build) == Cards(["0", "1", "2"], variables)
    # The sign of another kind of device, for example of the display, starts no process.
    assert graphics_cards(tmp_path, "") == Cards([])


def test_a_process_that_fails_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no driver')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    assert graphics_cards(tmp_path, "hip").names == []


def test_nvidia_has_one_folder_per_card(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert graphics_cards(tmp_path, "cuda") == Cards(["0", "1"], ("CUDA_VISIBLE_DEVICES",))


@pytest.mark.parametrize(
    ("build", "name"),
    [
        ("cuda", "CUDA_VISIBLE_DEVICES"),
        ("hip", "CUDA_VISIBLE_DEVICES"),
        ("hip", "HIP_VISIBLE_DEVICES"),
        ("xpu", "ZE_AFFINITY_MASK"),
        ("", "ZE_AFFINITY_MASK"),
    ],
)
def test_variables_that_are_set_are_respected(
    build: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    monkeypatch.setenv(name, "4,6")
    assert graphics_cards(tmp_path, build) == Cards(["4", "6"], (name,))
    monkeypatch.setenv(name, "")
    assert graphics_cards(tmp_path, build) == Cards([], (name,))


def test_the_build_of_torch_is_in_its_files(tmp_path: Path) -> None:
    here = "hip" if torch.version.hip else "cuda" if torch.version.cuda else "xpu" if torch.version.xpu else ""
    assert torch_build() == here
    version = tmp_path / "version.py"
    for text, build in (
        ("cuda: Optional[str] = '12.6'\nhip: Optional[str] = None\nxpu: Optional[str] = None\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482'\n", "hip"),
        ("cuda = None\nhip = None\nxpu = '20250101'\n", "xpu"),
    ):
        version.write_text(text)
        assert torch_build(tmp_path) == build
    assert torch_build(tmp_path / "missing") == ""
