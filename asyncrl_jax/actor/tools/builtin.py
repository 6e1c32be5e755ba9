"""The tools that come with the package, by the name that `--config.tools.names` carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl_jax.actor.tools.base import Tool, ToolBroken, ToolFailed
from asyncrl_jax.actor.tools.calculator import calculate
from asyncrl_jax.actor.tools.sandbox import Limits, Sandbox, SandboxUnavailable
from asyncrl_jax.config_environment import ToolsConfig


def _one_text(name: str, meaning: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string", "description": meaning}}, "required": [name]}


class Calculator:
    """Exact arithmetic."""

    name = "calculator"
    description = "Value of an arithmetic expression of numbers, + - * / // % ** and parentheses."
    parameters: Mapping[str, Any] = _one_text("expression", "for example (2 + 3) * 4")
    limits_itself = True

    async def call(self, arguments: Mapping[str, Any]) -> str:
        try:
            return str(calculate(arguments["expression"]))
        except ValueError as error:
            raise ToolFailed(str(error)) from None


class Python:
    """Python in a sandbox; every call is a fresh process."""

    name = "python"
    description = "Runs a Python program (standard library only) and returns what it prints."
    parameters: Mapping[str, Any] = _one_text("code", "a whole program; print what you want to see")
    limits_itself = True

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def call(self, arguments: Mapping[str, Any]) -> str:
        try:
            run = await self._sandbox.run(arguments["code"])
        except SandboxUnavailable as error:
            raise ToolBroken(str(error)) from error
        if run.succeeded:
            return run.stdout
        reason = {
            "timeout": f"stopped after {self._sandbox.limits.wall_s:g} s",
            "output_limit": f"stopped: more than {self._sandbox.limits.output_bytes} bytes of output",
            "exited": f"exit code {run.exit_code}",
        }[run.ending]
        outcome = "failed" if run.ending == "exited" else run.ending
        raise ToolFailed(f"{reason}\n{run.stdout}{run.stderr}".strip(), outcome)


def make_sandbox(config: ToolsConfig) -> Sandbox:
    """The sandbox of the config.

    Raises:
      SandboxUnavailable: if bubblewrap is asked for and not there.
    """
    limits = Limits(
        wall_s=config.sandbox_wall_s,
        cpu_s=max(1, round(config.sandbox_wall_s)),
        memory_bytes=config.sandbox_memory_bytes,
        processes=config.sandbox_processes,
    )
    return Sandbox("process" if config.sandbox == "process" else "bubblewrap", limits)


TOOLS: dict[str, Callable[[ToolsConfig], Tool]] = {
    "calculator": lambda _: Calculator(),
    "python": lambda config: Python(make_sandbox(config)),
}


def make_tools(names: Sequence[str], config: ToolsConfig) -> dict[str, Tool]:
    """Tools by name.

    Raises:
      ValueError: for a name that is not known.
      SandboxUnavailable: see `make_sandbox`.
    """
    for name in names:
        if name not in TOOLS:
            raise ValueError(f"--config.tools.names={','.join(names)}: no tool {name!r}; known: {', '.join(TOOLS)}")
    return {name: TOOLS[name](config) for name in names}
