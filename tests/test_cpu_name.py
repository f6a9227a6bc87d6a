"""Names of CPUs from /proc/cpuinfo, as kernels of several machines print it."""

import pytest

from tilewright.host.topology import cpu_name

XEON = """\
processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 143
model name	: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
stepping	: 8
"""


def arm(number, implementer, part, variant="0x0", before=""):
    """One CPU's lines, as an aarch64 kernel prints them; it tells 32-bit programs a model name `before` the rest."""
    return f"""\
processor	: {number}
{before}BogoMIPS	: 50.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer	: {implementer}
CPU architecture: 8
CPU variant	: {variant}
CPU part	: {part}
CPU revision	: 1

"""


@pytest.mark.parametrize(
    "cpuinfo,name",
    [
        (XEON + "\n" + XEON, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"),
        (arm(0, "0x41", "0xd0c", "0x3") + arm(1, "0x41", "0xd0c", "0x3"), "Arm Neoverse-N1"),
        (arm(0, "0x41", "0xd40"), "Arm Neoverse-V1"),
        (arm(0, "0x41", "0xd4f"), "Arm Neoverse-V2"),
        (arm(0, "0x6d", "0xd49"), "Microsoft Cobalt 100"),
        (arm(0, "0xc0", "0xac3"), "Ampere Computing Ampere-1"),
        (arm(0, "0x51", "0x001"), "Qualcomm Oryon"),
        (arm(0, "0x41", "0xd99"), "implementer 0x41, part 0xd99"),
        (arm(0, "0x61", "0x000"), "implementer 0x61, part 0x000"),  # in a virtual machine of macOS
        (arm(0, "0x00", "0x051"), "implementer 0x00, part 0x051"),  # QEMU's own CPU
        (
            arm(0, "0x41", "0xd08") + "Hardware\t: BCM2835\nModel\t\t: Raspberry Pi 4 Model B Rev 1.1\n",
            "Arm Cortex-A72",
        ),
        (arm(0, "0x41", "0xd0c", before="model name\t: ARMv8 Processor rev 1 (v8l)\n"), "Arm Neoverse-N1"),
        ("processor\t: 0\nhart\t\t: 0\nisa\t\t: rv64imafdc\n", ""),
        ("", ""),
    ],
)
def test_a_cpu_has_its_name(cpuinfo, name):
    assert cpu_name(cpuinfo) == name


def test_all_kinds_of_cores_are_told():
    small, large = [arm(i, "0x41", "0xd05") for i in range(4)], [arm(i, "0x41", "0xd0b", "0x4") for i in range(4, 8)]
    assert cpu_name("".join(small + large)) == "4 x Arm Cortex-A55, 4 x Arm Cortex-A76"
    apple = [arm(i, "0x61", "0x022" if i < 4 else "0x023", "0x1") for i in range(8)]
    assert cpu_name("".join(apple)) == "4 x Apple M1 Icestorm, 4 x Apple M1 Firestorm"
