"""Optimizers by name, the learning rate's schedule, and how both respond to lag."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from asyncrl_jax.config import LearnerConfig

Params = dict[str, jax.Array]

FINAL_LR_SHARE = 0.1  # of the peak, once `learner.lr_decay_updates` are done
MUON_RMS = 0.2  # root mean square of a Muon update: that of Adam, so that one learning rate suits both

# Weights that Muon makes orthogonal, by the last part of their name: (axes summed over, axes of the output) from the
# end of the shape, so that a leading axis of experts or layers is a batch of matrices.
MUON_AXES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "q_proj": ((-3,), (-2, -1)),
    "k_proj": ((-3,), (-2, -1)),
    "v_proj": ((-3,), (-2, -1)),
    "o_proj": ((-3, -2), (-1,)),
    "gate_proj": ((-2,), (-1,)),
    "up_proj": ((-2,), (-1,)),
    "down_proj": ((-2,), (-1,)),
}


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """Clipping and the optimizer in fp32, without its learning rate, which is an input of the step.

    * adamw: Adam with decoupled weight decay; norm scales and biases do not decay.
    * adafactor: second moments by rows and columns where both are at least 128, no momentum (Shazeer & Stern 2018,
      arXiv 1804.04235), the same decay.
    * muon: projections and experts by Muon (Jordan 2024; scale as in Liu et al. 2025, arXiv 2502.16982), one matrix for
      each expert; embedding, head, router, norms and critic by Adam.
    """
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    decay = optax.add_decayed_weights(config.weight_decay, mask=_matrices)
    if config.optimizer == "adamw":
        return optax.chain(clip, optax.scale_by_adam(), decay)
    if config.optimizer == "adafactor":
        return optax.chain(clip, optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), decay)
    if config.optimizer == "muon":
        muon = optax.contrib.muon(
            learning_rate=1.0,  # the step multiplies by its own
            weight_decay=config.weight_decay,
            consistent_rms=MUON_RMS,
            muon_weight_dimension_numbers=_muon_dimensions,
        )
        return optax.chain(clip, muon, optax.scale(-1.0))
    raise ValueError(f"optimizer {config.optimizer!r}: use adamw, adafactor or muon")


def _matrices(params: Params) -> dict[str, bool]:
    return {name: leaf.ndim > 1 for name, leaf in params.items()}


def _muon_dimensions(params: Params) -> dict[str, Any]:
    """Muon's axes of every leaf; None where Adam takes over."""
    dimensions: dict[str, Any] = {}
    for name, leaf in params.items():
        axes = MUON_AXES.get(name.rsplit(".", 1)[-1])
        if axes is None or not hasattr(leaf, "ndim") or leaf.ndim < len(axes[0]) + len(axes[1]):
            dimensions[name] = None
        else:
            reduction, output = (tuple(axis % leaf.ndim for axis in part) for part in axes)
            dimensions[name] = optax.contrib.MuonDimensionNumbers(reduction, output)
    return dimensions


def learning_rate_at(config: LearnerConfig, update: int) -> float:
    """Learning rate of the update after `update` done ones: a linear rise, then a linear fall to `FINAL_LR_SHARE`.

    As more and more groups are solved by all members or by none, the gradient comes from few of them, and Adam would
    still make steps of the same size; the fall keeps late updates from undoing early ones. It does not depend on the
    length of the run, so a run that is extended replays the updates that it made.
    """
    rise = min(1.0, (update + 1) / max(config.lr_warmup_updates, 1))
    if config.lr_decay_updates == 0:
        return config.learning_rate * rise
    done = (update + 1 - config.lr_warmup_updates) / (config.lr_decay_updates - config.lr_warmup_updates)
    fall = 1.0 - (1.0 - FINAL_LR_SHARE) * min(max(done, 0.0), 1.0)
    return config.learning_rate * rise * fall


def lag_response(
    mean_lag: jax.Array | float, *, lr_slowdown: float, kl_gain: float
) -> tuple[jax.Array | float, jax.Array | float]:
    """(factor on the learning rate, factor on the KL coefficient) for a batch of this mean lag.

    1 / (1 + slowdown · lag) and 1 + gain · lag: the older the data, the smaller the step and the stronger the pull to
    the reference; (1, 1) for fresh data, and where both settings are 0. A smaller step for staler gradients is the rule
    of Zhang et al. 2016 (arXiv 1511.05950, section 3.2), who divide by the lag.

    Args:
      mean_lag: over the tokens trained on, in updates.
      lr_slowdown: at least 0, per update of lag.
      kl_gain: at least 0, per update of lag.
    """
    return 1.0 / (1.0 + lr_slowdown * mean_lag), 1.0 + kl_gain * mean_lag


def moving_average(average: Params, params: Params, decay: float) -> Params:
    """decay · average + (1 − decay) · params, leaf by leaf."""
    return jax.tree.map(lambda old, new: decay * old + (1.0 - decay) * new, average, params)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the scalar condition holds, else `old`, for whole trees."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)
