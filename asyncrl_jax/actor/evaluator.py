"""Evaluations: held-out tasks, solved by one exact version that no refresh can change, on an engine of their own."""

from __future__ import annotations

import asyncio
import collections
import logging

from asyncrl_jax.actor.engines.base import Engine
from asyncrl_jax.actor.envs.base import EnvironmentMaker
from asyncrl_jax.actor.episode import EpisodeConfig, EpisodeFailed, run_episode
from asyncrl_jax.actor.refresh import Loader
from asyncrl_jax.actor.renewal import renewed
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.transport.control import Control
from asyncrl_jax.types import EvaluationRequest, EvaluationResult, Task, Trajectory

log = logging.getLogger(__name__)

_POLL_S = 0.5  # between looks for a request
_LEASE_S = 15.0  # of a request; another actor takes it over this long after this one died


class Evaluator:
    """Works on one evaluation at a time, beside the training episodes.

    Invariant: task i of level l is sampled with the same seed for every version, so that they are compared on equal
    terms.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        control: Control,
        environments: EnvironmentMaker,
        config: EpisodeConfig,
        *,
        holder: str,
        temperature: float,
        max_attempts: int,
    ) -> None:
        """Args: engine: not the one that samples for training. holder: name of the claims, of this actor alone."""
        self.num_running = 0  # tasks of the evaluation under way
        self.draining = False  # takes up no further one
        self._engine = engine
        self._loader = loader
        self._control = control
        self._environments = environments
        self._config = config
        self._holder = holder
        self._temperature = temperature
        self._max_attempts = max_attempts

    async def run(self) -> None:
        """Serves requests for as long as it is not cancelled."""
        while True:
            if self.draining:
                await asyncio.sleep(_POLL_S)
                continue
            request = await asyncio.to_thread(self._control.claim_evaluation, self._holder, _LEASE_S)
            if request is None or not await self._serve(request):
                await asyncio.sleep(_POLL_S)

    async def _serve(self, request: EvaluationRequest) -> bool:
        """Evaluates and reports. False if the version could not be loaded; the request is then asked for again."""

        def renew() -> None:
            self._control.renew_evaluation(request.evaluation_id, self._holder, _LEASE_S)

        async with renewed(renew, _LEASE_S / 3):
            version = await asyncio.to_thread(self._control.version, request.version)
            if version is None:
                log.error("evaluation %s: v%d is not known any more", request.evaluation_id, request.version)
                return False
            if self._engine.version != version.number and not await self._loader.load(version):
                return False
            result = await self._evaluate(request)
        await asyncio.to_thread(self._control.report_evaluation, result)
        return True

    async def _evaluate(self, request: EvaluationRequest) -> EvaluationResult:
        levels = range(1, len(self._config.environment.level_weights) + 1)
        keys = [(level, index) for level in levels for index in range(request.num_tasks_per_level)]
        self.num_running = len(keys)
        try:
            async with asyncio.TaskGroup() as playing:
                tasks = [playing.create_task(self._play(request, level, index)) for level, index in keys]
        finally:
            self.num_running = 0
        num_tasks: collections.Counter[int] = collections.Counter()
        num_successes: collections.Counter[int] = collections.Counter(dict.fromkeys(levels, 0))
        reward = 0.0
        for (level, _), task in zip(keys, tasks, strict=True):
            trajectory = task.result()
            if trajectory is not None:
                assert set(trajectory.policy_versions.tolist()) <= {-1, request.version}
                num_tasks[level] += 1
                num_successes[level] += trajectory.success
                reward += trajectory.reward
        return EvaluationResult(
            evaluation_id=request.evaluation_id,
            version=request.version,
            update=request.update,
            num_tasks=dict(num_tasks),
            num_successes=dict(num_successes),
            mean_reward=reward / max(num_tasks.total(), 1),
        )

    async def _play(self, request: EvaluationRequest, level: int, index: int) -> Trajectory | None:
        """One task; None, and no part of the result, if its environment failed in every attempt."""
        task = Task(self._config.environment.name, "heldout", level, index)
        for _ in range(self._max_attempts):
            try:
                return await run_episode(
                    self._engine,
                    self._environments(),
                    task,
                    seed=derive_seed(request.seed, "evaluation", level, index),
                    temperature=self._temperature,
                    config=self._config,
                )
            except EpisodeFailed as error:
                log.warning("evaluation %s, level %d, task %d: %s", request.evaluation_id, level, index, error)
        return None
