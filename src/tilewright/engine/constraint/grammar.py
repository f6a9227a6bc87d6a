"""Turns a grammar as text into a matcher of llguidance, or into an error that says what is wrong with it.

Imports neither torch nor numpy, so that the sandbox (engine/constraint/sandbox.py) starts quickly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import llguidance

Result = TypeVar("Result")

# The library follows references and rules by recursion, without a limit of its own: a schema of 60 KB, a chain of 1,000
# objects, overflowed a stack of 8 MB. Untouched stack takes no memory.
COMPILE_STACK_BYTES = 64 << 20
MAX_ERROR_LENGTH = 500


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why."""


def limits() -> llguidance.LLParserLimits:
    """Return the limits on what a grammar may cost.

    A quarter of the library's defaults for a mask: some 5 ms of derivatives and 1 ms of parsing at its speeds, while
    masks of usual schemas take less than 1 ms (docs/tools.md). Lexer states are some 1 KB each.
    """
    import llguidance

    return llguidance.LLParserLimits(
        step_lexer_fuel=50_000, step_max_items=12_500, max_lexer_states=50_000, verbose_errors=False
    )


def build(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Return a matcher at the start of the grammar. Its first mask is computed here; later masks cost less."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    _check(matcher)
    mask = matcher.compute_bitmask()
    _check(matcher)
    # Drafts are rolled back, which is impossible after lexemes with max_tokens= or stop=.
    probe = matcher.deep_copy()
    byte = next(index for index, bits in enumerate(mask) if bits)
    probe.consume_token(8 * byte + (mask[byte] & -mask[byte]).bit_length() - 1)
    probe.rollback(1)
    _check(probe)
    return matcher


def on_deep_stack(function: Callable[[], Result], stack_bytes: int) -> Result:
    """Run the function on a thread with a stack of this size; return or raise what it does."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    with _stack_size_lock:
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=run, name="compile")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


_stack_size_lock = threading.Lock()


def error_of(matcher: llguidance.LLMatcher) -> str | None:
    """Return the error of a matcher in a few lines, or None."""
    if not matcher.is_error():
        return None
    message = matcher.get_error().split("\n<")[0].strip()  # cut before a backtrace, or the state of the parser
    if message == "NoExtensionBias":
        return "no text of this vocabulary fits it"
    return message if len(message) <= MAX_ERROR_LENGTH else message[:MAX_ERROR_LENGTH] + " ..."


def _check(matcher: llguidance.LLMatcher) -> None:
    error = error_of(matcher)
    if error is not None:
        raise GrammarError(error)
