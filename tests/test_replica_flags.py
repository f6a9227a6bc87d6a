"""The flags of commands that run several engines."""

import argparse
import sys

import pytest

from tilewright import cli, config
from tilewright.flags import replicas
from tilewright.flags.replicas import ReplicaCount, count_or_range, cpus_per_replica, fixed_count, local_options
from tilewright.types import RequestError


@pytest.mark.parametrize(("text", "count"), [("2", (2, 2)), ("1:4", (1, 4)), ("3:3", (3, 3)), ("12", (12, 12))])
def test_counts(text, count):
    assert count_or_range(text) == ReplicaCount(*count)


@pytest.mark.parametrize("text", ["0", "-1", "two", "4:1", "1:", ":4", "0:4", "1:2:3", "1.5", "", "1234567"])
def test_counts_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match=repr(text)):
        count_or_range(text)


def test_a_batch_has_a_fixed_count():
    assert fixed_count("8") == ReplicaCount(8, 8) and fixed_count("8").is_fixed
    with pytest.raises(argparse.ArgumentTypeError):
        fixed_count("1:4")


@pytest.mark.parametrize(
    ("nodes", "num_replicas", "num_cpus"),
    [
        ([16], 1, 16),
        ([16], 2, 8),
        ([16], 3, 5),
        ([16, 16], 2, 16),
        ([16, 16], 3, 8),
        ([64, 8], 2, 32),
        ([64, 8, 8], 10, 8),
        ([2], 2, 1),
    ],
)
def test_replicas_get_as_many_cpus_as_there_are(nodes, num_replicas, num_cpus):
    assert cpus_per_replica(nodes, num_replicas) == num_cpus
    assert sum(node // num_cpus for node in nodes) >= num_replicas
    assert sum(node // (num_cpus + 1) for node in nodes) < num_replicas


@pytest.mark.parametrize("nodes", [[], [0], [1, 2]])
def test_too_few_cpus(nodes):
    with pytest.raises(RequestError, match=f"4 replicas need as many CPUs, the Ray cluster has {sum(nodes)}"):
        cpus_per_replica(nodes, 4)


@pytest.fixture
def clean_config(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_NUM_THREADS", "")
    monkeypatch.delenv("TILEWRIGHT_NUM_THREADS")
    config.from_environment.cache_clear()
    yield
    config.from_environment.cache_clear()


def test_replicas_share_memory_and_cpus(clean_config, monkeypatch):
    monkeypatch.setattr(config.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert local_options({"model": "x"}, 4, 8) == {"model": "x", "kv_memory": "12.5%"}, "four of them fit here"
    assert config.current().num_threads == 4
    assert local_options({"model": "x"}, 4, 2)["kv_memory"] == "25%", "there are but two"
    assert local_options({"model": "x"}, 16, 8)["kv_memory"] == "50%"
    assert local_options({"kv_memory": "1GB"}, 4, 8) == {"kv_memory": "1GB"}


def test_the_number_of_threads_in_the_environment_counts(clean_config, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_NUM_THREADS", "3")
    local_options({}, 4, 2)
    assert config.current().num_threads == 3


def test_ray_is_told_to_stay_on_this_machine(monkeypatch):
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_worker_niceness", "5")
    config.prepare_ray(is_own=False)
    assert config.os.environ["RAY_USAGE_STATS_ENABLED"] == "0" and "RAY_AUTH_TOKEN" not in config.os.environ
    config.prepare_ray(is_own=True)
    token = config.os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 64 and config.os.environ["RAY_AUTH_MODE"] == "token"
    assert config.os.environ["RAY_worker_niceness"] == "5", "the user's"
    config.prepare_ray(is_own=True)
    assert config.os.environ["RAY_AUTH_TOKEN"] == token


@pytest.mark.parametrize("command", [["serve"], ["batch", "in.jsonl", "out.jsonl"]])
def test_flags_that_need_others(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # other tests need it
    assert cli.main([*command, "--ray-address", "127.0.0.1:1"]) == 2
    assert "--ray-address is given, expected --replicas with it" in capsys.readouterr().err
    monkeypatch.setattr(replicas.importlib.util, "find_spec", lambda name: None)
    assert cli.main([*command, "--replicas", "2"]) == 2
    assert "pip install 'ray[serve,data]'" in capsys.readouterr().err
    assert "ray" not in sys.modules
