"""The name of a CPU, from what Linux says of it in /proc/cpuinfo."""

from __future__ import annotations

import re
from collections import Counter

# ARM CPUs have no "model name" but numbers: of who made the core, and of the core. They tell no product: Neoverse-N1 is
# in Graviton2 and in Ampere Altra, Neoverse-V2 in Graviton4 and in NVIDIA Grace.
_ARM_CORES: dict[int, tuple[str, dict[int, str]]] = {
    0x41: (
        "Arm",
        {
            0xD03: "Cortex-A53", 0xD05: "Cortex-A55", 0xD07: "Cortex-A57", 0xD08: "Cortex-A72", 0xD09: "Cortex-A73",
            0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0D: "Cortex-A77", 0xD0E: "Cortex-A76AE",
            0xD41: "Cortex-A78", 0xD42: "Cortex-A78AE", 0xD4B: "Cortex-A78C",
            0xD46: "Cortex-A510", 0xD47: "Cortex-A710", 0xD4D: "Cortex-A715",
            0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD87: "Cortex-A725",
            0xD44: "Cortex-X1", 0xD4C: "Cortex-X1C", 0xD48: "Cortex-X2", 0xD4E: "Cortex-X3", 0xD82: "Cortex-X4",
            0xD85: "Cortex-X925",
            0xD4A: "Neoverse-E1", 0xD0C: "Neoverse-N1", 0xD49: "Neoverse-N2", 0xD8E: "Neoverse-N3",
            0xD40: "Neoverse-V1", 0xD4F: "Neoverse-V2", 0xD84: "Neoverse-V3", 0xD83: "Neoverse-V3AE",
        },
    ),
    0x46: ("Fujitsu", {0x001: "A64FX"}),
    0x48: ("HiSilicon", {0xD01: "TaiShan v110 (Kunpeng 920)"}),
    0x4E: ("NVIDIA", {0x004: "Carmel"}),
    0x51: ("Qualcomm", {0x001: "Oryon", 0xC00: "Falkor"}),
    0x61: (
        "Apple",
        {
            0x022: "M1 Icestorm", 0x023: "M1 Firestorm", 0x024: "M1 Pro Icestorm", 0x025: "M1 Pro Firestorm",
            0x028: "M1 Max Icestorm", 0x029: "M1 Max Firestorm", 0x032: "M2 Blizzard", 0x033: "M2 Avalanche",
            0x034: "M2 Pro Blizzard", 0x035: "M2 Pro Avalanche", 0x038: "M2 Max Blizzard", 0x039: "M2 Max Avalanche",
            0x048: "M3 Max Sawtooth", 0x049: "M3 Max Everest",
        },
    ),
    0x6D: ("Microsoft", {0xD49: "Cobalt 100"}),
    0xC0: ("Ampere Computing", {0xAC3: "Ampere-1", 0xAC4: "Ampere-1A"}),
}  # fmt: skip


def cpu_name(cpuinfo: str) -> str:
    """The name of the CPU, all its kinds of cores where there are several; "" where the text tells none."""
    cores = Counter(filter(None, map(_arm_core, cpuinfo.split("\n\n"))))
    if not cores:
        return _field("model name", cpuinfo)
    if len(cores) == 1:
        return next(iter(cores))
    return ", ".join(f"{count} x {name}" for name, count in cores.items())


def _arm_core(cpu: str) -> str:
    """The core that one CPU's lines name; "" where it is none of ARM's."""
    implementer, part = (_field(name, cpu) for name in ("CPU implementer", "CPU part"))
    if not implementer or not part:
        return ""
    maker, cores = _ARM_CORES.get(int(implementer, 16), ("", {}))
    core = cores.get(int(part, 16))
    return f"{maker} {core}" if core else f"implementer {implementer}, part {part}"


def _field(name: str, text: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
