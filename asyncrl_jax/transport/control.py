"""Control state in Redis: epoch, versions, leases, heartbeats, redo log, evaluations, phase, the orchestrator's memory.

Times of leases and heartbeats are the server's, so the clocks of hosts need not agree. What is no JSON, or no record of
its kind, is left out by every reader and named in the log: a hand in Redis must not end a run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
import typing
from typing import Any, TypeVar

import redis

from asyncrl_jax.transport import fencing, scripts
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.repeats import Repeats
from asyncrl_jax.transport.steering import Steering, parse
from asyncrl_jax.types import Decision, EvaluationRequest, EvaluationResult, LearnerState, Line, WeightVersion

_log = logging.getLogger(__name__)
_log.addFilter(Repeats())  # what is wrong there stays wrong until somebody mends it
_T = TypeVar("_T")
_hints: Any = functools.cache(typing.get_type_hints)

_MOST_TASKS = 2**53  # of an evaluation, at one level
PHASES = ("running", "finishing", "finished", "stopping")

# KEYS: key. ARGV: value.
_SET = "redis.call('SET', KEYS[1], ARGV[1]) return 1"


def _dump(value: Any) -> str:
    return json.dumps(dataclasses.asdict(value), sort_keys=True)


class Control:
    """The state that roles share. Every write is one atomic step and safe to repeat.

    With a fence, the orchestrator's writes (phase, evaluations asked for) belong to one leadership and raise Deposed
    when another orchestrator leads.
    """

    def __init__(self, client: redis.Redis, keys: Keys, fence: fencing.Fence | None = None) -> None:
        self._redis: Any = client  # Any: redis-py types a reply for all client settings at once
        self._keys = keys
        self._announce = self._redis.register_script(scripts.ANNOUNCE)
        self._add_once = self._redis.register_script(scripts.ADD_ONCE)
        self._lease = self._redis.register_script(scripts.LEASE)
        self._leased = self._redis.register_script(scripts.LEASED)
        self._beat = self._redis.register_script(scripts.BEAT)
        self._beating = self._redis.register_script(scripts.BEATING)
        self._request = fencing.register(client, scripts.REQUEST_EVALUATION, fence)
        self._set = fencing.register(client, _SET, fence)
        self._claim = self._redis.register_script(scripts.CLAIM_EVALUATION)
        self._renew = self._redis.register_script(scripts.RENEW_EVALUATION)
        self._report = self._redis.register_script(scripts.REPORT_EVALUATION)

    # --- Epoch, phase, memory ---

    def ensure_epoch(self, at_least: int = 1) -> tuple[int, bool]:
        """(epoch, fresh). `fresh`: Redis had no epoch, so it is new or its contents were lost; `at_least` is then set.

        Args:
          at_least: one more than any epoch this run has used, so that ticket ids stay unique for ever.
        """
        fresh = bool(self._redis.set(self._keys.epoch, at_least, nx=True))
        epoch = self.epoch()
        assert epoch is not None
        return epoch, fresh

    def epoch(self) -> int | None:
        """The epoch, or None if Redis is new or was reset.

        Raises:
          ResponseError: if something else stands there.
        """
        value = self._redis.get(self._keys.epoch)
        if value is not None and not (value.isdigit() and len(value) <= 15):
            raise redis.ResponseError(f"{self._keys.epoch} is no number")
        return None if value is None else int(value)

    def forget_everything(self) -> int:
        """Deletes every key of the run, streams and ledger included: for a Redis that has gone back in time.

        Returns the number of keys deleted.
        """
        names = list(self._redis.scan_iter(f"{self._keys.namespace}:*", count=1000))
        return int(self._redis.delete(*names)) if names else 0

    def reopen(self, *, by_hand: bool = False) -> None:
        """The phase of a run that goes on. One that stopped since it was drained issues tickets again.

        Args:
          by_hand: a human starts it: a drain that was not over is called off too.
        """
        steering = Steering(self._redis, self._keys)
        if (by_hand or self.phase() == "stopping") and steering.operator().get("draining"):
            why = "the drained run was started again"
            steering.operate({"draining": None}, Decision("operator", "resume", "draining", why))
        self.set_phase("running")

    def set_phase(self, phase: str) -> None:
        """Raises: ValueError: for a phase that isn't one of PHASES."""
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r}: use one of {', '.join(PHASES)}")
        self._set(keys=[self._keys.phase], args=[phase])

    def phase(self) -> str:
        """The phase of the run; "running" when none was set."""
        value = self._redis.get(self._keys.phase)
        phase = "running" if value is None else value.decode(errors="replace")
        return phase if phase in PHASES else "running"

    def set_learner(self, state: LearnerState) -> None:
        """States the learner's progress."""
        self._redis.set(self._keys.learner, _dump(state))

    def learner(self) -> LearnerState | None:
        """The learner's progress, or None before it stated any."""
        value = self._redis.get(self._keys.learner)
        return _record(LearnerState, value)

    # --- Versions and lines ---

    def announce(self, version: WeightVersion, *, backwards: bool = False) -> bool:
        """Makes a committed version known, and the one that actors load if it is newer than that.

        Args:
          version: `announced_at` is set to now if it is 0.
          backwards: also point actors at an older number, for a rollback.

        Returns whether actors are pointed at this version.

        Raises:
          RuntimeError: if the number was announced with another manifest or place in history: numbers never repeat.
        """
        if not version.announced_at:
            version = dataclasses.replace(version, announced_at=time.time())
        keys = [self._keys.versions, self._keys.latest]
        answer = self._announce(keys=keys, args=[version.number, _dump(version), _identity(version), int(backwards)])
        if answer not in (0, 1):
            raise RuntimeError(f"version {version.number} is announced already, as {answer.decode()}; now {version}")
        return bool(answer)

    def latest(self) -> WeightVersion | None:
        """The version that actors load, or None before the first announcement."""
        value = self._redis.get(self._keys.latest)
        return self.version(int(value)) if value is not None and value.isdigit() else None

    def version(self, number: int) -> WeightVersion | None:
        """A version by number, or None if it was never announced or is forgotten."""
        value = self._redis.hget(self._keys.versions, str(number))
        return _record(WeightVersion, value)

    def versions(self) -> dict[int, WeightVersion]:
        """Every version announced and not forgotten, by number in rising order."""
        values = self._redis.hgetall(self._keys.versions)
        found = [version for value in values.values() if (version := _record(WeightVersion, value)) is not None]
        return {version.number: version for version in sorted(found, key=lambda version: version.number)}

    def add_line(self, line: Line) -> None:
        """Raises: RuntimeError: if the number stands for another line already."""
        existing = self._add_once(keys=[self._keys.lines], args=[line.line, _dump(line)])
        if _record(Line, existing) != line:
            raise RuntimeError(f"line {line.line} exists already, as {existing.decode()}; now {line}")

    def lines(self) -> dict[int, Line]:
        """Every line by number; line 0 always."""
        values = self._redis.hgetall(self._keys.lines)
        found = [line for value in values.values() if (line := _record(Line, value)) is not None]
        return {0: Line(0)} | {line.line: line for line in found}

    # --- Leases and heartbeats ---

    def lease(self, version: int, holder: str, ttl_s: float) -> bool:
        """Protects a version from deletion for `ttl_s`. Call again to renew. False if the version is not announced."""
        keys = [self._keys.leases, self._keys.versions]
        return bool(self._lease(keys=keys, args=[version, holder, ttl_s]))

    def release(self, version: int, holder: str) -> None:
        """Ends a lease."""
        self._redis.zrem(self._keys.leases, f"{version} {holder}")

    def leased(self) -> set[int]:
        """Versions under at least one lease that has not run out."""
        numbers = [member.partition(b" ")[0] for member in self._leased(keys=[self._keys.leases])]
        return {int(number) for number in numbers if number.isdigit()}

    def beat(self, role: str, instance: str, payload: dict[str, Any], ttl_s: float) -> None:
        """States that an instance of a role is alive for the next `ttl_s`. Neither name holds a space."""
        if " " in role or " " in instance:
            raise ValueError(f"a space in {role!r} or {instance!r}")
        keys = [self._keys.heartbeats, self._keys.heartbeat_expiry]
        self._beat(keys=keys, args=[f"{role} {instance}", json.dumps(payload), ttl_s])

    def heartbeats(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Payload of every live instance, by (role, instance)."""
        flat = self._beating(keys=[self._keys.heartbeats, self._keys.heartbeat_expiry])
        alive = {}
        for name, payload in zip(flat[::2], flat[1::2], strict=True):
            role, _, instance = name.decode(errors="replace").partition(" ")
            values = parse(payload, f"the heartbeat of {name!r}")
            if instance and isinstance(values, dict):
                alive[role, instance] = values
        return alive

    def heartbeat(self, role: str, instance: str) -> dict[str, Any]:
        """The newest payload of one instance, alive or not; empty if there is none."""
        values = parse(self._redis.hget(self._keys.heartbeats, f"{role} {instance}"), f"the heartbeat of {role}")
        return values if isinstance(values, dict) else {}

    # --- Redo log ---

    def append_redo(self, update: int, payload: dict[str, Any]) -> None:
        """States what `update` will train on, before it does. Replaces what was stated for it and for later updates."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(self._keys.redo, update, "+inf")
            pipe.zadd(self._keys.redo, {json.dumps({"update": update, "payload": payload}): update})
            pipe.execute()

    def redo(self, after_update: int) -> list[dict[str, Any]]:
        """Payloads of the updates after `after_update`, in order, each with its `update`."""
        members = self._redis.zrangebyscore(self._keys.redo, f"({after_update}", "+inf")
        records = [parse(member, "a redo entry") for member in members]
        return [
            {**record["payload"], "update": record["update"]}
            for record in records
            if isinstance(record, dict) and "update" in record and isinstance(record.get("payload"), dict)
        ]

    def trim_redo(self, upto_update: int) -> None:
        """Drops updates up to and including `upto_update`: a durable checkpoint holds them."""
        self._redis.zremrangebyscore(self._keys.redo, "-inf", upto_update)

    # --- Evaluations ---

    def request_evaluation(self, request: EvaluationRequest) -> bool:
        """Queues an evaluation, once for its id. Returns whether this call did."""
        keys = [self._keys.evaluation_requests, self._keys.evaluation_queue]
        return bool(self._request(keys=keys, args=[request.evaluation_id, _dump(request), request.update]))

    def claim_evaluation(self, holder: str, lease_s: float) -> EvaluationRequest | None:
        """The evaluation this holder works on already, else the oldest that nobody does; None if there is none."""
        found = self._claim(keys=self._evaluation_keys(), args=[holder, lease_s])
        return _record(EvaluationRequest, found)

    def renew_evaluation(self, evaluation_id: str, holder: str, lease_s: float) -> bool:
        """Extends the holder's lease. False if another holder has it or the result is in: stop working on it."""
        return bool(self._renew(keys=self._evaluation_keys(), args=[evaluation_id, holder, lease_s]))

    def report_evaluation(self, result: EvaluationResult) -> bool:
        """Stores the first result of an evaluation. Returns whether this one is it."""
        if not result.finished_at:
            result = dataclasses.replace(result, finished_at=time.time())
        return bool(self._report(keys=self._evaluation_keys(), args=[result.evaluation_id, _dump(result)]))

    def evaluations(self) -> list[EvaluationResult]:
        """All results, by update count."""
        results = []
        for value in self._redis.hvals(self._keys.evaluation_results):
            result = _record(EvaluationResult, value)
            if result is None:
                continue
            try:  # JSON made strings of the levels
                tasks, successes = _by_level(result.num_tasks), _by_level(result.num_successes)
            except (TypeError, ValueError, OverflowError) as error:
                _log.error("the result of evaluation %.80r in Redis is none and is ignored: %s", value, error)
                continue
            results.append(dataclasses.replace(result, num_tasks=tasks, num_successes=successes))
        return sorted(results, key=lambda result: (result.update, result.evaluation_id))

    def pending_evaluations(self) -> list[EvaluationRequest]:
        """Requests without a result, by update count."""
        waiting = self._redis.zrange(self._keys.evaluation_queue, 0, -1)
        values = self._redis.hmget(self._keys.evaluation_requests, waiting) if waiting else []
        return [request for value in values if (request := _record(EvaluationRequest, value)) is not None]

    def _evaluation_keys(self) -> list[str]:
        keys = self._keys
        return [
            keys.evaluation_requests,
            keys.evaluation_queue,
            keys.evaluation_holders,
            keys.evaluation_expiry,
            keys.evaluation_results,
        ]


def _record(kind: type[_T], value: bytes | None) -> _T | None:
    """A record of this kind; None, and a line in the log, for anything else. Unknown fields are dropped."""
    found = parse(value, f"a {kind.__name__}")
    if not isinstance(found, dict):
        return None
    hints = _hints(kind)
    given = {name: field for name, field in found.items() if name in hints}
    wrong = [name for name, one in given.items() if hints[name] in (int, str) and type(one) is not hints[name]]
    try:
        if wrong:
            raise TypeError(f"{wrong} of the wrong type")
        return kind(**given)
    except TypeError as error:
        _log.error("a %s in Redis is none and is ignored: %s", kind.__name__, error)
        return None


def _by_level(counts: Any) -> dict[int, int]:
    """Raises: TypeError, ValueError, OverflowError: for what counts no tasks."""
    by_level = {int(level): int(count) for level, count in counts.items()} if isinstance(counts, dict) else {}
    if not all(0 <= count <= _MOST_TASKS for count in by_level.values()):
        raise ValueError(f"counts of tasks from 0 to {_MOST_TASKS}, not {by_level!s:.80}")
    return by_level


def _identity(version: WeightVersion) -> str:
    """What must be equal for two announcements of one number to be the same version."""
    return f"{version.manifest_digest} {version.line} {version.update} {version.parent}"
