"""absl flags made from the config tree: one `--config.<dotted.name>` for every leaf, whose help is the leaf's meaning.

Settings are taken in this order, later ones winning: the defaults, then `--preset` or `--config_file`, then flags given
on the command line. Only launchers use this file; everything below them receives a `Config`.
"""

from __future__ import annotations

import difflib
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags

from asyncrl_jax.config import Config, flatten, leaf_types, override
from asyncrl_jax.config_file import read_config
from asyncrl_jax.config_hf import read_hf_config
from asyncrl_jax.config_model import RUN_SETTINGS
from asyncrl_jax.exit_codes import USER_ERROR
from asyncrl_jax.presets import PRESETS, preset

_PREFIX = "config."
_DEFINITIONS: dict[type, Callable[..., Any]] = {
    bool: flags.DEFINE_boolean,
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    str: flags.DEFINE_string,
}


class _TupleParser(flags.ArgumentParser[tuple[Any, ...]]):
    """Comma list of numbers, `1,0.5,2`; empty for an empty tuple."""

    def __init__(self, element: type) -> None:
        self.element = element
        self.syntactic_help = f"a comma list of {element.__name__}s"

    def parse(self, argument: str | tuple[Any, ...]) -> tuple[Any, ...]:
        if isinstance(argument, tuple):
            return argument
        try:
            return tuple(self.element(part.strip()) for part in argument.split(",") if part.strip())
        except ValueError as error:
            raise ValueError(f"{argument!r} is not {self.syntactic_help}") from error

    def flag_type(self) -> str:
        return f"comma list of {self.element.__name__}s"


class _TupleSerializer(flags.ArgumentSerializer[tuple[Any, ...]]):
    def serialize(self, value: tuple[Any, ...]) -> str:
        return ",".join(str(element) for element in value)


def define(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines `--preset`, `--config_file` and a `--config.*` flag for every leaf of `Config`."""
    common: dict[str, Any] = {"flag_values": flag_values, "module_name": sys.argv[0]}
    flags.DEFINE_enum("preset", None, list(PRESETS), "Named starting point for the config.", **common)
    flags.DEFINE_string("config_file", None, "JSON file of settings, as a run's config.json.", **common)
    define_settings(Config, _PREFIX, flag_values)


def define_settings(cls: type, prefix: str, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines a flag `--<prefix><dotted.name>` for every leaf of a settings tree."""
    common: dict[str, Any] = {"flag_values": flag_values, "module_name": sys.argv[0]}
    for name, (kind, default, meaning) in leaf_types(cls).items():
        flag = prefix + name
        if typing.get_origin(kind) is tuple:
            parser = _TupleParser(typing.get_args(kind)[0])
            flags.DEFINE(parser, flag, default, meaning, serializer=_TupleSerializer(), **common)
        else:
            _DEFINITIONS[kind](flag, default, meaning, **common)


def changes(flag_values: flags.FlagValues = flags.FLAGS, cls: type = Config, prefix: str = _PREFIX) -> dict[str, Any]:
    """Leaves of a settings tree that were given as flags, by dotted name."""
    return {name: flag_values[prefix + name].value for name in leaf_types(cls) if flag_values[prefix + name].present}


def config_from_flags(flag_values: flags.FlagValues = flags.FLAGS) -> Config:
    """The validated config that the parsed flags describe. `--config.model.checkpoint` sets the model's settings too.

    Raises:
      ValueError: for a setting that is refused, or a file that can't be read.
    """
    if flag_values.preset and flag_values.config_file:
        raise ValueError("--preset and --config_file: give one of them, a file already holds every setting")
    base = Config()
    if flag_values.preset:
        base = preset(flag_values.preset)
    if flag_values.config_file:
        base = read_config(Path(flag_values.config_file))
    given = changes(flag_values)
    if directory := given.get("model.checkpoint"):
        given = _model_settings(directory) | given
    config: Config = override(base, given)
    return config


def _model_settings(directory: str) -> dict[str, Any]:
    """Leaves of `model` that a checkpoint states: its function, and the longest sequence."""
    try:
        leaves = flatten(read_hf_config(directory), "model.")
    except ValueError as error:
        raise ValueError(f"--config.model.checkpoint={directory}: {error}") from error
    return {name: value for name, value in leaves.items() if name.removeprefix("model.") not in RUN_SETTINGS}


def exit_with(message: str, code: int = USER_ERROR) -> NoReturn:
    """Ends the process with one line on stderr, without a traceback."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(code)


def check_output(path: str) -> None:
    """Looks at --output before the work is done.

    Raises:
      ValueError: if there is no directory to write it to.
    """
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--output={path}: there is no directory {Path(path).absolute().parent}")


def parse_words(argv: Sequence[str]) -> list[str]:
    """Parses the command line of a binary without settings; a mistake ends the process with one line and exit code 2.

    Returns:
      The name of the program and what is no flag.
    """
    app.define_help_flags()
    try:
        return flags.FLAGS(list(argv))
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(flags.FLAGS), n=3)
        hint = f"did you mean --{', --'.join(near)}?" if near else "see --help"
        exit_with(f"unknown flag --{error.flagname}: {hint}")
    except flags.Error as error:
        exit_with(str(error))


def parse(argv: Sequence[str]) -> list[str]:
    """As `parse_words`, for a binary with settings, which are checked, and without words."""
    rest = parse_words(argv)
    try:
        if len(rest) > 1:
            raise ValueError(f"unexpected argument {rest[1]!r}: settings are given as --name=value")
        config_from_flags()
    except ValueError as error:
        exit_with(str(error))
    return rest


def run(main: Callable[[], int]) -> None:
    """Body of a launcher: defines and parses the flags, calls `main` and exits with the code that it returns."""
    define()
    _show_own(main)
    app.run(lambda _argv: main(), flags_parser=parse)


def run_words(main: Callable[[list[str]], int | None]) -> None:
    """Body of a launcher without settings: as `run`, and `main` is given the words that are no flags."""
    _show_own(main)
    app.run(main, flags_parser=parse_words)


def _show_own(main: Callable[..., Any]) -> None:
    """Makes --help show a launcher's own flags."""
    for flag in flags.FLAGS.get_key_flags_for_module(main.__module__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
