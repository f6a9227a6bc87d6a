"""Measures this machine in another process: the one that receives tokens imports no torch."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

from tilewright.types import RequestError


def is_here(host: str, port: int) -> bool:
    """Whether the server's address is one of this machine's own."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def measure() -> dict[str, Any]:
    """What the machine is, under "machine", and the figures of a Probe taken now, under "probe"; in a few seconds."""
    command = [sys.executable, "-m", "tilewright.bench.serve.limits"]
    result = subprocess.run(command, stdout=subprocess.PIPE)  # standard error is passed through
    if result.returncode:
        raise RequestError("this machine could not be measured; --no-limits skips that")
    return json.loads(result.stdout)


def _main() -> None:
    from dataclasses import asdict

    from tilewright import machine
    from tilewright.bench.probe import probe

    print(json.dumps({"machine": machine.as_dict(machine.describe()), "probe": asdict(probe())}))


if __name__ == "__main__":
    _main()
