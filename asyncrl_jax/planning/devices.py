"""Accelerators by name: what their makers state."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator chip."""

    name: str
    peak_flops: float  # dense bf16 FLOP/s
    memory_bytes: float  # HBM
    memory_bytes_per_s: float  # HBM bandwidth


# Dense bf16 peak (no structured sparsity), HBM size and HBM bandwidth from the makers' data sheets.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312e12, 80e9, 2.04e12),
        Device("h100", 989e12, 80e9, 3.35e12),
        Device("h200", 989e12, 141e9, 4.8e12),
        Device("b200", 2.25e15, 180e9, 7.7e12),
        Device("v5e", 197e12, 16e9, 0.82e12),
        Device("v5p", 459e12, 95e9, 2.77e12),
        Device("v6e", 918e12, 32e9, 1.64e12),
    )
}
