"""What all episodes of an actor host share besides its engine: scoring processes, and the endpoint for agents."""

from __future__ import annotations

from asyncrl_jax.actor.chat.endpoint import Endpoint
from asyncrl_jax.actor.verifiers import VerifierPool
from asyncrl_jax.config_environment import EnvironmentConfig


class Services:
    """Started when first used, ended by `close`."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.verifiers = VerifierPool(config.score_processes, config.score_timeout_s)
        self.endpoint = Endpoint(config.endpoint_host, config.endpoint_port)

    async def close(self) -> None:
        """Ends processes, conversations and the server."""
        await self.endpoint.close()
        await self.verifiers.close()
