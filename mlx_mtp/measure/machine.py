"""What figures were measured on. Owns: the machine, in words."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.model.memory import ram_bytes


@dataclass(frozen=True)
class Machine:
    """The machine.

    Attributes:
        chip: for example "Apple M3 Max".
        os: for example "macOS 15.5".
        memory_bytes: RAM.
        device: what MLX computes on, "gpu" or "cpu".
    """

    chip: str
    os: str
    memory_bytes: int
    device: str

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 2**30:.0f} GB"
        return f"{self.chip}, {memory}, {self.os}, MLX on {self.device.upper()}"


def this_machine() -> Machine:
    device = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
    chip = mx.device_info().get("device_name") or platform.processor() or platform.machine()
    return Machine(str(chip), _os_name(), ram_bytes(), device)


def _os_name() -> str:
    if mac := platform.mac_ver()[0]:
        return f"macOS {mac}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"
