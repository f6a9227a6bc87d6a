"""A transcription as a question to the model: the sound, and what is asked of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tilewright.inputs.media import MediaLimits, check_bytes
from tilewright.server.bodies import ChatBody, Message
from tilewright.server.engine_requests import chat_request
from tilewright.server.errors import ApiError
from tilewright.server.link.backend import EngineRequest, ModelInfo
from tilewright.server.transcriptions.body import FILE, TranscriptionBody
from tilewright.server.transcriptions.writer import TranscriptionWriter
from tilewright.types import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable


def transcription_request(
    body: TranscriptionBody, model: ModelInfo, limits: MediaLimits
) -> tuple[EngineRequest, Callable[[], TranscriptionWriter]]:
    """What is asked of the engine, and what makes the writer of its answer."""
    if "audio" not in model.accepts:
        takes = " and ".join(("text", *model.accepts)) if model.accepts else "text alone"
        message = f"{model.name} takes {takes}, and this needs a model that takes sound"
        raise ApiError(400, message, param="model", code="unsupported_model")
    try:
        sound = check_bytes(body.data, FILE, limits)
    except RequestError as error:
        raise RequestError(str(error), param=FILE, code=error.code) from error
    parts = [{"type": "audio", "audio": sound}, {"type": "text", "text": body.instruction}]
    chat = ChatBody(
        messages=[Message(role="user")],
        # OpenAI's default here, other than in a chat: what is likeliest.
        temperature=body.temperature or 0.0,
        seed=body.seed,
        max_completion_tokens=body.max_completion_tokens,
        enable_thinking=False,
    )
    request = chat_request(chat, [{"role": "user", "content": parts}], model)
    body.data = b""  # the request has it
    return replace(request, names={**request.names, "prompt": FILE}), partial(TranscriptionWriter, body, chat, model)
