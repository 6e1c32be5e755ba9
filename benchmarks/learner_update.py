"""One whole learner update on one CPU thread, beside google-tunix and transformers + PyTorch, in fp32.

The model is a Qwen3-MoE of 4 layers, hidden width 128, 8 experts of 256, top-2, vocabulary 512; the batch 16 × 256
tokens, and once more 16 sequences of uneven length (lognormal, mean 110, at most 256), which this package packs and the
others pad. All start from the same weights, compute the same loss (PPO's clipped objective, mean over tokens; no KL, no
balance loss) and must agree on it and on the norm of its gradient, or there is no result. This package and Tunix also
clip and make AdamW's step; PyTorch makes the forward and the backward pass alone.

Each peer is a process of its own environment, on the same core, with the same allocator settings. They make one update
after the other, in turns; times are CPU times of the process (wall times are printed as well), medians over the turns.

    python -m benchmarks.learner_update --setup       makes the peers' environments in the user's cache: about 3 GB
    python -m benchmarks.learner_update               a peer without an environment is left out, and its ratio null

Prints one JSON line last: {"ratio_to_tunix": …, "ratio_to_torch": …, "ratio_to_tunix_uneven": …, …}, each the peer's
time ÷ ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._core import Seconds, one_thread, pin_to_one_core
from benchmarks.peers import problem

HERE = Path(__file__).parent
REQUIREMENTS = {"tunix": ["google-tunix==0.1.7"], "torch": ["torch", "transformers", "safetensors"]}
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4  # relative to the loss of one token (about 1) and the gradient's norm


def cached_python(peer: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "asyncrl_jax" / "benchmarks" / peer / "bin" / "python"


def set_up() -> None:
    """Makes the peers' environments."""
    for peer, requirements in REQUIREMENTS.items():
        python = cached_python(peer)
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)


class Peer:
    """A running peer, warmed up."""

    def __init__(self, command: list[str], environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            command, env=environment, cwd=HERE.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer()

    def update(self, batch: str) -> Seconds:
        """Makes one update and returns its time."""
        assert self._process.stdin is not None
        print(batch, file=self._process.stdin, flush=True)
        return Seconds(**self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print what they like
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended with exit code {self._process.wait()}")


def commands(arguments: argparse.Namespace, directory: Path) -> dict[str, list[str]]:
    """How to start each peer that has an environment."""
    made = {"ours": [sys.executable, "-m", "benchmarks.peers.asyncrl_peer", str(directory)]}
    for peer, options in (("tunix", []), ("torch", [arguments.torch_attention, arguments.torch_experts])):
        python = Path(getattr(arguments, f"{peer}_python") or cached_python(peer))
        if python.exists():
            made[peer] = [str(python), "-m", f"benchmarks.peers.{peer}_peer", str(directory), *options]
        else:
            print(f"{peer} is left out: no {python}; make it with --setup", file=sys.stderr)
    return made


def write_problem(directory: Path) -> None:
    from asyncrl_jax.models import init_params, save_params
    from benchmarks.peers.asyncrl_peer import config_for

    problem.make_batches(directory)
    model = config_for("even").model
    save_params(model, init_params(model, 0), directory / "model")


def check_agreement(peers: Mapping[str, Peer]) -> dict[str, Any]:
    """Largest differences from our loss and gradient norm.

    Raises:
      RuntimeError: if a peer computes something else.
    """
    differences = {}
    for name, peer in peers.items():
        for batch in problem.BATCHES:
            ours, theirs = peers["ours"].about["first"][batch], peer.about["first"][batch]
            loss = abs(theirs["loss"] - ours["loss"])
            gradient = abs(theirs["grad_norm"] / ours["grad_norm"] - 1)
            if loss > LOSS_TOLERANCE or gradient > GRADIENT_TOLERANCE:
                raise RuntimeError(f"{name} disagrees on the {batch} batch: {theirs}, ours {ours}")
            differences[f"{name} {batch}"] = [float(f"{loss:.1e}"), float(f"{gradient:.1e}")]
    return differences


def measure(peers: Mapping[str, Peer], repeats: int) -> dict[str, list[Seconds]]:
    """Times by "<peer> <batch>"; one update of each in every turn."""
    times: dict[str, list[Seconds]] = {f"{name} {batch}": [] for name in peers for batch in problem.BATCHES}
    for _ in range(repeats):
        for batch in problem.BATCHES:
            for name, peer in peers.items():
                times[f"{name} {batch}"].append(peer.update(batch))
    return times


def report(times: Mapping[str, list[Seconds]]) -> dict[str, Any]:
    def ratio(peer: str, batch: str, clock: str) -> float | None:
        theirs, ours = ([getattr(s, clock) for s in times.get(f"{name} {batch}", [])] for name in (peer, "ours"))
        return round(statistics.median(theirs) / statistics.median(ours), 2) if theirs else None

    ratios = {}
    for suffix, batch in (("", "even"), ("_uneven", "uneven")):
        for peer in REQUIREMENTS:
            ratios[f"ratio_to_{peer}{suffix}"] = ratio(peer, batch, "cpu")
    wall = {f"{peer} {batch}": ratio(peer, batch, "wall") for peer in REQUIREMENTS for batch in problem.BATCHES}
    spread = {
        name: [round(f(s.cpu for s in of), 4) for f in (statistics.median, min, max)] for name, of in times.items()
    }
    return ratios | {"cpu_s_median_min_max": spread, "wall_ratios": wall, "load": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="turns")
    parser.add_argument("--setup", action="store_true", help="make the peers' environments and stop")
    parser.add_argument("--tunix-python", help="interpreter of an environment with google-tunix")
    parser.add_argument("--torch-python", help="interpreter of an environment with torch and transformers")
    parser.add_argument("--torch-attention", default="eager", help="attn_implementation of transformers")
    parser.add_argument("--torch-experts", default="eager", help="experts_implementation of transformers")
    arguments = parser.parse_args()
    if arguments.setup:
        set_up()
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    pin_to_one_core()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_problem(directory)
        environment = one_thread(os.environ)
        peers: dict[str, Peer] = {}
        try:
            for name, command in commands(arguments, directory).items():
                peers[name] = Peer(command, environment)
            differences = check_agreement(peers)
            times = measure(peers, arguments.repeats)
        finally:
            for peer in peers.values():
                peer.close()
    versions = {name: peer.about["versions"] for name, peer in peers.items()}
    extra = {"differences_of_loss_and_gradient_norm": differences, "versions": versions, "repeats": arguments.repeats}
    print(json.dumps(report(times) | extra))


if __name__ == "__main__":
    main()
