"""What process 0 of a learner tells its other processes to do, in order: a stream that it alone writes."""

from __future__ import annotations

import json
from typing import Any

import redis

from asyncrl_jax.transport.keys import Keys

_LONGEST_BLOCK_MS = 5000  # below the client's socket timeout, so that a hung server is noticed


class Orders:
    """The orders of one start of the learner. Each is numbered; a gap or a repetition is an error and not guessed at.

    Old orders are dropped: no process is far behind, since all go through the same collectives.
    """

    def __init__(self, client: redis.Redis, keys: Keys, start: str) -> None:
        """Args: start: names this start of the learner, so that orders of an earlier one are never followed."""
        self._redis: Any = client  # Any: redis-py types a reply for all client settings at once
        self._stream = keys.orders(start)
        self._number = 0
        self._last_id = "0-0"

    def give(self, order: dict[str, Any]) -> None:
        """Appends an order (process 0)."""
        self._number += 1
        with self._redis.pipeline(transaction=True) as pipe:
            # The number is the entry's id, so an order that is sent again after a lost reply is refused, not repeated.
            pipe.xadd(self._stream, {"order": json.dumps(order)}, id=f"{self._number}-0", maxlen=1024, approximate=True)
            pipe.expire(self._stream, 7 * 24 * 3600)
            try:
                pipe.execute()
            except redis.ResponseError as error:
                if "equal or smaller" not in str(error):
                    raise

    def take(self, block_ms: int) -> dict[str, Any] | None:
        """The next order, or None if there is none after `block_ms`.

        Raises:
          RuntimeError: if an order was missed, as when Redis lost its data.
        """
        answer = self._redis.xread({self._stream: self._last_id}, count=1, block=min(block_ms, _LONGEST_BLOCK_MS))
        if not answer:
            return None
        entry_id, fields = answer[0][1][0]
        number = int(entry_id.decode().split("-")[0])
        if number != self._number + 1:
            raise RuntimeError(f"order {self._number + 1} is missing: the next one found is {number}")
        self._number, self._last_id = number, entry_id.decode()
        return json.loads(fields[b"order"])
