"""What all episodes of an actor host share besides its engine: processes of scorers and environments, and the
endpoint for agents."""

from __future__ import annotations

import collections
from collections.abc import Awaitable, Callable, Mapping, Sequence

from asyncrl_jax.actor.chat.endpoint import Endpoint
from asyncrl_jax.actor.envs.isolated import IsolatedTasks, IsolationLimits
from asyncrl_jax.actor.envs.text import TextEnvironmentFactory
from asyncrl_jax.actor.tools.base import Tool
from asyncrl_jax.actor.tools.mcp_client import McpServer, mcp_tools
from asyncrl_jax.actor.verifiers import VerifierPool
from asyncrl_jax.config_environment import EnvironmentConfig


class Services:
    """Started when first used, ended by `close`."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.verifiers = VerifierPool(config.score_processes, config.score_timeout_s)
        self.endpoint = Endpoint(config.endpoint_host, config.endpoint_port)
        self.tool_outcomes: collections.Counter[str] = collections.Counter()  # calls by "tool/outcome"
        self._config = config
        self._isolated: list[IsolatedTasks] = []
        self._closing: list[Callable[[], Awaitable[None]]] = []

    def mcp_tools(self, addresses: Sequence[str], timeout_s: float) -> dict[str, Tool]:
        """The tools of MCP servers, by name; see `mcp_client`."""
        servers = [McpServer(address, timeout_s) for address in addresses]
        for server in servers:
            self.closes(server.close)
        return mcp_tools(servers)

    def isolated(self, inner: TextEnvironmentFactory) -> TextEnvironmentFactory:
        """The environment in processes of its own, if the config has any."""
        if not self._config.processes:
            return inner
        # Sooner than a call's limit: what stands still holds up all calls of its process.
        limits = IsolationLimits(self._config.call_timeout_s / 2, self._config.process_leak_bytes)
        self._isolated.append(IsolatedTasks(inner, self._config.processes, limits))
        self.closes(self._isolated[-1].close)
        return self._isolated[-1]

    def closes(self, close: Callable[[], Awaitable[None]]) -> None:
        """Calls `close` when the actor ends."""
        self._closing.append(close)

    def values(self) -> Mapping[str, int]:
        """Counts since the start, for metrics."""
        counts = {f"tools/{name}": count for name, count in self.tool_outcomes.items()}
        for isolated in self._isolated:
            counts |= vars(isolated.counters)
        return counts

    async def close(self) -> None:
        """Ends processes, conversations and the server."""
        await self.endpoint.close()
        await self.verifiers.close()
        for close in self._closing:
            await close()
