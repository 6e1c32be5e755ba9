"""Environments by the name that `--config.environment.name` and `Task.environment` carry."""

from __future__ import annotations

import importlib.util

from asyncrl_jax.actor.chat.formats import chat_format
from asyncrl_jax.actor.chat.messages import read_opening, read_variants
from asyncrl_jax.actor.envs.agent import AgentEnvironments, AgentProgram, agent_program
from asyncrl_jax.actor.envs.arithmetic import Arithmetic
from asyncrl_jax.actor.envs.base import EnvironmentMaker
from asyncrl_jax.actor.envs.chat import ChatEnvironments
from asyncrl_jax.actor.envs.text import TextEnvironmentFactory
from asyncrl_jax.actor.envs.third_party import third_party_factory
from asyncrl_jax.actor.services import Services
from asyncrl_jax.actor.tools.builtin import make_sandbox, make_tools
from asyncrl_jax.actor.tools.sandbox import SandboxUnavailable
from asyncrl_jax.config import Config

# Kind of environment to a package that it needs, and what installs that.
_NEEDS = {
    "agent": ("fastapi", "'asyncrl-jax[agents]'"),
    "gymnasium": ("gymnasium", "'asyncrl-jax[gym]'"),
    "math": ("math_verify", "'asyncrl-jax[math]'"),
    "openenv": ("websockets", "'asyncrl-jax[openenv]'"),
    "reasoning_gym": ("reasoning_gym", "--no-deps reasoning-gym"),
    "verifiers": ("verifiers", "'asyncrl-jax[verifiers]'"),
}


def make_environments(config: Config, services: Services | None = None) -> EnvironmentMaker:
    """The environment of a run: called, it gives one for one episode.

    Args:
      config: of the run.
      services: what episodes share; None where none is played.

    Raises:
      ValueError: for a name, tokenizer or tool that is not known, a package that is not installed, a sandbox that
        can't be had, tokens that the model does not know, or levels that do not exist; it names the setting.
    """
    environments = _make(config, services or Services(config.environment, plays=False))
    if config.model.vocab_size < environments.vocab_size:
        raise ValueError(
            f"--config.model.vocab_size={config.model.vocab_size}: environment {config.environment.name} has "
            f"{environments.vocab_size} tokens; set that many, or more"
        )
    if len(config.environment.level_weights) > environments.num_levels:
        raise ValueError(
            f"--config.environment.level_weights={config.environment.level_weights}: environment "
            f"{config.environment.name} has {environments.num_levels} levels; name a weight for each, as for one level "
            "--config.environment.level_weights=1 --config.environment.demonstrated_levels=1"
        )
    return environments


def _make(config: Config, services: Services) -> EnvironmentMaker:
    kind, _, rest = config.environment.name.partition(":")
    _check_packages(kind, config)
    if kind in (Arithmetic.name, "agent", "verifiers"):
        _check_without_tools(config)
    if kind == Arithmetic.name and not rest:
        return Arithmetic
    if kind == "agent":
        return _driving(agent_program(rest), config, services)
    if kind == "verifiers":
        from asyncrl_jax.actor.envs.verifiers_env import verifiers_program

        levels = len(config.environment.level_weights)
        return _driving(verifiers_program(rest, levels, config.environment.arguments, services), config, services)
    try:
        factory = _text_factory(kind, rest, config, services)
        tools = make_tools(config.tools.names, config.tools) | services.mcp_tools(
            config.tools.mcp, config.tools.timeout_s
        )
    except SandboxUnavailable as error:
        raise ValueError(f"--config.tools.sandbox={config.tools.sandbox}: {error}") from error
    chat = chat_format(config.environment.tokenizer)
    opening = read_opening(config.environment.opening) if config.environment.opening else ()
    variants = read_variants(config.environment.prompt_variants) if config.environment.prompt_variants else ()
    return ChatEnvironments(
        factory,
        chat,
        tools,
        config.tools,
        turn_tokens=config.environment.turn_tokens,
        opening=opening,
        variants=variants,
        outcomes=services.tool_outcomes,
    )


def _check_packages(kind: str, config: Config) -> None:
    needs = [(f"environment.name={config.environment.name}", *_NEEDS[kind])] if kind in _NEEDS else []
    if config.environment.tokenizer != "byte":
        needs.append((f"environment.tokenizer={config.environment.tokenizer}", "transformers", "'asyncrl-jax[hf]'"))
    if config.tools.mcp:
        needs.append((f"tools.mcp={','.join(config.tools.mcp)}", "mcp", "'asyncrl-jax[mcp]'"))
    for setting, package, requirement in needs:
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--config.{setting}: needs pip install {requirement}")


def _check_without_tools(config: Config) -> None:
    for name, tools in {"names": config.tools.names, "mcp": config.tools.mcp}.items():
        if tools:
            raise ValueError(
                f"--config.tools.{name}={','.join(tools)}: empty: {config.environment.name} brings its own tools, and "
                "would not offer them"
            )


def _driving(program: AgentProgram, config: Config, services: Services) -> EnvironmentMaker:
    levels, chat = len(config.environment.level_weights), chat_format(config.environment.tokenizer)
    return AgentEnvironments(program, levels, chat, services.endpoint, config.environment.turn_tokens)


def _text_factory(kind: str, rest: str, config: Config, services: Services) -> TextEnvironmentFactory:
    # Imported when asked for: each brings a package of its own.
    if kind == "code" and not rest:
        from asyncrl_jax.actor.envs.code import CodeTasks

        return CodeTasks(make_sandbox(config.tools))
    if kind == "reasoning_gym":
        from asyncrl_jax.actor.envs.reasoning import ReasoningTasks

        return ReasoningTasks(rest, services.verifiers)
    if kind == "math":
        from asyncrl_jax.actor.envs.questions import QuestionTasks

        return QuestionTasks(rest, services.verifiers)
    if kind == "openenv":
        from asyncrl_jax.actor.envs.openenv import OpenEnvTasks

        sessions = OpenEnvTasks(rest, len(config.environment.level_weights))
        services.closes(sessions.close)
        return sessions
    third_party = third_party_factory(
        config.environment.name, len(config.environment.level_weights), config.environment.arguments
    )
    if third_party is not None:
        return services.isolated(third_party)
    raise ValueError(
        f"--config.environment.name={config.environment.name}: not known; use arithmetic, code, math:<file>, "
        "reasoning_gym:<data set>, function:<module>:<name>, text:<module>:<name>, agent:<module>:<name>, "
        "gymnasium:<id>, verifiers:<id> or openenv:<url>"
    )
