"""A text to read out as a question to the engine: an answer that is written already, and is spoken."""

from __future__ import annotations

from tilewright.server.errors import ApiError
from tilewright.server.link.backend import EngineRequest, ModelInfo
from tilewright.server.speech.body import SpeechBody


def speech_request(body: SpeechBody, model: ModelInfo) -> EngineRequest:
    """The text begins an answer, of which the model writes one more token: the last, which nobody hears."""
    if not model.voices:
        message = f"{model.name} does not speak, and this needs a model that does"
        raise ApiError(400, message, param="model", code="unsupported_model")
    _check(body)
    sampling = {
        "max_tokens": 1,
        "voice": body.voice_name or model.voices[0],
        "temperature": body.temperature,
        "seed": body.seed,
    }
    return EngineRequest(
        messages=[{"role": "assistant", "content": body.input}],
        template_args={"continue_final_message": True},
        sampling={name: value for name, value in sampling.items() if value is not None},
        names={"prompt": "input"},
    )


def _check(body: SpeechBody) -> None:
    if not body.input.strip():
        raise ApiError(400, "input has nothing but spaces, expected a text", param="input")
    if body.instructions:
        message = "instructions is given, which is not supported: the model's voices speak in one way each"
        raise ApiError(400, message, param="instructions", code="unsupported_parameter")
    if body.stream and body.response_format != "pcm":
        message = f"response_format is {body.response_format} with stream_format sse, expected pcm"
        raise ApiError(400, message, param="response_format")
