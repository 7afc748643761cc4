"""All that is looked at, in the order of the table."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dovetail.cli.checkup.check import Check
from dovetail.cli.checkup.files import check_descriptors, check_disk, check_folder, check_shared_memory
from dovetail.cli.checkup.packages import check_extras, check_packages, check_python, read_requirements
from dovetail.cli.checkup.store import check_store
from dovetail.cli.checkup.torch_build import answers_of, check_torch, probing


def checkup(folder: Path, home: Path | None = None, store: str | None = None) -> list[Check]:
    """Look at everything.

    Args:
        folder: Where checkpoints would go; it need not be there yet.
        home: The folder of experiments; None is that of `DOVETAIL_HOME`, or else `.dovetail`.
        store: The URL of a database server; None is that of `DOVETAIL_STORE`, or else the file in `home`.
    """
    requirements = read_requirements()
    # Torch takes seconds to import: the rest is done meanwhile.
    with probing() as probe:
        before = [check_python(), *check_packages(requirements)]
        after = [
            *check_extras(requirements),
            check_folder(folder),
            check_disk("disk", folder),
            check_disk("temporary disk", Path(tempfile.gettempdir())),
            check_descriptors(),
            *check_shared_memory(),
            check_store(home, store),
        ]
        return [*before, *check_torch(answers_of(probe)), *after]
