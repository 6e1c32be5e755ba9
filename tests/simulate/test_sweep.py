import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from asyncrl_jax.config import Config, override
from asyncrl_jax.simulate import sweep
from asyncrl_jax.simulate.inputs import Inputs

SMALL = {"learner.groups_per_update": 4, "learner.group_size": 2, "actor.num_hosts": 4, "learner.num_updates": 10}
INPUTS = Inputs(duration_s=0.0, episode_s="lognormal:1:1", update_s="constant:1", publish_s=0.1, swap_s=0.1)


@pytest.fixture(scope="module")
def outcomes():
    return sweep.run_sweep(override(Config(), SMALL), INPUTS, "lag.token_updates", [0, 2, 8])


def test_a_sweep_changes_one_setting_and_lowers_a_below_n(outcomes):
    assert list(outcomes) == ["0", "2", "8"]
    assert [one.lag_max <= bound for one, bound in zip(outcomes.values(), (0, 2, 8), strict=True)] == [True] * 3
    assert outcomes["8"].wall_s < outcomes["0"].wall_s


def test_settings_of_the_simulation_itself_can_be_swept():
    name, values = sweep.parse_sweep("simulate.update_s=constant:1,constant:5")
    fast, slow = sweep.run_sweep(override(Config(), SMALL), INPUTS, name, values).values()
    assert slow.wall_s > fast.wall_s


@pytest.mark.parametrize("text", ["lag.tokens=1", "lag.token_updates", "lag.token_updates=a", "simulate.nothing=1"])
def test_a_sweep_of_nothing_is_refused(text):
    with pytest.raises(ValueError, match="--sweep="):
        sweep.parse_sweep(text)


def test_the_table_has_a_row_a_value_and_the_picture_four_parts(outcomes):
    text = io.StringIO()
    Console(file=text, width=80).print(sweep.as_table("lag.token_updates", outcomes))
    lines = text.getvalue().splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["0", "2", "8"]
    assert "…" not in text.getvalue()
    assert len(sweep.draw("lag.token_updates", outcomes, "title").axes) == 4


def test_the_launcher_prints_a_line_of_json_last_and_writes_the_picture(tmp_path):
    given = {f"--config.{name}": value for name, value in SMALL.items()}
    given |= {"--simulate.duration_s": 0, "--simulate.episode_s": "constant:1", "--output": tmp_path / "out.png"}
    command = [sys.executable, "-m", "launchers.simulate", *(f"{name}={value}" for name, value in given.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert list(last["outcomes"]) == ["2", "4", "8"]
    assert last["outcomes"]["4"]["updates"] == 10
    assert (tmp_path / "out.png").stat().st_size > 10_000
    wrong = subprocess.run([*command, "--simulate.episode_s=bell:1"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "--simulate.episode_s=" in wrong.stderr
    assert "Traceback" not in wrong.stderr
