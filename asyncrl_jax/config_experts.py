"""Settings of how a mixture of experts is kept balanced and its routing replayed, while it is trained."""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config_leaf import require, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Beside `learner.balance_coefficient`, the weight of the Switch loss."""

    z_coefficient: float = setting(0.0, "weight of the router z-loss, the mean squared logsumexp of router logits")
    bias_rate: float = setting(
        0.0, "step of the selection biases towards balance, per update and without a loss; needs router.selection_bias"
    )
    load_alarm: float = setting(3.0, "largest expert load ÷ smallest above which a layer is reported as imbalanced")
    replay: bool = setting(
        False,
        "replay the experts that the sampler chose (R3), where trajectories carry them; weights stay the trainer's",
    )

    def __post_init__(self) -> None:
        for name in ("z_coefficient", "bias_rate"):
            require(getattr(self, name) >= 0, f"experts.{name}", getattr(self, name), "at least 0")
        require(self.load_alarm >= 1, "experts.load_alarm", self.load_alarm, "at least 1")
