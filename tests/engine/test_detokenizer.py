from fuzzing import num_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_model import LetterDecoder, answer, make_core, run_all, text_inputs

from tilewright.engine.sample.detokenizer import Detokenizer
from tilewright.types import SamplingParams


class PieceDecoder:
    """Token i is pieces[i]; the last character is kept back until the next token, or the end."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.kept = ""

    def push(self, token_ids):
        text = self.kept + "".join(self.pieces[token_id] for token_id in token_ids)
        self.kept = text[-1:]
        return text[:-1]

    def flush(self):
        return self.kept


def outputs(pieces, stop, min_tokens=0):
    detokenizer = Detokenizer(PieceDecoder(pieces), stop, min_tokens)
    texts = []
    for token_id in range(len(pieces)):
        texts.append(detokenizer.push(token_id))
        if detokenizer.is_stopped:
            break
    texts.append(detokenizer.flush())
    assert detokenizer.text == "".join(texts)
    return detokenizer


def expected_text(text, stop):
    """Up to the stop string that is whole first."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stop:
                return text[:start]
    return text


@settings(max_examples=num_cases(300), deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(pieces, stop):
    text = "".join(pieces)
    detokenizer = outputs(pieces, stop)
    assert detokenizer.text == expected_text(text, stop)
    assert detokenizer.is_stopped == any(item in text for item in stop)


def test_only_what_may_begin_a_stop_string_is_held_back():
    detokenizer = Detokenizer(LetterDecoder(), ("abc", "bd"))
    texts = [detokenizer.push(token_id) for token_id in (5, 1, 2, 2, 1, 2, 3)]
    assert texts == ["e", "", "", "ab", "b", "", ""]
    assert detokenizer.is_stopped and detokenizer.text == "eabb"
    assert detokenizer.flush() == ""


def test_held_text_comes_out_at_the_end():
    detokenizer = Detokenizer(LetterDecoder(), ("abc",))
    assert [detokenizer.push(1), detokenizer.push(2), detokenizer.flush()] == ["", "", "ab"]
    assert not detokenizer.is_stopped and detokenizer.text == "ab"


def test_min_tokens():
    for min_tokens, expected in [(0, ""), (1, ""), (2, "a"), (3, "aa"), (4, "aaa")]:
        detokenizer = Detokenizer(LetterDecoder(), ("a",), min_tokens)
        while not detokenizer.is_stopped:
            detokenizer.push(1)
        assert detokenizer.text == expected


def test_a_stop_string_that_only_the_end_completes():
    pieces = [chr(96 + token_id) for token_id in range(24)]
    prompt, params = text_inputs([1, 2, 3]), {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    last = pieces[answer(prompt, SamplingParams(**params))[-1]]
    core = make_core(make_token_decoder=lambda: PieceDecoder(pieces))
    (sequence,) = core.add("a", prompt, SamplingParams(**params, stop=(last,)))
    results = run_all(core)
    completion = core.completion(sequence)
    assert completion.finish_reason == results[-1][1].finish_reason == "stop"
    assert last not in completion.text
