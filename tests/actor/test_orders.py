"""What an actor tells the orchestrator, and how it obeys: tallies, orders, partial groups, a budget for retries."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
import types

import numpy as np
import pytest

from asyncrl_jax.actor import refresh
from asyncrl_jax.actor.concurrency import Concurrency
from asyncrl_jax.actor.engines.base import EngineCounters
from asyncrl_jax.actor.episode import EpisodeConfig, EpisodeFailed
from asyncrl_jax.actor.loop_watch import LoopWatch
from asyncrl_jax.actor.pulse import Pulse
from asyncrl_jax.actor.sampler import RETRY_BURST, Sampler
from asyncrl_jax.actor.services import Services
from asyncrl_jax.actor.tally import Tally, WatchedEngine, repetition
from asyncrl_jax.actor.tools.base import ToolBroken
from asyncrl_jax.actor.watchdog import Watchdog
from asyncrl_jax.config import ActorConfig, EnvironmentConfig, RewardConfig
from asyncrl_jax.transport.steering import ActorOrder, Directives
from asyncrl_jax.transport.tasks import Delivery
from asyncrl_jax.types import FinishReason, Task, Ticket, Trajectory, WeightVersion


def ticket(number=1, size=4):
    return Ticket(f"1-{number}", Task("sums", "train", 2, number), size, 0, 0, 4, 1.0, number, 0.0)


def trajectory(tokens=(1, 2, 3), reward=1.0, success=True):
    length = len(tokens)
    return Trajectory(
        tokens=np.array([7, *tokens], np.int32),
        loss_mask=np.array([0] + [1] * length, np.uint8),
        behaviour_logprobs=np.array([0] + [-0.5] * length, np.float32),
        policy_versions=np.array([-1] + [0] * length, np.int32),
        reward=reward,
        reward_parts=np.zeros(4, np.float32),
        success=success,
        finish_reason=FinishReason.ANSWERED,
        num_turns=1,
        sampling_started_at=10.0,
        sampling_ended_at=12.0,
    )


def test_a_tally_sums_groups_by_bucket_and_starts_anew():
    tally = Tally("a")
    tally.group(ticket(), [trajectory(reward=1.0), trajectory(reward=0.0, success=False)])
    record = tally.take()
    assert record["buckets"]["sums/2"] == {
        "groups": 1,
        "episodes": 2,
        "reward": 1.0,
        "reward_squared": 1.0,
        "group_variance": 0.25,
        "successes": 1,
        "tokens": 6,
        "repetition": 0.0,
        "surprisal": 3.0,
    }
    assert (
        record["targets"]["environment:sums"] | {"successes": 2, "seconds": 4.0}
        == record["targets"]["environment:sums"]
    )
    assert {"environment:sums", "reward:sums", "actor:a"} == record["targets"].keys()
    assert tally.take() is None


def broken(tool):
    error = ToolBroken("no connection")
    error.tool = tool
    return error


def test_calls_that_a_tool_answers_are_its_successes_once_each():
    outcomes = collections.Counter({"python/ok": 2, "python/failed": 1, "python/broken": 5, "python/timeout": 1})
    tally = Tally("a", "sums", outcomes)
    assert tally.take()["targets"]["tool:sums/python"]["successes"] == 3
    assert tally.take() is None
    outcomes["python/ok"] += 1
    assert tally.take()["targets"]["tool:sums/python"]["successes"] == 1


@pytest.mark.parametrize(
    ("stage", "cause", "target", "kind"),
    [
        ("step", TimeoutError(), "environment:sums", "infrastructure"),
        ("reset", ValueError("no task"), "environment:sums", "data"),
        ("score", ConnectionError(), "reward:sums", "infrastructure"),
        ("step", broken("search"), "tool:sums/search", "infrastructure"),
        ("step", broken(""), "environment:sums", "infrastructure"),
    ],
)
def test_a_fault_is_counted_where_it_happened_infrastructure_and_data_apart(stage, cause, target, kind):
    tally = Tally("a")
    error = EpisodeFailed(stage, "x")
    error.__cause__ = cause
    tally.fault("sums", error)
    (found,) = tally.take()["targets"].items()
    assert found[0] == target
    assert found[1][kind] == {f"{stage}/{type(cause).__name__}": 1}


def test_repetition_is_the_share_of_pairs_seen_before():
    assert repetition(np.arange(10)) == 0.0
    assert repetition(np.zeros(101, np.int32)) == pytest.approx(0.99)
    assert repetition(np.array([1])) == 0.0


class Tasks:
    """Hands out the given tickets, as many as are asked for."""

    def __init__(self, *tickets):
        self.waiting, self.asked, self.failed = list(tickets), [], []

    def claim(self, count, block_ms):
        time.sleep(0.001)
        self.asked.append(count)
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return [Delivery(one, one.ticket_id, 1) for one in taken]

    def release(self, delivery):
        return True

    def fail(self, delivery, reason):
        self.failed.append(reason)
        return True


class Writer:
    def __init__(self):
        self.groups = []

    def submit(self, delivery, group):
        self.groups.append(group)
        return True


class Refreshed:
    async def until_loaded(self):
        pass

    async def until_serves(self, _ticket):
        pass


@dataclasses.dataclass
class Scene:
    """A sampler whose members play as the test says."""

    tasks: Tasks
    play: object  # of (ticket, member): a trajectory, or an exception to raise

    def __post_init__(self):
        self.writer, self.tally = Writer(), Tally("a")
        self.sampler = Sampler(
            WatchedEngine(None),
            None,
            Refreshed(),
            self.tasks,
            self.writer,
            None,
            EpisodeConfig(EnvironmentConfig(), RewardConfig()),
            actor_id="a",
            concurrency=Concurrency(16, 0, queue_share=0.25),
            group_size=4,
            max_attempts=3,
            tally=self.tally,
        )

    def run(self, script):
        async def attempt(one, member):
            return await self.play(one, member)

        async def both():
            serving = asyncio.create_task(self.sampler.run())
            try:
                await asyncio.wait_for(script(self), 20)
            finally:
                serving.cancel()
                await asyncio.wait([serving])

        self.sampler._attempt = attempt
        asyncio.run(both())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_orch_04_a_lost_member_costs_itself_and_the_others_go_as_a_partial_group():
    async def play(_ticket, member):
        await asyncio.sleep(3600 if member == 2 else 0)
        return trajectory(reward=float(member))

    async def script(scene):
        await until(lambda: scene.sampler._unfinished["1-1"] == 1)
        assert scene.writer.groups == []
        scene.sampler.cut(["1-1", "9-9"])
        await until(lambda: scene.writer.groups)

    scene = Scene(Tasks(ticket()), play)
    scene.run(script)
    (group,) = scene.writer.groups
    assert group.partial
    assert [t.reward for t in group.trajectories] == [0.0, 1.0, 3.0]
    assert scene.sampler.counters.groups_partial == 1


def test_the_step_part_of_a_bucket_that_is_held_out_is_measured_but_not_sent():
    def scored(reward, success):
        parts = np.array([success, 0.5, 0, 0], np.float32)
        steps = {"step_scores": np.array([0.5], np.float32), "step_ends": np.array([4], np.int32)}
        return dataclasses.replace(trajectory(reward=reward, success=success), reward_parts=parts, **steps)

    async def play(_ticket, member):
        return scored(1.2, True) if member else scored(0.2, False)

    async def script(scene):
        await until(lambda: scene.writer.groups)

    rewards = {}
    for held_out in ((), ("sums/1",), ("sums/2",)):
        scene = Scene(Tasks(ticket()), play)
        scene.sampler.steps_held_out = held_out
        scene.run(script)
        (group,) = scene.writer.groups
        rewards[held_out] = [round(t.reward, 6) for t in group.trajectories], group.trajectories[0].step_scores is None
        assert scene.tally.take()["buckets"]["sums/2"]["contrasts"] == 1
    assert rewards[()] == rewards[("sums/1",)] == ([0.2, 1.2, 1.2, 1.2], False)
    assert rewards[("sums/2",)] == ([0.0, 1.0, 1.0, 1.0], True)


def test_a_group_cut_with_too_few_members_fails_and_is_counted():
    async def play(_ticket, member):
        await asyncio.sleep(3600 if member else 0)
        return trajectory()

    async def script(scene):
        await until(lambda: scene.sampler._unfinished["1-1"] == 3)
        scene.sampler.cut(["1-1"])
        await until(lambda: scene.tasks.failed)

    scene = Scene(Tasks(ticket()), play)
    scene.run(script)
    assert "only 1 of 4" in scene.tasks.failed[0]
    assert scene.writer.groups == []


async def instantly(_ticket, _member):
    return trajectory()


def test_a_paused_or_draining_actor_claims_nothing_and_says_when_it_is_drained():
    async def script(scene):
        scene.sampler.order = ActorOrder(drain=True)
        await asyncio.sleep(0.15)
        asked = len(scene.tasks.asked)
        assert scene.sampler.drained
        await asyncio.sleep(0.15)
        assert len(scene.tasks.asked) == asked
        scene.sampler.order = ActorOrder(pause=True)
        assert not scene.sampler.drained
        await asyncio.sleep(0.15)
        assert len(scene.tasks.asked) == asked
        scene.sampler.order = ActorOrder()
        await until(lambda: len(scene.tasks.asked) > asked)

    Scene(Tasks(), instantly).run(script)


def test_a_probed_actor_plays_one_group_at_a_time():
    running, most = set(), []

    async def play(one, _member):
        running.add(one.ticket_id)
        most.append(len(running))
        await asyncio.sleep(0.02)
        running.discard(one.ticket_id)
        return trajectory()

    async def script(scene):
        await until(lambda: len(scene.writer.groups) == 3)

    scene = Scene(Tasks(ticket(1), ticket(2), ticket(3)), play)
    scene.sampler.order = ActorOrder(probe=True)
    scene.run(script)
    assert max(most) == 1


def test_retries_have_a_budget():
    scene = Scene(Tasks(), instantly)
    allowed = sum(scene.sampler._may_retry() for _ in range(100))
    assert allowed == int(RETRY_BURST)
    assert scene.sampler.counters.retries_refused == 100 - allowed


def test_sessions_that_wait_for_tokens_are_counted():
    class Slow:
        num_slots = 2

        async def open(self, *_args, **_options):
            return self

        async def generate(self, *_):
            await asyncio.sleep(0.01)
            raise RuntimeError("closed")

    async def run():
        watched = WatchedEngine(Slow())
        session = await watched.open(0, 1.0)
        generating = asyncio.create_task(session.generate((1,), frozenset(), 1))
        await asyncio.sleep(0)
        watched.take_slots_busy()
        assert watched.num_generating == 1
        await asyncio.sleep(0)
        assert watched.take_slots_busy() == pytest.approx(0.5)
        await asyncio.wait([generating])
        assert isinstance(generating.exception(), RuntimeError)
        assert watched.num_generating == 0

    asyncio.run(run())


def test_obs_07_a_wait_for_weights_says_what_for_and_that_it_is_over(monkeypatch, caplog):
    monkeypatch.setattr(refresh, "_PATIENCE_S", 0.02)
    refresher = refresh.Refresher(None, None, None, poll_interval_s=1.0, max_behind=2)

    async def run():
        waiting = asyncio.create_task(refresher.until_serves(dataclasses.replace(ticket(), min_update=3)))
        await until(lambda: "has waited" in caplog.text)
        async with refresher._loaded:
            refresher.version = WeightVersion(3, None, 0, 3, "")
            refresher._loaded.notify_all()
        await waiting

    asyncio.run(run())
    assert "ticket 1-1 has waited 0 s for weights of update 3 on line 0; loaded is None" in caplog.text
    assert "ticket 1-1 goes on after" in caplog.text


class Orders:
    def __init__(self, *counts):
        self.counts = list(counts)

    def directives(self):
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        return Directives(actors={"a": ActorOrder(replace=count)})


def test_orch_08_only_an_order_newer_than_the_process_ends_it():
    ended = []
    with Watchdog(Orders(2, 2, 2), "a", 0.001, end=ended.append):
        time.sleep(0.1)
    assert ended == []
    with Watchdog(Orders(2, 2, 3), "a", 0.001, end=ended.append) as watchdog:
        watchdog._thread.join(10)
    assert ended == [1]


def test_orch_06_a_blocked_event_loop_is_measured():
    """A reward that sleeps on the event loop delays heartbeats, and the next one says by how much."""
    beats = []
    nothing = types.SimpleNamespace
    sampler = nothing(
        counters=nothing(),
        num_episodes=0,
        drained=False,
        tickets=[],
        order=ActorOrder(),
        keep_alive=lambda: asyncio.sleep(0),
    )
    steering = nothing(directives=lambda: Directives())
    watch = LoopWatch()
    pulse = Pulse(
        "a",
        ActorConfig(heartbeat_s=0.01),
        nothing(beat=lambda *args: beats.append(args[2])),
        None,
        nothing(counters=EngineCounters(), num_slots=1),
        nothing(counters=EngineCounters()),
        nothing(version=None, paused_since=None, num_refused=0),
        sampler,
        nothing(num_running=0),
        steering,
        Tally("a"),
        nothing(num_generating=0, take_slots_busy=lambda: 0.0),
        watch,
        Services(EnvironmentConfig()),
    )

    async def run():
        beating, watching = asyncio.create_task(pulse.run()), asyncio.create_task(watch.run())
        await until(lambda: len(beats) > 2)
        time.sleep(0.5)
        seen = len(beats)
        await until(lambda: len(beats) > seen + 1)
        assert max(beat["loop_lag_s"] for beat in beats) > 0.3
        beating.cancel()
        watching.cancel()

    asyncio.run(run())


def test_the_accelerator_is_busy_for_the_share_of_time_in_which_either_engine_of_the_host_computes():
    beats, nothing = [], types.SimpleNamespace
    sampling, evaluating = EngineCounters(), EngineCounters()
    pulse = Pulse(
        "a",
        ActorConfig(),
        nothing(beat=lambda *args: beats.append(args[2])),
        None,
        nothing(counters=sampling, num_slots=1),
        nothing(counters=evaluating),
        nothing(version=None, paused_since=None, num_refused=0),
        nothing(counters=nothing(), num_episodes=0, drained=False),
        nothing(num_running=0),
        None,
        Tally("a"),
        nothing(num_generating=0, take_slots_busy=lambda: 0.0),
        LoopWatch(),
        Services(EnvironmentConfig()),
    )
    pulse._before = (time.monotonic() - 10.0, EngineCounters(), 0.0)
    sampling.compute_s, evaluating.compute_s = 4.0, 2.0
    assert pulse._values()["accelerator_busy"] == pytest.approx(0.6, abs=0.01)
    assert pulse._values()["accelerator_busy"] == 0.0
    sampling.compute_s += 100.0  # a block that began before the last beat
    assert pulse._values()["accelerator_busy"] == 1.0
