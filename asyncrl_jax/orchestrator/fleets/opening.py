"""The fleet that the settings name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from asyncrl_jax.config import Config
from asyncrl_jax.config_fleet import FleetConfig
from asyncrl_jax.orchestrator.fleets.base import Fleet


def check_installed(settings: FleetConfig) -> None:
    """Raises: ValueError: if the package of the fleet's cluster is not there."""
    kind = settings.kind
    if kind != "local" and importlib.util.find_spec(kind) is None:
        raise ValueError(f"--config.orchestrator.fleet.kind={kind}: needs pip install 'asyncrl-jax[{kind}]'")


def open_fleet(config: Config, run_dir: Path) -> Fleet:
    """Connects to the cluster of `orchestrator.fleet.kind`; a local fleet is the launcher's.

    Raises:
      FleetUnavailable: if it cannot be reached.
    """
    if config.orchestrator.fleet.kind == "ray":
        from asyncrl_jax.orchestrator.fleets.ray import RayFleet

        return RayFleet(config, run_dir)
    assert config.orchestrator.fleet.kind == "kubernetes"
    from asyncrl_jax.orchestrator.fleets.kubernetes import KubernetesFleet

    return KubernetesFleet.connect(config.orchestrator.fleet)
