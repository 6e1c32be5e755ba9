"""What a human may ask of a run and set in it while it runs. Every change is a line in the decision log.

status                             leader, progress, N, buckets, breakers, holds, actors, newest decisions
set N=6 temperature=0.9 …          also mode, actors, learning_rate_scale, weight.<bucket>, breaker.<target> and
                                   archive_reset; NAME=auto gives a setting back to the rules
pause | resume                     issue nothing | go on, also after the run paused itself
drain [ACTOR …]                    the whole run: finish what is outstanding, then stop; or these actors
resume ACTOR …                     let drained actors claim again
review                             buckets that are held for a human
review release|hold BUCKET …       let a bucket be drawn again | take it out
"""

from __future__ import annotations

import collections
import functools
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl_jax.config import Config
from asyncrl_jax.config_fleet import NO_END
from asyncrl_jax.orchestrator import memory
from asyncrl_jax.orchestrator import round as rounds
from asyncrl_jax.orchestrator.host_classes import seen_by_class
from asyncrl_jax.orchestrator.policies import curriculum
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.ledger import Ledger
from asyncrl_jax.transport.shared_settings import SharedSettings
from asyncrl_jax.transport.steering import Steering
from asyncrl_jax.types import Decision, LearnerState

AUTO = "auto"
_SHOWN_DECISIONS = 12
_DIGITS = 9  # of a number of things
_ENVIRONMENTAL = ("environment", "reward", "tool")  # kinds of targets that belong to an environment


def _number(least: float, most: float = math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        within = f"between {least:g} and {most:g}" if most < math.inf else f"at least {least:g}"
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"a number, {within}") from None
        if not (least <= value <= most and math.isfinite(value)):
            raise ValueError(f"a finite number, {within}")
        return value

    return parse


def _count(text: str, least: int, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and int(text) >= least):
        raise ValueError(f"a number of {what}, {least} or more")
    return int(text)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return parse


# Name, or its start up to the dot, to what its value must be.
SETTINGS: dict[str, Callable[[str], Any]] = {
    "N": functools.partial(_count, least=0, what="updates"),  # bound on lag, in updates
    "mode": _one_of("fresh", "normal"),  # "fresh": wait for fresh data
    "actors": functools.partial(_count, least=1, what="actors"),  # members of the fleet, within limits and budget
    "temperature": _number(0.01, 10.0),  # of sampling
    "learning_rate_scale": _number(0.0, 10.0),
    "weight.": _number(0.0),  # weight.<bucket>
    "breaker.": _one_of("open", "closed"),  # breaker.<target>
    "archive_reset": functools.partial(
        _count, least=0, what="updates"
    ),  # expire untrained groups older than this many updates, once
}


def check_command(words: Sequence[str], config: Config) -> None:
    """Looks at one command line before anything is asked or changed.

    Raises:
      ValueError: for a command or a value that is none.
    """
    command, rest = _command(words)
    if rest or command not in ("status", "review"):
        _changes(command, rest, config)


def run_command(
    words: Sequence[str],
    config: Config,
    control: Control,
    ledger: Ledger,
    steering: Steering,
    shared: SharedSettings,
) -> str:
    """Carries out one command line; returns what to print.

    Raises:
      ValueError: for a command or a value that is none; nothing was changed.
    """
    command, rest = _command(words)
    if command == "status" and not rest:
        return status(config, control, ledger, steering, shared)
    if command == "review" and not rest:
        return _held(config, steering) or "no bucket is held"
    changes, reason = _changes(command, rest, config)
    decision = Decision("operator", command, ", ".join(changes), reason)
    changed = steering.operate(changes, decision)
    unknown = _silent(changes, control) if changed else ""
    return f"{reason}{unknown}" if changed else f"nothing to change: {reason}"


def _silent(changes: Mapping[str, Any], control: Control) -> str:
    """Says it when an actor that is named gives no sign of life: it may be dead, or misspelt."""
    named = [name.removeprefix(start) for name in changes for start in _OF_ACTORS if name.startswith(start)]
    alive = [instance for role, instance in control.heartbeats() if role == "actor"]
    if silent := [actor for actor in named if actor not in alive]:
        return f"; no sign of life of {', '.join(silent)}, only of {', '.join(sorted(alive)) or 'none'}"
    return ""


_OF_ACTORS = ("drain.", "breaker.actor:")


def _command(words: Sequence[str]) -> tuple[str, list[str]]:
    return (words[0], list(words[1:])) if words else ("status", [])


def _changes(command: str, rest: list[str], config: Config) -> tuple[dict[str, Any], str]:
    """(settings by name, in words)."""
    once = uuid.uuid4().hex[:8]  # makes a setting that acts once differ from the one before
    if command == "set":
        if not rest:
            raise ValueError(f"'set' needs NAME=VALUE; {_known_settings()}")
        settings = [_setting(word, config, once) for word in rest]
        if twice := [name for name, times in collections.Counter(name for name, _ in settings).items() if times > 1]:
            raise ValueError(f"{' '.join(rest)!r}: {', '.join(twice)} is given twice")
        return dict(settings), " ".join(rest)
    if command == "pause" and not rest:
        return {"paused": True}, "nothing is issued until `resume`"
    if command == "resume":
        if rest:
            return {f"drain.{actor}": None for actor in rest}, f"{', '.join(rest)} may claim again"
        return {"paused": None, "draining": None, "resumed": once}, "tickets are issued again"
    if command == "drain":
        if rest:
            return {f"drain.{actor}": True for actor in rest}, f"{', '.join(rest)} finish what they have"
        return {"draining": True}, "what is outstanding is finished, then the run stops and can be resumed"
    if command == "review" and len(rest) >= 2 and rest[0] in ("release", "hold"):
        for bucket in rest[1:]:
            _check_bucket(bucket, config)
        value = f"released {once}" if rest[0] == "release" else f"held {once}"
        return {f"review.{bucket}": value for bucket in rest[1:]}, f"{rest[0]} {', '.join(rest[1:])}"
    usage = (__doc__ or "").split("\n\n", 1)[1].rstrip()
    raise ValueError(f"{' '.join([command, *rest])!r} is no command. There are:\n{usage}")


def _setting(word: str, config: Config, once: str) -> tuple[str, Any]:
    name, given, text = word.partition("=")
    known = next((key for key in SETTINGS if name == key or (key.endswith(".") and name.startswith(key))), None)
    if not given or known is None:
        raise ValueError(f"{word!r}: {_known_settings()}")
    if name.startswith("weight."):
        _check_bucket(name.removeprefix("weight."), config)
    if name.startswith("breaker."):
        _check_target(name.removeprefix("breaker."), config)
    if text == AUTO:
        return name, None
    try:
        value = SETTINGS[known](text)
    except ValueError as error:
        raise ValueError(f"{word!r}: {error}") from None
    if name == "N":
        _check_bound(value, config)
    if name == "actors":
        _check_size(value, config)
    return name, {"updates": value, "once": once} if name == "archive_reset" else value


def _known_settings() -> str:
    return f"settings are {', '.join(f'{key}…=' if key.endswith('.') else f'{key}=' for key in SETTINGS)}"


def _check_target(target: str, config: Config) -> None:
    """Actors, and tools of servers and agents, are known to a run only: of the others, what the config knows."""
    kind, _, name = target.partition(":")
    environment = name.rpartition("/")[0] if kind == "tool" else name
    if kind == "actor" and name:
        return
    if kind not in _ENVIRONMENTAL or environment != config.environment.name:
        own = config.environment.name
        raise ValueError(
            f"{target!r} is no target; there are environment:{own}, reward:{own}, tool:{own}/NAME and actor:ID"
        )


def _check_bound(value: int, config: Config) -> None:
    lag, most = config.effective_lag, config.most_token_updates
    least = lag.actor_updates + config.learner.replay_ratio - 1
    if config.mode != "async":
        raise ValueError(f"N={value}: N belongs to the mode in mode {config.mode}")
    if not least <= value <= most:
        raise ValueError(
            f"N={value}: between {least}, actor updates + replay ratio - 1, and {most}, the larger of "
            "lag.token_updates and orchestrator.tuning.max_token_updates"
        )


def _check_size(value: int, config: Config) -> None:
    """Raises: ValueError: for more actors than classes have room for, or than one machine is to start."""
    fleet, limit = config.orchestrator.fleet, config.orchestrator.autoscale.max_actors
    if value > fleet.most_members:
        raise ValueError(f"actors={value}: at most {fleet.most_members}, orchestrator.fleet.classes")
    if fleet.kind == "local" and value > max(limit, config.actor.num_hosts):
        raise ValueError(f"actors={value}: at most {limit}, orchestrator.autoscale.max_actors")


def _check_bucket(bucket: str, config: Config) -> None:
    buckets = rounds.base_weights(config, {})
    if bucket not in buckets:
        raise ValueError(f"{bucket!r} is no bucket; there are {', '.join(buckets)}")


def status(config: Config, control: Control, ledger: Ledger, steering: Steering, shared: SharedSettings) -> str:
    """The state of the run in lines of plain text."""
    learner, beats = control.learner(), control.heartbeats()
    states = memory.load(rounds.initial_states(config), steering.states())
    directives, operator = steering.directives(), steering.operator()
    counts = ledger.counts()
    beat = next((b for (role, _), b in beats.items() if role == "learner"), {})
    standbys = sum(role == "standby" for role, _ in beats)
    lags = [rounds.number(beat, f"lag_{name}") for name in ("mean", "p95", "max")]
    lines = [
        ", ".join(filter(None, [f"run        {control.phase()}", rounds.halt(states.halted, operator, config)])),
        f"leader     {'beats' if ('orchestrator', '0') in beats else 'none'}, {standbys} standing by",
        _learner(learner, beat),
        f"lag        N = {directives.token_updates}{', fresh data only' if directives.fresh else ''}"
        + (f", mean {lags[0]:.2f}, p95 {lags[1]:.0f}, max {lags[2]:.0f}" if beat else ""),
        _tickets(beats.get(("orchestrator", "0"), {})),
        _fleet(states),
        "ledger     " + ", ".join(f"{name} {count}" for name, count in counts.items() if count),
    ]
    lines += [
        f"settings   the {role} was last started with another {', '.join(names)} than config.json has"
        for role, names in shared.differing(config).items()
    ]
    lines += _classes(config, states, {name: found for (role, name), found in beats.items() if role == "actor"})
    lines += _buckets(states, beat)
    lines += [
        f"breaker    {target} is {found.phase}: {found.signature or 'probed'}"
        for target, found in sorted(states.breaker.breakers.items())
        if found.phase != "closed"
    ]
    lines += [line for line in [_held(config, steering)] if line]
    lines += [_actor(name, b, directives) for (role, name), b in sorted(beats.items()) if role == "actor"]
    lines += [f"set        {name} = {value}" for name, value in sorted(operator.items())]
    lines += [
        f"{time.strftime('%H:%M:%S', time.localtime(one.at))}   {one.decision.policy}: {one.decision.action} "
        f"{one.decision.subject}, {one.decision.reason} {_figures(one.decision.numbers)}".rstrip()
        for one in steering.newest_decisions(_SHOWN_DECISIONS)
    ]
    return "\n".join(line.translate(_UNPRINTED) for line in lines)


_UNPRINTED = dict.fromkeys((*range(32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")  # what steers a terminal


def _learner(learner: LearnerState | None, beat: Mapping[str, Any]) -> str:
    if learner is None:
        return "learner    none yet"
    line = f"learner    update {learner.update} of line {learner.line}, {learner.phase}"
    if not beat:
        return f"{line}; no sign of life"
    busy, starved_s, pooled = (rounds.number(beat, name) for name in ("busy", "starved_s", "queue_depth"))
    return f"{line}; busy {busy:.0%}, starved for {starved_s:.0f} s, {pooled:.0f} groups pooled"


def _tickets(beat: Mapping[str, Any]) -> str:
    if not beat:
        return "tickets    nobody issues any"
    outstanding, target = rounds.number(beat, "outstanding"), rounds.number(beat, "target")
    factor = rounds.number(beat, "factor", 1.0)
    scaled = f", {factor:g} times as usual" if factor != 1.0 else ""
    return f"tickets    {outstanding:.0f} outstanding, {target:.0f} uses aimed at{scaled}"


def _fleet(states: rounds.States) -> str:
    scaled = states.autoscale
    leaving = scaled.size - scaled.target
    line = f"fleet      {scaled.target} actors{f', {leaving} more drain' if leaving else ''}"
    return f"{line}; the learner is to have mesh.data = {scaled.copies}"


def _classes(config: Config, states: rounds.States, beats: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line for each class of hosts, where there are several."""
    fleet, lines = config.orchestrator.fleet, []
    wanted = fleet.members(states.autoscale.target)
    for one in fleet.host_classes if len(fleet.classes) > 1 else ():
        seen, own = seen_by_class(beats, fleet)[one.name], config.actor_of(one.name)
        most = f" at most {one.most}," if one.most < NO_END else ""
        lines.append(
            f"class      {one.name}: {seen.actors} of {wanted[one.name]} actors,{most} {own.slots} slots each, "
            f"{seen.episodes} episodes, {seen.tokens_per_s:,.0f} tok/s, accelerator busy {seen.accelerator_busy:.0%}"
        )
    return lines


def _buckets(states: rounds.States, beat: Mapping[str, Any]) -> list[str]:
    """Share issued and share trained of each bucket: where they part, long or failing tasks are starved."""
    trained = beat.get("groups_by_bucket")
    trained = {name: rounds.number(trained, name) for name in trained} if isinstance(trained, dict) else {}
    issued = states.issued
    all_issued, all_trained = max(sum(issued.values()), 1), max(sum(trained.values()), 1)
    return [
        f"bucket     {name}: success {f'{bucket.success:.2f}' if bucket.groups else '–'}, "
        f"{issued.get(name, 0) / all_issued:.0%} of what was issued"
        + (f", {trained.get(name, 0) / all_trained:.0%} of what was trained" if beat else "")
        for name, bucket in sorted(states.curriculum.buckets.items(), key=lambda item: curriculum.split_bucket(item[0]))
    ]


def _held(config: Config, steering: Steering) -> str:
    states = memory.load(rounds.initial_states(config), steering.states())
    held = {name: bucket.drift or "held" for name, bucket in states.drift.buckets.items() if bucket.held}
    held |= {name: bucket.alarm for name, bucket in states.agreement.buckets.items() if bucket.held}
    return "\n".join(f"review     {name}: {why}; asyncrl review release {name}" for name, why in sorted(held.items()))


def _actor(name: str, beat: Mapping[str, Any], directives: Any) -> str:
    order = directives.actors.get(name)
    orders = [word for word in ("pause", "probe", "drain") if order is not None and getattr(order, word)]
    state = "drained" if beat.get("drained") else f"{rounds.number(beat, 'running'):.0f} episodes"
    state += f", accelerator busy {rounds.number(beat, 'accelerator_busy'):.0%}"
    return f"actor      {name}: v{beat.get('version')}, {state}{', ordered: ' if orders else ''}{', '.join(orders)}"


def _figures(numbers: Mapping[str, float]) -> str:
    return f"({', '.join(f'{name} {value:.4g}' for name, value in numbers.items())})" if numbers else ""
