"""One effective leader: in any order of renewals, pauses, deaths and clock jumps, a stale leader writes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.orchestrator.lease import Lease
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.fencing import Deposed, Fence, Leadership
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.steering import Steering
from asyncrl_jax.types import Decision, EvaluationRequest, Outcome

# A failure is shown as it was found: shrinking it takes minutes.
STEPS = settings(max_examples=280, stateful_step_count=50, deadline=None, phases=(Phase.generate,))


def leadership(space, name):
    return Leadership(space.client, space.keys, name)


def test_the_second_waits_and_takes_over_with_a_new_token(space):
    first, second = leadership(space, "a"), leadership(space, "b")
    fence = first.acquire(0.2)
    assert fence is not None
    assert second.acquire(0.2) is None
    assert first.acquire(0.2) == fence  # renewed, the same leadership
    time.sleep(0.25)
    assert second.acquire(0.2).token != fence.token
    assert first.acquire(0.2) is None


def test_a_release_hands_over_at_once_and_its_token_is_dead(space):
    first, second = leadership(space, "a"), leadership(space, "b")
    fence = first.acquire(30)
    first.release()
    with pytest.raises(Deposed):
        Ledger(space.client, space.keys, fence).next_ticket_ids(1)
    assert second.acquire(30) is not None


def test_every_write_of_a_deposed_leader_is_refused_whole(space):
    old = leadership(space, "a").acquire(0.05)
    ledger = Ledger(space.client, space.keys, old)
    ids = ledger.next_ticket_ids(2)
    time.sleep(0.1)
    new = leadership(space, "b").acquire(30)
    control, steering = Control(space.client, space.keys, old), Steering(space.client, space.keys, old)
    before = sorted(space.client.scan_iter(f"{space.keys.namespace}:*"))
    writes = [
        lambda: ledger.next_ticket_ids(1),
        lambda: ledger.settle(ids[0], Outcome.EXPIRED),
        lambda: control.set_phase("stopping"),
        lambda: control.request_evaluation(EvaluationRequest("e", 0, 0, 1, 0)),
        lambda: steering.commit({"lag": 1}, None, [Decision("lag", "raise", "N", "")]),
    ]
    for write in writes:
        with pytest.raises(Deposed):
            write()
    assert sorted(space.client.scan_iter(f"{space.keys.namespace}:*")) == before
    assert space.control.phase() == "running"
    Steering(space.client, space.keys, new).commit({"lag": 2})
    assert space.steering.states() == {"lag": 2}


def test_a_stopped_leader_that_wakes_up_is_refused(space, server):
    """SIGSTOP, take-over, SIGCONT: at no moment are there two effective leaders."""
    lease_s = 0.4
    process = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).parent / "paused_leader.py"),
            server.url,
            space.keys.namespace,
            str(lease_s),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PASSWORD": server.password or "", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert process.stdout.readline() == "leads\n"
        assert process.stdout.readline() == "wrote\n"
        process.send_signal(signal.SIGSTOP)
        standby = leadership(space, "standby")
        waited_from = time.monotonic()
        while (fence := standby.acquire(30)) is None:
            assert time.monotonic() - waited_from < 3 * lease_s, "take-over within three leases"
            time.sleep(0.02)
        successor = Ledger(space.client, space.keys, fence)
        (mine,) = successor.next_ticket_ids(1)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=30)
        assert output.endswith("refused\n")
        assert successor.next_ticket_ids(1) == [f"1-{int(mine.split('-')[1]) + 1}"], "nothing was written in between"
    finally:
        process.kill()
        process.wait()


def test_a_lease_is_asked_for_only_when_a_renewal_is_due(space):
    now, asked = [0.0], []
    real = leadership(space, "a")

    class Counting:
        def acquire(self, lease_s):
            asked.append(now[0])
            return real.acquire(lease_s)

    lease = Lease(Counting(), 8.0, clock=lambda: now[0])
    for _ in range(100):
        now[0] += 0.1
        assert lease.keep() is not None
    assert len(asked) == 5


def test_a_server_clock_that_jumps_back_does_not_lock_everybody_out(space):
    assert leadership(space, "a").acquire(0.2) is not None
    far = time.time() + 3600  # as a clock that has since been put back an hour would have left it
    space.client.hset(space.keys.leader, "expiry", f"{far:.6f}")
    assert leadership(space, "b").acquire(0.2) is not None


# --- The same, for any order of events ---


class Leaders(RuleBasedStateMachine):
    """Four candidates that renew, sleep, die, wake and write, under a clock that goes as it likes: the scripts in a
    real Redis. Its clock cannot be set, so what it has written down is moved against it instead."""

    server = None
    steps = handovers = 0
    LEASE_S = 1000.0  # no time of the test's own counts beside it

    @initialize()
    def begin(self):
        self.client = connect(RedisConfig(url=self.server.url), self.server.password)
        self.keys, self.now = Keys(uuid.uuid4().hex), 0.0
        self.fences: dict[int, Fence] = {}
        self.granted: set[str] = set()  # every token there was
        self.leader: int | None = None  # whom the newest token was given to
        self.until = 0.0  # its lease runs

    @rule(candidate=st.integers(0, 3))
    def ask(self, candidate):
        left = self.until - self.now
        held = self.leader not in (None, candidate) and 0 < left <= 2 * self.LEASE_S
        fence = Leadership(self.client, self.keys, f"c{candidate}").acquire(self.LEASE_S)
        if abs(left) > 1 and abs(left - 2 * self.LEASE_S) > 1:  # else the moment itself decides
            assert (fence is None) is held
        if fence is None:
            return
        if candidate != self.leader:
            assert fence.token not in self.granted, "a token is never given again"
            Leaders.handovers += 1
        self.granted.add(fence.token)
        self.fences[candidate], self.leader, self.until = fence, candidate, self.now + self.LEASE_S

    @rule(candidate=st.integers(0, 3))
    def die(self, candidate):
        self.fences.pop(candidate, None)

    @rule(seconds=st.floats(-5000, 5000))
    def time_passes_or_jumps(self, seconds):
        self.now += seconds
        if self.leader is not None:
            self.client.hincrbyfloat(self.keys.leader, "expiry", -seconds)

    @invariant()
    def at_most_one_effective_leader(self):
        """A write is effective exactly if Redis takes it."""
        Leaders.steps += 1
        for candidate, fence in getattr(self, "fences", {}).items():
            control = Control(self.client, self.keys, fence)
            if candidate == self.leader:
                control.set_phase("running")
            else:
                with pytest.raises(Deposed):
                    control.set_phase("stopping")

    def teardown(self):
        if hasattr(self, "client"):
            self.client.delete(self.keys.leader, self.keys.phase)
            self.client.close()


@pytest.mark.timeout(300)  # every step is several round trips
def test_at_most_one_effective_leader_in_any_order_of_events(server):
    Leaders.server, Leaders.steps, Leaders.handovers = server, 0, 0
    run_state_machine_as_test(Leaders, settings=STEPS)
    assert Leaders.steps >= 10_000
    assert Leaders.handovers > 100


@pytest.mark.parametrize(("field", "value"), [("expiry", "soon"), ("seconds", "x"), ("count", "many")])
def test_whatever_stands_in_the_lease_once_it_has_run_out_another_leads(space, field, value):
    old = leadership(space, "a").acquire(0.01)
    time.sleep(0.02)
    space.client.hset(space.keys.leader, field, value)
    new = leadership(space, "b").acquire(30)
    assert new is not None
    with pytest.raises(Deposed):
        Ledger(space.client, space.keys, old).next_ticket_ids(1)


def test_an_evaluation_is_taken_over_though_the_clock_of_redis_was_put_back(space):
    space.control.request_evaluation(EvaluationRequest("e", 0, 0, 1, 0))
    assert space.control.claim_evaluation("dead", 60) is not None
    assert space.control.claim_evaluation("b", 60) is None
    space.client.zadd(space.keys.evaluation_expiry, {"e": time.time() + 3600})  # as a clock an hour ahead left it
    assert space.control.claim_evaluation("b", 60) is not None
