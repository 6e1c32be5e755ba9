"""The orchestrator's loop: lead or stand by; then observe, decide, write, every `TICK_S`.

    stage         waits for                        unblocked by
    lead          the lease                        the leader's death, or its release
    admission     learner state, ledger counts     the learner's next update or settlement
    expiry        a new update count               the learner's next update
    round         `policy_interval_s`              time; then all other policies look once
    evaluation    a version old enough             an announcement; an actor reports the result
    finish        phase "done" of the learner      the verdict on the last evaluation

Invariants:
  * Everything it knows is in Redis; killed at any point, its successor goes on from there. Tickets and evaluations are
    idempotent by id; a round's states, directives, decisions and folded observations are written in one step.
  * Every write carries the token of its leadership, and Redis refuses the write of a leader that has been succeeded.
  * What it issues never exceeds the uses that the lag bound leaves to the updates still to come.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import redis as redis_client

from asyncrl_jax.config import Config
from asyncrl_jax.observe.metrics import Metrics
from asyncrl_jax.orchestrator import memory
from asyncrl_jax.orchestrator import round as rounds
from asyncrl_jax.orchestrator.decision_files import archive_decisions
from asyncrl_jax.orchestrator.fleets.keeper import FleetKeeper
from asyncrl_jax.orchestrator.fleets.opening import check_installed, open_fleet
from asyncrl_jax.orchestrator.host_classes import seen_by_class
from asyncrl_jax.orchestrator.lease import Lease
from asyncrl_jax.orchestrator.policies import admission, curriculum, regression, watermark
from asyncrl_jax.orchestrator.recovery import first_round
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.fencing import Deposed, Fence, Leadership
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger, NoEpoch
from asyncrl_jax.transport.steering import Steering
from asyncrl_jax.types import EvaluationRequest, LearnerState, Outcome, Ticket

log = logging.getLogger(__name__)

TICK_S = 0.02
FULL_EVALUATION = 2  # the first and the last evaluation use this many times the tasks, and so does a confirmation
_LEASE_FOR_EVALUATION_S = 60.0  # holds a version that is to be evaluated; renewed every round


def run_orchestrator(config: Config, run_dir: Path, redis_password: str | None, stop: threading.Event) -> int:
    """Leads, or stands by, until the run is finished or `stop` is set.

    Returns:
      The process's exit status.

    Raises:
      RedisUnavailable: if Redis stays away longer than `redis.outage_s`.
      ValueError: if the package of the fleet's cluster is not installed.
    """
    client = connect(config.redis, redis_password)
    keys = Keys(config.redis.namespace)
    holder = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:12]}".replace(" ", "_")
    lease = Lease(Leadership(client, keys, holder), config.orchestrator.lease_s)
    control = Control(client, keys)
    settings = config.orchestrator.fleet
    check_installed(settings)
    keeper: FleetKeeper | None = None
    if settings.kind != "local":
        valid_s = config.orchestrator.lease_s + 2 * config.orchestrator.policy_interval_s
        keeper = FleetKeeper(lambda: open_fleet(config, run_dir), settings.apply_every_s, valid_s)
    leading: tuple[Fence, Orchestrator] | None = None
    while not stop.is_set():
        fence = lease.keep()
        if fence is None:
            _let_go(leading)
            leading = None
            if keeper is not None:
                keeper.rest()
            if _stand_by(control, holder, config):
                break
            stop.wait(config.orchestrator.lease_s / 10)
            continue
        if leading is None or leading[0] != fence:
            leading = (fence, Orchestrator.on(client, keys, config, fence, run_dir, keeper))
        try:
            if leading[1].tick():
                if keeper is not None:
                    keeper.ask(settings.members(0))
                break
        except Deposed as error:
            log.warning("a write was refused: %s", error)
            lease.lost()
            _let_go(leading)
            leading = None
        stop.wait(TICK_S)
    _let_go(leading)
    if keeper is not None:
        keeper.close()
    if stop.is_set():
        lease.release()
    return 0


def _let_go(leading: tuple[Fence, Orchestrator] | None) -> None:
    if leading is not None:
        leading[1].close()


def _stand_by(control: Control, holder: str, config: Config) -> bool:
    """Says that a standby is there. True when the run is over."""
    control.beat("standby", holder, {}, config.actor.heartbeat_timeout_s)
    return control.phase() in ("finished", "stopping")


class Orchestrator:
    """One leadership. Holds nothing that a successor would miss: only what the last tick saw."""

    def __init__(
        self,
        config: Config,
        control: Control,
        ledger: Ledger,
        steering: Steering,
        run_dir: Path | None = None,
        keeper: FleetKeeper | None = None,
    ):
        """Args: run_dir: where decisions go that Redis need not keep; None keeps them there. keeper: of a cluster."""
        self._keeper = keeper
        self._config = config
        self._lag = config.effective_lag
        self._control = control
        self._ledger = ledger
        self._steering = steering
        self._run_dir = run_dir
        self._metrics: Metrics | None = None  # opened when there is something to write
        self._beat_at = 0.0
        self._round_at: float | None = None
        self._plan: rounds.Plan | None = None
        self._states = rounds.initial_states(config)
        self._states_loaded = False  # from Redis; after that nobody else can have written them
        self._quotas: dict[str, watermark.Quota] = {}
        self._issued: collections.Counter[str] = collections.Counter()  # groups by bucket, of the whole run
        self._probes_left: int | None = None
        self._expired_upto: tuple[int, int] | None = None
        self._epoch: int | None = None
        self._evaluated: set[str] = set()
        self._decision: admission.Admission | None = None

    @classmethod
    def on(
        cls,
        client: redis_client.Redis,
        keys: Keys,
        config: Config,
        fence: Fence | None,
        run_dir: Path | None = None,
        keeper: FleetKeeper | None = None,
    ) -> Orchestrator:
        """One whose every write carries the fence's token."""
        control, ledger = Control(client, keys, fence), Ledger(client, keys, fence)
        return cls(config, control, ledger, Steering(client, keys, fence), run_dir, keeper)

    def tick(self) -> bool:
        """One turn of the loop. True when the run is over.

        Raises:
          Deposed: if another orchestrator leads.
        """
        phase = self._control.phase()
        if phase in ("finished", "stopping"):
            return True
        # Pending is read before the learner's state: what is settled in between is then counted twice as outstanding,
        # never left out, so the bound holds.
        counts = self._ledger.counts()
        learner = self._control.learner()
        epoch = self._control.epoch()
        if epoch != self._epoch:  # what was asked of a Redis that lost its data is asked again
            if self._epoch is not None:
                log.warning("Redis lost its data, and with it whatever was set by hand: set it again")
            self._epoch = epoch
            self._evaluated.clear()
            self._round_at = None
            self._states_loaded = False
        finished = False
        if learner is not None and epoch is not None:
            self._look(learner)
            assert self._plan is not None
            with contextlib.suppress(NoEpoch):  # lost since the line above: the learner opens the next one
                self._admit(learner, counts, self._plan)
            self._expire(learner)
            finished = self._evaluate(learner) and self._settled(learner)
            if finished:
                self._finish(counts)
            elif self._plan.draining and self._drained(counts, learner):
                log.warning("drained: no actor has anything to do, the run stops and can be resumed")
                self._control.set_phase("stopping")
                return True
        self._beat(counts, learner)
        return finished

    def _drained(self, counts: dict[str, int], learner: LearnerState) -> bool:
        """Whether nothing more will happen: nobody plays, and what is with the learner is too little for an update."""
        left = counts["pending"] - learner.unsettled_tickets
        if left == 0:
            return True
        running = sum(live.state == "issued" for live in self._ledger.live().values())
        if running:
            actors = [beat for (role, _), beat in self._control.heartbeats().items() if role == "actor"]
            if not actors or not all(beat.get("drained") for beat in actors):
                return False
        return left - running < self._config.learner.groups_per_update

    # -- the round ---------------------------------------------------------------------------------------------------

    def _look(self, learner: LearnerState) -> None:
        """All policies but admission look once every `policy_interval_s`."""
        started = time.monotonic()
        interval_s = self._config.orchestrator.policy_interval_s
        if self._plan is not None and self._round_at is not None and started - self._round_at < interval_s:
            return
        self._round_at = started
        states, decide = self._states, rounds.decide
        if not self._states_loaded:
            states = memory.load(rounds.initial_states(self._config), self._steering.states())
            self._states_loaded, decide = True, first_round
        else:  # spent and issued since the last round
            states = dataclasses.replace(states, quotas=self._quotas, issued=dict(self._issued))
        observations, folded = self._steering.observations()
        scene = self._scene(learner, tuple(observations))
        self._states, self._plan, decisions = decide(states, scene, self._config)
        self._steering.commit(memory.dump(self._states), self._plan.directives, decisions, folded)
        for decision in decisions:
            log.info("%s: %s %s, %s", decision.policy, decision.action, decision.subject, decision.reason)
        if self._keeper is not None:
            self._keeper.ask(self._config.orchestrator.fleet.members(self._states.autoscale.size))
        self._quotas = dict(self._plan.quotas)
        self._issued = collections.Counter(self._states.issued)
        self._probes_left = self._plan.probe_groups
        self._confirm(self._plan.confirm)
        self._hold_versions()
        self._give_up_overdue(learner, scene.now)
        if self._run_dir is not None:
            archive_decisions(self._run_dir, self._steering, self._config.orchestrator.decisions_kept)
        self._write_classes(learner, scene)

    def _write_classes(self, learner: LearnerState, scene: rounds.Scene) -> None:
        """Metrics of each class of hosts, where there are several."""
        fleet = self._config.orchestrator.fleet
        if self._run_dir is None or len(fleet.classes) < 2:
            return
        if self._metrics is None:
            self._metrics = Metrics(self._run_dir, "orchestrator", self._config.observe)
        wanted = fleet.members(self._states.autoscale.target)
        seen = seen_by_class(scene.actor_beats, fleet).items()
        rows = {name: {"wanted": wanted[name], **vars(found)} for name, found in seen}
        self._metrics.write(learner.update, rows)

    def close(self) -> None:
        """Flushes metrics."""
        if self._metrics is not None:
            self._metrics.close()

    def _scene(self, learner: LearnerState, observations: tuple[Any, ...]) -> rounds.Scene:
        beats = self._control.heartbeats()
        versions = self._control.versions()
        scores = tuple(
            regression.Score(
                result.evaluation_id,
                result.version,
                versions[result.version].line,
                result.update,
                sum(result.num_tasks.values()),
                sum(result.num_successes.values()),
            )
            for result in self._control.evaluations()
            if result.version in versions
        )
        return rounds.Scene(
            now=self._steering.now(),
            learner=learner,
            learner_beat=next((beat for (role, _), beat in beats.items() if role == "learner"), {}),
            actor_beats={instance: beat for (role, instance), beat in beats.items() if role == "actor"},
            backlog_groups=max(self._ledger.num_queued() - learner.unsettled_tickets, 0),
            scores=scores,
            observations=observations,
            operator=self._steering.operator(),
        )

    def _confirm(self, suspect: regression.Score | None) -> None:
        if suspect is None:
            return
        name = f"{regression.CONFIRM}{suspect.evaluation_id}"
        asked = self._control.request_evaluation(
            EvaluationRequest(
                evaluation_id=name,
                version=suspect.version,
                update=suspect.update,
                num_tasks_per_level=self._config.evaluation.num_tasks_per_level * FULL_EVALUATION,
                seed=derive_seed(self._config.seed, name),
            )
        )
        if asked:
            log.warning("v%d fell in evaluation %s: %s is asked for", suspect.version, suspect.evaluation_id, name)

    def _hold_versions(self) -> None:
        """Keeps the files of versions that an evaluation is or may yet be asked for."""
        held = {request.version for request in self._control.pending_evaluations()}
        held |= {result.version for result in self._control.evaluations() if not self._judged(result.evaluation_id)}
        if self._states.regression.suspect is not None:
            held.add(self._states.regression.suspect.version)
        for version in held:
            self._control.lease(version, "orchestrator", _LEASE_FOR_EVALUATION_S)

    def _judged(self, evaluation_id: str) -> bool:
        return evaluation_id in self._states.regression.seen

    def _give_up_overdue(self, learner: LearnerState, now: float) -> None:
        """Ends running tickets that a human or a policy has expired, or that nobody will ever answer."""
        limit_s, before = self._lag.ticket_timeout_s, self._states.expire_before
        for ticket_id, live in self._ledger.live().items():
            if live.state != "issued":
                continue
            waited_s = now - (live.handed_out_at or live.ticket.issued_at)
            if limit_s and waited_s > limit_s:
                log.error("ticket %s is given up: no answer for %.0f s", ticket_id, waited_s)
                self._ledger.settle(ticket_id, Outcome.FAILED, update=learner.update, reason="overdue")
            elif before is not None and live.ticket.line == before[0] and live.ticket.min_update < before[1]:
                self._ledger.settle(ticket_id, Outcome.EXPIRED, update=learner.update, reason="archive_reset")

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, learner: LearnerState, counts: dict[str, int], plan: rounds.Plan) -> None:
        if learner.phase != "training" or plan.halt:
            return
        settings = self._config.learner
        rates = self._control.heartbeat("learner", "0")
        decision = admission.decide(
            admission.Observed(
                update=learner.update,
                outstanding_tickets=counts["pending"] - learner.unsettled_tickets,
                outstanding_uses=counts["pending"] * settings.replay_ratio - learner.unsettled_uses,
                step_s=rounds.number(rates, "step_s"),
                service_s=rounds.number(rates, "service_s"),
                factor=plan.factor,
                fresh=plan.fresh,
                most_tickets=self._probes_left,
            ),
            dataclasses.replace(self._lag, token_updates=plan.token_updates),
            mode=self._config.mode,
            groups_per_update=settings.groups_per_update,
            replay_ratio=settings.replay_ratio,
            num_updates=settings.num_updates,
            pool_updates=self._config.pool.size_updates,
            publish_every_updates=self._config.weights.publish_every_updates,
        )
        self._decision = decision
        if decision.num_tickets > 0 and self._drawable():
            ids = self._ledger.next_ticket_ids(decision.num_tickets)
            tickets = [self._ticket(ticket_id, learner.line, decision, plan) for ticket_id in ids]
            issued = self._ledger.issue([ticket for ticket in tickets if ticket is not None])
            for ticket in tickets:
                if ticket is not None:
                    self._issued[curriculum.bucket_name(ticket.task.environment, ticket.task.level)] += 1
            if self._probes_left is not None:
                self._probes_left -= issued

    def _drawable(self) -> dict[str, float]:
        """Weights of the buckets that may be drawn from now: empty when all are held, open, or out of quota."""
        assert self._plan is not None
        size = self._config.learner.group_size
        weights = {}
        for name, weight in self._plan.weights.items():
            left = watermark.allowed(self._quotas, curriculum.split_bucket(name)[0], size)
            if weight > 0 and (left is None or left > 0):
                weights[name] = weight
        return weights

    def _ticket(self, ticket_id: str, line: int, decision: admission.Admission, plan: rounds.Plan) -> Ticket | None:
        """The ticket of this id; None, and the id stays unused, once a quota leaves nothing to draw."""
        count = int(ticket_id.rsplit("-", 1)[1])
        task = curriculum.draw_task(self._drawable(), self._config.seed, count)
        if task is None:
            return None
        self._quotas = watermark.spend(self._quotas, task.environment, self._config.learner.group_size)
        return Ticket(
            ticket_id=ticket_id,
            task=task,
            group_size=self._config.learner.group_size,
            line=line,
            min_update=decision.min_update,
            deadline=decision.deadline,
            temperature=plan.temperature,
            seed=derive_seed(self._config.seed, "sampling", ticket_id),
            issued_at=time.time(),
        )

    def _expire(self, learner: LearnerState) -> None:
        """Ends tickets that no update can train on any more. Queued ones are the learner's to judge."""
        at = (learner.line, learner.update)
        if at == self._expired_upto:
            return
        for ticket_id, live in self._ledger.live().items():
            ticket = live.ticket
            grace = ticket.deadline - ticket.min_update if self._lag.straggler_policy == "mask" else 0
            if live.state == "issued" and ticket.line == learner.line and ticket.deadline + grace < learner.update:
                self._ledger.settle(ticket_id, Outcome.EXPIRED, update=learner.update, reason="sampled_too_late")
        self._expired_upto = at

    # -- evaluation and the end --------------------------------------------------------------------------------------

    def _evaluate(self, learner: LearnerState) -> bool:
        """Asks for the evaluations that are due. True when the last one is in."""
        latest = self._control.latest()
        if latest is None or learner.phase == "warm_start":
            return False
        num_updates = self._config.learner.num_updates
        final = learner.phase == "done" and learner.update >= num_updates  # else: left by a shorter run before
        due = latest.update - latest.update % self._config.evaluation.every_updates
        name = f"final-{latest.update}" if final else f"update-{due}"
        if latest.line:  # its updates count anew what the line before has counted
            name = f"line-{latest.line}-{name}"
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

    def _settled(self, learner: LearnerState) -> bool:
        """Whether every evaluation is judged and no rollback is on its way."""
        versions = self._control.versions()
        results = [r.evaluation_id for r in self._control.evaluations() if r.version in versions]
        if self._states.regression.suspect is None and not all(map(self._judged, results)):
            self._round_at = None  # look at once
            self._look(learner)
        state = self._states.regression
        if state.suspect is not None or not all(map(self._judged, results)):
            return False
        return state.rollback is None or state.rollback.line != learner.line

    def _finish(self, counts: dict[str, int]) -> None:
        self._control.set_phase("finished")
        log.info("the run is finished: %s", counts)
        if self._run_dir is not None:
            archive_decisions(self._run_dir, self._steering, 0)

    def _beat(self, counts: dict[str, int], learner: LearnerState | None) -> None:
        now = time.monotonic()
        actor = self._config.actor
        if now - self._beat_at < actor.heartbeat_s:
            return
        self._beat_at = now
        unsettled = learner.unsettled_tickets if learner else 0
        payload: dict[str, Any] = {
            "issued": counts["issued"],
            "outstanding": counts["pending"] - unsettled,
            "target": self._decision.target_uses if self._decision else 0,
            "ledger": counts,
        }
        if self._plan is not None:
            payload |= {
                "token_updates": self._plan.token_updates,
                "fresh": self._plan.fresh,
                "factor": self._plan.factor,
                "halt": self._plan.halt,
                "weights": dict(self._plan.weights),
                "breakers_open": sum(b.phase != "closed" for b in self._states.breaker.breakers.values()),
            }
        self._control.beat("orchestrator", "0", payload, actor.heartbeat_timeout_s)
