"""Settings of a learner that is several processes."""

from __future__ import annotations

import dataclasses

from asyncrl_jax.config_leaf import require, setting

AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Every process is started with the same config but for `process_id`; the mesh spans the devices of all."""

    coordinator: str = setting(
        "", "host:port that process 0 listens on; auto: found from the cluster (TPU pods, Slurm); empty: one process"
    )
    num_processes: int = setting(1, "processes of the learner; with coordinator = auto the cluster says")
    process_id: int = setting(0, "number of this process, from 0; with coordinator = auto the cluster says")
    order_wait_s: float = setting(
        1800.0, "longest a process waits for process 0 to say what comes next before it gives up, in s"
    )

    def __post_init__(self) -> None:
        require(self.num_processes >= 1, "distributed.num_processes", self.num_processes, "at least 1")
        require(
            0 <= self.process_id < self.num_processes,
            "distributed.process_id",
            self.process_id,
            f"from 0 to num_processes - 1 = {self.num_processes - 1}",
        )
        require(
            bool(self.coordinator) or self.num_processes == 1,
            "distributed.coordinator",
            repr(self.coordinator),
            f"name the host:port of process 0, since num_processes = {self.num_processes}",
        )
        require(
            self.coordinator in ("", AUTO) or ":" in self.coordinator,
            "distributed.coordinator",
            self.coordinator,
            "use host:port, auto, or nothing",
        )
        require(self.order_wait_s > 0, "distributed.order_wait_s", self.order_wait_s, "more than 0")
