"""One round of a federation: its data, and one function for each of its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dovetail.errors import FederationError
from dovetail.federated.backends import Done
from dovetail.federated.clock import Arrival
from dovetail.federated.messages import Fault, Task, Update, Weights
from dovetail.federated.postprocess import Gathering
from dovetail.federated.postprocess.base import EVERYONE
from dovetail.federated.records import RoundRecord, accuracy_of_clients, client_metrics
from dovetail.federated.servers.hooks import call_choose_clients, notify, trained_weights
from dovetail.federated.servers.saving import roll_back, save_server, snapshot
from dovetail.federated.servers.tasks import make_task, packed_weights, shared_weights, training_config
from dovetail.federated.validation import admit, check_update
from dovetail.overrides import defines
from dovetail.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from dovetail.federated.servers.fedavg import Server


@dataclass
class Round:
    """The data of one round; each step adds its part.

    Attributes:
        number: The number of the round, counted from 1.
        started: The time at which it started, by `time.perf_counter`.
        selected: The ids of the clients that were selected.
        tasks: One task for each of them.
        arrivals: The outcomes that arrived in this round. Without `synchronous` they may answer earlier tasks.
        answers: The outcomes among the arrivals that are no faults.
        gathering: What postprocessors receive about the round.
        updates: The updates that are decoded and valid.
        used: The answers that count: those with a valid update, or none if there are fewer than `min_clients`.
        faults: The clients that were left out, with the reasons.
        weights: The aggregated global weights. None means that the round changes no weights.
        metrics: The metrics of the clients and of the global model.
    """

    number: int
    started: float = field(default_factory=time.perf_counter)
    selected: list[int] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    answers: list[Done] = field(default_factory=list)
    gathering: Gathering = field(init=False)
    updates: list[Update] = field(default_factory=list)
    used: list[Done] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    weights: Weights | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def run_round(server: Server) -> None:
    """Run one round and record it.

    ```text
    select_clients      selection                  → round.selected
    make_tasks          weights, settings, seeds   → round.tasks
    run_clients         backend, clock             → answers on their way
    collect_answers     clock                      → round.answers
    decode_updates      postprocessors, validation → round.updates, round.used
    receive_weights     hooks                      → round.updates
    aggregate_updates   algorithm, aggregator      → round.weights
    update_server                                  → server.weights, server.states, selection
    evaluate_round      clients, test data         → round.metrics
    record_round                                   → server.records, checkpoint
    ```

    A round that raises before it is recorded is rolled back, so that the next run repeats it.
    """
    before, num_records = snapshot(server), len(server.records)
    server.current_round += 1
    round = Round(server.current_round)
    try:
        select_clients(server, round)
        make_tasks(server, round)
        run_clients(server, round)
        collect_answers(server, round)
        decode_updates(server, round)
        receive_weights(server, round)
        aggregate_updates(server, round)
        update_server(server, round)
        evaluate_round(server, round)
        record_round(server, round)
    except BaseException:
        # A recorded round has been saved too; only its callbacks failed, so it must not be repeated.
        if len(server.records) == num_records:
            roll_back(server, before)
        raise


def is_finished(server: Server) -> bool:
    """Return whether the last round was run, or a target is reached."""
    trainer = server.config.trainer
    metrics = server.records[-1].metrics if server.records else {}
    if trainer.target_accuracy is not None and metrics.get("accuracy", -math.inf) >= trainer.target_accuracy:
        return True
    if trainer.target_perplexity is not None and _perplexity(metrics) <= trainer.target_perplexity:
        return True
    return server.current_round >= trainer.rounds


def select_clients(server: Server, round: Round) -> None:
    """Select as many clients as are missing; clients that still work for an earlier round count."""
    busy = server.clock.busy()
    per_round = server.config.clients.per_round if server.silos is None else len(server.silos.ids)
    num_missing = min(per_round, len(server.pool)) - len(busy)
    if num_missing > 0:
        round.selected = call_choose_clients(server, num_missing, busy)
    server.selected_clients = round.selected
    notify(server, "on_clients_selected", round.selected)


def make_tasks(server: Server, round: Round) -> None:
    """Make one task for each selected client."""
    weights, config = packed_weights(server), training_config(server.config)
    # Each client adds one mask per other client of the round, so it needs their ids.
    if server.outbound.needs_cohort:
        config["cohort"] = list(round.selected)
    round.tasks = [make_task(server, client_id, weights, config) for client_id in round.selected]


def run_clients(server: Server, round: Round) -> None:
    """Run the tasks on the backend, and give the clock the answers and the times at which they arrive."""
    answers, faults = _run_tasks(server, round)
    round.faults += faults
    if not round.tasks:
        return
    weights = round.tasks[0].weights
    # A lossy codec changes what clients receive. Differences are relative to that, not to the server's weights.
    sent = server.inbound.unpack(weights) if len(server.inbound) else weights
    for position, task in enumerate(round.tasks):
        if (answer := answers.get(task.client_id)) is not None:
            answer = Done(replace(answer.update, sent=sent), answer.state)
            server.clock.expect(_arrival(server, task, position, answer))


def collect_answers(server: Server, round: Round) -> None:
    """Wait for the answers of this round; without `synchronous`, these are those that arrive first."""
    round.arrivals = server.clock.gather(round.number, server.config.server)
    round.faults += [arrival.outcome for arrival in round.arrivals if isinstance(arrival.outcome, Fault)]
    round.answers = [arrival.outcome for arrival in round.arrivals if isinstance(arrival.outcome, Done)]


def decode_updates(server: Server, round: Round) -> None:
    """Undo the postprocessing of the updates, and keep the valid ones.

    Raises:
        FederationError: All clients failed, and no answer is on its way.
    """
    round.gathering = Gathering(
        round.number,
        [task.client_id for task in round.tasks],
        shared_weights(server),
        num_clients=len(server.client_ids),
        seed=derive_seed(server.config.server.random_seed, "aggregation", round.number),
    )
    # Staleness: the number of rounds since the client received its weights; 0 in synchronous rounds.
    timed = [replace(it.update, staleness=round.number - it.update.round) for it in round.answers]
    decoded, faults = server.outbound.decode(timed, round.gathering)
    for update in decoded:
        # Shapes and finite values first: the check of an algorithm may compute with the tensors.
        fault = check_update(update, update.sent)
        if fault is None and update.num_samples:
            fault = server.algorithm.check(update)
        if fault is None:
            round.updates.append(update)
        else:
            faults.append(fault)
    if round.updates:
        invalid = {fault.client_id for fault in faults}
        round.used = [it for it in round.answers if it.update.client_id not in invalid]
    # Neither weights nor client states change then, as if these clients had not been selected.
    if len(round.used) < server.config.server.min_clients:
        round.used = []
    round.faults += faults
    if server.silos is not None:
        round.faults = server.silos.faults(round.faults, [it.update for it in round.answers])
    # While answers are on their way, a round without updates is normal; otherwise all later rounds would fail too.
    if not round.updates and not server.clock.busy():
        raise_if_all_failed(round.number, round.faults)


def receive_weights(server: Server, round: Round) -> None:
    """Call the hooks that receive the trained weights; `weights_received` of a subclass may change them."""
    round.updates = server._receive(round.updates)
    # Without this check, every round would compute the trained weights of all clients.
    if any(defines(callback, "on_weights_received") for callback in server.callbacks):
        notify(server, "on_weights_received", trained_weights(round.updates))


def aggregate_updates(server: Server, round: Round) -> None:
    """Aggregate the updates into new global weights."""

    def average(updates: Sequence[Update]) -> Weights:
        return server.outbound.aggregated(server.aggregator(updates), updates, round.gathering)

    # The update of a client without samples is zero and has no weight.
    counted = [update for update in round.updates if update.num_samples]
    if round.used and counted:
        round.weights = server._aggregate(counted, average)


def update_server(server: Server, round: Round) -> None:
    """Replace the global weights and the states of the clients whose answers count."""
    if round.weights is not None:
        server.weights = round.weights
    for answer in round.used:
        # Only now, because the state of a client whose update was rejected must stay at its last accepted task.
        server.states.put(answer.update.client_id, answer.state)
    if round.used:
        seconds = {arrival.client_id: arrival.seconds for arrival in round.arrivals}
        # The sum of masked updates belongs to no client.
        observed = [update for update in round.updates if update.client_id != EVERYONE]
        server.selection.observe(round.number, observed, seconds)
    notify(server, "on_weights_aggregated", server._reported(round.updates))


def evaluate_round(server: Server, round: Round) -> None:
    """Measure the global model; without test data of the server, use the accuracy that clients measured."""
    tested = server.evaluate() if server.config.server.do_test else {}
    round.metrics = {**client_metrics(round.updates), **(tested or accuracy_of_clients(round.updates))}


def record_round(server: Server, round: Round) -> None:
    """Append the record of the round, call the hooks, commit the client states and write the checkpoint."""
    before = server.records[-1].elapsed_time if server.records else 0.0
    is_simulated = server.config.server.simulates_time
    server.records.append(
        RoundRecord(
            round.number,
            server.clock.now if is_simulated else before + time.perf_counter() - round.started,
            tuple(task.client_id for task in round.tasks),
            tuple(answer.update.client_id for answer in round.used),
            tuple(round.faults),
            round.metrics,
            bytes_down=sum(task.num_bytes for task in round.tasks),
            bytes_up=sum(answer.update.num_bytes for answer in round.answers),
            staleness=max((update.staleness for update in round.updates), default=0),
            backend=server.backend.ran_on,
        )
    )
    try:
        notify(server, "on_clients_processed")
    finally:
        # A recorded round is complete, even if a callback raises.
        server.states.commit()
        save_server(server)


def raise_if_all_failed(number: int, faults: Sequence[Fault]) -> None:
    """Raise an error that shows the first fault, if there is one; call it when no client has a usable answer.

    Raises:
        FederationError: At least one client failed.
    """
    if faults:
        num_failed = len({fault.client_id for fault in faults})
        raise FederationError(
            f"round {number}: no client has a usable answer, {num_failed} failed; first failure: {faults[0].sentence}"
        )


def _run_tasks(server: Server, round: Round) -> tuple[dict[int, Done], list[Fault]]:
    """Return the accepted answers of the round's clients by id, and the faults of the others."""
    answered: list[Done] = []
    faults: list[Fault] = []
    for outcome in server.backend.run([(task, server.states.get(task.client_id)) for task in round.tasks]):
        if isinstance(outcome, Fault):
            faults.append(outcome)
        else:
            answered.append(outcome)
    accepted, rejected = admit(
        (outcome.update for outcome in answered), [task.client_id for task in round.tasks], round.number
    )
    # A client may have answered twice, so updates are compared by identity.
    accepted_ids = {id(update) for update in accepted}
    answers = {it.update.client_id: it for it in answered if id(it.update) in accepted_ids}
    faults += rejected
    known = answers.keys() | {fault.client_id for fault in faults}
    silent = [task.client_id for task in round.tasks if task.client_id not in known]
    faults += [Fault(it, round.number, "timed out", f"client {it} has not answered") for it in silent]
    # A backend returns outcomes in any order; the record must not depend on it.
    order = {task.client_id: position for position, task in enumerate(round.tasks)}
    return answers, sorted(faults, key=lambda fault: order.get(fault.client_id, len(order)))


def _arrival(server: Server, task: Task, position: int, answer: Done) -> Arrival:
    """Return an answer with the time at which it arrives; a fault if it takes longer than the simulated timeout."""
    # Answers that arrive at the same time are sorted by round first, and by position in the round second.
    settings, order = server.config.server, task.round * 2**32 + position
    if not settings.simulates_time:
        return Arrival(server.clock.now, order, 0.0, answer)
    outcome: Done | Fault = answer
    seconds, limit = _simulated_seconds(server, task, answer.update), settings.timeout
    if limit is not None and seconds > limit:
        reason = f"client {task.client_id} takes {seconds:g} simulated seconds, and the server waits for {limit:g}"
        # The server waits until the limit before it gives the client up, so the fault arrives at that time.
        outcome, seconds = Fault(task.client_id, task.round, "timed out", reason), limit
    return Arrival(server.clock.now + seconds, order, seconds, outcome)


def _simulated_seconds(server: Server, task: Task, update: Update) -> float:
    """Return the simulated seconds from sending a task to the arrival of its answer."""
    # An edge server reports how long its own rounds took.
    work = update.metrics.get("simulated_seconds")
    if work is None:
        epochs = task.config.get("epochs") or server.trainer.context.config.get("epochs", 1)
        work = server.speeds.work(task.client_id, epochs, update.num_samples / server.mean_samples)
    return work + server.speeds.transfer(task.num_bytes, update.num_bytes)


def _perplexity(metrics: Mapping[str, float]) -> float:
    # The exponential of a larger number overflows.
    return metrics.get("perplexity", math.exp(min(metrics.get("loss", math.inf), 700.0)))
