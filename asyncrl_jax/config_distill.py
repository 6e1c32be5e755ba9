"""Settings of distillation: which teachers, and what of them the policy is drawn to."""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config_leaf import require, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """On-policy distillation: a KL to teachers, on what the policy itself sampled."""

    teachers: tuple[str, ...] = setting((), "Hugging Face directories of the teachers; empty: no distillation")
    shares: tuple[float, ...] = setting((), "of each teacher in the mixture that is learnt; empty: equal ones")
    match: str = setting("logits", "logits (KL over the whole vocabulary) or logprobs (estimated from sampled tokens)")
    coefficient: float = setting(1.0, "weight of the KL to the teachers")

    def __post_init__(self) -> None:
        require(
            self.match in ("logits", "logprobs"), "learner.distill.match", self.match, "use one of logits, logprobs"
        )
        require(self.coefficient > 0, "learner.distill.coefficient", self.coefficient, "more than 0")
        require(all(self.teachers), "learner.distill.teachers", self.teachers, "a directory for each")
        require(
            len(self.shares) in (0, len(self.teachers)) and all(share > 0 for share in self.shares),
            "learner.distill.shares",
            self.shares,
            f"empty, or a number above 0 for each of the {len(self.teachers)} teachers",
        )

    @property
    def mixture(self) -> tuple[float, ...]:
        """Share of each teacher; they sum to 1."""
        shares = self.shares or (1.0,) * len(self.teachers)
        return tuple(share / sum(shares) for share in shares)
