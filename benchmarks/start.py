"""How long it takes to begin: importing, and the command line, each in a new process.

    python benchmarks/start.py

The interpreter alone, and torch alone, are there for comparison.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time

from report import Row, Section, Table, parser, ratios, verdict

__all__ = ["main"]

ROUNDS = (9, 2)
# Seconds of `dovetail experiment --help`.
LIMIT = 0.3

PLAIN, HELP, TORCH = "python", "dovetail experiment --help", "import torch"
COMMANDS = {
    PLAIN: ["-c", "pass"],
    f"{PLAIN}, again": ["-c", "pass"],
    "import dovetail": ["-c", "import dovetail"],
    "dovetail --help": ["-m", "dovetail", "--help"],
    HELP: ["-m", "dovetail", "experiment", "--help"],
    TORCH: ["-c", TORCH],
    "from dovetail.trainers import Trainer": ["-c", "from dovetail.trainers import Trainer"],
    "from dovetail.servers import fedavg": ["-c", "from dovetail.servers import fedavg"],
}


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__).parse_args(arguments)
    rounds = ROUNDS[options.quick]
    section = Section(
        "start",
        "Start-up time",
        "New processes that import something, or print the help of the command line, and end. The light modules do "
        "without torch; whatever trains needs it, and is compared with it.",
        is_quick=options.quick,
    )
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    # The first round writes bytecode.
    for number in range(1 + rounds):
        names = list(COMMANDS)
        random.Random(number).shuffle(names)
        for name in names:
            begun = time.perf_counter()
            subprocess.run([sys.executable, *COMMANDS[name]], capture_output=True, check=True)
            if number:
                times[name].append(time.perf_counter() - begun)
    rows = []
    for name, found in times.items():
        over = statistics.median(ratios(found, times[TORCH]))
        judged = verdict(found, LIMIT) if name == HELP else ""
        bar = LIMIT if name == HELP else None
        rows.append(Row(name, found, bar, verdict=judged, cells=(f"{over:.2f}",), is_noise=name.endswith("again")))
    section.add(
        Table("From nothing to the end", "seconds", rows, ("over import torch",), note=f"{rounds} rounds.", is_log=True)
    )
    section.save(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
