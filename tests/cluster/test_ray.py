"""Replicas of the embedded model on a cluster of this machine: answers under load while a process is killed."""

import collections
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from oracle import require
from processes import family_of
from serve_process import ServerProcess

from tilewright import config
from tilewright.types import RequestError

pytestmark = [pytest.mark.alone, pytest.mark.ray]

FLAGS = ["--replicas", "2", "--replica-cpus", "1", "--kv-memory", "64MB"]
READY_S = 120  # a replica is some 10 s of imports on a machine that has nothing else to do


@pytest.fixture(scope="module")
def cluster():
    """The environment of processes that use a cluster of our own. One for all tests: it takes seconds to start."""
    before = dict(os.environ)
    config.prepare_ray(is_own=True)  # which Ray reads as it is imported
    require("ray")
    from tilewright.server.replicas import ray_serving

    os.environ |= {"TILEWRIGHT_NUM_THREADS": "1", "TILEWRIGHT_CACHE_DIR": "off"}
    ray_serving.connect(None, num_cpus=4)
    import ray

    yield {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    ray_serving.disconnect()
    os.environ.clear()
    os.environ |= before


@pytest.fixture(scope="module")
def server(cluster):
    process = ServerProcess(None, *FLAGS, ready_s=READY_S, **cluster)
    yield process
    process.end()


def pids_of(name):
    """The processes of the cluster that run an actor of this name."""
    found = set()
    for pid in family_of(os.getpid()):
        try:
            if re.match(name, Path(f"/proc/{pid}/cmdline").read_text()):
                found.add(pid)
        except OSError:
            continue
    return found


def health(server):
    with urllib.request.urlopen(f"{server.url}/health", timeout=30) as response:
        return json.load(response)


def wait_until(is_true, timeout_s=READY_S):
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def ask(server, prompt, *, stream, temperature=0.0, max_tokens=120):
    """(text, number of tokens) of an answer."""
    options = {"model": "", "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
    options["extra_body"] = {"ignore_eos": True}
    client = server.client()
    if not stream:
        found = client.completions.create(**options)
        return found.choices[0].text, found.usage.completion_tokens
    text, num_tokens = "", 0
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **options):
        text += "".join(choice.text for choice in chunk.choices)
        num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
    return text, num_tokens


def test_the_cluster_listens_on_loopback(cluster):
    """All but the port that Ray Serve opens for each replica, which asks for a token."""
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    family = family_of(os.getpid())
    ours = [line for line in listening if any(f"pid={pid}," in line for pid in family)]
    assert ours
    outside = [line for line in ours if not re.match(r"\[?(::ffff:)?127\.", line.split()[3])]
    assert not [line for line in outside if "ServeRepli" not in line], outside
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_a_batch_loses_and_doubles_nothing_when_a_worker_is_killed(cluster, tmp_path):
    requests = [
        {"custom_id": f"number {number}", "method": "POST", "url": "/v1/completions"}
        | {"body": {"prompt": f"Count from {number}", "max_tokens": 60, "temperature": 0, "ignore_eos": True}}
        for number in range(48)
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in requests[:8]))
    command = [sys.executable, "-m", "tilewright", "batch", str(source), str(output), "--kv-memory", "64MB"]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=READY_S)
    assert alone.returncode == 0, alone.stderr
    before = output.read_text()
    source.write_text("".join(json.dumps(one) + "\n" for one in requests))
    process = subprocess.Popen([*command, *FLAGS], stderr=subprocess.PIPE, text=True, env={**os.environ, **cluster})
    try:
        wait_until(lambda: output.stat().st_size > len(before) or process.poll() is not None)
        os.kill(min(pids_of(r"ray::.*BatchActor")), signal.SIGKILL)
        _, errors = process.communicate(timeout=READY_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    text = output.read_text()
    assert text.startswith(before), "what was answered is not computed again"
    lines = [json.loads(line) for line in text.splitlines()]
    assert collections.Counter(line["custom_id"] for line in lines) == {one["custom_id"]: 1 for one in requests}
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in lines} == {60}


@pytest.mark.parametrize("victim_name", ["ray::ServeReplica", r".*link.service"])
def test_all_answers_are_right_when_a_replica_is_killed(server, victim_name):
    """The replica with its engine, or the engine alone, which the replica restarts."""
    prompts = [f"Count from {number}" for number in range(6)]
    expected = {prompt: ask(server, prompt, stream=False) for prompt in prompts}
    victim = min(pids_of(victim_name))
    assert len(pids_of(victim_name)) == 2
    assert health(server) == {"status": "ok", "replicas": 2}
    kinds = [(prompt, stream, 0.0) for prompt in prompts for stream in (True, False)]
    kinds += [(prompt, stream, 1.0) for prompt in prompts[:2] for stream in (True, False)]
    with ThreadPoolExecutor(len(kinds)) as pool:
        waiting = [
            pool.submit(ask, server, prompt, stream=stream, temperature=temperature)
            for prompt, stream, temperature in kinds
        ]
        wait_until(lambda: metric(server, "requests_running") >= len(kinds) // 2)
        os.kill(victim, signal.SIGKILL)
        answers = [one.result(timeout=READY_S) for one in waiting]
    for (prompt, _, temperature), (text, num_tokens) in zip(kinds, answers, strict=True):
        assert num_tokens == 120
        assert temperature or (text, num_tokens) == expected[prompt]
    wait_until(lambda: health(server).get("replicas") == 2)
    assert metric(server, "engine_restarts_total") >= 1
    assert victim not in pids_of(victim_name) and len(pids_of(victim_name)) == 2


def metric(server, name):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        return float(re.search(rf"^tilewright_{name} (\S+)$", response.read().decode(), re.MULTILINE)[1])


def test_requests_that_begin_alike_meet_in_one_cache(server):
    for number in range(4):
        system = f"Rule {number}: " + "count aloud, one by one, and slowly. " * 20
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Go on"}]
        options = {"model": "", "messages": messages, "max_tokens": 2}
        first, second = (server.client().chat.completions.create(**options) for _ in range(2))
        assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens_details.cached_tokens


def test_a_client_that_leaves_frees_the_replica(server):
    options = {"model": "", "prompt": "x", "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    streams = [server.client().completions.create(stream=True, **options) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
    assert metric(server, "requests_running") == 3
    for stream in streams:
        stream.close()
    wait_until(lambda: metric(server, "requests_running") == 0, timeout_s=20)


def test_replicas_are_replaced_one_by_one_without_losing_a_request(server):
    before = pids_of("ray::ServeReplica")
    expected = ask(server, "Count", stream=False, max_tokens=20)
    is_over = threading.Event()

    def keep_asking():
        answers = set()
        while not is_over.is_set():
            answers |= {ask(server, "Count", stream=stream, max_tokens=20) for stream in (True, False)}
        return answers

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(keep_asking) for _ in range(3)]
        server.process.send_signal(signal.SIGHUP)
        try:
            wait_until(lambda: not before & pids_of("ray::ServeReplica") and health(server)["replicas"] == 2)
        finally:
            is_over.set()
        assert {answer for one in asking for answer in one.result(READY_S)} == {expected}


def test_a_model_that_cannot_be_served_is_said_why(cluster, tmp_path):
    with pytest.raises(AssertionError, match=r"config.json is missing"):
        ServerProcess(tmp_path, *FLAGS, ready_s=READY_S, **cluster)


def test_replicas_must_fit_on_the_machines(cluster):
    from tilewright.server.replicas import ray_serving

    with pytest.raises(RequestError, match=r"16 replicas of 1 CPUs do not fit on machines with 4 CPUs"):
        ray_serving.num_replica_cpus(1, 16)
