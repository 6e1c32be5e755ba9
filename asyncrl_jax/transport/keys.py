"""Every name used in Redis, in one place.

Keys of one run share the prefix `<namespace>:`. The scripts build the name of a group stream from its prefix, so the
server must be one primary, not a cluster.
"""

from __future__ import annotations

import dataclasses
import zlib

TASK_CONSUMERS = "actors"  # consumer group of the tasks stream
GROUP_CONSUMERS = "learner"  # consumer group of every group stream


@dataclasses.dataclass(frozen=True)
class Keys:
    """Names of keys; each property says the Redis type."""

    namespace: str

    def _name(self, name: str) -> str:
        return f"{self.namespace}:{name}"

    # Ledger.

    @property
    def tickets(self) -> str:
        """Hash: live ticket id -> encoded ticket. A ticket is live exactly while it is here."""
        return self._name("live:tickets")

    @property
    def task_entries(self) -> str:
        """Hash: live ticket id -> its entry in the tasks stream, until its group is queued."""
        return self._name("live:tasks")

    @property
    def group_entries(self) -> str:
        """Hash: live ticket id -> "<partition> <entry id> <submission>" of its queued group."""
        return self._name("live:groups")

    @property
    def ledger(self) -> str:
        """Stream: one event for each ticket issued and for each outcome."""
        return self._name("ledger")

    @property
    def counts(self) -> str:
        """Hash: issued, each outcome, duplicates, letters_dropped. For display."""
        return self._name("counts")

    @property
    def rolled_back(self) -> str:
        """Set: tickets whose training a rollback has undone."""
        return self._name("rolled_back")

    @property
    def reserved(self) -> str:
        """Set: ticket ids handed out and not issued yet."""
        return self._name("reserved")

    @property
    def ticket_count(self) -> str:
        """Integer: ticket ids handed out so far."""
        return self._name("ticket_count")

    def settlement(self) -> list[str]:
        """KEYS[1] to KEYS[6] of every script that may settle a ticket; see `scripts.py`."""
        return [self.tickets, self.task_entries, self.group_entries, self.tasks, self.ledger, self.counts]

    # Streams.

    @property
    def tasks(self) -> str:
        """Stream: tickets for actors."""
        return self._name("tasks")

    @property
    def group_prefix(self) -> str:
        """Start of the name of every group stream; the partition number follows."""
        return self._name("groups:")

    def groups(self, partition: int) -> str:
        """Stream: groups of one partition."""
        return f"{self.group_prefix}{partition}"

    def payload(self, submission: str) -> str:
        """String: bytes of a submitted group, or a reference to them (`payloads.py`), until its ticket is settled."""
        return f"{self.group_prefix}payload:{submission}"

    @property
    def dead_size(self) -> str:
        """Integer: bytes of all dead letters."""
        return self._name("dead:size")

    def orders(self, start: str) -> str:
        """Stream: what process 0 of a learner of several processes tells the others; one a start of the learner."""
        return self._name(f"orders:{start}")

    @property
    def dead(self) -> str:
        """Stream: entries that could not be used, with their bytes and the reason."""
        return self._name("dead")

    # Control state.

    @property
    def epoch(self) -> str:
        """Integer: rises whenever the contents of Redis were lost."""
        return self._name("epoch")

    @property
    def learner(self) -> str:
        """JSON: LearnerState."""
        return self._name("learner")

    @property
    def versions(self) -> str:
        """Hash: version number -> JSON of WeightVersion."""
        return self._name("versions")

    @property
    def latest(self) -> str:
        """Integer: number of the version that actors load."""
        return self._name("latest")

    @property
    def lines(self) -> str:
        """Hash: line number -> JSON of Line."""
        return self._name("lines")

    @property
    def leases(self) -> str:
        """Sorted set: "<version> <holder>" by expiry, in unix seconds of the server."""
        return self._name("leases")

    @property
    def heartbeats(self) -> str:
        """Hash: "<role> <instance>" -> JSON payload."""
        return self._name("heartbeats")

    @property
    def heartbeat_expiry(self) -> str:
        """Sorted set: "<role> <instance>" by expiry, in unix seconds of the server."""
        return self._name("heartbeats:expiry")

    @property
    def redo(self) -> str:
        """Sorted set: JSON of what an update trains on, by update count."""
        return self._name("redo")

    @property
    def evaluation_requests(self) -> str:
        """Hash: evaluation id -> JSON of EvaluationRequest."""
        return self._name("evaluations:requests")

    @property
    def evaluation_queue(self) -> str:
        """Sorted set: ids without a result, by update count."""
        return self._name("evaluations:queue")

    @property
    def evaluation_holders(self) -> str:
        """Hash: evaluation id -> "<holder>" that works on it."""
        return self._name("evaluations:holders")

    @property
    def evaluation_expiry(self) -> str:
        """Sorted set: evaluation id by expiry of its holder's lease, in unix seconds of the server."""
        return self._name("evaluations:expiry")

    @property
    def evaluation_results(self) -> str:
        """Hash: evaluation id -> JSON of EvaluationResult."""
        return self._name("evaluations:results")

    @property
    def phase(self) -> str:
        """String: phase of the run."""
        return self._name("phase")

    @property
    def state(self) -> str:
        """Hash: name -> JSON; the orchestrator's memory."""
        return self._name("state")

    @property
    def settings(self) -> str:
        """Hash: role -> JSON; digests of the settings that it was last started with."""
        return self._name("settings")

    # Steering.

    @property
    def leader(self) -> str:
        """Hash: holder, token, expiry (unix seconds of the server), seconds and count of the leader's lease."""
        return self._name("leader")

    @property
    def directives(self) -> str:
        """JSON: Directives."""
        return self._name("directives")

    @property
    def operator(self) -> str:
        """Hash: name -> JSON; what a human has set."""
        return self._name("operator")

    @property
    def decisions(self) -> str:
        """Stream: what was decided, and why."""
        return self._name("decisions")

    @property
    def cuts(self) -> str:
        """Set: tickets whose late members are no longer waited for."""
        return self._name("cuts")

    @property
    def observations(self) -> str:
        """Stream: what actors saw, until the orchestrator has folded it."""
        return self._name("observations")


def partition_of(ticket_id: str, partitions: int) -> int:
    """The group stream that a ticket's group goes to, the same in every process."""
    return zlib.crc32(ticket_id.encode()) % partitions
