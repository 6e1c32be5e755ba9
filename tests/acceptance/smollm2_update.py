"""Upcycles SmolLM2 and makes two GRPO updates on random groups; prints metrics and peak memory as JSON lines.

python smollm2_update.py <directory>
"""

import json
import resource
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "models"))
sys.path.append(str(Path(__file__).parents[2]))
import smollm2

from asyncrl_jax.config import Config, flatten, override
from asyncrl_jax.config_hf import read_hf_config
from asyncrl_jax.learner.state import start_from
from asyncrl_jax.learner.step import make_train_step
from asyncrl_jax.models import from_hf, load_params, params_of, save_params, upcycle
from asyncrl_jax.models.mesh import make_mesh
from benchmarks.quickstart_update import random_update

CHANGES = {
    "learner.groups_per_update": 2,
    "learner.group_size": 4,
    "learner.microbatch_rows": 1,
    "model.remat": "layers",
}


def write_mixture(directory):
    smollm2.write_checkpoint(directory / "dense")
    dense = from_hf(directory / "dense")
    params, config = upcycle(params_of(dense), dense.config, 4, 2, seed=0)
    save_params(config, params, directory / "moe")


def main():
    directory = Path(sys.argv[1])
    write_mixture(directory)
    config = override(Config(), flatten(read_hf_config(directory / "moe"), "model.") | CHANGES)
    mesh = make_mesh(config.mesh)
    reference = load_params(directory / "moe", config.model, mesh)
    state, step = start_from(config, reference, mesh), make_train_step(config, mesh)
    packed, _ = random_update(config)
    for _ in range(2):
        state, metrics = step(state, reference, packed, np.float32(1e-4))
        names = ("loss", "kl", "grad_norm", "balance_loss", "tokens", "skipped")
        values = {name: float(value) for name, value in jax.device_get(metrics).items() if name in names}
        values["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
