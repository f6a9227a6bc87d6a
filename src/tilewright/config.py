"""Settings from environment variables, which only this file reads.

TILEWRIGHT_MAX_ISA       the highest ISA level the kernels may use: scalar, avx2, avx512, avx512_vnni,
                         avx512_bf16 or amx on x86-64;
                         scalar, neon, neon_dotprod or neon_bf16 on aarch64; unset: the best there is
TILEWRIGHT_NUM_THREADS   threads the kernels use, counting the caller, on each rank where there are several; unset: one
                         per CPU of TILEWRIGHT_BIND, or of the process; with several ranks, one per core of the rank
TILEWRIGHT_BIND          CPUs the threads are pinned to, such as "0-7,9"; unset: not pinned. With several ranks: the
                         CPUs that ranks are cut from, as if the process had only those
TILEWRIGHT_CACHE_DIR     where packed weights are kept between starts, or "off"; unset: tilewright in XDG_CACHE_HOME or,
                         without that, in ~/.cache
TILEWRIGHT_API_KEY       the key, or keys with commas between, that `tilewright serve` asks for; unset: none
NO_COLOR                 anything: no colours in the terminal; unset: colours where a terminal shows them
OPENAI_API_KEY           the key that `tilewright bench serve` sends to the server; unset: none
RAY_ADDRESS              the Ray cluster that --replicas uses; unset: one is started on this machine
"""

import functools
import logging
import os
import platform
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# By architecture, as platform.machine() names it; from the plainest to the best.
ISA_LEVELS = {
    "x86_64": ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"),
    "aarch64": ("scalar", "neon", "neon_dotprod", "neon_bf16"),
}

# systemd's EnvironmentFile and Docker's --env-file expand nothing: the text itself would be the key.
_UNEXPANDED = re.compile(r"\$[({A-Za-z_]|`")
_PLACEHOLDER = re.compile(
    r"<.*>|\[.*\]|\.{3,}|x{3,}|\*+|(change|replace)[-_]?(me|this).*|your[-_]?(secret|api)?[-_]?key.*|(api[-_]?)?key|todo|"
    r"placeholder|secret[-_]?key",
    re.IGNORECASE,
)

_log = logging.getLogger(__name__)


class ConfigError(ValueError):
    """An invalid setting; the message has its name, its value and what is allowed."""


@dataclass(frozen=True)
class Config:
    """Settings from the environment, and the CPUs of the process."""

    available_cpus: tuple[int, ...]  # at the start of the process: a pinned thread sees only its own
    max_isa: str | None = None  # None: the best level of this CPU
    num_threads: int | None = None  # None: one per CPU of `bind_cpus`, or of the process
    threads_sleep_soon: bool = False  # idle threads sleep soon instead of spinning
    bind_cpus: tuple[int, ...] = ()  # empty: threads are not pinned
    memory_nodes: tuple[int, ...] = ()  # nodes of a rank's memory; empty: the system's default policy
    cache_dir: Path | None = None  # None: packed weights are not cached
    no_color: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    openai_api_key: str | None = field(default=None, repr=False)
    ray_address: str | None = None  # None: start our own cluster

    @property
    def usable_cpus(self) -> tuple[int, ...]:
        """CPUs that threads may be bound to."""
        return tuple(sorted(self.bind_cpus)) or self.available_cpus

    @property
    def team_size(self) -> int:
        """Threads of a kernel."""
        return self.num_threads or len(self.usable_cpus)


@functools.cache
def from_environment() -> Config:
    """Return the Config that this process was started with, read once."""
    return resolve(os.environ, os.sched_getaffinity(0))


_in_place: Config | None = None


def current() -> Config:
    """Return the Config of this process: the environment's, unless `use` replaced it."""
    return _in_place or from_environment()


def use(settings: Config | None) -> None:
    """Replace the settings of the environment; None restores them.

    For a rank of several, which has its own CPUs. The kernels follow when `ops.native` is loaded, or told to.
    """
    global _in_place
    _in_place = settings


def use_threads(num_threads: int) -> None:
    """Let this process and its children use `num_threads` threads, unless the environment sets the number.

    For a process that shares the machine with others like it; before the kernels are loaded.
    """
    os.environ.setdefault("TILEWRIGHT_NUM_THREADS", str(num_threads))
    from_environment.cache_clear()


def prepare_ray(*, is_own: bool) -> None:
    """Set the variables that Ray reads when imported, for our own cluster or for a running one.

    The user's own settings are kept, except that usage reports to Ray's makers are always off.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not is_own:
        return
    defaults = {
        # Addresses of this machine only: despite its name, the variable also works on Linux.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # A replica of Ray Serve also listens on all addresses. With a token it answers nobody else.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ray runs its workers at niceness 15: any other program on the machine would come before the engines.
        "RAY_worker_niceness": "0",
    }
    os.environ |= {name: value for name, value in defaults.items() if name not in os.environ}


def resolve(
    environment: Mapping[str, str], available_cpus: Collection[int], architecture: str = platform.machine()
) -> Config:
    """Return the Config that the variables of `environment` describe; ConfigError if one is invalid."""
    max_isa = _parse_isa(environment.get("TILEWRIGHT_MAX_ISA"), architecture)
    bind_cpus = parse_cpus("TILEWRIGHT_BIND", environment.get("TILEWRIGHT_BIND", ""), available_cpus)
    num_threads = _parse_num_threads(environment.get("TILEWRIGHT_NUM_THREADS"))
    cache_dir = _parse_cache_dir(environment)
    api_keys = _parse_api_keys(environment.get("TILEWRIGHT_API_KEY", ""))
    openai_api_key = environment.get("OPENAI_API_KEY") or None
    config = Config(
        tuple(sorted(available_cpus)),
        max_isa=max_isa,
        num_threads=num_threads,
        threads_sleep_soon=environment.get("OMP_WAIT_POLICY", "").lower() == "passive",
        bind_cpus=bind_cpus,
        cache_dir=cache_dir,
        no_color=bool(environment.get("NO_COLOR")),
        api_keys=api_keys,
        openai_api_key=openai_api_key,
        ray_address=environment.get("RAY_ADDRESS") or None,
    )
    _log.debug(
        "max_isa %s, num_threads %s, bind_cpus %s, cache_dir %s",
        max_isa or "best",
        num_threads or "all",
        bind_cpus or "none",
        cache_dir or "off",
    )
    return config


def _parse_api_keys(text: str) -> tuple[str, ...]:
    keys = tuple(key for part in text.split(",") if (key := part.strip()))
    for key in keys:
        if fault := api_key_fault(key):
            raise ConfigError(f"TILEWRIGHT_API_KEY has a key that {fault}")
    return keys


def api_key_fault(key: str) -> str | None:
    """Return what is wrong with a key, without the key itself; None if nothing is. The docs' examples are refused."""
    if _UNEXPANDED.search(key):
        return "looks like the text of a shell, which was not run: put what it prints there"
    if not key or not (key.isascii() and key.isprintable()) or " " in key:
        return "is empty or has other characters than printable ASCII without spaces"
    if _PLACEHOLDER.fullmatch(key):
        return "looks like a place for a key: put a secret there, such as openssl rand -hex 24 prints"
    return None


def _parse_cache_dir(environment: Mapping[str, str]) -> Path | None:
    text, home = environment.get("TILEWRIGHT_CACHE_DIR"), environment.get("HOME")
    if text == "off":
        return None
    if text:
        path = Path(home, text[2:]) if text.startswith("~/") and home else Path(text)
        if not path.is_absolute():
            raise ConfigError(f"TILEWRIGHT_CACHE_DIR is {text!r}, expected a whole path or off")
        return path
    # By the XDG rules a relative path counts as unset.
    xdg = environment.get("XDG_CACHE_HOME", "")
    if Path(xdg).is_absolute():
        return Path(xdg, "tilewright")
    return Path(home, ".cache", "tilewright") if home else None


def _parse_isa(text: str | None, architecture: str) -> str | None:
    if not text:
        return None
    levels = ISA_LEVELS[architecture]
    if text in levels:
        return text
    expected = f"expected one of {', '.join(levels)}"
    for other, other_levels in ISA_LEVELS.items():
        if text in other_levels:
            raise ConfigError(f"TILEWRIGHT_MAX_ISA is {text!r}, a level of {other}; this is {architecture}: {expected}")
    raise ConfigError(f"TILEWRIGHT_MAX_ISA is {text!r}, {expected}")


def _parse_num_threads(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ConfigError(f"TILEWRIGHT_NUM_THREADS is {text!r}, expected a whole number from 1 to 1024")
    return int(text)


def parse_cpus(name: str, text: str, available_cpus: Collection[int]) -> tuple[int, ...]:
    """Return the CPUs of a list such as "0-7,9", in its order, all available; none for "". `name` is for errors."""
    if not text:
        return ()
    cpus = expand_ranges(text)
    if cpus is None:
        raise ConfigError(f"{name} is {text!r}, expected CPU numbers and ranges such as 0-7,9")
    allowed = format_cpus(sorted(available_cpus))
    if not cpus:
        raise ConfigError(f"{name} is {text!r}, which names no CPU; this process may use {allowed}")
    if others := sorted(set(cpus) - set(available_cpus)):
        raise ConfigError(f"{name} is {text!r}, but this process may not use {name_cpus(others)}, only {allowed}")
    return tuple(dict.fromkeys(cpus))


def expand_ranges(text: str) -> list[int] | None:
    """Return the numbers of a list such as "0-7,9"; None if it is malformed."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return None
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPU numbers in the given order in the form of TILEWRIGHT_BIND: "0-7,9"."""
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def name_cpus(cpus: Sequence[int]) -> str:
    """Return CPUs in words: "CPU 3", "CPUs 0-7,9"."""
    return f"CPU{'s' * (len(cpus) != 1)} {format_cpus(cpus)}"
