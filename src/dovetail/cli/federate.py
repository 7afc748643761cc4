"""Command `dovetail federate`: run a federation from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.output import print_json, print_line
from dovetail.extras import require


def federate(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="The YAML file.", exists=True, dir_okay=False, show_default="defaults"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the file, such as trainer.rounds=4."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option("--results", metavar="DIR", help="Write rounds.csv and rounds.png here.")
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option("--checkpoints", metavar="DIR", help="Write a checkpoint every round, and resume from it."),
    ] = None,
    on_flower: Annotated[
        bool, typer.Option("--flower", help="Run it on Flower: a SuperLink and SuperNodes on this machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the rounds, as JSON.")] = False,
) -> None:
    """Run a federation of simulated clients. Without a file, ten clients train on handwritten digits."""
    from dovetail.federated.servers.building import federation
    from dovetail.federated.servers.display import RoundDisplay
    from dovetail.federated.servers.reading import read_federated
    from dovetail.federated.servers.results import Personalized

    federation_config = read_federated(config if config is not None else _DIGITS, settings or [])
    if checkpoints is not None:
        federation_config = federation_config.with_settings(checkpoint_path=str(checkpoints))
    if results is not None:
        federation_config = federation_config.with_settings(result_path=str(results))
    folder = federation_config.results.result_path
    watching = [] if as_json else [RoundDisplay()]
    personal = Personalized()
    # The server itself writes the result files.
    writing = [personal]
    if on_flower:
        # Before the import of the module, which needs Flower, so that the error names the extra.
        require("flwr", "flower")
        from dovetail.federated.servers.flower import run_on_flower

        records = run_on_flower(federation_config, [*watching, *writing])
    else:
        server, client = federation(federation_config, [*watching, *writing])
        records = server.run(client)
    if as_json:
        rounds = [record.to_plain() for record in records]
        print_json(rounds if personal.found is None else {"rounds": rounds, "personalized": personal.found})
    elif folder is not None:
        clients = "" if personal.found is None else f", {folder}/clients.csv"
        print_line(f"written: {folder}/rounds.csv{clients} and {folder}/rounds.png")


# The settings without a file: a small model that learns visibly in ten rounds.
_DIGITS = {
    "trainer": {"rounds": 10, "epochs": 2, "batch_size": 16, "optimizer": "SGD"},
    "parameters": {"optimizer": {"lr": 0.1}},
}
