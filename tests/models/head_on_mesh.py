"""Run with 8 virtual devices: the chunked head on meshes equals that of one device, bit for bit where it can."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from asyncrl_jax.config_model import MeshConfig
from asyncrl_jax.models.head import score_targets
from asyncrl_jax.models.mesh import make_mesh

B, T, D, V = 8, 5, 6, 14


def main():
    rng = np.random.default_rng(0)
    x_BTD, head_DV = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32)
    asked_BT = rng.random((B, T)) < np.linspace(0, 0.9, B)[:, None]  # devices take different numbers of turns
    rest = rng.integers(0, V, (B, T)), rng.uniform(0.5, 2.0, (B, T)).astype(np.float32), asked_BT
    weights = rng.normal(size=(2, B, T)).astype(np.float32)

    def loss(x_BTD, head_DV, mesh):
        scores = score_targets(x_BTD, head_DV, *rest, chunk_tokens=3, mesh=mesh)
        return jnp.sum(scores.logprobs * weights[0] + scores.entropy * weights[1]), scores

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    expected = step(x_BTD, head_DV, None)
    sizes = [size for size in itertools.product((1, 2), repeat=4) if np.prod(size) > 1 and np.prod(size) <= 8]
    for data, fsdp, expert, tensor in [sizes[0], sizes[2], *sizes[-4:]]:
        mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, expert=expert, tensor=tensor))
        found = step(x_BTD, head_DV, mesh)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
        print("equal on", dict(mesh.shape))


if __name__ == "__main__":
    main()
