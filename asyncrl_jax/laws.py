"""Laws of random times and sizes, as settings write them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

_LAWS: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "exponential": ("mean",),
    "lognormal": ("median", "sigma"),
    "pareto": ("least", "alpha"),
}


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A law of non-negative numbers, written as `law:number:number`.

    * `constant:value`, `exponential:mean`
    * `lognormal:median:sigma`: sigma of the logarithm; p99 is 10 × the median at sigma 0.99
    * `pareto:least:alpha`: heavier still; the mean is infinite up to alpha 1
    * `quantiles:a,b,…`: as measured: evenly spaced quantiles, the least and the largest included
    """

    law: str
    numbers: tuple[float, ...]

    def sample(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """float64 of the shape asked for."""
        match self.law:
            case "constant":
                return np.full(shape, self.numbers[0])
            case "exponential":
                return generator.exponential(self.numbers[0], shape)
            case "lognormal":
                return generator.lognormal(math.log(max(self.numbers[0], 1e-300)), self.numbers[1], shape)
            case "pareto":
                return self.numbers[0] * (1.0 + generator.pareto(self.numbers[1], shape))
            case _:
                points = np.linspace(0.0, 1.0, len(self.numbers))
                return np.interp(generator.random(shape), points, self.numbers)

    def __str__(self) -> str:
        separator = "," if self.law == "quantiles" else ":"
        return f"{self.law}:{separator.join(f'{number:.6g}' for number in self.numbers)}"


def parse(text: str) -> Distribution:
    """The distribution that a text names.

    Raises:
      ValueError: for an unknown law, a wrong count of numbers, or a negative or infinite one.
    """
    law, _, rest = text.partition(":")
    try:
        numbers = tuple(float(part) for part in rest.split("," if law == "quantiles" else ":"))
    except ValueError:
        raise ValueError(f"{text!r}: numbers are expected after {law!r}, as in lognormal:60:1.0") from None
    if law not in (*_LAWS, "quantiles"):
        raise ValueError(f"{text!r}: unknown law {law!r}; use one of {', '.join(_LAWS)}, quantiles")
    if law in _LAWS and len(numbers) != len(_LAWS[law]):
        raise ValueError(f"{text!r}: {law} takes {len(_LAWS[law])} number(s): {', '.join(_LAWS[law])}")
    if any(number < 0 or not math.isfinite(number) for number in numbers):
        raise ValueError(f"{text!r}: every number must be finite and at least 0")
    if law == "pareto" and numbers[1] == 0:
        raise ValueError(f"{text!r}: alpha must be above 0")
    if law == "quantiles" and list(numbers) != sorted(numbers):
        raise ValueError(f"{text!r}: quantiles must rise")
    return Distribution(law, numbers)


def measured(values: Sequence[float], points: int = 101) -> Distribution:
    """The law of measured values, by its quantiles.

    Raises:
      ValueError: without values.
    """
    if not len(values):
        raise ValueError("nothing was measured")
    return Distribution("quantiles", tuple(np.quantile(np.asarray(values, np.float64), np.linspace(0, 1, points))))


class Delays:
    """Waits one after the other, the same for the same law and seed. An empty law has none."""

    def __init__(self, law: str, seed: int) -> None:
        self._law = parse(law) if law else None
        self._generator = np.random.default_rng(seed) if law else None

    def next_s(self) -> float:
        """The next one, in s."""
        if self._law is None or self._generator is None:
            return 0.0
        return float(self._law.sample(self._generator, ()))
