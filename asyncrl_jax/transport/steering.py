"""How a run is steered: what the orchestrator directs, what a human has set, what was decided, and what was observed.

    operator settings   written by humans (`asyncrl`), read by the orchestrator
    directives          written by the leading orchestrator alone, read by the learner and the actors
    decisions           a stream: every change of either, with the numbers that caused it
    observations        a stream: what actors saw, summed; the orchestrator folds it into its policies' states
    state               what the orchestrator remembers, one JSON a policy

A round of the orchestrator commits states, directives, decisions and the observations that it has folded in one step,
so whoever takes over folds each observation once. Readers take garbage for absence and say so; a hand in Redis must
not end a run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import redis

from asyncrl_jax.transport import fencing
from asyncrl_jax.transport.fencing import Fence
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.repeats import Repeats
from asyncrl_jax.types import Decision

_log = logging.getLogger(__name__)
_log.addFilter(Repeats())  # what is wrong there stays wrong until somebody mends it

# Statistics, not data: without an orchestrator to fold them the oldest are dropped.
MOST_OBSERVATIONS = 20_000
_CUTS_KEPT_S = 3600  # after the last one; a ticket that was cut is long gone by then
LONGEST_OBSERVATION = 64 * 2**10  # characters

# KEYS: state, directives, decisions, observations. ARGV: id of this commit, directives or '', id of the last
# observation folded or '', number of states, then (name, JSON) pairs, then the JSON of decisions.
_COMMIT = """
if redis.call('HGET', KEYS[1], 'commit') == ARGV[1] then return 0 end -- the reply was lost
redis.call('HSET', KEYS[1], 'commit', ARGV[1])
if ARGV[2] ~= '' then redis.call('SET', KEYS[2], ARGV[2]) end
local last = 4 + 2 * tonumber(ARGV[4])
for i = 5, last, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
for i = last + 1, #ARGV do redis.call('XADD', KEYS[3], '*', 'decision', ARGV[i]) end
if ARGV[3] ~= '' then
  for _, entry in ipairs(redis.call('XRANGE', KEYS[4], '-', ARGV[3])) do redis.call('XDEL', KEYS[4], entry[1]) end
end
return 1
"""

# KEYS: operator, decisions. ARGV: JSON of the decision, then (name, JSON or '' to forget) pairs.
_OPERATE = """
local changed = 0
for i = 2, #ARGV, 2 do
  if ARGV[i + 1] == '' then changed = changed + redis.call('HDEL', KEYS[1], ARGV[i])
  elseif redis.call('HGET', KEYS[1], ARGV[i]) ~= ARGV[i + 1] then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    changed = changed + 1
  end
end
if changed > 0 then redis.call('XADD', KEYS[2], '*', 'decision', ARGV[1]) end
return changed
"""


@dataclasses.dataclass(frozen=True, slots=True)
class ActorOrder:
    """What one actor is told to do."""

    pause: bool = False  # claim nothing
    probe: bool = False  # one group at a time
    drain: bool = False  # claim nothing, finish what is under way, then end
    replace: int = 0  # end at once if this is higher than it was when the process started


@dataclasses.dataclass(frozen=True, slots=True)
class RollbackOrder:
    """What the learner is told: leave `line` for its newest checkpoint at or before `update`."""

    number: int
    line: int
    update: int


@dataclasses.dataclass(frozen=True, slots=True)
class Directives:
    """What the leading orchestrator tells the others."""

    token_updates: int | None = None  # N in force for tickets issued now; None before the first round
    fresh: bool = False  # only fresh data is admitted
    learning_rate_scale: float = 1.0
    expire_before: tuple[int, int] | None = None  # (line, update): untrained groups whose `min_update` is older end
    keep_update: int | None = None  # the newest checkpoint at or before it is kept
    rollback: RollbackOrder | None = None
    actors: Mapping[str, ActorOrder] = dataclasses.field(default_factory=dict)  # by actor id; absent: no order
    steps_held_out: tuple[str, ...] = ()  # buckets whose groups get nothing from a process reward model
    fleet_size: int | None = None  # members that the fleet is to have, in their order; None before the first round
    learner_copies: int | None = None  # of the weights in the learner's mesh (mesh.data), as asked for; None: as it is


@dataclasses.dataclass(frozen=True, slots=True)
class LoggedDecision:
    """A line of the decision log."""

    entry_id: str  # of the stream; sorts by time
    decision: Decision

    @property
    def at(self) -> float:
        """Unix seconds, by the clock of Redis."""
        return int(self.entry_id.split("-")[0]) / 1000


class Steering:
    """The steering state of a run; with a fence, `commit` belongs to one leadership."""

    def __init__(self, client: redis.Redis, keys: Keys, fence: Fence | None = None) -> None:
        self._redis: Any = client  # Any: redis-py types a reply for all client settings at once
        self._keys = keys
        self._commit = fencing.register(client, _COMMIT, fence)
        self._operate = self._redis.register_script(_OPERATE)

    def now(self) -> float:
        """Unix seconds, by the clock of Redis: one clock for all orchestrators."""
        seconds, microseconds = self._redis.time()
        return int(seconds) + int(microseconds) / 1e6

    # --- What the orchestrator remembers and directs ---

    def commit(
        self,
        states: Mapping[str, Any],
        directives: Directives | None = None,
        decisions: Sequence[Decision] = (),
        folded: str = "",
    ) -> None:
        """Writes all of it or nothing. Safe to repeat.

        Args:
          states: JSON values by name of policy.
          folded: id of the newest observation that the states contain; it and older ones are dropped.

        Raises:
          Deposed: if another orchestrator leads.
        """
        given = "" if directives is None else json.dumps(dataclasses.asdict(directives), sort_keys=True)
        pairs = [part for name, value in states.items() for part in (name, json.dumps(value))]
        lines = [json.dumps(dataclasses.asdict(decision), sort_keys=True) for decision in decisions]
        keys = [self._keys.state, self._keys.directives, self._keys.decisions, self._keys.observations]
        self._commit(keys=keys, args=[uuid.uuid4().hex, given, folded, len(states), *pairs, *lines])

    def states(self) -> dict[str, Any]:
        """What `commit` stored, by name."""
        values = self._redis.hgetall(self._keys.state)
        found = {}
        for name, value in values.items():
            if name != b"commit" and (parsed := parse(value, f"state {name!r}")) is not None:
                found[name.decode(errors="replace")] = parsed
        return found

    def directives(self) -> Directives:
        """What the others are told; the default before anything was."""
        found = parse(self._redis.get(self._keys.directives), "the directives")
        if not isinstance(found, dict):
            return Directives()
        try:
            return _directives(found)
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
            _log.error("the directives in Redis are no directives and are ignored: %s", error)
            return Directives()

    # --- What a human sets ---

    def operate(self, changes: Mapping[str, Any], decision: Decision) -> bool:
        """Sets values by name (None forgets one) and logs the decision. Returns whether anything changed."""
        pairs = [part for name, value in changes.items() for part in (name, "" if value is None else json.dumps(value))]
        keys = [self._keys.operator, self._keys.decisions]
        return bool(self._operate(keys=keys, args=[json.dumps(dataclasses.asdict(decision), sort_keys=True), *pairs]))

    def operator(self) -> dict[str, Any]:
        """Values set by hand, by name."""
        values = self._redis.hgetall(self._keys.operator)
        found = {}
        for name, value in values.items():
            if (parsed := parse(value, f"operator setting {name!r}")) is not None:
                found[name.decode(errors="replace")] = parsed
        return found

    # --- The decision log ---

    def decisions(self, after: str = "0-0", count: int = 1000) -> list[LoggedDecision]:
        """At most `count` decisions after the one with id `after`, oldest first."""
        return _logged(self._redis.xrange(self._keys.decisions, min=f"({after}", count=count))

    def newest_decisions(self, count: int = 20) -> list[LoggedDecision]:
        """The newest, oldest first."""
        return _logged(reversed(self._redis.xrevrange(self._keys.decisions, count=count)))

    def decision_ids(self, count: int) -> list[str]:
        """Ids of the oldest entries of the log, also of what is no decision."""
        return [entry_id.decode() for entry_id, _ in self._redis.xrange(self._keys.decisions, count=count)]

    def num_decisions(self) -> int:
        """Decisions in Redis; older ones are in the run record."""
        return int(self._redis.xlen(self._keys.decisions))

    def discard_decisions(self, entry_ids: Sequence[str]) -> int:
        """Deletes decisions that are safe in a file. Returns the number deleted."""
        return int(self._redis.xdel(self._keys.decisions, *entry_ids)) if entry_ids else 0

    # --- Observations ---

    def observe(self, record: Mapping[str, Any]) -> None:
        """Adds one. A lost reply may add it twice: these are statistics.

        Raises:
          ValueError: if it is too long.
        """
        text = json.dumps(record)
        if len(text) > LONGEST_OBSERVATION:
            raise ValueError(f"an observation of {len(text)} characters, at most {LONGEST_OBSERVATION}")
        self._redis.xadd(self._keys.observations, {"record": text}, maxlen=MOST_OBSERVATIONS, approximate=True)

    def observations(self, count: int = 5000) -> tuple[list[Mapping[str, Any]], str]:
        """(the oldest observations, id of the last of them or "")."""
        entries = self._redis.xrange(self._keys.observations, count=count)
        records = [parse(fields.get(b"record"), "an observation") for _, fields in entries]
        return [r for r in records if isinstance(r, dict)], entries[-1][0].decode() if entries else ""

    # --- Partial groups ---

    def cut(self, ticket_ids: Collection[str]) -> None:
        """Asks actors to wait no longer for late members of these tickets."""
        if ticket_ids:
            self._redis.sadd(self._keys.cuts, *ticket_ids)
            self._redis.expire(self._keys.cuts, _CUTS_KEPT_S)

    def cut_among(self, ticket_ids: Sequence[str]) -> list[str]:
        """Those of these tickets whose late members are no longer waited for."""
        if not ticket_ids:
            return []
        named = self._redis.smismember(self._keys.cuts, ticket_ids)
        return [ticket_id for ticket_id, cut in zip(ticket_ids, named, strict=True) if cut]


def parse(value: bytes | None, what: str) -> Any:
    """JSON from Redis; None, and a line in the log, for what is none."""
    if value is None:
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # the latter: nested thousands deep
        _log.error("%s in Redis is not JSON and is ignored: %r", what, value[:80])
        return None


def _logged(entries: Any) -> list[LoggedDecision]:
    logged = []
    for entry_id, fields in entries:
        found = parse(fields.get(b"decision"), "a decision")
        try:
            decision = Decision(**found)
            numbers = {str(name): float(value) for name, value in decision.numbers.items()}
            logged.append(LoggedDecision(entry_id.decode(), dataclasses.replace(decision, numbers=numbers)))
        except (TypeError, ValueError, AttributeError, OverflowError):
            _log.error("decision %r in Redis is none and is left out", entry_id)
    return logged


def _directives(found: dict[str, Any]) -> Directives:
    known = {field.name for field in dataclasses.fields(Directives)}
    given = {name: value for name, value in found.items() if name in known}
    if given.get("expire_before") is not None:
        line, update = given["expire_before"]
        given["expire_before"] = (int(line), int(update))
    if given.get("rollback") is not None:
        given["rollback"] = RollbackOrder(**given["rollback"])
    given["actors"] = {actor: ActorOrder(**order) for actor, order in (given.get("actors") or {}).items()}
    given["steps_held_out"] = tuple(str(bucket) for bucket in given.get("steps_held_out") or ())
    for name in ("fleet_size", "learner_copies"):
        if given.get(name) is not None:
            given[name] = int(given[name])
    given["learning_rate_scale"] = float(given.get("learning_rate_scale", 1.0))
    return Directives(**given)
