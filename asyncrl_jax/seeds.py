"""Seeds derived from names, the same in every process."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**31) from any printable parts, so that every use of randomness has its own stream."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def member_seed(ticket_seed: int, member: int, attempt: int) -> int:
    """The seed of one attempt, counted from 1, at one member of a ticket's group."""
    return derive_seed(ticket_seed, "member", member, attempt)
