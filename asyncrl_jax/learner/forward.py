"""What the learner asks of a model: trunk, log-probs of targets, entropy. The only place that calls one.

Dimensions: B rows, T positions of a row, D hidden width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from asyncrl_jax.config import Config, MeshConfig, ModelConfig
from asyncrl_jax.learner.packing import PackedUpdate
from asyncrl_jax.models.head import TargetScores
from asyncrl_jax.models.moe import Placement
from asyncrl_jax.models.router import Routing
from asyncrl_jax.models.transformer import Params, graph_of, merge


def forward_on(config: Config, mesh: Mesh) -> Forward:
    """The model of the config, its experts spread over the mesh."""
    return forward_of(config.model, config.mesh, mesh)


def forward_of(model: ModelConfig, settings: MeshConfig, mesh: Mesh) -> Forward:
    """Any model, on the mesh."""
    return Forward(graph_of(model, Placement(mesh, settings.expert_buffer)))


@dataclasses.dataclass(frozen=True)
class Forward:
    """A model as functions of its weights. A batch has `tokens`, `positions` and `segment_ids`, int32 [B, T].

    Routing that a packed update carries is replayed, by the weights being trained and by those they are compared with.
    """

    graph: nnx.GraphDef

    def trunk(self, params: Params, batch: Any) -> tuple[jax.Array, Routing]:
        """(the head's input [B, T, D], what the routers did)."""
        steered = {}
        if isinstance(batch, PackedUpdate):
            steered = {"replay_BTLA": batch.routed_experts, "noise_key": batch.noise_keys}
        x_BTD, routing = merge(self.graph, params).trunk(batch.tokens, batch.positions, batch.segment_ids, **steered)
        return x_BTD, routing

    def scores(
        self, params: Params, x_BTD: jax.Array, batch: Any, temperature_BT: jax.Array | None = None
    ) -> TargetScores:
        """Of `batch.targets` where `batch.loss_mask`, from the trunk's output. No temperature: `batch.temperature`."""
        temperature_BT = batch.temperature if temperature_BT is None else temperature_BT
        return merge(self.graph, params).score(x_BTD, batch.targets, temperature_BT, batch.loss_mask)

    def logprobs(self, params: Params, batch: Any) -> jax.Array:
        """[B, T], without gradient: for weights that are not being trained, so their routers get no noise."""
        x_BTD, _ = self.trunk(params, batch._replace(noise_keys=None))
        return jax.lax.stop_gradient(self.scores(params, x_BTD, batch).logprobs)

    def head(self, params: Params, x: jax.Array) -> jax.Array:
        """float32 logits [..., V] of the trunk's output [..., D]."""
        return merge(self.graph, params).head(x)

    def logits(self, params: Params, batch: Any) -> tuple[jax.Array, Routing]:
        """(float32 [B, T, V], what the routers did)."""
        x_BTD, routing = self.trunk(params, batch)
        return self.head(params, x_BTD), routing
