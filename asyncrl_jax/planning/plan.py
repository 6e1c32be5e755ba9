"""A plan: what a config needs on its mesh and what a fleet would make of it, as numbers and as a table."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.table import Table

from asyncrl_jax.config import Config
from asyncrl_jax.planning import rates, size
from asyncrl_jax.planning.rates import BYTES_PER_WEIGHT, Fleet, Rates, Workload
from asyncrl_jax.planning.size import LearnerBytes, Parameters

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
    """All figures. Bytes are of one device, FLOPs of one token, rates of the whole fleet."""

    parameters: Parameters
    learner_bytes: LearnerBytes
    engine_bytes: float  # weights and all caches of one actor device
    device_bytes: float
    forward_flops: float
    update_flops: float
    rates: Rates

    @property
    def problems(self) -> list[str]:
        """What does not fit, each with a way out."""
        found = []
        if self.learner_bytes.total > self.device_bytes:
            found.append(
                f"the learner needs {self.learner_bytes.total / GIB:.1f} GiB a device, there are "
                f"{self.device_bytes / GIB:.1f}: raise --config.mesh.fsdp or expert, or lower learner.microbatch_rows"
            )
        if self.engine_bytes > self.device_bytes:
            found.append(
                f"an engine needs {self.engine_bytes / GIB:.1f} GiB, a device has {self.device_bytes / GIB:.1f}: lower "
                "--config.actor.slots, or let several devices serve one engine"
            )
        return found


def make_plan(config: Config, workload: Workload, fleet: Fleet) -> Plan:
    """The plan of a config: its model and mesh, one update of the workload, on the fleet.

    Raises:
      ValueError: if a mesh axis does not divide a dimension of the model.
    """
    params = size.parameters(config.model)
    layers, heads, widths = size.attention_dims(config.model)
    multiplied = params.active if config.model.tie_embeddings else params.active - params.embedding
    extra_forwards = 1 + (config.learner.kl.coefficient > 0)  # the counting pass, and the reference
    per_token = rates.flops(
        multiplied,
        rates.attention_flops(layers, heads, widths, workload.tokens / 2),
        num_extra_forwards=extra_forwards,
    )
    weights = params.total * BYTES_PER_WEIGHT
    cache = size.cache_bytes(config.model, workload.tokens)
    decode_rate = rates.decode_tokens_per_s(
        fleet.device,
        weight_bytes=_weights_read(params, config, fleet.slots) * BYTES_PER_WEIGHT,
        cache_bytes_per_sequence=cache / 2,  # half grown on average
        flops_per_token=per_token.forward,
        fleet=fleet,
    )
    return Plan(
        parameters=params,
        learner_bytes=size.learner_bytes(config),
        engine_bytes=weights + fleet.slots * cache,
        device_bytes=fleet.device.memory_bytes,
        forward_flops=per_token.forward,
        update_flops=per_token.update,
        rates=rates.rates(workload, fleet, update_flops=per_token.update, decode_rate=decode_rate),
    )


def _weights_read(params: Parameters, config: Config, slots: int) -> float:
    """Weights that one decode step reads: all but the experts that no sequence has chosen."""
    model = config.model
    missed = (1.0 - model.experts_per_token / model.num_experts) ** slots if params.in_experts else 0.0
    return params.total - params.in_experts * missed


def as_dict(plan: Plan) -> dict[str, Any]:
    """Every figure by name, for a machine to read."""
    figures = dataclasses.asdict(plan) | {"problems": plan.problems}
    figures["parameters"]["active_share"] = plan.parameters.active_share
    figures["learner_bytes"]["total"] = plan.learner_bytes.total
    figures["rates"] |= {"batch_s": plan.rates.batch_s, "bound_by": plan.rates.bound_by}
    return figures


def as_table(plan: Plan) -> Table:
    """Every figure in a unit that people read."""
    table = Table("figure", "value", "what it is", title="plan", title_justify="left")
    params, speed = plan.parameters, plan.rates
    table.add_row("parameters", f"{params.total / 1e6:,.1f} M", "all")
    table.add_row("active", f"{params.active / 1e6:,.1f} M", f"serve one token: {params.active_share:.1%}")
    for field in dataclasses.fields(plan.learner_bytes):
        table.add_row(field.name, _gib(getattr(plan.learner_bytes, field.name)), "on a learner device")
    table.add_row("learner", _gib(plan.learner_bytes.total), f"of {_gib(plan.device_bytes)} on a device")
    table.add_row("engine", _gib(plan.engine_bytes), f"of {_gib(plan.device_bytes)}: bf16 weights and all caches")
    table.add_section()
    table.add_row("forward", f"{plan.forward_flops / 1e9:,.3f} GFLOPs", "a token")
    table.add_row("update", f"{plan.update_flops / 1e9:,.3f} GFLOPs", "a token, reference and counting pass included")
    table.add_row("learner rate", f"{speed.learner_tokens_per_s:,.0f} tokens/s", "trained")
    table.add_row("rollout rate", f"{speed.rollout_tokens_per_s:,.0f} tokens/s", "sampled")
    table.add_section()
    table.add_row("learner", f"{speed.learner_s:,.2f} s", "a batch")
    table.add_row("rollout", f"{speed.rollout_s:,.2f} s", "a batch")
    table.add_row("environments", f"{speed.environment_s:,.2f} s", "a batch, by their steps alone")
    table.add_row("batch", f"{speed.batch_s:,.2f} s", f"bound by: {speed.bound_by}")
    table.add_row("cost", f"{speed.cost_per_hour:,.2f}", "an hour")
    table.add_row("cost", f"{speed.cost_per_million_effective_tokens:,.4f}", "a million effective tokens")
    return table


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:,.3f} GiB"
