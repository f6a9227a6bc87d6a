"""Parts with precomputed values, changed by chance: each is taken as it is, or refused by name."""

import base64
import random
import string

import numpy as np
import pytest

from tilewright.inputs.media import MediaLimits
from tilewright.inputs.messages import normalize
from tilewright.inputs.precomputed import TYPES, Precomputed
from tilewright.types import RequestError

ODD = [
    None, True, -1, 0, 1, 3.5, 2**31, 10**400, float("nan"), float("inf"), "", "AAAA", "AA==", "\ud800", "é", b"",
    b"abcd", [], [1], [1, 2], [1, 2, 3], [[1]], (2, 2), (1, 4, 4), {}, {"a": 1}, {1}, "bfloat16", "float32",
    "image_features", "audio_features", object(),
]  # fmt: skip
ARRAYS = [np.ones((4, 4), np.float32), np.array([1, 4, 4]), np.array(["a"])]


def part_of(value_type, rng):
    values = bytes(rng.randrange(256) for _ in range(32))
    return {
        "type": value_type, value_type: rng.choice([values, base64.b64encode(values).decode()]), "dtype": "float16",
        "shape": [4, 4], "grid": [1, 4, 4], "tiling": [1, 1], "times_s": [], "key": "0" * 32,
    }  # fmt: skip


def changed(part, rng):
    part = dict(part)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(sorted(part))
        if rng.random() < 0.2:
            del part[key]
        elif rng.random() < 0.3 and isinstance(part[key], str) and part[key]:
            place = rng.randrange(len(part[key]))
            part[key] = part[key][:place] + rng.choice(string.printable) + part[key][place + rng.randrange(2) :]
        else:
            part[key] = rng.choice(ODD if key == "type" else ODD + ARRAYS)
        if not part:
            break
    return part


@pytest.mark.parametrize("value_type", TYPES)
def test_taken_or_refused(value_type):
    rng, outcomes = random.Random(value_type), {"taken": 0, "refused": 0}
    for _ in range(1000):
        part = changed(part_of(value_type, rng), rng)
        try:
            _, media = normalize([{"role": "user", "content": [part]}], limits=MediaLimits(max_bytes=1 << 16))
        except RequestError as error:
            outcomes["refused"] += 1
            assert len(str(error)) < 250
            continue
        outcomes["taken"] += 1
        for medium in media:
            given = medium.source
            if isinstance(given, Precomputed):
                assert given.kind == medium.kind and len(given.grid) == 3 and len(given.tiling) == 2
    assert min(outcomes.values()) > 20
