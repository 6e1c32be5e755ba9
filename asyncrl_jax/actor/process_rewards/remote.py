"""A process reward model behind HTTP: all steps of one episode in one request.

    POST <reward.process.url>           {"steps": [{"before": "1 + 1 = ", "text": "2"}, …]}
    200                                 {"scores": [0.97, …]}

`before` is what stood between the step before and this one: the task, an answer of the environment, or nothing; joined
in order, `before` and `text` are the episode. Each score is a number in [0, 1]. With `reward.process.key_variable` set,
requests carry `Authorization: Bearer <key>`.

An answer that is late, too long, compressed, a redirect, or no such JSON is no score: it fails the episode, and is
never taken for a 0. What may be better a moment later is asked again: no connection, no answer in time, and status 429
or 5xx. Second requests come out of a budget, so that an endpoint in trouble doesn't get twice the load.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Sequence
from typing import Any

from asyncrl_jax.actor.process_rewards.steps import Step
from asyncrl_jax.actor.rewards import InvalidReward
from asyncrl_jax.actor.verifiers import ScoreFailed
from asyncrl_jax.config_environment import ProcessRewardConfig

RETRY_SHARE = 0.2  # second requests for each first one, beside `RETRY_BURST` at once
RETRY_BURST = 32.0
_BACKOFF_S = 0.1  # before the second request; doubles
_ANSWER_BYTES = 4096  # of an answer, beside `_SCORE_BYTES` a step
_SCORE_BYTES = 64
_AGAIN = frozenset({429, 500, 502, 503, 504})  # status after which another request may go well


class RemoteProcessModel:
    """See `ProcessRewardModel`.

    Invariants:
      * A request takes no longer than `timeout_s`, whatever the endpoint sends and however slowly.
      * No more of an answer is read than scores of so many steps can take.
      * The key goes to the configured host alone, and stands in no message.
    """

    def __init__(self, config: ProcessRewardConfig) -> None:
        """Takes the key out of the process's environment, so that no child inherits it.

        Raises:
          ValueError: if the variable of the key is not set, or holds what can't be one; or httpx is not installed.
        """
        try:
            import httpx
        except ImportError:
            raise ValueError(f"--config.reward.process.url={config.url}: needs httpx (the extra process)") from None

        logging.getLogger("httpx").setLevel(logging.WARNING)  # or there would be a line for every request
        headers = {"Accept-Encoding": "identity", "Accept": "application/json"}
        if config.key_variable:
            headers["Authorization"] = f"Bearer {_key(config.key_variable)}"
        self._errors = httpx.TransportError
        self._client = httpx.AsyncClient(
            headers=headers,
            follow_redirects=False,
            timeout=None,  # noqa: S113, one limit is on the whole request: `_ask`
            limits=httpx.Limits(max_connections=config.max_connections),
            trust_env=False,  # a proxy would see the key
        )
        self._config = config
        self._free = asyncio.Semaphore(config.max_connections)
        self._retries = RETRY_BURST

    async def score(self, steps: Sequence[Step]) -> Sequence[Any]:
        body = json.dumps({"steps": [{"before": step.before, "text": step.text} for step in steps]}).encode()
        self._retries = min(self._retries + RETRY_SHARE, RETRY_BURST)
        attempt = 1
        while True:
            try:
                async with self._free:  # waiting for it is no part of the request's time
                    return _scores(await self._ask(body, _ANSWER_BYTES + _SCORE_BYTES * len(steps)))
            except ScoreFailed:
                if attempt == self._config.max_attempts or self._retries < 1:
                    raise
                self._retries -= 1
            await asyncio.sleep(_BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            attempt += 1

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, body: bytes, most_bytes: int) -> bytes:
        limit_s = self._config.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._answer(body, most_bytes)
        except TimeoutError:
            raise ScoreFailed("timeout", f"no answer within {limit_s:g} s") from None
        except self._errors as error:
            raise ScoreFailed("no_connection", type(error).__name__) from None

    async def _answer(self, body: bytes, most_bytes: int) -> bytes:
        content = {"Content-Type": "application/json"}
        async with self._client.stream("POST", self._config.url, content=body, headers=content) as answer:
            if answer.status_code in _AGAIN:
                raise ScoreFailed("refused", f"status {answer.status_code}")
            if answer.status_code != 200:
                reason = "redirected" if answer.is_redirect else "refused"
                raise InvalidReward(reason, f"status {answer.status_code}")
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise InvalidReward("compressed", "the answer has a Content-Encoding, which was not asked for")
            parts, size = [], 0
            self._client.cookies.clear()
            async for part in answer.aiter_raw():
                size += len(part)
                if size > most_bytes:
                    raise InvalidReward("too_long", f"an answer of more than {most_bytes} bytes")
                parts.append(part)
            return b"".join(parts)


def _scores(answer: bytes) -> list[Any]:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError) as error:  # its text would repeat the answer
        raise InvalidReward("not_json", f"{type(error).__name__} in {len(answer)} bytes") from None
    scores = found.get("scores") if isinstance(found, dict) else None
    if not isinstance(scores, list):
        raise InvalidReward("no_scores", f'no object with a list "scores", but {type(found).__name__}')
    return scores


def _key(variable: str) -> str:
    key = os.environ.pop(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        what = "not set" if not key else "no key: it has characters that no header can carry"
        raise ValueError(f"--config.reward.process.key_variable={variable}: the variable is {what}")
    return key
