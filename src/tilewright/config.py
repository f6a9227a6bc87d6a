"""The settings that come from the environment: the only file that reads it.

TILEWRIGHT_MAX_ISA       the highest ISA level the kernels may use: scalar, avx2, avx512, avx512_bf16 or amx on x86-64;
                         scalar, neon, neon_dotprod or neon_bf16 on aarch64; unset: the best there is
TILEWRIGHT_NUM_THREADS   threads the kernels use, counting the caller; unset: one per CPU of TILEWRIGHT_BIND, or of
                         the process
TILEWRIGHT_BIND          CPUs the threads are pinned to, such as "0-7,9"; unset: not pinned
TILEWRIGHT_CACHE_DIR     where packed weights are kept between starts, or "off"; unset: tilewright in XDG_CACHE_HOME or,
                         without that, in ~/.cache
TILEWRIGHT_API_KEY       the key, or keys with commas between, that `tilewright serve` asks for; unset: none
NO_COLOR                 anything: no colours in the terminal; unset: colours where a terminal shows them
OPENAI_API_KEY           what `tilewright bench serve` shows the server it measures; unset: nothing
"""

import functools
import logging
import os
import platform
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# By architecture, as platform.machine() names it; from the plainest to the best.
ISA_LEVELS = {
    "x86_64": ("scalar", "avx2", "avx512", "avx512_bf16", "amx"),
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
    """A setting that cannot be used; says its name, its value and what is allowed."""


@dataclass(frozen=True)
class Config:
    """What the environment asks of us, and the CPUs it found."""

    available_cpus: tuple[int, ...]  # as the process started: a pinned thread sees only its own
    max_isa: str | None = None  # None: the best there is
    num_threads: int | None = None  # None: one per CPU of the process
    bind_cpus: tuple[int, ...] = ()  # empty: threads are not pinned
    cache_dir: Path | None = None  # None: packed weights are not kept
    no_color: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    openai_api_key: str | None = field(default=None, repr=False)


@functools.cache
def current() -> Config:
    """The Config of this process, read once."""
    return resolve(os.environ, os.sched_getaffinity(0))


def resolve(
    environment: Mapping[str, str], available_cpus: Collection[int], architecture: str = platform.machine()
) -> Config:
    """The Config that the variables of `environment` describe, checked; ConfigError otherwise."""
    max_isa = _parse_isa(environment.get("TILEWRIGHT_MAX_ISA"), architecture)
    bind_cpus = _parse_cpus(environment.get("TILEWRIGHT_BIND"), available_cpus)
    num_threads = _parse_num_threads(environment.get("TILEWRIGHT_NUM_THREADS"))
    if num_threads is None and bind_cpus:
        num_threads = len(bind_cpus)
    cache_dir = _parse_cache_dir(environment)
    api_keys = _parse_api_keys(environment.get("TILEWRIGHT_API_KEY", ""))
    openai_api_key = environment.get("OPENAI_API_KEY") or None
    config = Config(
        tuple(sorted(available_cpus)),
        max_isa=max_isa,
        num_threads=num_threads,
        bind_cpus=bind_cpus,
        cache_dir=cache_dir,
        no_color=bool(environment.get("NO_COLOR")),
        api_keys=api_keys,
        openai_api_key=openai_api_key,
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
    """Why a key cannot be one, without the key itself; None if it can. Whoever reads the docs knows their examples."""
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
    # The XDG rules: a path that is not whole is as none.
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


def _parse_cpus(text: str | None, available_cpus: Collection[int]) -> tuple[int, ...]:
    if not text:
        return ()
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"TILEWRIGHT_BIND is {text!r}, expected CPU numbers and ranges such as 0-7,9")
        cpus.extend(range(int(first), int(last or first) + 1))
    allowed = format_cpus(sorted(available_cpus))
    if not cpus:
        raise ConfigError(f"TILEWRIGHT_BIND is {text!r}, which names no CPU; this process may use {allowed}")
    for cpu in cpus:
        if cpu not in available_cpus:
            raise ConfigError(f"TILEWRIGHT_BIND is {text!r}, but this process may not use CPU {cpu}, only {allowed}")
    return tuple(dict.fromkeys(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """CPU numbers in the order given, as TILEWRIGHT_BIND takes them: "0-7,9"."""
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
