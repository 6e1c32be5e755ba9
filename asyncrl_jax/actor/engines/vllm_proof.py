"""Proof that a live vLLM samples with the weights it was given, through its own scheduler, kernels and sampler.

Dimensions: C canary rows, T tokens of one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from asyncrl_jax.actor.engines.vllm_backend import TOP, Backend, SamplingRequest
from asyncrl_jax.weights.manifest import Manifest, WeightsMismatch

PROOF_TOKENS = 3  # sampled for each row of a proof: by prefill, from its cache, and from what a decode step has cached
_TEMPERATURE = 0.7  # not 1, so that a temperature applied twice or never shows; below 1, see `_misreported`
_MAX_ROWS = 4  # rows that are continued


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far log-probs may be from what they are compared with, in nats.

    In bfloat16 a token's experts may change with the last bit of a router's input, and its log-prob by any amount; the
    mean over all tokens hardly moves. Wrong weights move both.
    """

    mean: float
    worst: float

    def check(self, reason: str, what: str, differences: np.ndarray) -> None:
        """Raises WeightsMismatch, with this reason, when differences are too large or not finite."""
        mean, worst = float(differences.mean()), float(differences.max())
        if not (mean <= self.mean and worst <= self.worst):  # written so that NaN fails
            detail = f"{what} by {mean:.3g} nats in the mean and {worst:.3g} at worst"
            raise WeightsMismatch(reason, f"{detail}; at most {self.mean:g} and {self.worst:g}")


async def prove(backend: Backend, manifest: Manifest, *, tolerance: Tolerance, max_tokens: int, attempt: int) -> None:
    """Compares the engine with the manifest's canary, and what its sampler reports with what its own prefill says.

    Args:
      backend: with the weights loaded, and nothing else to do.
      manifest: of these weights.
      tolerance: of log-probs.
      max_tokens: of the engine's longest sequence.
      attempt: a number that no other proof of this backend has; another one samples other tokens.

    Raises:
      WeightsMismatch: with reason "version", "canary" or "continuation".
    """
    canary_CT = manifest.canary.tokens
    rows = [tuple(map(int, row)) for row in canary_CT]
    if canary_CT.shape[1] > max_tokens:
        raise WeightsMismatch("canary", f"v{manifest.number}: its canary {canary_CT.shape} does not fit the engine")
    name = f"proof-{attempt}-v{manifest.number}"
    start = max(1, min(canary_CT.shape[1], max_tokens - PROOF_TOKENS))
    length = min(PROOF_TOKENS, max_tokens - start)
    scores, continuations = await asyncio.gather(
        asyncio.gather(*(backend.score(f"{name}-canary-{i}", row) for i, row in enumerate(rows))),
        asyncio.gather(
            *(
                _continue(backend, manifest, f"{name}-{i}", row[:start], length, attempt)
                for i, row in enumerate(rows[:_MAX_ROWS])
            )
        ),
    )
    try:
        logprobs = [
            [score[t][token] for t, token in enumerate(row[1:])] for row, score in zip(rows, scores, strict=True)
        ]
    except KeyError as error:
        raise WeightsMismatch("canary", f"v{manifest.number}: no log-prob of token {error}") from error
    where = f"v{manifest.number}"
    differences = np.abs(np.array(logprobs, np.float64) - manifest.canary.logprobs)
    tolerance.check("canary", f"{where}: log-probs differ", differences)
    misreported = np.concatenate(continuations)
    tolerance.check("continuation", f"{where}: sampling reports log-probs that differ from prefill's", misreported)


async def _continue(
    backend: Backend, manifest: Manifest, name: str, prompt: tuple[int, ...], length: int, seed: int
) -> np.ndarray:
    """Samples on from a row, has a prefill of the result confirm the log-probs, and returns how far each is off."""
    request = SamplingRequest(
        request_id=f"{name}-continuation",
        prompt=prompt,
        max_tokens=length,
        temperature=_TEMPERATURE,
        seed=seed,
        stop_tokens=(),
        num_top=1,
    )
    sampled = await backend.sample(request)
    if sampled.version != str(manifest.number):
        raise WeightsMismatch("version", f"v{manifest.number}: the engine says that it samples with {sampled.version}")
    confirmed = await backend.score(f"{name}-confirmation", (*prompt, *map(int, sampled.tokens)))
    pairs = zip(sampled.top, confirmed[len(prompt) - 1 :], strict=True)
    return np.array([_misreported(reported, score, _TEMPERATURE) for reported, score in pairs])


def _misreported(reported: Mapping[int, float], confirmed: Mapping[int, float], temperature: float) -> float:
    """By how much `reported` log-probs miss what temperature makes of the `confirmed` ones, in nats.

    `confirmed` holds the TOP most likely tokens and the sampled one, and temperature, below 1, makes the rest less
    likely: with p the least of the TOP probabilities and r the sum of the unknown ones, what they add to the normaliser
    is between 0 and r p^(1/temperature - 1). With a small vocabulary nothing is unknown.
    """
    known = math.fsum(math.exp(value) for value in confirmed.values())
    scaled = math.fsum(math.exp(value / temperature) for value in confirmed.values())
    least = sorted(confirmed.values(), reverse=True)[:TOP][-1]
    unknown = max(0.0, 1.0 - known) * math.exp(least * (1.0 / temperature - 1.0))
    low, high = math.log(scaled), math.log(scaled + unknown)
    worst = 0.0
    for token, value in reported.items():
        if token not in confirmed:
            continue  # the sampled token is always among them
        above = value - (confirmed[token] / temperature - low)
        below = confirmed[token] / temperature - high - value
        if math.isnan(above):
            return math.nan
        worst = max(worst, above, below)
    return worst
