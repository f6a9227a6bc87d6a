"""Ranks on two hosts: two network namespaces of this machine with a cable between them that leads nowhere else."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.alone  # two ranks, which wait for each other
ADDRESSES = ["10.231.77.1", "10.231.77.2"]

# Rank 0 is the launcher, too.
RANK = """
import sys
import torch
from tilewright.parallel.rendezvous import Rendezvous, make_group, open_rendezvous

rank = int(sys.argv[1])
if rank == 0:
    host = open_rendezvous(2, host=sys.argv[2], timeout_s=120)
    print(host.rendezvous.to_json(), flush=True)
group = make_group(host.rendezvous if rank == 0 else Rendezvous.from_json(sys.argv[2]), rank)
x = torch.arange(70_001).to(torch.bfloat16) * (1 + rank)
group.all_reduce(x)
print(x.view(torch.int16).sum().item(), flush=True)
group.barrier()
"""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts():
    """The names of two namespaces that reach each other."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    names = [f"tilewright-{os.getpid()}-{i}" for i in range(2)]
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make network namespaces: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", names[1])
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def start(host, *arguments):
    command = ["ip", "netns", "exec", host, sys.executable, "-c", RANK, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_an_all_reduce_between_hosts(hosts):
    with start(hosts[0], "0", ADDRESSES[0]) as first:
        try:
            rendezvous = first.stdout.readline()
            assert json.loads(rendezvous)["address"][0] == ADDRESSES[0]
            with start(hosts[1], "1", rendezvous) as second:
                sums = [int(rank.communicate(timeout=240)[0]) for rank in (first, second)]
        finally:
            first.kill()
    parts = [torch.arange(70_001).to(torch.bfloat16) * (1 + rank) for rank in range(2)]
    expected = (parts[0].float() + parts[1].float()).to(torch.bfloat16)
    assert sums == [expected.view(torch.int16).sum().item()] * 2
