"""Loss, outputs and gradients of a tiny model on meshes of up to 8 forced host devices; prints one line of JSON.

python every_mesh.py <name> …; a report is {"1x1x2x1": {"output": <error>, "loss": <error>, …, "worst": <leaf>}, …}.
Errors are relative to the largest value of the array on one device.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from asyncrl_jax.config_model import MeshConfig, ModelConfig
from asyncrl_jax.learner.balance import switch_balance_loss
from asyncrl_jax.models import graph_of, init_params, merge
from asyncrl_jax.models.mesh import AXES, batch_sharding, make_mesh
from asyncrl_jax.models.moe import Placement
from asyncrl_jax.models.sharding import param_shardings

CONFIG = ModelConfig(
    num_layers=1,
    hidden_dim=16,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    num_experts=8,
    experts_per_token=2,
    expert_dim=8,
    vocab_size=16,
    init_std=0.3,
)
ROWS, LENGTH = 8, 6
IDLE, BUSY = 3, 0  # experts


def params():
    """Weights of which one expert gets no token and another more than half of them."""
    made = dict(init_params(CONFIG, 0))
    # The first feature is the same, positive number in every token.
    made["embedding"] = made["embedding"].at[:, 0].set(3.0)
    made["layers.0.attention.o_proj"] = made["layers.0.attention.o_proj"].at[:, :, 0].set(0.0)
    router = made["layers.0.moe.router"].at[0, IDLE].set(-50.0)
    made["layers.0.moe.router"] = router.at[0, BUSY].set(8.0)
    return made


def batch():
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 3, (ROWS, LENGTH)), axis=1)[:, ::-1].copy()  # 0, padding, at the end
    positions = np.tile(np.arange(LENGTH), (ROWS, 1))
    return rng.integers(0, 16, (ROWS, LENGTH)), positions, segments, rng.normal(size=(ROWS, LENGTH))


def loss_of(weights, tokens, positions, segments, advantages, *, graph):
    out = merge(graph, weights).forward(tokens, positions, segments)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(out.logits_BTV), tokens[..., None], axis=-1)[..., 0]
    valid = segments > 0
    balance = switch_balance_loss(
        counts_LE=out.routing.counts_E,
        prob_sums_LE=out.routing.prob_sums_E,
        num_tokens=out.routing.num_tokens[0],
        experts_per_token=CONFIG.experts_per_token,
    )
    loss = jnp.sum(jnp.where(valid, -advantages * logprobs, 0.0)) / jnp.sum(valid) + 0.5 * balance
    return loss, (jnp.where(valid[..., None], out.logits_BTV, 0.0), out.routing.counts_E)


def run(mesh):
    shardings = param_shardings(CONFIG, mesh)
    rows = batch_sharding(mesh)
    function = functools.partial(loss_of, graph=graph_of(CONFIG, Placement(mesh)))
    jitted = jax.jit(jax.value_and_grad(function, has_aux=True), in_shardings=(shardings, *[rows] * 4))
    given = jax.device_put(params(), shardings)
    (loss, (logits, counts)), gradients = jitted(given, *(jnp.asarray(x, jnp.result_type(x)) for x in batch()))
    return jax.tree.map(np.asarray, {"loss": loss, "output": logits, "counts": counts, "gradient": gradients})


def error(actual, expected):
    return float(np.max(np.abs(actual - expected)) / max(np.max(np.abs(expected)), 1e-12))


def main():
    expected = run(make_mesh(MeshConfig()))
    counts = expected["counts"][0]
    assert counts[IDLE] == 0, counts
    assert counts[BUSY] > 0.3 * counts.sum(), counts
    report = {}
    for name in sys.argv[1:]:
        shape = map(int, name.split("x"))
        got = run(make_mesh(MeshConfig(**dict(zip(AXES, shape, strict=True)))))
        leaves = {leaf: error(value, expected["gradient"][leaf]) for leaf, value in got["gradient"].items()}
        worst = max(leaves, key=lambda leaf: leaves[leaf])
        report[name] = {
            "output": error(got["output"], expected["output"]),
            "loss": error(got["loss"], expected["loss"]),
            "counts": error(got["counts"], expected["counts"]),
            "gradient": leaves[worst],
            "worst": worst,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
