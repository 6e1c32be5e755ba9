"""Three updates on 1, then 4, then 2 devices, through checkpoints, beside three on one; prints the largest difference.

python changing_meshes.py <directory>
"""

import sys

import jax
import numpy as np
from update_setup import ramp_advantages, random_groups, tiny_config, zero_lags

from asyncrl_jax.config import override
from asyncrl_jax.learner.checkpoint import Checkpoints
from asyncrl_jax.learner.packing import pack_update
from asyncrl_jax.learner.state import create_state, start_from
from asyncrl_jax.learner.step import make_train_step
from asyncrl_jax.models import init_params
from asyncrl_jax.models.mesh import make_mesh

MESHES = [{}, {"mesh.fsdp": 2, "mesh.expert": 2}, {"mesh.tensor": 2}]
BASE = override(tiny_config(), {"learner.microbatch_rows": 4})


def main():
    groups = random_groups()
    packed = pack_update(groups, ramp_advantages(groups), zero_lags(groups), BASE)
    checkpoints = Checkpoints(sys.argv[1], keep=3)
    alone = None
    for update, mesh_settings in enumerate(MESHES):
        config = override(BASE, mesh_settings)
        mesh = make_mesh(config.mesh)
        step = make_train_step(config, mesh)
        reference = start_from(config, init_params(config.model, 1), mesh).params
        state = create_state(config, 0, mesh)
        if update:
            state, meta = checkpoints.restore(update, state)
            assert meta == {"update": update}
            saved, _ = checkpoints.restore(update, jax.tree.map(np.asarray, state))
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), saved)  # a restore changes no bit
        state, _ = step(state, reference, packed, np.float32(1e-3))
        if not update:
            alone, alone_step, alone_reference = jax.tree.map(jax.numpy.copy, state), step, reference
        checkpoints.save(update + 1, state, {"update": update + 1})
        checkpoints.wait()
    for _ in MESHES[1:]:
        alone, _ = alone_step(alone, alone_reference, packed, np.float32(1e-3))
    differences = jax.tree.map(lambda a, b: np.max(np.abs(np.asarray(a) - np.asarray(b))), alone.params, state.params)
    assert int(state.update) == int(alone.update) == len(MESHES)
    print(max(float(difference) for difference in jax.tree.leaves(differences)))


if __name__ == "__main__":
    main()
