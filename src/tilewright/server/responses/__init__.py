"""OpenAI's Responses interface, on top of chat completions."""

from tilewright.server.responses.builder import ResponseBuilder
from tilewright.server.responses.history import History
from tilewright.server.responses.request import chat_body
from tilewright.server.responses.writer import ResponsesWriter

__all__ = ["History", "ResponseBuilder", "ResponsesWriter", "chat_body"]
