import json
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags as absl_flags

from asyncrl_jax import flags
from asyncrl_jax.config import Config, flatten, leaf_types, to_json
from asyncrl_jax.config_file import read_config, write_config
from asyncrl_jax.presets import PRESETS, preset


def parse(*arguments: str) -> Config:
    values = absl_flags.FlagValues()
    flags.define(values)
    values(["program", *arguments])
    return flags.config_from_flags(values)


def test_every_leaf_has_a_flag_whose_help_is_its_meaning():
    values = absl_flags.FlagValues()
    flags.define(values)
    for name, (_, default, meaning) in leaf_types().items():
        assert values[f"config.{name}"].help.startswith(meaning)
        assert values[f"config.{name}"].value == default


def test_no_flag_gives_the_defaults():
    assert parse() == Config()


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--config.mode=sync", "mode", "sync"),
        ("--config.seed=3", "seed", 3),
        ("--config.learner.learning_rate=1e-4", "learner.learning_rate", 1e-4),
        ("--config.reward.shuffle", "reward.shuffle", True),
        ("--noconfig.reward.shuffle", "reward.shuffle", False),
        ("--config.environment.level_weights=1,0.5,0", "environment.level_weights", (1.0, 0.5, 0.0)),
        ("--config.environment.demonstrated_levels=2", "environment.demonstrated_levels", (2,)),
        ("--config.environment.demonstrated_levels=", "environment.demonstrated_levels", ()),
    ],
)
def test_a_flag_sets_its_leaf_with_the_leafs_type(argument, name, value):
    found = flatten(parse(argument))[name]
    assert (found, type(found)) == (value, type(value))


def test_flags_win_over_the_preset_and_over_the_file(tmp_path):
    assert parse("--preset=replay", "--config.learner.replay_ratio=3").learner.replay_ratio == 3
    write_config(tmp_path / "config.json", preset("replay"))
    config = parse(f"--config_file={tmp_path / 'config.json'}", "--config.seed=5")
    assert (config.learner.replay_ratio, config.seed) == (2, 5)


def test_a_default_given_as_a_flag_wins_over_the_preset():
    assert parse("--preset=replay", "--config.learner.replay_ratio=1").learner.replay_ratio == 1


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name):
    assert isinstance(preset(name), Config)


def test_preset_replay_allows_a_pool_of_20_updates():
    lag = preset("replay").effective_lag
    assert (lag.actor_updates, lag.token_updates) == (4, 24)
    assert preset("replay").pool.size_updates == 20


def test_a_config_file_round_trips(tmp_path):
    config = parse("--config.environment.level_weights=1,2", "--config.environment.demonstrated_levels=1")
    write_config(tmp_path / "config.json", config)
    assert read_config(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "3"),
        ("seed", True),
        ("seed", 3.0),
        ("mode", 1),
        ("environment.level_weights", 1.0),
        ("environment.demonstrated_levels", [1.5]),
        ("learner.num_layers", 3),
        ("mode", "turbo"),
    ],
)
def test_a_config_file_with_a_bad_value_is_refused_by_name(tmp_path, name, value):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_json(Config()) | {name: value}))
    with pytest.raises(ValueError, match=name.rsplit(".", maxsplit=1)[-1]):
        read_config(path)


@pytest.mark.parametrize("text", ["", "[1]", '{"seed": '])
def test_a_config_file_that_is_no_settings_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(path)


MISTAKES = {
    "--config.mod=sync": "did you mean --config.mode",
    "--config.seed=three": "--config.seed=three",
    "--config.mode=turbo": "--config.mode=turbo: use one of sync, semi_async, async",
    "--config.environment.turn_delay_s=lognormal:1": "turn_delay_s='lognormal:1': lognormal takes 2",
    "--config.learner.learning_rate=nan": "--config.learner.learning_rate=nan",
    "--config.environment.level_weights=1,x": "'1,x' is not a comma list of floats",
    "--preset=fast": "--preset=fast",
    "--config_file=/nowhere.json": "/nowhere.json: No such file",
    "--config.model.checkpoint=/nowhere": "--config.model.checkpoint=/nowhere: /nowhere/config.json: No such file",
    "--config.redis.url=redis://:secret@host": "password_file",
    "--config.redis.url=redis://host?password=secret": "password_file",
    "--config.pool.draw=lifo": "--config.pool.draw=lifo: use fifo or strata",
    "--config.pool.size_updates=4": "at most N - A + 1 = 3",
    "--config.deterministic": "--config.deterministic=True: needs --config.mode=sync, not async",
    "--config.observe.writers=tensorboard,excel": "--config.observe.writers=excel: use tensorboard, wandb",
    "--config.reward.final=inf": "--config.reward.final=inf",
    "--config.seed=18446744073709551616": "--config.seed=18446744073709551616",
    "train": "unexpected argument 'train'",
}


def test_ux_03_a_mistake_is_one_line_and_exit_code_2():
    script = "from asyncrl_jax import flags\nflags.run(lambda: 0)"
    started = {
        mistake: subprocess.Popen([sys.executable, "-c", script, mistake], stderr=subprocess.PIPE, text=True)
        for mistake in MISTAKES
    }
    for mistake, process in started.items():
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 2, mistake
        assert errors.count("\n") == 1, errors
        assert MISTAKES[mistake] in errors
    assert "secret" not in errors


def test_preset_and_file_together_are_refused():
    with pytest.raises(ValueError, match="give one of them"):
        parse("--preset=seed", "--config_file=x.json")


def test_the_binaries_are_short():
    for path in (Path(__file__).parents[2] / "launchers").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path


@pytest.mark.parametrize("binary", ["asyncrl", "asyncrl-compare", "asyncrl-convert"])
def test_ux_03_a_mistake_in_a_flag_of_a_binary_without_settings_is_one_line_and_exit_code_2(binary):
    command = Path(sys.executable).with_name(binary)
    done = subprocess.run([command, "--zzz"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, f"{binary}: error: unknown flag --zzz: see --help\n")
