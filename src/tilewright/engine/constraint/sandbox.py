"""Compiles grammars in a process of its own before they are compiled in ours.

What hangs, crashes or takes all memory there harms nobody. No size is harmless: six multipleOf in a schema of 100 bytes
compiled for more than a minute.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence

import llguidance

from tilewright.engine.constraint.grammar import GrammarError, build, on_deep_stack
from tilewright.process.state import ActivityProbe, how_ended, is_stopped, was_ended_from_outside
from tilewright.types import TransientError

_log = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # of CPU, so that a busy machine refuses nothing that an idle one takes
MAX_WAIT = 3  # times TIMEOUT_S for a process that gets little of a CPU
START_TIMEOUT_S = 60.0
_POLL_S = 0.25
MEMORY_BYTES = 1 << 30
# A quarter of what the compilation after it gets: what passes here does not overflow there.
STACK_BYTES = 16 << 20


class GrammarLost(GrammarError):
    """The process ended by its limits while it compiled the grammar."""


class CompileSandbox:
    """Tries grammars, for any thread, one after the other. Its process starts with the first, and again if it died."""

    def __init__(self, num_tokens: int, special_tokens: Mapping[int, str], stop_token_ids: Sequence[int]) -> None:
        """The part of a vocabulary that compiling reads; special tokens are those that are no text."""
        self._vocabulary = [num_tokens, list(special_tokens.items()), list(stop_token_ids)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize | None = None  # ends the process, at our exit at the latest

    def run(self, grammar: str) -> None:
        """GrammarError if the grammar cannot be compiled, or not within TIMEOUT_S and MEMORY_BYTES.

        A process that was lost is replaced once: it may have been killed, or ended by memory that earlier grammars
        left. TransientError if the grammar cannot be tried for a reason that is not in it.
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
        """What is wrong with the grammar, if anything. GrammarLost if the process ends by its own limits."""
        if self._process is None:
            self._process = self._start()
        try:
            answer = _ask(self._process, grammar, TIMEOUT_S)
        except BaseException:
            self._end()
            raise
        error: str | None = json.loads(answer)
        return error

    def _start(self) -> subprocess.Popen[bytes]:
        # With our own path: the package may be on it by other ways than an installation.
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a crash is seen by the missing answer
                start_new_session=True,  # so that Ctrl-C does not reach it
            )
        except OSError as error:  # too many processes or open files
            raise TransientError(f"the process that tries constraints cannot be started: {error}") from error
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        try:
            _ask(process, self._vocabulary, START_TIMEOUT_S)
        except (GrammarError, TransientError):
            self._end()
            how = how_ended(process.returncode)
            raise TransientError(f"the process that tries constraints did not start ({how})") from None
        return process

    def _end(self) -> None:
        assert self._finalizer is not None
        self._finalizer()
        self._process = None


def _ask(process: subprocess.Popen[bytes], message: object, timeout_s: float) -> bytes:
    """The line that the process answers to a message.

    GrammarLost if the process ends by its own limits, GrammarError if it computes for too long, TransientError if it
    was killed, is stopped or gets no CPU.
    """
    assert process.stdin is not None and process.stdout is not None
    probe, answer = ActivityProbe(process.pid), b""
    left = memoryview(json.dumps(message).encode() + b"\n")
    with contextlib.suppress(BrokenPipeError):
        while True:
            # A process that is stopped reads nothing: what does not fit into the pipe is written as it reads.
            readable, writable, _ = select.select([process.stdout], [process.stdin] if left else [], [], _POLL_S)
            if readable:
                answer = process.stdout.readline()
                break
            if writable:
                left = left[os.write(process.stdin.fileno(), left) :]
            if probe.used_s >= timeout_s:
                raise GrammarError(f"it takes more than {timeout_s:g} s to compile")
            if probe.elapsed_s >= (1 if is_stopped(process.pid) else MAX_WAIT) * timeout_s:
                raise TransientError(f"the process that tries constraints did not answer for {probe.elapsed_s:.0f} s")
    if answer.endswith(b"\n"):
        return answer
    status = process.wait()
    if was_ended_from_outside(status):
        raise TransientError(f"the process that tries constraints was ended ({how_ended(status)})")
    raise GrammarLost(f"it is nested too deeply, or takes more than {MEMORY_BYTES >> 20} MiB to compile")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # of what was not written yet
                pipe.close()


def serve() -> None:
    """The other side: answers the vocabulary and then each grammar, a line of JSON, with its error or null."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = _Bytes(*json.loads(sys.stdin.readline()))
    tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=vocabulary.stop_token_ids)
    print("null", flush=True)
    for line in sys.stdin:
        print(json.dumps(_error_of(tokenizer, json.loads(line))), flush=True)


def _error_of(tokenizer: llguidance.LLTokenizer, grammar: str) -> str | None:
    try:
        on_deep_stack(lambda: build(tokenizer, grammar), STACK_BYTES)
    except GrammarError as error:
        return str(error)
    return None


class _Bytes(llguidance.TokenizerWrapper):
    """A vocabulary of single bytes and the special tokens, as llguidance reads one."""

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
