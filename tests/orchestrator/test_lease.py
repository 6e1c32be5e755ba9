"""One effective leader: in any order of renewals, pauses, deaths and clock jumps, a stale leader writes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from asyncrl_jax.orchestrator.lease import Lease
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.fencing import Deposed, Leadership
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


# --- The same, for any order of events: the lease as its script decides it, with clocks that jump ---


class ModelLease:
    """The lease in Redis, line by line as `fencing.py` has it in Lua (which the tests above run for real)."""

    def __init__(self):
        self.holder, self.expiry, self.seconds, self.count, self.token = None, 0.0, 0.0, 0, None

    def acquire(self, holder, seconds, now):
        runs = self.holder is not None and self.expiry > now and self.expiry - now <= 2 * self.seconds
        if holder != self.holder:
            if runs:
                return None
            self.count += 1
            self.token = f"{self.count} {holder}"
        self.holder, self.seconds, self.expiry = holder, seconds, now + seconds
        return self.token


class Leaders(RuleBasedStateMachine):
    """Four candidates that renew, sleep, die, wake and write, under a clock that goes as it likes."""

    steps = 0

    @initialize()
    def begin(self):
        self.lease, self.now, self.fences, self.writers = ModelLease(), 0.0, {}, []
        self.seen: dict[str, str] = {}  # token -> candidate: a token is never given to two
        self.last_token_number = 0

    @rule(candidate=st.integers(0, 3))
    def ask(self, candidate):
        token = self.lease.acquire(f"c{candidate}", 2.0, self.now)
        if token is not None:
            assert self.seen.setdefault(token, candidate) == candidate
            self.fences[candidate] = token

    @rule(candidate=st.integers(0, 3))
    def write(self, candidate):
        """A write is effective exactly if Redis finds the token current."""
        if self.fences.get(candidate) == self.lease.token and self.lease.token is not None:
            number = int(self.lease.token.split()[0])
            assert number >= self.last_token_number, "a write of an older leadership came after one of a newer"
            self.last_token_number = number
            self.writers.append(candidate)

    @rule(candidate=st.integers(0, 3))
    def die(self, candidate):
        self.fences.pop(candidate, None)

    @rule(seconds=st.floats(-10, 10))
    def time_passes_or_jumps(self, seconds):
        self.now += seconds

    @invariant()
    def at_most_one_effective_leader(self):
        Leaders.steps += 1
        effective = [c for c, token in self.fences.items() if token == self.lease.token]
        assert len(effective) <= 1

    @invariant()
    def nobody_is_locked_out(self):
        """Whatever the clock did: of two questions, one now and one two leases later, one is granted."""
        copy = ModelLease()
        copy.__dict__.update(self.lease.__dict__)
        assert copy.acquire("late", 2.0, self.now) or copy.acquire("late", 2.0, self.now + 2 * self.lease.seconds)


def test_at_most_one_effective_leader_in_any_order_of_events():
    Leaders.steps = 0
    run_state_machine_as_test(Leaders, settings=STEPS)
    assert Leaders.steps >= 10_000
