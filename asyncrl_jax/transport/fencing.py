"""One leader among any number of orchestrators: a lease with a fencing token that Redis itself checks on every write.

Invariants:
  * A token names one leadership and is never given again; a new one is given only once the old lease has run out.
  * A write that carries a token is refused, as a whole, unless the token is the current one. The check and the write
    are one script, so a leader that was paused at any instruction cannot write after its successor has begun.

The lease may run out by Redis's clock alone. A clock that jumps forward costs a change of leader, one that jumps back
a wait of one more lease; neither gives two effective leaders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import redis

from asyncrl_jax.transport.keys import Keys

_DEPOSED = "DEPOSED"

# Takes the lease's name off KEYS and the token off ARGV, so that the script that follows finds its own.
_FENCED = f"""
local fence_lease, fence_token = table.remove(KEYS), table.remove(ARGV)
if redis.call('HGET', fence_lease, 'token') ~= fence_token then
  return redis.error_reply('{_DEPOSED} another orchestrator leads')
end
"""

_NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
"""

# KEYS: lease. ARGV: holder, seconds. Returns the token, or nil if another holder's lease has not run out.
_ACQUIRE = (
    _NOW
    + """
local lease = redis.call('HMGET', KEYS[1], 'holder', 'expiry', 'seconds', 'token')
local function number(text) return tonumber(text or '0') or 0 end -- 0 for what is none
local holder, expiry, seconds = lease[1], number(lease[2]), number(lease[3])
-- Longer than it was given for: the clock has jumped back.
local runs = holder and expiry > now and expiry - now <= 2 * seconds
local token = lease[4]
if holder ~= ARGV[1] then
  if runs then return nil end
  local count = string.format('%.0f', number(redis.call('HGET', KEYS[1], 'count')) + 1)
  redis.call('HSET', KEYS[1], 'count', count)
  token = count .. ' ' .. ARGV[1]
end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'token', token, 'seconds', ARGV[2],
  'expiry', string.format('%.6f', now + tonumber(ARGV[2])))
return token
"""
)

# KEYS: lease. ARGV: holder. Gives the lease up; its token stays refused.
_RELEASE = """
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], 'holder', 'token', 'expiry', 'seconds')
return 1
"""


class Deposed(RuntimeError):
    """Another orchestrator leads: nothing of the refused write has happened."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fence:
    """One leadership's token."""

    lease: str  # key
    token: str


class Leadership:
    """One candidate."""

    def __init__(self, client: redis.Redis, keys: Keys, holder: str) -> None:
        """Args: holder: unique for ever, so that no two processes share a token; no space in it."""
        if " " in holder:
            raise ValueError(f"a space in {holder!r}")
        self._keys = keys
        self._holder = holder
        self._acquire: Any = client.register_script(_ACQUIRE)
        self._release: Any = client.register_script(_RELEASE)
        self._redis: Any = client

    def acquire(self, lease_s: float) -> Fence | None:
        """Takes or renews the lease; None while another holds it. Safe to repeat."""
        token = self._acquire(keys=[self._keys.leader], args=[self._holder, lease_s])
        return None if token is None else Fence(self._keys.leader, token.decode())

    def release(self) -> None:
        """Lets a standby take over at once."""
        self._release(keys=[self._keys.leader], args=[self._holder])

    def holder(self) -> str | None:
        """Who leads, or led last."""
        value = self._redis.hget(self._keys.leader, "holder")
        return None if value is None else value.decode()


def register(client: Any, script: str, fence: Fence | None) -> Any:
    """The script as a function of `keys` and `args`; with a fence it raises Deposed once the token is not current."""
    if fence is None:
        return client.register_script(script)
    fenced = client.register_script(_FENCED + script)

    def call(keys: Sequence[str], args: Sequence[Any]) -> Any:
        try:
            return fenced(keys=[*keys, fence.lease], args=[*args, fence.token])
        except redis.ResponseError as error:
            if _DEPOSED in str(error):
                raise Deposed(f"{fence.token}: {error}") from None
            raise

    return call
