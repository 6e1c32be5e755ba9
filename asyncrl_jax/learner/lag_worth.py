"""What tokens of each lag are worth, in every update and lately: how far the policy has moved from what sampled them.

Dimensions: B rows, T positions, W lags told apart (0, 1, … and "that and more").
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

NUM_LAGS = 9  # W: 0 to 7 updates, and 8 or more
_KEPT = 0.8  # of the sums, from one update to the next


def sums_by_lag(ratio_BT: jax.Array, token_lag_BT: jax.Array, loss_mask_BT: jax.Array) -> jax.Array:
    """float32 [4, W]: tokens, Σr, Σr² and Σ(r log r − r + 1) of the ratios r of trained to sampling policy.

    The last, over tokens of the sampling policy, estimates KL(trained ‖ sampling) and is never negative.
    """
    lags_BT = jnp.clip(token_lag_BT, 0, NUM_LAGS - 1)
    ratio_BT = jnp.where(loss_mask_BT, ratio_BT, 1.0).astype(jnp.float32)
    kl_BT = ratio_BT * jnp.log(jnp.maximum(ratio_BT, 1e-30)) - ratio_BT + 1.0
    terms = jnp.stack([jnp.ones_like(ratio_BT), ratio_BT, jnp.square(ratio_BT), kl_BT])
    of_lag_WBT = (lags_BT[None] == jnp.arange(NUM_LAGS)[:, None, None]) & loss_mask_BT[None]
    return jnp.einsum("kbt,wbt->kw", terms, of_lag_WBT.astype(jnp.float32))


def metrics_by_lag(sums: jax.Array) -> dict[str, jax.Array]:
    """`lag_tokens/<lag>`, `lag_ess/<lag>` (effective sample size ÷ tokens) and `lag_kl/<lag>` (nats a token)."""
    tokens_W, ratio_W, squared_W, kl_W = sums
    ess_W = jnp.square(ratio_W) / jnp.maximum(tokens_W * squared_W, 1e-9)
    by_name = {"tokens": tokens_W, "ess": ess_W, "kl": kl_W / jnp.maximum(tokens_W, 1.0)}
    return {f"lag_{name}/{lag}": values_W[lag] for name, values_W in by_name.items() for lag in range(NUM_LAGS)}


class LagWorth:
    """The metrics of the last updates, as the orchestrator judges the lag bound by."""

    def __init__(self) -> None:
        self.clip_fraction = 0.0
        self._by_lag: dict[int, tuple[float, float, float]] = {}  # tokens, ess, kl

    def add(self, metrics: Mapping[str, float]) -> None:
        """Takes up one update's metrics, weighted by tokens; older ones fade."""
        self.clip_fraction = _KEPT * self.clip_fraction + (1 - _KEPT) * metrics.get("clip_fraction", 0.0)
        for lag in range(NUM_LAGS):
            new = metrics.get(f"lag_tokens/{lag}", 0.0)
            tokens, ess, kl = self._by_lag.get(lag, (0.0, 0.0, 0.0))
            kept = _KEPT * tokens
            total = kept + new
            if total < 1:
                self._by_lag.pop(lag, None)
                continue
            share = new / total
            self._by_lag[lag] = (
                total,
                ess + share * (metrics.get(f"lag_ess/{lag}", 0.0) - ess),
                kl + share * (metrics.get(f"lag_kl/{lag}", 0.0) - kl),
            )

    def by_lag(self) -> dict[str, list[float]]:
        """[tokens, ess, kl] by lag, JSON-ready."""
        return {str(lag): list(values) for lag, values in self._by_lag.items()}
