"""Compiles grammars in a process of its own before they are compiled in ours.

What hangs, crashes or takes all memory there harms nobody. No size is harmless: six multipleOf in a schema of 100 bytes
compiled for more than a minute.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence

import llguidance

from tilewright.engine.constraint.grammar import GrammarError, build, on_deep_stack

TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
MEMORY_BYTES = 1 << 30
# A quarter of what the compilation after it gets: what passes here does not overflow there.
STACK_BYTES = 16 << 20


class CompileSandbox:
    """Tries grammars, for any thread, one after the other. Its process starts with the first, and again if it died."""

    def __init__(self, num_tokens: int, special_tokens: Mapping[int, str], stop_token_ids: Sequence[int]) -> None:
        """The part of a vocabulary that compiling reads; special tokens are those that are no text."""
        self._vocabulary = json.dumps([num_tokens, list(special_tokens.items()), list(stop_token_ids)])
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize | None = None  # ends the process, at our exit at the latest

    def run(self, grammar: str) -> None:
        """GrammarError if the grammar cannot be compiled, or not within TIMEOUT_S and MEMORY_BYTES."""
        with self._lock:
            if self._process is None:
                self._process = self._start()
            answer = _ask(self._process, json.dumps(grammar), TIMEOUT_S)
            if not answer:
                self._end()
        if answer is None:
            raise GrammarError(f"it takes more than {TIMEOUT_S:g} s to compile")
        if not answer:
            raise GrammarError(f"it is nested too deeply, or takes more than {MEMORY_BYTES >> 20} MiB to compile")
        error = json.loads(answer)
        if error is not None:
            raise GrammarError(error)

    def _start(self) -> subprocess.Popen[str]:
        # With our own path: the package may be on it by other ways than an installation.
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a crash is seen by the missing answer
            text=True,
            encoding="utf-8",
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
        self._finalizer = weakref.finalize(self, _end, process)
        if not _ask(process, self._vocabulary, START_TIMEOUT_S):
            self._end()
            raise RuntimeError(f"the process that tries constraints ended with {process.returncode} when it started")
        return process

    def _end(self) -> None:
        assert self._finalizer is not None
        self._finalizer()
        self._process = None


def _ask(process: subprocess.Popen[str], line: str, timeout_s: float) -> str | None:
    """The line that the process answers to a line; empty if it has died, None if it takes too long."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    readable, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if readable else None


def _end(process: subprocess.Popen[str]) -> None:
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
