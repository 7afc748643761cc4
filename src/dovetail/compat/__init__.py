"""Trainers with the names that users of other libraries know: lernomatic, zae-engine, plato and PyMarlin.

Each module has a `Trainer` that derives from `dovetail.Trainer` and adds names: a method is one call of the trainer's
own. Nothing here trains.
"""

__all__: list[str] = []
