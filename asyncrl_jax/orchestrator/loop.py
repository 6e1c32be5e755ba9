"""The orchestrator's loop: observe, decide, write, every `TICK_S`.

    stage         waits for                        unblocked by
    admission     learner state, ledger counts     the learner's next update or settlement
    expiry        a new update count               the learner's next update
    evaluation    a version old enough             an announcement; an actor reports the result
    finish        phase "done" of the learner      the result of the last evaluation

Invariants:
  * Everything it knows is in Redis; killed at any point, its successor goes on from there. Tickets and evaluations are
    idempotent by id.
  * What it issues never exceeds the uses that the lag bound leaves to the updates still to come.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path
from typing import Any

from asyncrl_jax.config import Config
from asyncrl_jax.orchestrator.policies import admission, curriculum
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger, NoEpoch
from asyncrl_jax.types import EvaluationRequest, LearnerState, Outcome, Ticket

log = logging.getLogger(__name__)

TICK_S = 0.02
FULL_EVALUATION = 2  # the first and the last evaluation use this many times the tasks


def run_orchestrator(config: Config, run_dir: Path, redis_password: str | None, stop: threading.Event) -> int:
    """Runs until the learner has done its updates and the last evaluation is in, or until `stop` is set.

    Returns:
      The process's exit status.

    Raises:
      RedisUnavailable: if Redis stays away longer than `redis.outage_s`.
    """
    del run_dir  # no memory of its own
    redis = connect(config.redis, redis_password)
    keys = Keys(config.redis.namespace)
    orchestrator = Orchestrator(config, Control(redis, keys), Ledger(redis, keys))
    while not stop.is_set():
        if orchestrator.tick():
            return 0
        stop.wait(TICK_S)
    return 0


class Orchestrator:
    """One control loop. Holds nothing that a successor would miss: only what the last tick saw."""

    def __init__(self, config: Config, control: Control, ledger: Ledger):
        self._config = config
        self._lag = config.effective_lag
        self._control = control
        self._ledger = ledger
        self._beat_at = 0.0
        self._expired_upto: tuple[int, int] | None = None
        self._epoch: int | None = None
        self._evaluated: set[str] = set()
        self._decision: admission.Admission | None = None

    def tick(self) -> bool:
        """One round. True when the run is over."""
        phase = self._control.phase()
        if phase in ("finished", "stopping"):
            return True
        # Pending is read before the learner's state: what is settled in between is then counted twice as outstanding,
        # never left out, so the bound holds.
        counts = self._ledger.counts()
        learner = self._control.learner()
        epoch = self._control.epoch()
        if epoch != self._epoch:  # what was asked of a Redis that lost its data is asked again
            self._epoch = epoch
            self._evaluated.clear()
        if learner is not None and epoch is not None:
            with contextlib.suppress(NoEpoch):  # lost since the line above: the learner opens the next one
                self._admit(learner, counts)
            self._expire(learner)
            finished = self._evaluate(learner)
            if finished:
                self._control.set_phase("finished")
                log.info("the run is finished: %s", counts)
        else:
            finished = False
        self._beat(counts, learner)
        return finished

    def _admit(self, learner: LearnerState, counts: dict[str, int]) -> None:
        if learner.phase != "training":
            return
        settings = self._config.learner
        rates = self._learner_rates()
        decision = admission.decide(
            admission.Observed(
                update=learner.update,
                outstanding_tickets=counts["pending"] - learner.unsettled_tickets,
                outstanding_uses=counts["pending"] * settings.replay_ratio - learner.unsettled_uses,
                update_s=rates.get("update_s", 0.0),
                service_s=rates.get("service_s", 0.0),
            ),
            self._lag,
            mode=self._config.mode,
            groups_per_update=settings.groups_per_update,
            replay_ratio=settings.replay_ratio,
            num_updates=settings.num_updates,
        )
        self._decision = decision
        if decision.num_tickets > 0:
            ids = self._ledger.next_ticket_ids(decision.num_tickets)
            self._ledger.issue([self._ticket(ticket_id, learner.line, decision) for ticket_id in ids])

    def _ticket(self, ticket_id: str, line: int, decision: admission.Admission) -> Ticket:
        count = int(ticket_id.rsplit("-", 1)[1])
        environment = self._config.environment
        weights = {
            curriculum.bucket_name(environment.name, level): weight
            for level, weight in enumerate(environment.level_weights, 1)
        }
        task = curriculum.draw_task(weights, self._config.seed, count)
        assert task is not None
        return Ticket(
            ticket_id=ticket_id,
            task=task,
            group_size=self._config.learner.group_size,
            line=line,
            min_update=decision.min_update,
            deadline=decision.deadline,
            temperature=self._config.actor.temperature,
            seed=derive_seed(self._config.seed, "sampling", ticket_id),
            issued_at=time.time(),
        )

    def _learner_rates(self) -> dict[str, Any]:
        return next((beat for (role, _), beat in self._control.heartbeats().items() if role == "learner"), {})

    def _expire(self, learner: LearnerState) -> None:
        """Ends tickets that no update can train on any more. Queued ones are the learner's to judge."""
        at = (learner.line, learner.update)
        if at == self._expired_upto:
            return
        grace = self._lag.token_updates if self._lag.straggler_policy == "mask" else 0
        for ticket_id, live in self._ledger.live().items():
            running = live.state == "issued" and live.ticket.line == learner.line
            if running and live.ticket.deadline + grace < learner.update:
                self._ledger.settle(ticket_id, Outcome.EXPIRED, update=learner.update, reason="sampled_too_late")
        self._expired_upto = at

    def _evaluate(self, learner: LearnerState) -> bool:
        """Asks for the evaluations that are due. True when the last one is in."""
        latest = self._control.latest()
        if latest is None or learner.phase == "warm_start":
            return False
        num_updates = self._config.learner.num_updates
        final = learner.phase == "done" and learner.update >= num_updates  # else: left by a shorter run before
        due = latest.update - latest.update % self._config.evaluation.every_updates
        name = f"final-{latest.update}" if final else f"update-{due}"
        if name not in self._evaluated and (final or due < num_updates):
            full = final or due == 0
            self._control.request_evaluation(
                EvaluationRequest(
                    evaluation_id=name,
                    version=latest.number,
                    update=latest.update,
                    num_tasks_per_level=self._config.evaluation.num_tasks_per_level * (FULL_EVALUATION if full else 1),
                    seed=self._config.seed,
                )
            )
            self._evaluated.add(name)
            log.info("evaluation %s of v%d is asked for", name, latest.number)
        if not final:
            return False
        results = {result.evaluation_id for result in self._control.evaluations()}
        return name in results and not self._control.pending_evaluations()

    def _beat(self, counts: dict[str, int], learner: LearnerState | None) -> None:
        now = time.monotonic()
        actor = self._config.actor
        if now - self._beat_at < actor.heartbeat_s:
            return
        self._beat_at = now
        unsettled = learner.unsettled_tickets if learner else 0
        payload = {
            "issued": counts["issued"],
            "outstanding": counts["pending"] - unsettled,
            "target": self._decision.target_uses if self._decision else 0,
            "ledger": counts,
        }
        self._control.beat("orchestrator", "0", payload, actor.heartbeat_timeout_s)
