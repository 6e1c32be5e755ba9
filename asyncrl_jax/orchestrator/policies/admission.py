"""How many tickets to issue now, and how old their weights may be.

Rule. Issued while the learner is at update u, a ticket carries `min_update` (no token of it is sampled with older
weights) and the deadline `min_update + N` (no update after it trains on it), so a token's lag cannot exceed N
whatever happens in between. What is outstanding stays within the updates that can still use it, and below that, just
in time: the update under way, plus what the learner will ask for while the next groups are being sampled (Little's
law), plus a small slack. What it will ask for follows from the seconds that an update keeps it busy: the time between
updates has its waits in it, and would ask for less the longer it waits. Filling to the bound instead would make the
mean lag N for ever.

* async: `min_update = u - A`; at most N - A + 1 updates' worth outstanding.
* semi_async: S updates' worth are released when the previous S are done; `min_update` and deadline are those of the
  period, so N = S - 1.
* sync: semi_async with S = 1, so every token has lag 0.
* "wait for fresh", whatever the mode: as sync, once what was issued before is used up. Where only every P-th update is
  published, as semi_async with S = P: weights of the updates in between never reach an actor.
* A deadline is the ticket's own. When N changes, tickets issued before keep theirs, so no token's lag exceeds the
  larger of the old and the new N.
* Whatever has ended without being trained (failed, filtered, expired, undone) is no longer outstanding, so its place
  is given to another at the next look.

Long episodes are not starved as long as the learner waits for running tickets that are due (`lag.straggler_wait_s`):
what is issued is then trained in the same proportion, at the price of an idle learner. A wait that is too short shows
in the outcomes by level: `asyncrl status` has the share issued and the share trained of each bucket.

Source: J. D. C. Little, "A proof for the queuing formula L = λW", 1961.
Failure mode: an overestimated service time raises the depth, and with it the lag, up to N and never past it; an
underestimated one lets the learner idle.
"""

from __future__ import annotations

import dataclasses
import math

from asyncrl_jax.config import LagConfig

_MOST_GROUPS = 1e9  # in service: beyond any bound


@dataclasses.dataclass(frozen=True)
class Observed:
    """What admission looks at. Counts are of groups, a group trained r times counting r."""

    update: int  # optimizer updates the learner has done
    outstanding_tickets: int  # issued groups with a use left that no finished update has made yet
    outstanding_uses: int  # those uses
    step_s: float  # seconds that an update keeps the learner busy, lately; 0 if not known yet
    service_s: float  # seconds from the start of a group's sampling to its arrival, lately; 0 if not known yet
    factor: float = 1.0  # of `watermark`, on what is aimed at below the bound
    fresh: bool = False  # of `lag`: wait for fresh data
    most_tickets: int | None = None  # of quotas, probes and pauses; None for no limit


@dataclasses.dataclass(frozen=True)
class Admission:
    """The decision, and the number that caused it."""

    num_tickets: int
    min_update: int
    deadline: int
    target_uses: int  # uses that should be outstanding


def decide(
    observed: Observed,
    lag: LagConfig,
    *,
    mode: str,
    groups_per_update: int,
    replay_ratio: int,
    num_updates: int,
    pool_updates: int = 0,
    publish_every_updates: int = 1,
) -> Admission:
    """Tickets to issue now.

    Args:
      observed: the state of the run.
      lag: the *effective* bounds of the mode (`Config.effective_lag`), in updates.
      mode: "sync", "semi_async" or "async".
      groups_per_update: groups one update consumes.
      replay_ratio: most updates that may train on one group.
      num_updates: length of the run; nothing is issued that no update could use.
      pool_updates: updates' worth of uses that the learner's pool is to hold, within the bound; 0: just in time.
      publish_every_updates: P, updates from one version to the next.
    """
    update = observed.update
    if observed.fresh:
        mode, lag = "semi_async", dataclasses.replace(lag, actor_updates=0, semi_async_batches=publish_every_updates)
    remaining = max(num_updates - update, 0) * groups_per_update
    if mode == "async":
        min_update = max(update - lag.actor_updates, 0)
        deadline = min_update + lag.token_updates
        bound = (lag.token_updates - lag.actor_updates + 1) * groups_per_update
        ahead = observed.factor * (_groups_in_service(observed, groups_per_update) + lag.slack_groups)
        target = min(bound, max(groups_per_update + math.ceil(ahead), pool_updates * groups_per_update))
    else:
        period = lag.semi_async_batches
        start = update - update % period
        min_update, deadline = start, start + period - 1
        target = (deadline + 1 - update) * groups_per_update
    target = min(target, remaining)
    tickets = max(target - max(observed.outstanding_uses, 0), 0) // replay_ratio
    if remaining:  # an update takes distinct groups, however many uses each has left
        tickets = max(tickets, groups_per_update - max(observed.outstanding_tickets, 0))
    if observed.most_tickets is not None:
        tickets = min(tickets, observed.most_tickets)
    return Admission(tickets, min_update, deadline, target)


def _groups_in_service(observed: Observed, groups_per_update: int) -> int:
    """Groups the learner consumes while one is sampled; one update's worth until rates are known."""
    if observed.step_s <= 0 or observed.service_s <= 0:
        return groups_per_update
    return math.ceil(min(groups_per_update * observed.service_s / observed.step_s, _MOST_GROUPS))
