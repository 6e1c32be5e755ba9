"""Admission, breakers and the ledger under arbitrary orders of events, crashes and clock jumps."""

from __future__ import annotations

import collections
import dataclasses
import uuid

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncrl_jax.config import LagConfig, RedisConfig
from asyncrl_jax.config_orchestrator import BreakerConfig
from asyncrl_jax.orchestrator.policies import admission, breaker
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.groups import GroupReader, GroupWriter
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger, recompute
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.types import Outcome, Task, Ticket

# A failure is shown as it was found: shrinking it takes minutes.
STEPS = settings(max_examples=280, stateful_step_count=50, deadline=None, phases=(Phase.generate,))
GROUPS = 3  # an update


@dataclasses.dataclass
class Held:
    """A ticket of the model, and the group that it became."""

    min_update: int
    deadline: int
    line: int
    bound: int  # N in force at its issue, whatever the policy wrote on it
    version: int | None = None  # update count of the weights that sampled it, the oldest allowed unless fresher
    uses: int = 0


class Admission(RuleBasedStateMachine):
    """The real policy against a model of ledger, actors and learner: N moves, orchestrators and learners die, actors
    fail, attempt twice or hang, the learner waits for stragglers or gives them up, and goes back to a checkpoint."""

    steps = 0
    trained = 0

    @initialize(replay=st.integers(1, 2), actor=st.integers(0, 2))
    def begin(self, replay, actor):
        self.replay = replay
        self.lag = LagConfig(actor_updates=actor, token_updates=actor + 3, slack_groups=2)
        self.update, self.line, self.checkpoint, self.fresh = 0, 0, (0, {}), False
        self.running: dict[int, Held] = {}
        self.pooled: dict[int, Held] = {}
        self.ended: collections.Counter[int] = collections.Counter()
        self.uses: collections.Counter[tuple[int, int]] = collections.Counter()  # by (line of life, ticket)
        self.issued = 0

    @rule()
    def a_round_of_all(self):
        self.orchestrate()
        self.actors_answer(0, 8, set(), 1)
        self.the_learner_updates()

    @rule()
    def orchestrate(self):
        """Any instance, at any time: all it looks at is the state of the run."""
        outstanding = len(self.running) + len(self.pooled)
        made = sum(held.uses for held in self.pooled.values())
        decision = admission.decide(
            admission.Observed(self.update, outstanding, outstanding * self.replay - made, 1.0, 3.0, fresh=self.fresh),
            self.lag,
            mode="async",
            groups_per_update=GROUPS,
            replay_ratio=self.replay,
            num_updates=10**6,
        )
        bound = 0 if self.fresh else self.lag.token_updates
        assert self.update - (0 if self.fresh else self.lag.actor_updates) <= decision.min_update or not self.update
        assert decision.num_tickets >= GROUPS - outstanding, "the learner could wait for ever"
        for _ in range(decision.num_tickets):
            self.issued += 1
            self.running[self.issued] = Held(decision.min_update, decision.deadline, self.line, bound)
        assert len(self.running) + len(self.pooled) <= max((4 * GROUPS) + GROUPS, outstanding)

    @rule(wider=st.integers(0, 4), fresh=st.sampled_from((False, False, False, True)))
    def n_moves(self, wider, fresh):
        self.lag = dataclasses.replace(self.lag, token_updates=self.lag.actor_updates + self.replay - 1 + wider)
        self.fresh = fresh

    @precondition(lambda self: self.running)
    @rule(
        first=st.integers(0, 3), count=st.integers(1, 8), failed=st.sets(st.integers(0, 7)), fresher=st.integers(0, 3)
    )
    def actors_answer(self, first, count, failed, fresher):
        """In any order; a second attempt at a ticket finds it queued or settled, and is ignored."""
        for n, ticket in enumerate(sorted(self.running)[first : first + count]):
            held = self.running.pop(ticket)
            if n in failed:
                self.ended[ticket] += 1
                continue
            held.version = min(held.min_update + fresher, max(self.update, held.min_update))
            self.pooled[ticket] = held

    @rule()
    def the_learner_updates(self):
        """Due tickets that still run are given up first, as at the end of `straggler_wait_s`; old groups expire."""
        for ticket, held in list(self.running.items()):
            if held.line == self.line and held.deadline < self.update:
                del self.running[ticket]
                self.ended[ticket] += 1
        for ticket, held in list(self.pooled.items()):
            if held.line != self.line or self.update - held.version > held.deadline - held.min_update:
                del self.pooled[ticket]
                self.ended[ticket] += 1
        if len(self.pooled) < GROUPS:
            return
        for ticket in sorted(self.pooled, key=lambda t: (self.pooled[t].deadline, t))[:GROUPS]:
            held = self.pooled[ticket]
            assert 0 <= self.update - held.version <= held.bound, "an over-lag token"
            held.uses += 1
            self.uses[self.line, ticket] += 1
            Admission.trained += 1
            if held.uses >= self.replay:
                del self.pooled[ticket]
                self.ended[ticket] += 1
        self.update += 1

    @rule()
    def a_checkpoint(self):
        self.checkpoint = (self.update, {ticket: held.uses for ticket, held in self.pooled.items()})

    @rule(really=st.sampled_from((False, False, False, True)))
    def the_learner_goes_back(self, really):
        """A new line from the checkpoint: what runs ends, what is pooled counts its true distance, here: too old."""
        if not really:
            return
        self.update, uses = self.checkpoint
        self.line += 1
        for ticket in list(self.running):
            del self.running[ticket]
            self.ended[ticket] += 1
        for ticket, held in list(self.pooled.items()):
            del self.pooled[ticket]
            self.ended[ticket] += 1
            assert held.uses >= uses.get(ticket, 0)
        self.checkpoint = (self.update, {})

    @invariant()
    def no_group_is_lost_or_doubled(self):
        Admission.steps += 1
        assert self.issued == len(self.running) + len(self.pooled) + len(self.ended)
        assert all(count == 1 for count in self.ended.values())
        assert all(count <= self.replay for count in self.uses.values())


def test_no_over_lag_token_and_no_lost_group_whatever_n_does_and_whoever_dies():
    Admission.steps = Admission.trained = 0
    run_state_machine_as_test(Admission, settings=STEPS)
    assert Admission.steps >= 10_000
    assert Admission.trained > 500


BREAKERS = BreakerConfig(
    cooldown_s=5, max_cooldown_s=40, window_s=20, stall_s=15, max_replacements=2, min_healthy_actors=1
)
TARGETS = ("environment:a", "tool:a/t", "reward:b")


class Breakers(RuleBasedStateMachine):
    """Faults, successes, hangs, restarts of the orchestrator, and a clock that goes as it likes."""

    steps = 0

    @initialize()
    def begin(self):
        self.state, self.now = breaker.State(), 1000.0
        self.tokens = {"x": 0.0, "y": 0.0}
        self.replaced: dict[str, list[float]] = collections.defaultdict(list)

    def look(self, **observed):
        Breakers.steps += 1
        actors = {name: breaker.Actor(tokens, True) for name, tokens in self.tokens.items()}
        before = self.state
        decided = breaker.decide(before, breaker.Observed(self.now, actors=actors, **observed), BREAKERS)
        assert decided == breaker.decide(before, breaker.Observed(self.now, actors=actors, **observed), BREAKERS)
        self.state = decided.state
        for actor in decided.replace:
            self.replaced[actor].append(self.state.now)
            self.tokens[actor] = 0.0
        for target, found in self.state.breakers.items():
            assert found.phase in ("closed", "slow", "open", "half_open")
            assert (decided.factors.get(target, 1.0) == 0.0) == (found.phase == "open")
            assert found.phase != "open" or found.signature, "what is open says why"
        changed = {
            t for t, b in self.state.breakers.items() if b.phase != before.breakers.get(t, breaker.Breaker()).phase
        }
        assert changed <= {entry.subject for entry in decided.log}, "no change without a line in the log"
        for times in self.replaced.values():
            assert all(len([t for t in times if at - 3600 < t <= at]) <= 2 for at in times), "replaced too often"

    @rule(
        name=st.sampled_from(TARGETS),
        good=st.integers(0, 30),
        bad=st.integers(0, 12),
        data=st.booleans(),
        seconds=st.floats(0.1, 20),
    )
    def episodes(self, name, good, bad, data, seconds):
        faults = {"f": float(bad)} if bad else {}
        kind = {"data": faults} if data else {"infrastructure": faults}
        self.look(tallies={name: breaker.Tally(float(good), good * seconds, **kind)})

    @rule(seconds=st.floats(-500, 500))
    def time_passes_or_jumps(self, seconds):
        self.now += seconds
        self.look()

    @rule(actor=st.sampled_from(("x", "y")))
    def an_actor_advances(self, actor):
        self.tokens[actor] += 1
        self.look()

    @rule(name=st.sampled_from(TARGETS), choice=st.sampled_from(("open", "closed")))
    def by_hand(self, name, choice):
        self.look(forced={name: choice})
        assert self.state.phase(name) == choice

    def teardown(self):
        """Cured, everything closes: nothing stays open for ever."""
        if not hasattr(self, "state"):
            return
        self.now = max(self.now, self.state.now)
        for _ in range(12):
            self.now += 50
            self.look(tallies={target: breaker.Tally(10.0, 1.0) for target in TARGETS})
        assert {self.state.phase(target) for target in TARGETS} == {"closed"}


def test_breakers_keep_their_promises_in_any_order_of_events():
    Breakers.steps = 0
    run_state_machine_as_test(Breakers, settings=STEPS)
    assert Breakers.steps >= 10_000


class RealLedger(RuleBasedStateMachine):
    """The ledger's scripts in a real Redis: issue, claim, submit, fail, give back, settle and undo, each also twice."""

    server = None
    steps = groups = 0

    @initialize()
    def begin(self):
        config = RedisConfig(url=self.server.url, claim_idle_s=1000, partitions=2)
        self.client = connect(config, self.server.password)
        self.keys = Keys(uuid.uuid4().hex)
        Control(self.client, self.keys).ensure_epoch()
        self.ledger = Ledger(self.client, self.keys)
        self.tasks = TaskStream(self.client, self.keys, "actor", config)
        self.writer = GroupWriter(self.client, self.keys, config, limits=None)
        self.reader = GroupReader(self.client, self.keys, "learner", config)
        self.issued: dict[str, Ticket] = {}
        self.held, self.queued, self.outcomes = {}, {}, {}
        self.trained: set[str] = set()

    @rule(n=st.integers(1, 4), again=st.booleans())
    def issue(self, n, again):
        tickets = [
            Ticket(name, Task("arithmetic", "train", 1, 0), 2, 0, 0, 4, 1.0, 0, 0.0)
            for name in self.ledger.next_ticket_ids(n)
        ]
        assert self.ledger.issue(tickets) == n
        if again:
            assert self.ledger.issue(tickets) == 0
        self.issued |= {ticket.ticket_id: ticket for ticket in tickets}

    @rule(n=st.integers(1, 3))
    def claim(self, n):
        for delivery in self.tasks.claim(n, 0):
            assert delivery.ticket.ticket_id not in self.outcomes
            self.held[delivery.ticket.ticket_id] = delivery

    @precondition(lambda self: self.held)
    @rule(again=st.booleans())
    def submit(self, again):
        ticket, delivery = self.held.popitem()
        live = ticket not in self.outcomes
        assert self.writer.submit_encoded(delivery, b"group") is live
        if again:
            assert self.writer.submit_encoded(delivery, b"group") is False
        if live:
            self.queued[ticket] = delivery

    @precondition(lambda self: self.held)
    @rule(gives_back=st.booleans())
    def give_up(self, gives_back):
        ticket, delivery = self.held.popitem()
        live = ticket not in self.outcomes
        if gives_back:
            assert self.tasks.release(delivery) is live
        elif self.tasks.fail(delivery, "x"):
            self.outcomes[ticket] = Outcome.FAILED

    @precondition(lambda self: self.issued)
    @rule(data=st.data(), outcome=st.sampled_from((Outcome.EXPIRED, Outcome.FAILED, Outcome.FILTERED)))
    def settle(self, data, outcome):
        ticket = data.draw(st.sampled_from(sorted(self.issued)))
        assert self.ledger.settle(ticket, outcome) is (ticket not in self.outcomes)
        self.outcomes.setdefault(ticket, outcome)
        self.queued.pop(ticket, None)

    @rule()
    def train(self):
        entries = []
        while some := self.reader.read(10, 0):
            entries += some
        done = [(entry, entry.ticket.ticket_id) for entry in entries]
        assert sorted(ticket for _, ticket in done) == sorted(self.queued), "a group that was lost, or is there twice"
        self.reader.complete(done, Outcome.TRAINED, 1)
        for _, ticket in done:
            del self.queued[ticket]
            self.outcomes[ticket] = Outcome.TRAINED
            self.trained.add(ticket)
        RealLedger.groups += len(done)

    @precondition(lambda self: self.trained)
    @rule(again=st.booleans())
    def undo(self, again):
        gone = sorted(self.trained)[:2]
        assert self.ledger.undo(gone, 0) == len(gone)
        if again:
            assert self.ledger.undo(gone, 0) == 0
        self.trained -= set(gone)
        self.outcomes |= dict.fromkeys(gone, Outcome.UNDONE)

    @invariant()
    def the_counts_are_the_models(self):
        RealLedger.steps += 1
        if not hasattr(self, "ledger") or RealLedger.steps % 4:
            return
        counts = self.ledger.counts()
        ended = collections.Counter(self.outcomes.values())
        assert counts["issued"] == len(self.issued)
        assert counts["pending"] == len(self.issued) - len(self.outcomes)
        assert {outcome: counts[outcome.value] for outcome in Outcome} == {
            outcome: ended[outcome] for outcome in Outcome
        }

    def teardown(self):
        if not hasattr(self, "ledger"):
            return
        self.train()
        recomputed = recompute(self.ledger.events(count=10_000))
        assert recomputed.balances
        ended = collections.Counter(self.outcomes.values())
        assert recomputed.outcomes == {outcome: ended[outcome] for outcome in Outcome}
        Control(self.client, self.keys).forget_everything()
        self.client.close()


@pytest.mark.timeout(300)  # every step is several round trips
def test_the_ledger_balances_in_any_order_of_events(server):
    RealLedger.server, RealLedger.steps, RealLedger.groups = server, 0, 0
    run_state_machine_as_test(RealLedger, settings=STEPS)
    assert RealLedger.steps >= 10_000
    assert RealLedger.groups > 100, "hardly anything was submitted"
