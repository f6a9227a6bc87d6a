"""Text that cannot fit is refused before it costs anything; what fits has the ids it would have without limits."""

import threading
import time
from concurrent.futures import CancelledError

import pytest
from checkpoint_files import llama_metadata, smollm2_metadata, write_qwen3_vl_folder
from fuzzing import num_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.inputs.messages import MAX_MESSAGES, MAX_VALUES, TextBudget, TextLimits
from tilewright.inputs.tokenizer import PIECE_CHARACTERS, Tokenizer
from tilewright.types import ContextLengthExceeded, RequestError

UNITS = st.text(min_size=1, max_size=12) | st.sampled_from(["a", " ", "a ", "\n", "e\u0301", "<|im_end|>", "1", "日本"])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Tokenizer.from_folder(write_qwen3_vl_folder(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module", params=["qwen", "smollm", "llama"])
def tokenizer(request, qwen):
    made = {"smollm": smollm2_metadata, "llama": llama_metadata}
    return qwen if request.param == "qwen" else Tokenizer.from_gguf(made[request.param]())


def budget(max_context, tokenizer, **options):
    return TextBudget(TextLimits(max_context, tokenizer.max_token_bytes), **options)


def say(content):
    return [{"role": "user", "content": content}]


def test_no_token_is_longer_than_the_longest(tokenizer):
    sizes = [len(tokenizer.find_bytes(token_id)) for token_id in range(tokenizer.vocab_size)]
    assert max(sizes) <= tokenizer.max_token_bytes <= 2 * max(sizes)


@settings(max_examples=num_cases(25), deadline=None)
@given(units=st.lists(UNITS, min_size=1, max_size=4), length=st.integers(1, 3 * PIECE_CHARACTERS))
def test_what_fits_is_never_refused_and_has_the_same_ids(qwen, units, length):
    """With a context of exactly as many tokens, however a text is cut into pieces that are counted."""
    unit = "".join(units)
    text = (unit * (1 + length // len(unit)))[:length]
    whole = qwen.encode(text)
    assert whole == qwen._backend.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids
    assert qwen.encode(text, budget=budget(len(whole), qwen)) == whole


def test_a_text_that_cannot_fit_is_refused_unread(qwen, monkeypatch):
    limits = budget(100, qwen).limits
    monkeypatch.setattr(Tokenizer, "_ids", lambda *args: pytest.fail("it was tokenized"))
    for size in (limits.max_characters + 1, 20_000_000):
        with pytest.raises(
            ContextLengthExceeded, match=f"{size} characters, and 100 tokens hold {limits.max_characters} at most"
        ):
            qwen.encode("a" * size, budget=TextBudget(limits))


def test_counting_ends_when_the_context_is_full(qwen, monkeypatch):
    """The length alone does not tell: most tokens are far shorter than the longest."""
    counted = []
    original = Tokenizer._ids

    def ids(self, text, add_special_tokens):
        counted.append(len(text))
        return original(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_ids", ids)
    limits = TextLimits(20_000, 128)
    with pytest.raises(ContextLengthExceeded, match=r"is 20000 tokens.*2000000 characters.* about \d+ tokens"):
        qwen.encode("a " * 1_000_000, budget=TextBudget(limits))
    assert counted == [PIECE_CHARACTERS]


def test_nobody_waits_for_it_any_more(qwen):
    asked = []

    def is_cancelled():
        asked.append(True)
        return len(asked) > 2

    with pytest.raises(CancelledError):
        qwen.encode("a " * 200_000, budget=budget(300_000, qwen, is_cancelled=is_cancelled))
    assert len(asked) == 3


def test_other_threads_run_while_a_text_is_tokenized(qwen):
    ticks, is_over = [], threading.Event()

    def tick():
        while not is_over.wait(0.001):
            ticks.append(True)

    ticking = threading.Thread(target=tick)
    ticking.start()
    while not ticks:
        time.sleep(0.001)
    before = len(ticks)
    qwen.encode("a " * 200_000)
    during = len(ticks) - before
    is_over.set()
    ticking.join()
    assert during > 3


def test_conversations_are_measured_before_they_are_rendered():
    limits = TextLimits(100, 10)
    assert limits.check_chat(say("x" * 900), None, {}) == 900 + len("rolecontentuser")
    for messages, tools, template_args in (
        (say("x" * 1001), None, {}),
        (say([{"type": "text", "text": "x" * 600}, {"type": "text", "text": "x" * 600}]), None, {}),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "x" * 1001}}]}], None, {}),
        (say("x"), [{"function": {"parameters": {"properties": {"image": {"description": "x" * 1001}}}}}], {}),
        (say("x"), None, {"system": "x" * 1001}),
        ([{"role": "user", "x" * 1001: ""}], None, {}),
    ):
        with pytest.raises(ContextLengthExceeded, match=r"is 100 tokens.*characters or more, and 100 tokens hold 1000"):
            limits.check_chat(messages, tools, template_args)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
    assert limits.check_chat(say([picture, {"type": "image", "image": b"x" * 5000}]), None, {}) < 100


def test_messages_and_values_are_counted():
    limits = TextLimits(10**6, 10)
    limits.check_chat(say("x") * MAX_MESSAGES, None, {})
    with pytest.raises(RequestError, match=f"messages has {MAX_MESSAGES + 1} entries, the limit is {MAX_MESSAGES}"):
        limits.check_chat(say("x") * (MAX_MESSAGES + 1), None, {})
    deep: list = []
    for _ in range(MAX_VALUES):
        deep = [deep]
    for messages in (say(["x"] * MAX_VALUES), [{"role": "tool", "calls": [[]] * MAX_VALUES}], say([{"a": deep}])):
        with pytest.raises(RequestError, match=f"more than {MAX_VALUES} keys and values") as caught:
            limits.check_chat(messages, None, {})
        assert caught.value.code == "array_above_max_length"


def test_token_ids_are_counted():
    limits = TextLimits(100, 10)
    assert limits.check_prompt(None, range(100)) == 0
    with pytest.raises(ContextLengthExceeded, match=r"is 100 tokens.*resulted in 101 tokens"):
        limits.check_prompt(None, range(101))
