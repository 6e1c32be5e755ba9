"""Weights go from a Hugging Face directory to a run and back, in Python and from a shell."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from asyncrl_jax.config import Config, override
from asyncrl_jax.config_file import write_config
from asyncrl_jax.config_model import AttentionConfig, ModelConfig
from asyncrl_jax.flags import config_from_flags, define
from asyncrl_jax.learner.checkpoint import Checkpoints
from asyncrl_jax.learner.convert import publish_weights, read_weights
from asyncrl_jax.learner.state import create_state
from asyncrl_jax.learner.trainer import Trainer
from asyncrl_jax.models import from_hf, init_params, params_of, save_params

DENSE = ModelConfig(
    family="llama", mlp_pattern="d", mlp_dim=10, num_experts=0, experts_per_token=0, expert_dim=0, hidden_dim=12,
    num_heads=3, num_kv_heads=1, head_dim=6, attention=AttentionConfig(qk_norm="none"), init_std=0.02,
)  # fmt: skip


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def run_dir(tmp_path):
    config = override(Config(), {"model.num_layers": 1})
    write_config(tmp_path / "config.json", config)
    publish_weights(tmp_path / "weights", config.model, init_params(config.model, 0), number=0)
    publish_weights(tmp_path / "weights", config.model, init_params(config.model, 3), number=3)
    return tmp_path


def test_versions_of_a_run_are_read_the_newest_unless_one_is_named(run_dir):
    model, newest = read_weights(run_dir)
    assert model.num_layers == 1
    assert same(newest, init_params(model, 3))
    assert same(read_weights(run_dir, version=0)[1], init_params(model, 0))
    with pytest.raises(ValueError, match="no version 7; there are 0, 3"):
        read_weights(run_dir, version=7)


def test_a_checkpoint_of_a_run_is_read(run_dir):
    config = override(Config(), {"model.num_layers": 1, "seed": 5})
    saved = Checkpoints(run_dir / "checkpoints", keep=1)
    saved.save(10, create_state(config, 5), {})
    saved.wait()
    saved.close()
    model, params = read_weights(run_dir, checkpoint=-1)
    with pytest.raises(ValueError, match=r"no checkpoint 3; there are \d+"):
        read_weights(run_dir, checkpoint=3)
    assert same(params, init_params(model, 5))


def convert(*flags):
    command = [sys.executable, "-m", "launchers.convert", *flags]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=110, check=False)


def test_from_a_shell_a_dense_checkpoint_becomes_a_mixture_of_experts(tmp_path):
    save_params(DENSE, init_params(DENSE, 0), tmp_path / "dense")
    done = convert(f"--source={tmp_path / 'dense'}", f"--output={tmp_path / 'moe'}", "--upcycle=3")
    assert done.returncode == 0, done.stderr
    moe = from_hf(tmp_path / "moe")
    assert (moe.config.family, moe.config.num_experts, moe.config.experts_per_token) == ("mixtral", 3, 2)
    gate_EDF = params_of(moe)["layers.0.moe.gate_proj"]
    np.testing.assert_array_equal(gate_EDF[2], init_params(DENSE, 0)["layers.0.mlp.gate_proj"])


def test_from_a_shell_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    done = convert(f"--source={tmp_path}", f"--output={tmp_path / 'out'}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"error: {tmp_path / 'config.json'}: No such file or directory")


def test_a_learner_starts_from_the_checkpoint_that_its_config_names(tmp_path):
    save_params(DENSE, init_params(DENSE, 4), tmp_path)
    given = flags.FlagValues()
    define(given)
    given(
        [
            "test",
            f"--config.model.checkpoint={tmp_path}",
            "--config.warm_start.num_steps=0",
            "--config.model.remat=dots",
        ]
    )
    config = config_from_flags(given)
    assert (config.model.family, config.model.mlp_dim, config.model.remat) == ("llama", 10, "dots")
    trainer = Trainer(config)
    assert not same(trainer.state.params, init_params(DENSE, 4))
    trainer.warm_start(tmp_path / "none", threading.Event())
    assert same(trainer.state.params, init_params(DENSE, 4))
    given(["test", f"--config.model.checkpoint={tmp_path}", "--config.model.rope_theta=50"])
    with pytest.raises(ValueError, match="rope_theta: 50"):
        Trainer(config_from_flags(given)).warm_start(tmp_path / "none", threading.Event())
