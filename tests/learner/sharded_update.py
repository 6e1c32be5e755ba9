"""The first update on a mesh of four devices: writes Adam's first moment, the loss and the layout.

python sharded_update.py <output.npz>
"""

import sys

import jax
import numpy as np
from update_setup import ramp_advantages, random_groups, tiny_config, zero_lags

from asyncrl_jax.config import override
from asyncrl_jax.learner.packing import pack_update
from asyncrl_jax.learner.state import create_state, start_from
from asyncrl_jax.learner.step import make_train_step
from asyncrl_jax.models import init_params
from asyncrl_jax.models.mesh import make_mesh


def main() -> None:
    config = override(tiny_config(), {"mesh.fsdp": 2, "mesh.expert": 2, "learner.microbatch_rows": 4})
    mesh, groups = make_mesh(config.mesh), random_groups()
    packed = pack_update(groups, ramp_advantages(groups), zero_lags(groups), config)
    state = create_state(config, 0, mesh)
    shards = state.params["layers.0.moe.gate_proj"].addressable_shards
    reference = start_from(config, init_params(config.model, 1), mesh).params
    state, metrics = make_train_step(config, mesh)(state, reference, packed, np.float32(1e-3))
    np.savez(
        sys.argv[1],
        num_devices=len(jax.devices()),
        num_expert_shards=len({str(shard.index[0]) for shard in shards}),
        loss=metrics["loss"],
        **{name: np.asarray(moment) for name, moment in state.opt_state[1].mu.items()},
    )


if __name__ == "__main__":
    main()
