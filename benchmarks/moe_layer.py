"""Share of the matmul peak that one MoE layer reaches on one CPU thread: forward and backward, dropless, fp32.

The peak is that of the fastest 2048³ product of the same run; products and layers take turns, so that a busy machine
slows both, and times are CPU times, which leave out what others had of the core (wall times are printed as well).
Counted is the arithmetic of the chosen experts alone, 18·T·k·D·F: three products forward and six backward,
without router, sort, gather and activation, which all take their time. Each share is that of the median repetition.

    python -m benchmarks moe_layer        prints one JSON line last: {"share_of_peak": {"8,2": …}, …}

Dimensions: T tokens, D hidden width, E experts, k experts of one token, F expert width.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks._core import Seconds, one_thread, pin_to_one_core, timed

T, D, F = 4096, 256, 512
CASES = ((8, 2), (32, 4), (128, 8), (128, 2))
PEAK_DIM = 2048


def layer_gradient(num_experts: int, choices: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A jitted forward and backward pass through router and experts, and its arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from asyncrl_jax.models.experts import Experts
    from asyncrl_jax.models.moe import moe
    from asyncrl_jax.models.router import RouterOptions

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) * shape[-2] ** -0.5, jnp.float32)

    experts = Experts(normal(num_experts, D, F), normal(num_experts, D, F), normal(num_experts, F, D))
    x_BTD, valid_BT = normal(1, T, D) * T**0.5, jnp.ones((1, T), bool)

    def loss(x_BTD: Any, router_DE: Any, experts: Experts, grad_BTD: Any) -> Any:
        y_BTD, routing = moe(x_BTD, valid_BT, router_DE, experts, RouterOptions(choices), dispatch="blocked")
        return jnp.vdot(y_BTD, grad_BTD), routing.counts_E

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    return gradient, (x_BTD, normal(D, num_experts), experts, normal(1, T, D))


def measure(repeats: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    square = jnp.ones((PEAK_DIM, PEAK_DIM))
    product = jax.jit(lambda a, b: a @ b)
    products: list[Seconds] = []
    layers: dict[str, list[Seconds]] = {}
    compile_s = {}
    jax.block_until_ready(product(square, square))
    for num_experts, choices in CASES:
        name = f"{num_experts},{choices}"
        gradient, arguments = layer_gradient(num_experts, choices)
        compile_s[name] = round(timed(lambda: jax.block_until_ready(gradient(*arguments)))[1].cpu, 1)  # noqa: B023
        layers[name] = []
        for _ in range(repeats):
            products.append(timed(lambda: jax.block_until_ready(product(square, square)))[1])
            layers[name].append(timed(lambda: jax.block_until_ready(gradient(*arguments)))[1])  # noqa: B023
        print(f"{name}: {statistics.median(s.cpu for s in layers[name]) * 1e3:.0f} ms", flush=True)
    return report(products, layers) | {"first_call_cpu_s": compile_s, "repeats": repeats, "jax": jax.__version__}


def report(products: list[Seconds], layers: dict[str, list[Seconds]]) -> dict[str, Any]:
    flops = {f"{num_experts},{choices}": 18 * T * choices * D * F for num_experts, choices in CASES}
    peak_cpu, peak_wall = (2 * PEAK_DIM**3 / min(times) for times in zip(*products, strict=True))

    def share(name: str, cpu_s: float) -> float:
        return round(flops[name] / cpu_s / peak_cpu, 3)

    cpu = {name: [s.cpu for s in times] for name, times in layers.items()}
    wall = {name: statistics.median(s.wall for s in times) for name, times in layers.items()}
    return {
        "share_of_peak": {name: share(name, statistics.median(times)) for name, times in cpu.items()},
        "share_of_peak_range": {
            name: [share(name, max(times)), share(name, min(times))] for name, times in cpu.items()
        },
        "share_of_peak_wall": {name: round(flops[name] / s / peak_wall, 3) for name, s in wall.items()},
        "cpu_ms": {name: round(statistics.median(times) * 1e3) for name, times in cpu.items()},
        "peak_gflops": round(peak_cpu / 1e9, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--measure", action="store_true", help="measure in this very process, whatever its settings")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.repeats)))
        return
    pin_to_one_core()
    # The settings must be there before Python starts.
    command = [sys.executable, "-m", "benchmarks.moe_layer", "--measure", f"--repeats={arguments.repeats}"]
    sys.exit(subprocess.run(command, check=False, env=one_thread(os.environ)).returncode)


if __name__ == "__main__":
    main()
