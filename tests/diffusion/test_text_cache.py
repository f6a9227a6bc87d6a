"""The cache of encoded prompts."""

import torch

from tilewright.diffusion.prompts import TextCache


def counting():
    calls = []

    def encode(texts):
        calls.append(list(texts))
        return [torch.full((len(text), 4), float(len(text))) for text in texts]

    return calls, encode


def test_a_prompt_is_encoded_once():
    calls, encode = counting()
    cache = TextCache()
    first = cache.encode(["cat", ""], encode)
    again = cache.encode(["", "dogs", "cat", "cat"], encode)
    assert calls == [["cat", ""], ["dogs"]]
    assert [len(text) for text in again] == [0, 4, 3, 3] and again[2] is first[0]
    assert cache.encode(["cat"], encode)[0] is first[0] and len(calls) == 2


def test_those_used_last_stay_within_the_limit():
    calls, encode = counting()
    cache = TextCache(max_bytes=4 * 4 * 6)
    cache.encode(["aa"], encode)
    cache.encode(["bb"], encode)
    cache.encode(["cc"], encode)
    cache.encode(["aa"], encode)  # used again: bb is the oldest now
    cache.encode(["d"], encode)
    assert len(cache) == 3 and cache.size_bytes == 4 * 4 * 5
    cache.encode(["aa", "cc", "d"], encode)
    assert calls == [["aa"], ["bb"], ["cc"], ["d"]]


def test_a_text_larger_than_the_cache_is_given_and_not_kept():
    _, encode = counting()
    cache = TextCache(max_bytes=16)
    assert len(cache.encode(["long"], encode)[0]) == 4
    assert len(cache) == 0 and cache.size_bytes == 0
