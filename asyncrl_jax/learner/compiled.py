"""A jitted function that counts its compilations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


class CompiledStep:
    """A jitted function that counts how often it was traced; the count says whether shapes ever changed."""

    def __init__(self, function: Callable[..., Any], **jit_options: Any):
        self.num_traces = 0

        def counted(*args: Any) -> Any:
            self.num_traces += 1
            return function(*args)

        self._jitted = jax.jit(counted, **jit_options)

    def lower(self, *args: Any) -> Any:
        """As of `jax.jit`: for what the compiler says about memory."""
        return self._jitted.lower(*args)

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)
