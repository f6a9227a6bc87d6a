import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright import config
from tilewright.ops.native import kernels

CPUS = range(16)


def resolve(**variables: str) -> config.Config:
    return config.resolve({f"TILEWRIGHT_{name}": value for name, value in variables.items()}, CPUS, "x86_64")


def test_nothing_set():
    assert resolve() == config.Config(tuple(CPUS), max_isa=None, num_threads=None, bind_cpus=())
    assert resolve(MAX_ISA="", NUM_THREADS="", BIND="") == resolve()


def test_all_set():
    settings = resolve(MAX_ISA="avx2", NUM_THREADS="3", BIND="0-7,9")
    assert (settings.max_isa, settings.num_threads) == ("avx2", 3)
    assert settings.bind_cpus == (0, 1, 2, 3, 4, 5, 6, 7, 9)


def test_other_settings_take_the_place_of_the_environment():
    rank = resolve(NUM_THREADS="3")
    config.use(rank)
    try:
        assert config.current() is rank
    finally:
        config.use(None)
    assert config.current() is config.from_environment()


def test_no_color_is_anything_but_nothing():
    assert config.resolve({"NO_COLOR": "0"}, CPUS).no_color
    assert not config.resolve({"NO_COLOR": ""}, CPUS).no_color and not resolve().no_color


def test_as_many_threads_as_cpus_to_pin_to():
    assert resolve(BIND="4,2").team_size == 2
    assert resolve(BIND="4,2", NUM_THREADS="3").team_size == 3
    assert resolve().team_size == len(CPUS)
    assert resolve(BIND="4,2").bind_cpus == (4, 2)
    assert resolve(BIND="1,1-2").bind_cpus == (1, 2)


@pytest.mark.parametrize(
    "variables,message",
    [
        (
            {"MAX_ISA": "avx10"},
            "TILEWRIGHT_MAX_ISA is 'avx10', expected one of scalar, avx2, avx512, avx512_vnni, avx512_bf16, amx",
        ),
        ({"NUM_THREADS": "0"}, "TILEWRIGHT_NUM_THREADS is '0', expected a whole number from 1 to 1024"),
        ({"NUM_THREADS": "-1"}, "TILEWRIGHT_NUM_THREADS is '-1', expected"),
        ({"NUM_THREADS": "two"}, "TILEWRIGHT_NUM_THREADS is 'two', expected"),
        ({"BIND": "0-x"}, "TILEWRIGHT_BIND is '0-x', expected CPU numbers and ranges such as 0-7,9"),
        ({"BIND": "1,,2"}, "TILEWRIGHT_BIND is '1,,2', expected"),
        ({"CACHE_DIR": "here"}, "TILEWRIGHT_CACHE_DIR is 'here', expected a whole path or off"),
        ({"BIND": "5-3"}, "TILEWRIGHT_BIND is '5-3', which names no CPU; this process may use 0-15"),
        ({"BIND": "14-16"}, "TILEWRIGHT_BIND is '14-16', but this process may not use CPU 16, only 0-15"),
        ({"BIND": "14-17,20"}, "TILEWRIGHT_BIND is '14-17,20', but this process may not use CPUs 16-17,20, only 0-15"),
    ],
)
def test_errors_name_the_value_and_what_is_allowed(variables, message):
    with pytest.raises(config.ConfigError, match=re.escape(message)):
        resolve(**variables)


@pytest.mark.parametrize(
    "environment,expected",
    [
        ({"HOME": "/home/a"}, "/home/a/.cache/tilewright"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/big"}, "/big/tilewright"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "relative"}, "/home/a/.cache/tilewright"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/big", "TILEWRIGHT_CACHE_DIR": ""}, "/big/tilewright"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/big", "TILEWRIGHT_CACHE_DIR": "/other"}, "/other"),
        ({"HOME": "/home/a", "TILEWRIGHT_CACHE_DIR": "~/packed"}, "/home/a/packed"),
        ({"HOME": "/home/a", "TILEWRIGHT_CACHE_DIR": "off"}, None),
        ({}, None),
    ],
)
def test_where_packed_weights_are_kept(environment, expected):
    assert config.resolve(environment, CPUS).cache_dir == (None if expected is None else Path(expected))


@pytest.mark.parametrize(
    "key",
    ["$(openssl rand -hex 24)", "$(date)", "${KEY}", "$KEY", "`uuidgen`", "a b", "<your key>", "changeme", "CHANGE_ME",
     "your-api-key", "xxxx", "...", "schlüssel", "good,$(bad)"],
)  # fmt: skip
def test_keys_that_nobody_meant(key):
    """The published text of an example would let everybody in."""
    with pytest.raises(config.ConfigError, match="TILEWRIGHT_API_KEY has a key that") as caught:
        config.resolve({"TILEWRIGHT_API_KEY": key}, CPUS)
    assert key not in str(caught.value)


def test_keys():
    assert config.resolve({"TILEWRIGHT_API_KEY": "secret"}, CPUS).api_keys == ("secret",)
    assert config.resolve({"TILEWRIGHT_API_KEY": "a1$9, k-2,"}, CPUS).api_keys == ("a1$9", "k-2")
    assert config.resolve({"TILEWRIGHT_API_KEY": ""}, CPUS).api_keys == ()


def test_the_key_is_not_shown():
    settings = config.resolve({"OPENAI_API_KEY": "secret"}, CPUS)
    assert settings.openai_api_key == "secret" and "secret" not in repr(settings)
    assert config.resolve({"OPENAI_API_KEY": ""}, CPUS).openai_api_key is None


@given(st.lists(st.sampled_from(CPUS), min_size=1, unique=True))
def test_cpu_lists_survive_the_round_trip(cpus):
    assert resolve(BIND=config.format_cpus(cpus)).bind_cpus == tuple(cpus)


def test_a_level_of_the_other_architecture_is_named_as_such():
    assert config.resolve({"TILEWRIGHT_MAX_ISA": "neon_dotprod"}, CPUS, "aarch64").max_isa == "neon_dotprod"
    with pytest.raises(config.ConfigError) as failure:
        config.resolve({"TILEWRIGHT_MAX_ISA": "avx512"}, CPUS, "aarch64")
    assert str(failure.value) == (
        "TILEWRIGHT_MAX_ISA is 'avx512', a level of x86_64; this is aarch64: "
        "expected one of scalar, neon, neon_dotprod, neon_bf16"
    )
    with pytest.raises(config.ConfigError, match="'neon', a level of aarch64; this is x86_64: expected one of"):
        resolve(MAX_ISA="neon")


def test_isa_levels_are_those_of_the_kernels():
    with pytest.raises(ValueError, match=re.escape(", ".join(config.ISA_LEVELS[platform.machine()]))):
        kernels.set_max_isa("none of them")


def test_applied_when_the_native_module_is_loaded(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_MAX_ISA", "scalar")
    monkeypatch.setenv("TILEWRIGHT_NUM_THREADS", "3")
    program = "from tilewright.ops.native import kernels; print(kernels.active_isa(), kernels.num_threads())"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["scalar", "3"]
