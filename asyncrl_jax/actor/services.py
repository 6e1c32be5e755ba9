"""What all episodes of an actor host share besides its engine: processes of scorers and environments, and the
endpoint for agents."""

from __future__ import annotations

import collections
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from asyncrl_jax.actor.chat.endpoint import Endpoint
from asyncrl_jax.actor.envs.isolated import EnvironmentDied, EnvironmentProcesses, IsolatedTasks, IsolationLimits, Known
from asyncrl_jax.actor.envs.text import TextEnvironmentFactory
from asyncrl_jax.actor.tools.base import Tool
from asyncrl_jax.actor.tools.mcp_client import McpServer, mcp_tools
from asyncrl_jax.actor.verifiers import VerifierPool
from asyncrl_jax.config_environment import EnvironmentConfig

log = logging.getLogger(__name__)


class Services:
    """Started when first used, ended by `close`."""

    def __init__(self, config: EnvironmentConfig, *, plays: bool = True) -> None:
        """Args: plays: episodes; where none is, no process is worth its start."""
        self.verifiers = VerifierPool(config.score_processes, config.score_timeout_s)
        self.endpoint = Endpoint(config.endpoint_host, config.endpoint_port)
        self.tool_outcomes: collections.Counter[str] = collections.Counter()  # calls by "tool/outcome"
        self._config = config
        self._plays = plays
        self._processes: list[EnvironmentProcesses] = []
        self._reports: list[Callable[[], Mapping[str, float]]] = []
        self._closing: list[Callable[[], Awaitable[None]]] = []

    def mcp_tools(self, addresses: Sequence[str], timeout_s: float) -> dict[str, Tool]:
        """The tools of MCP servers, by name; see `mcp_client`."""
        servers = [McpServer(address, timeout_s) for address in addresses]
        for server in servers:
            self.closes(server.close)
        return mcp_tools(servers)

    def isolated(self, inner: TextEnvironmentFactory) -> TextEnvironmentFactory:
        """The environment in processes of its own, if the config has any."""
        if not (self._plays and self._config.processes):
            return inner
        return IsolatedTasks(inner, self.environment_processes(inner.name, inner.num_levels))

    def environment_processes(self, name: str, num_levels: int) -> EnvironmentProcesses:
        """Processes of the config's number for an environment of it; none is started yet."""
        config = self._config
        # Sooner than a call's limit: what stands still holds up all calls of its process.
        limits = IsolationLimits(config.start_timeout_s, config.call_timeout_s / 2, config.process_leak_bytes)
        processes = EnvironmentProcesses(Known(name, num_levels, config.arguments), config.processes, limits)
        self._processes.append(processes)
        self.closes(processes.close)
        return processes

    async def start(self) -> None:
        """Starts the processes of environments, so that no episode has to wait for them. One that does not come up is
        tried again when an episode wants it."""
        for processes in self._processes:
            try:
                await processes.start()
            except EnvironmentDied as error:
                log.error("%s", error)

    def reports(self, values: Callable[[], Mapping[str, float]]) -> None:
        """Adds what `values` returns to each heartbeat."""
        self._reports.append(values)

    def closes(self, close: Callable[[], Awaitable[None]]) -> None:
        """Calls `close` when the actor ends."""
        self._closing.append(close)

    def values(self) -> Mapping[str, float]:
        """For heartbeat and metrics: counts since the start, and what was asked to be reported."""
        values: dict[str, float] = {f"tools/{name}": count for name, count in self.tool_outcomes.items()}
        for processes in self._processes:
            values |= vars(processes.counters)
        for report in self._reports:
            values |= report()
        return values

    async def close(self) -> None:
        """Ends processes, conversations and the server."""
        await self.endpoint.close()
        await self.verifiers.close()
        for close in self._closing:
            await close()
