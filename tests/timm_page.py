"""Runs the blocks of `docs/howto/timm.md`: `python timm_page.py`, in a separate process."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    # The folder of tests is not on the path of tests.
    vision = runpy.run_path(str(ROOT / "tests" / "vision.py"))
    vision["enable"]()
    page = (ROOT / "docs" / "howto" / "timm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, "docs/howto/timm.md", "exec", dont_inherit=True), namespace)
    print(f"{len(blocks)} blocks")
