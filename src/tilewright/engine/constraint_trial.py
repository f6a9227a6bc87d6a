"""Compiles a grammar in a process of its own: what hangs, crashes or takes all memory there harms nobody.

Reads a JSON object from standard input (see `Trial`) and prints the error as JSON, null if there is none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import llguidance

from tilewright.engine.constraint_grammar import GrammarError, build, on_deep_stack

TIMEOUT_S = 5.0
MEMORY_BYTES = 1 << 30
# A quarter of what the compilation after it gets: what passes here does not overflow there.
STACK_BYTES = 16 << 20


class TrialError(ValueError):
    """A grammar that failed its trial; the message says why."""


@dataclass(frozen=True)
class Trial:
    """A grammar, and as much of the vocabulary as its compilation looks at."""

    grammar: str
    num_tokens: int
    special_tokens: dict[int, str]  # of the ids that are no text
    stop_token_ids: list[int]


def run(trial: Trial) -> None:
    """TrialError if the grammar cannot be compiled, or not within TIMEOUT_S and MEMORY_BYTES."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tilewright.engine.constraint_trial"],
            input=json.dumps(asdict(trial)),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise TrialError(f"it takes more than {TIMEOUT_S:g} s to compile") from None
    if done.returncode < 0:
        raise TrialError(f"it is nested too deeply, or takes more than {MEMORY_BYTES >> 20} MiB to compile")
    if done.returncode:
        raise RuntimeError(f"the trial of a constraint ended with {done.returncode}: {done.stderr.strip()}")
    error = json.loads(done.stdout)
    if error is not None:
        raise TrialError(error)


def main() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fields = json.loads(sys.stdin.buffer.read())
    fields["special_tokens"] = {int(token_id): text for token_id, text in fields["special_tokens"].items()}
    print(json.dumps(_error_of(Trial(**fields))))


def _error_of(trial: Trial) -> str | None:
    tokenizer = llguidance.LLTokenizer(_Bytes(trial), eos_token=trial.stop_token_ids)
    try:
        on_deep_stack(lambda: build(tokenizer, trial.grammar), STACK_BYTES)
    except GrammarError as error:
        return str(error)
    return None


class _Bytes(llguidance.TokenizerWrapper):
    """A vocabulary of single bytes and the special tokens, as llguidance reads one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, trial: Trial) -> None:
        self.eos_token_id = trial.stop_token_ids[0]
        self.special_token_ids = list(trial.special_tokens)
        self.tokens = [b""] * trial.num_tokens
        for token_id, text in trial.special_tokens.items():
            self.tokens[token_id] = text.encode("utf-8", "replace")
        free = (token_id for token_id in range(trial.num_tokens) if token_id not in trial.special_tokens)
        self._id_of = dict(zip(range(256), free, strict=False))
        for byte, token_id in self._id_of.items():
            self.tokens[token_id] = bytes([byte])

    def __call__(self, text: str) -> list[int]:
        return [self._id_of[byte] for byte in text.encode()]


if __name__ == "__main__":
    main()
