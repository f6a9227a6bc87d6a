"""Compiles grammars in a separate process before they are compiled in the engine's.

A grammar that hangs, crashes or exhausts memory there harms nobody. No size is harmless: a schema of 100 bytes with six
multipleOf compiled for more than a minute.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from tilewright.engine.constraint.grammar import GrammarError, build, on_deep_stack
from tilewright.process.child import Child
from tilewright.process.confine import limit_memory
from tilewright.process.frames import Channel
from tilewright.process.state import ActivityProbe, how_ended, is_stopped, was_ended_from_outside
from tilewright.types import TransientError

_log = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # of CPU time, so that a busy machine accepts what an idle one does
MAX_WAIT = 3  # times TIMEOUT_S of wall time, for a process that gets little CPU
START_TIMEOUT_S = 60.0
_POLL_S = 0.25
MEMORY_BYTES = 1 << 30
MAX_ANSWER_BYTES = 1 << 20
# A quarter of the stack of the later compilation: what passes here does not overflow there.
STACK_BYTES = 16 << 20


class GrammarLost(GrammarError):
    """The process exceeded its own limits while it compiled the grammar."""


class CompileSandbox:
    """Tries grammars, one at a time. Thread-safe. The process starts with the first one, and again after it died."""

    def __init__(self, num_tokens: int, special_tokens: Mapping[int, str], stop_token_ids: Sequence[int]) -> None:
        """Take the part of a vocabulary that compiling reads; special tokens are those without text."""
        self._vocabulary = {
            "num_tokens": num_tokens,
            "special_tokens": list(special_tokens.items()),
            "stop_token_ids": list(stop_token_ids),
        }
        self._lock = threading.Lock()
        self._process: Child | None = None
        self._finalizer: weakref.finalize | None = None  # ends the process, at exit at the latest

    def run(self, grammar: str) -> None:
        """Raise GrammarError if the grammar cannot be compiled, or not within TIMEOUT_S and MEMORY_BYTES.

        A lost process is replaced once: it may have been killed, or ended by memory that earlier grammars used.
        TransientError if the grammar cannot be tried for a reason outside it.
        """
        with self._lock:
            try:
                error = self._try(grammar)
            except (GrammarLost, TransientError) as lost:
                _log.warning("the process that tries constraints is replaced: %s", lost)
                error = self._try(grammar)
        if error is not None:
            raise GrammarError(error)

    def _try(self, grammar: str) -> str | None:
        """Return the error of the grammar, or None. GrammarLost if the process exceeds its own limits."""
        if self._process is None:
            self._process = self._start()
        try:
            answer = _ask(self._process, {"grammar": grammar}, TIMEOUT_S)
        except BaseException:
            self._end()
            raise
        error: str | None = answer["error"]
        return error

    def _start(self) -> Child:
        try:
            # A crash shows as the missing answer: nothing that the process prints is of use.
            process = Child(
                f"{__name__}:serve",
                {},
                max_bytes=MAX_ANSWER_BYTES,
                output=subprocess.DEVNULL,
                errors=subprocess.DEVNULL,
            )
        except OSError as error:  # too many processes or open files
            raise TransientError(f"the process that tries constraints cannot be started: {error}") from error
        self._finalizer = weakref.finalize(self, process.end)
        try:
            _ask(process, self._vocabulary, START_TIMEOUT_S)
        except (GrammarError, TransientError):
            self._end()
            how = how_ended(process.status)
            raise TransientError(f"the process that tries constraints did not start ({how})") from None
        return process

    def _end(self) -> None:
        assert self._finalizer is not None
        self._finalizer()
        self._process = None


def _ask(process: Child, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send a message to the process and return its answer.

    GrammarLost if the process exceeds its own limits, GrammarError if it computes for too long, TransientError if it
    was killed, is stopped or gets no CPU.
    """
    probe = ActivityProbe(process.pid)

    def left_s() -> float:
        if probe.used_s >= timeout_s:
            raise GrammarError(f"it takes more than {timeout_s:g} s to compile")
        if probe.elapsed_s >= (1 if is_stopped(process.pid) else MAX_WAIT) * timeout_s:
            raise TransientError(f"the process that tries constraints did not answer for {probe.elapsed_s:.0f} s")
        return _POLL_S

    with contextlib.suppress(ConnectionError):  # it has ended
        process.channel.send(message, left_s=left_s)
        answer = process.channel.receive(left_s)
        if answer is not None:
            return answer
    status = process.finish(START_TIMEOUT_S)
    if was_ended_from_outside(status):
        raise TransientError(f"the process that tries constraints was ended ({how_ended(status)})")
    raise GrammarLost(f"it is nested too deeply, or takes more than {MEMORY_BYTES >> 20} MiB to compile")


def serve(channel: Channel) -> None:
    """Run the process: receive the vocabulary, then answer each grammar with its error or None."""
    limit_memory(MEMORY_BYTES)
    vocabulary = channel.receive()
    if vocabulary is None:
        return
    tokenizer = llguidance.LLTokenizer(_Bytes(**vocabulary), eos_token=vocabulary["stop_token_ids"])
    channel.send({})
    while (message := channel.receive()) is not None:
        channel.send({"error": _error_of(tokenizer, message["grammar"])})


def _error_of(tokenizer: llguidance.LLTokenizer, grammar: str) -> str | None:
    try:
        on_deep_stack(lambda: build(tokenizer, grammar), STACK_BYTES)
    except GrammarError as error:
        return str(error)
    return None


class _Bytes(llguidance.TokenizerWrapper):
    """A vocabulary of single bytes and the special tokens, in llguidance's interface."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, num_tokens: int, special_tokens: list[tuple[int, str]], stop_token_ids: list[int]) -> None:
        self.stop_token_ids = stop_token_ids
        self.eos_token_id = stop_token_ids[0]
        self.special_token_ids = [token_id for token_id, _ in special_tokens]
        # The bytes come after the ids that a grammar may name.
        self.tokens = [b""] * num_tokens + [bytes([byte]) for byte in range(256)]
        for token_id, text in special_tokens:
            self.tokens[token_id] = text.encode()
        self._first_byte = num_tokens

    def __call__(self, text: str) -> list[int]:
        return [self._first_byte + byte for byte in text.encode()]
