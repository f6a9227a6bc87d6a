"""What the talker reads before it speaks: the user's turns, and how the answer begins.

    rows of user turns | <|im_start|> assistant \\n | pad pad pad pad | bos | the answer's first token
                                                      codec tokens: nothink, think_bos, think_eos, speaker, pad, bos

Text rows are ids of the thinker's vocabulary; the codec tokens are added to the last six rows. Afterwards every row has
the next token of the answer, the end of text after the last, and padding from then on. System prompts and earlier
answers are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from tilewright.models.qwen3_omni.config import CodecTokens, TurnTokens
from tilewright.models.speaking import TalkerPrompt
from tilewright.types import RequestError

NUM_HEADER_TOKENS = 3  # <|im_start|>, the role and a line break
NUM_PADDING = 4


def talker_prompt(
    token_ids: Sequence[int],
    positions: np.ndarray,
    turns: TurnTokens,
    codec: CodecTokens,
    speaker: int,
    media_ids: Collection[int],
) -> TalkerPrompt:
    """Made from a prompt of the thinker and its rope positions [A, T].

    Positions are as if the turns left out were not there: a turn takes as many as it does in the thinker's prompt.
    RequestError if the prompt does not end with the beginning of an answer.
    """
    starts = [i for i, token_id in enumerate(token_ids) if token_id == turns.im_start]
    header = tuple(token_ids[starts[-1] : starts[-1] + NUM_HEADER_TOKENS]) if starts else ()
    if len(header) < NUM_HEADER_TOKENS or header[1] != turns.assistant:
        raise RequestError("the prompt does not end with the beginning of an answer, which is what is spoken")
    if starts[0] != 0:
        starts.insert(0, 0)
    answer = starts[-1]
    rows: list[int] = []
    places: list[np.ndarray] = []
    num_before = 0  # positions that the turns so far take
    for start, stop in itertools.pairwise(starts):
        if token_ids[start + 1] == turns.user:
            first = positions[:, start].max()
            rows += range(start, stop)
            places.append(positions[:, start:stop] - first + num_before)
            num_before += int(positions[:, stop].max() - first)
    codec_ids = (codec.nothink, codec.think_bos, codec.think_eos, speaker, codec.pad, codec.bos)
    beginning = (*header, *[turns.tts_pad] * NUM_PADDING, turns.tts_bos)
    last = np.broadcast_to(num_before + np.arange(len(beginning) + 1), (len(positions), len(beginning) + 1))
    media = [(row, of) for row, of in enumerate(rows) if token_ids[of] in media_ids]
    return TalkerPrompt(
        text_ids=(*(token_ids[row] for row in rows), *beginning),
        codec_ids=codec_ids,
        positions=np.ascontiguousarray(np.concatenate([*places, last], axis=1)),
        media_rows=tuple(row for row, _ in media),
        thinker_rows=tuple(of for _, of in media),
        written_ids=tuple(token_ids[answer + NUM_HEADER_TOKENS :]),
    )
