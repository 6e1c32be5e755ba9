"""A role at work: it says what it was started with, and names keys of Redis that it cannot work with."""

from __future__ import annotations

import logging
from collections.abc import Callable

import redis

from asyncrl_jax.flags import exit_with
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.shared_settings import SharedSettings
from asyncrl_jax.transport.wrong_types import explained

from .role import Role

log = logging.getLogger(__name__)


def play(role: Role, body: Callable[[], int]) -> int:
    """The role's own part; keys of Redis that hold what they cannot end it with one line that names them."""
    client, keys = connect(role.config.redis, role.password), Keys(role.config.redis.namespace)
    try:
        for differing in SharedSettings(client, keys).state(role.name, role.config):
            log.warning("%s", differing)
        return body()
    except redis.ResponseError as error:
        if why := explained(error, client, keys):
            exit_with(why)
        raise
    finally:
        client.close()
