"""A Redis client that waits out an outage, says so, and gives up with one clear line."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from redis._parsers import Encoder
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from asyncrl_jax.config import RedisConfig

_log = logging.getLogger(__name__)
_ANSWER_S = 10.0
_READ_BYTES = 2**20  # taken from the socket at once: replies carry whole groups
_COPIED_BYTES = 6000  # smaller arguments of a command are joined
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_OLDEST_VERSION = (6, 2)  # XAUTOCLAIM's release; XPENDING with IDLE needs it too


class RedisUnavailable(RuntimeError):
    """Redis can't be used: unreachable for too long, wrong password, too old, or something else answers."""


def connect(config: RedisConfig, password: str | None, *, answer_s: float = _ANSWER_S) -> redis.Redis:
    """A checked client. Its commands are retried through an outage of up to `outage_s`, so a write may run twice: every
    write of this package is safe to repeat.

    Args:
      answer_s: a server that holds a reply for longer counts as unreachable; longer than any blocking read.

    Raises:
      RedisUnavailable: with one line that names the address and what is wrong.
      ValueError: without an address.
    """
    if not config.url:
        raise ValueError("--config.redis.url is empty: name a server, or start one with asyncrl-local")
    client = redis.Redis.from_url(
        config.url,
        password=password,
        protocol=2,  # one shape of replies on every server version
        socket_timeout=answer_s,
        socket_connect_timeout=answer_s,
        socket_read_size=_READ_BYTES,
        # hiredis would copy every argument into one buffer; this packer hands large ones to the socket as they are.
        command_packer=PythonRespSerializer(_COPIED_BYTES, Encoder("utf-8", "strict", decode_responses=False).encode),
        retry=_WaitOut(config.url, config.outage_s),
    )
    try:
        version = str(client.info("server").get("redis_version", ""))
    except redis.AuthenticationError as error:
        given = (
            "the password was refused"
            if password
            else "it wants a password: set redis.password_file or the environment's ASYNCRL_REDIS_PASSWORD"
        )
        raise RedisUnavailable(f"Redis at {config.url}: {given} ({error})") from None
    except redis.ResponseError as error:
        raise RedisUnavailable(f"Redis at {config.url} refused INFO: {error}") from None
    except redis.InvalidResponse as error:
        raise RedisUnavailable(f"what answers at {config.url} is not Redis: {error}") from None
    if parse_version(version) < _OLDEST_VERSION:
        raise RedisUnavailable(f"Redis at {config.url} is version {version or 'unknown'}; 6.2 or newer is needed")
    return client


def parse_version(text: str) -> tuple[int, ...]:
    """(7, 0, 15) of "7.0.15"; what isn't a number ends it."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


class _WaitOut(Retry):
    """Retries until an outage has lasted `outage_s`; logs when a wait starts, goes on, and ends."""

    def __init__(self, url: str, outage_s: float) -> None:
        super().__init__(NoBackoff(), retries=-1)
        self._url = url
        self._outage_s = outage_s
        self._lock = threading.Lock()
        self._calls = threading.local()  # depth: redis-py connects, with retries, within a retried command
        self._down_since: float | None = None  # unix seconds

    def __deepcopy__(self, memo: dict[int, Any]) -> _WaitOut:
        return self  # redis-py copies the retry into each connection; an outage is one for all of them

    def call_with_retry(
        self,
        do: Callable[[], Any],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> Any:
        depth = getattr(self._calls, "depth", 0)
        self._calls.depth = depth + 1
        try:
            result = self._retry(do, fail, is_retryable, with_failure_count)
        finally:
            self._calls.depth = depth
        if depth == 0:  # a connection alone proves little: the server may be loading its data
            self._note_up()
        return result

    def _retry(
        self,
        do: Callable[[], Any],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None,
        with_failure_count: bool,
    ) -> Any:
        failures = 0
        first_failure_at = 0.0
        while True:
            try:
                return do()
            except redis.AuthenticationError:
                raise
            except self._supported_errors as error:
                if is_retryable and not is_retryable(error):
                    raise
                failures += 1
                if failures == 1:
                    first_failure_at = time.monotonic()
                fail(error, failures) if with_failure_count else fail(error)
                waited_s = time.monotonic() - first_failure_at
                self._note_down(error)
                if waited_s >= self._outage_s:
                    message = f"Redis at {self._url} is unreachable for {waited_s:.0f} s: {error}"
                    raise RedisUnavailable(message) from error
                time.sleep(min(_FIRST_PAUSE_S * 2 ** min(failures - 1, 10), _LONGEST_PAUSE_S))

    def _note_down(self, error: Exception) -> None:
        with self._lock:
            if self._down_since is not None:
                return
            self._down_since = time.time()
        since = time.strftime("%H:%M:%S", time.localtime(self._down_since))
        _log.warning("waiting for Redis at %s since %s, %.0f s at most: %s", self._url, since, self._outage_s, error)

    def _note_up(self) -> None:
        if self._down_since is None:
            return
        with self._lock:
            since, self._down_since = self._down_since, None
        if since is not None:
            _log.warning("Redis at %s answers again after %.1f s", self._url, time.time() - since)
