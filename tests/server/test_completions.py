"""Plain completions through the official client."""

import openai
import pytest

from tilewright.server.api.completions import Offsets


@pytest.fixture(scope="module")
def client(chat_server):
    return chat_server.client()


def complete(client, prompt="A tile is", **options):
    return client.completions.create(**{"model": "", "prompt": prompt, "max_tokens": 8, "temperature": 0, **options})


def test_what_follows(client, chat_engine):
    answer = complete(client)
    alone = chat_engine.generate("A tile is", max_tokens=8, temperature=0)
    assert answer.choices[0].text == alone.text and answer.choices[0].finish_reason == alone.finish_reason
    assert answer.usage.prompt_tokens == alone.num_prompt_tokens
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, stream=True))
    assert streamed == alone.text


def test_token_ids(client, chat_engine):
    ids = chat_engine.loaded.tokenizer.encode("A tile is")
    assert complete(client, ids).choices[0].text == complete(client).choices[0].text
    answer = complete(client, [ids, ids[:3]])
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == complete(client).choices[0].text


def test_prompts_and_answers_are_numbered_through(client):
    prompts = ["one", "two", "three"]
    answer = complete(client, prompts, n=2, temperature=1, seed=1)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for number, prompt in enumerate(prompts):
        alone = complete(client, prompt, n=2, temperature=1, seed=1)
        assert [choice.text for choice in alone.choices] == [
            choice.text for choice in answer.choices[2 * number : 2 * number + 2]
        ]
    texts = [""] * 6
    for chunk in complete(client, prompts, n=2, temperature=1, seed=1, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_echo_with_log_probabilities_scores_a_prompt(client, chat_engine):
    text = "A tile is square"
    answer = complete(client, text, max_tokens=0, echo=True, logprobs=2)
    alone = chat_engine.generate(text, max_tokens=1, temperature=0, prompt_logprobs=2)
    choice = answer.choices[0]
    assert choice.text == text and answer.usage.completion_tokens == 0
    assert choice.logprobs.tokens == list(text) and choice.logprobs.token_logprobs[0] is None
    expected = [item.logprob for item in alone.prompt_logprobs[1:]]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-6)
    assert choice.logprobs.text_offset == list(range(len(text)))
    more = complete(client, text, max_tokens=3, echo=True, logprobs=0)
    assert more.choices[0].text.startswith(text) and len(more.choices[0].logprobs.tokens) == len(text) + 3
    (chunk,) = [chunk for chunk in complete(client, text, max_tokens=3, echo=True, stream=True) if chunk.choices]
    assert chunk.choices[0].text == more.choices[0].text


def test_offsets_are_those_of_characters():
    offsets = Offsets()
    assert [offsets.next(token) for token in (b"\xc3", b"\xa9", b"!", b"ab", b"\xf0\x9f", b"\x98\x80", b".")] == [
        0, 0, 1, 2, 4, 4, 5,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suffix": "end"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of is 3"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": [99999]}, "99999"),
        ({"prompt": [-1]}, "-1"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_invalid_requests(client, options, message):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **options)
    assert message in caught.value.message
