"""The bodies of requests: OpenAI's fields, and common fields of other servers of open models.

`fields` lists the other fields that are known; a field that it does not name is refused.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tilewright.server.api import fields

MAX_STOPS = 32
MAX_STOP_CHARACTERS = 1024
MAX_PROMPTS = 256
MAX_BIASES = 1024

StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
# Validation stops at the first wrong item: an error for each would take minutes and all memory for 100 MB.
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


def null_means(default: object) -> BeforeValidator:
    """Return a validator that replaces null, which OpenAI's interface allows for an unset field, by its default."""
    return BeforeValidator(lambda value: default if value is None else value)


class Body(BaseModel):
    """An object of a request. The error about an undeclared field has the field's name in `ctx`.

    Values must have the field's type: "7" is not accepted as a number, nor 1 as true.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    others: ClassVar[fields.Rules | None] = {}  # rules for undeclared fields; None: all are accepted and used

    @field_validator("*", mode="before")
    @classmethod
    def _as_whole(cls, value: object) -> object:
        """Convert 7.0 to the integer 7: JSON has one type of numbers."""
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @model_validator(mode="after")
    def _check_others(self) -> Body:
        if self.others is not None and self.model_extra:
            fault = fields.find_fault(self.model_extra, self.others, self.declared())
            if fault is not None:
                context = {"field": fault.name, "message": fault.message}
                raise PydanticCustomError(fault.code, "{message}", context)
        return self

    @classmethod
    def declared(cls) -> list[str]:
        """Return the names of the declared fields in JSON."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class StreamOptions(Body):
    others = fields.STREAM_OPTIONS

    include_usage: Annotated[bool, null_means(False)] = False


class JsonSchema(Body):
    others = fields.JSON_SCHEMA

    name: str = "answer"
    # A field named `schema` would hide a method of BaseModel.
    json_schema: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Body):
    others = fields.RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """A constraint on the answer's text: exactly one of the fields is set."""

    json_schema: dict[str, Any] | None = Field(alias="json", default=None)
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = Field(default=None, description="in Lark's form")


class MediaSettings(Body):
    """Settings for reading media, in vLLM's form."""

    use_audio_in_video: Annotated[bool, null_means(False)] = Field(
        default=False, description="true: the sound of videos is heard with their frames"
    )


class MessageBody(Body):
    others = None  # passed to the chat template

    role: str
    content: str | Objects | None = None


class Function(Body):
    others = None  # passed to the chat template

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    others = None  # passed to the chat template

    type: Literal["function"] = "function"
    function: Function


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"] = "function"
    function: FunctionName


class GenerationBody(Body):
    """The fields of every request for an answer."""

    model: str | None = Field(default=None, description="the id that /v1/models returns; may be left out")
    stream: Annotated[bool, null_means(False)] = False

    @property
    def num_answers(self) -> int:
        """The number of answers to compute, over all prompts."""
        raise NotImplementedError


class TextBody(GenerationBody):
    """The fields that all requests for text share."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1, description="0 or -1: all tokens")
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: dict[str, Any] | None = Field(default=None, max_length=MAX_BIASES, description="token id to bias")
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: TokenIds | None = Field(default=None, max_length=MAX_STOPS)
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(default=None, description="structured_outputs.json, as older vLLM")
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    stream_options: StreamOptions | None = None


class SamplingBody(TextBody):
    """The fields that chat and plain completions share."""

    n: int | None = Field(default=None, ge=1, le=128)
    response_format: ResponseFormat | None = None


class AudioParam(Body):
    """The `audio` field of a chat request: the voice and file format of a spoken answer."""

    voice: str | None = Field(default=None, max_length=100, description="null: the model's first")
    format: Literal["wav", "mp3", "opus", "flac", "aac", "pcm16"] | None = Field(
        default=None, description="wav by default; a stream has pcm16: 24,000 samples a second"
    )


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(SamplingBody):
    others = fields.CHAT

    messages: Annotated[list[MessageBody], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1, description="the older name of max_completion_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: Annotated[bool, null_means(True)] = True
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description='"none": no reasoning; levels need a chat template that supports them'
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="arguments of the model's chat template, such as enable_thinking"
    )
    enable_thinking: bool | None = Field(default=None, description="short for chat_template_kwargs.enable_thinking")
    add_generation_prompt: Annotated[bool, null_means(True)] = Field(
        default=True, description="false: the prompt ends with the last message"
    )
    continue_final_message: Annotated[bool, null_means(False)] = Field(
        default=False, description="true: the answer continues the last message, the assistant's"
    )
    modalities: Texts | None = Field(default=None, description='["text", "audio"]: also speak the answer')
    audio: AudioParam | None = None
    mm_processor_kwargs: MediaSettings | None = None

    @property
    def num_answers(self) -> int:
        return self.n or 1

    @property
    def is_spoken(self) -> bool:
        return self.modalities is not None and "audio" in self.modalities

    @property
    def audio_format(self) -> str:
        return (self.audio and self.audio.format) or ("pcm16" if self.stream else "wav")

    @cached_property
    def plain_tools(self) -> list[dict[str, Any]]:
        """The tools as dictionaries, for the template, the grammar and the parser."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def tools_in_use(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.plain_tools


class CompletionBody(SamplingBody):
    others = fields.COMPLETION

    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[Texts, Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, null_means(16)] = Field(
        default=16, ge=0, description="0: with echo, only the prompt's log-probabilities"
    )
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Annotated[bool, null_means(False)] = False
    best_of: int | None = None
    suffix: str | None = Field(default=None, description="refused: fill-in-the-middle is not supported")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, also if the request has a single one."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def num_answers(self) -> int:
        return (self.n or 1) * len(self.prompts)


class ResponsesText(Body):
    others = fields.RESPONSES_TEXT

    format: dict[str, Any] | None = None


class ResponsesReasoning(Body):
    others = fields.RESPONSES_REASONING

    effort: ReasoningEffort | None = None


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ResponsesBody(TextBody):
    """A Responses request: `responses/request.py` turns it into a ChatBody, which is validated too."""

    others = fields.RESPONSES

    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = Field(default=None, ge=1, description="limits built-in tools; there are none")
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    include: Annotated[list[Includable], Field(fail_fast=True)] | None = Field(
        default=None, description="reasoning is always included, as plain text; there are no built-in tools"
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="an input that is too long is an error either way"
    )
    metadata: dict[str, str] | None = None
    store: bool | None = Field(default=None, description="false: previous_response_id cannot name it")
    user: Any = None

    @property
    def num_answers(self) -> int:
        return 1
