"""`tilewright.Engine`: the Python API of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewright.engine.constraint.compiler import ConstraintCompiler
from tilewright.engine.core import EngineCore
from tilewright.engine.handle import Handle
from tilewright.engine.kv.pages import kv_byte_dtype
from tilewright.engine.load.assembly import build_core
from tilewright.engine.load.loading import AUTO, LoadedModel, choose_format, load_model
from tilewright.engine.loop import EngineLoop
from tilewright.engine.measure.costs import Costs, costs_of
from tilewright.engine.measure.memory import MemoryUse, kv_bytes, read_resident, split_memory
from tilewright.engine.measure.stats import Stats
from tilewright.engine.media.features import encode_now, features_part
from tilewright.engine.options import EngineOptions
from tilewright.engine.ranks.ranks import EngineRanks, start_ranks
from tilewright.engine.run.executor import Executor
from tilewright.engine.schedule.sequence import PromptReader
from tilewright.engine.schedule.step import StepLimits
from tilewright.engine.speech.sequence import voice_aliases
from tilewright.inputs.isolation.opener import IsolatedOpener, Opener
from tilewright.inputs.media import MediaLimits
from tilewright.inputs.messages import TextBudget, TextLimits, has_media
from tilewright.inputs.processor import MediaProcessor
from tilewright.inputs.tokenizer import PIECE_CHARACTERS
from tilewright.models.protocol import KvSpec
from tilewright.ops import backend as ops_backend
from tilewright.ops import platform
from tilewright.ops.device import HOST, Device
from tilewright.ops.native import bind_team, work_alone
from tilewright.ops.platform import Platform
from tilewright.options import check_names, described, signature
from tilewright.types import (
    Completion,
    Delta,
    MediaKind,
    Messages,
    ModelInputs,
    RequestError,
    SamplingParams,
    did_you_mean,
)
from tilewright.weights import embedded, hub
from tilewright.weights.cache import EntryCheck
from tilewright.weights.checkpoint import open_checkpoint

_log = logging.getLogger(__name__)


class Engine:
    __doc__ = f"""A loaded model that answers many requests at once.

        with Engine("path/to/Qwen3-VL-2B-Instruct") as engine:
            print(engine.chat([{{"role": "user", "content": "What is a tile?"}}], max_tokens=100).text)

    `model` is a folder, a GGUF file or a hub id; None: the small model of the package, with a warning.
    Thread-safe; concurrent requests are computed together. The options:

{described(EngineOptions)}
    """
    __signature__ = signature(EngineOptions, model=None)

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        check_names("Engine", options, EngineOptions)
        own = EngineOptions(**options)
        name = _embedded_path() if model is None else model
        hub.find(name)  # a missing path fails before any process is started
        self.platform = platform.resolve(own.device, own.backend)
        _require_supported(self.platform, own)
        self._kv_byte_dtype = kv_byte_dtype(own.kv_cache_dtype)
        self._opener = IsolatedOpener() if own.isolate_media else Opener()
        self._cleanup = contextlib.ExitStack()  # run by `close`, or if starting fails
        self._cleanup.callback(self._opener.close)
        with self._cleaned_up_on_error(), ops_backend.use(self.platform.backend, self.platform.place):
            own = self._resolved(own, name)
            _require_room(self.platform, name, own)
            ranks = self._cleanup.enter_context(start_ranks(name, own))
            group = None if ranks is None else ranks.group
            self.loaded: LoadedModel = load_model(name, own, opener=self._opener, group=group)
            self.limits = StepLimits(
                max_context=_fit_context(self.loaded, own.max_context),
                max_sequences=own.max_sequences,
                max_tokens_per_step=own.max_tokens_per_step,
            )
            core = self._build_core(own, ranks)
            self.loop = self._start_loop(core)
            if ranks is not None:
                ranks.watch(self.loop.fail)
            self._entry_check = _start_check(self.loaded, self.loop)

    def _resolved(self, own: EngineOptions, name: str | Path) -> EngineOptions:
        """Return the options with what depends on this machine and the checkpoint decided, once for all ranks."""
        projector = None if own.mmproj is None else str(own.mmproj)
        return dataclasses.replace(
            own,
            backend=self.platform.backend,
            mmproj=projector,
            quantize=choose_format(name, projector) if own.quantize == AUTO else own.quantize,
            # The pack cache is for the host, which maps packed weights from disk; a GPU has its own copy.
            pack_cache=own.pack_cache and self.platform.place.is_host,
        )

    @contextlib.contextmanager
    def _cleaned_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._cleanup.close()
            raise

    def _build_core(self, own: EngineOptions, ranks: EngineRanks | None) -> EngineCore:
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        num_ranks = 1
        if ranks is not None:  # free memory is known only when all have loaded
            ranks.wait_until_loaded()
            num_ranks = ranks.size
        own_bytes = kv_bytes(own.kv_memory, self.platform.available_bytes()) // num_ranks
        self.platform.require_room("keys and values (kv_memory)", own_bytes)
        max_items = (own.media_limits or MediaLimits()).max_items
        sizes = split_memory(model, self.loaded.dtype.itemsize, self.limits, max_items, own_bytes, self._kv_byte_dtype)
        return build_core(
            model,
            self.loaded.dtype,
            self.limits,
            sizes.num_pages,
            num_cross_pages=sizes.num_cross_pages,
            num_state_slots=sizes.num_state_slots,
            num_window_pages=sizes.num_window_pages,
            make_token_decoder=tokenizer.stream,
            eos_token_ids=tokenizer.stop_token_ids,
            constraints=ConstraintCompiler(tokenizer, model.vocab_size),
            media_buffer=self.loaded.processor.media_buffer,
            ranks=ranks,
            speech=self.loaded.speech,
            speculate=own.speculate,
            prefix_cache=own.prefix_cache,
            replay=_can_replay(own.replay, self.platform, ranks),
            kv_cache_dtype=own.kv_cache_dtype,
        )

    def _start_loop(self, core: EngineCore) -> EngineLoop:
        own = self.platform
        return EngineLoop(
            core,
            # Prompts and images are prepared on the host, wherever the model computes.
            start_preparing=_on_backend(own.backend if own.place.is_host else "native", HOST, work_alone),
            start_stepping=_on_backend(own.backend, own.place, bind_team),
            costs=self.costs(),
        )

    def chat(self, messages: Any, **options: Any) -> Any:
        """Return the answer to a conversation, a Completion; a list of them for a list of conversations, or for n > 1.

        Messages are OpenAI's, with parts such as {"type": "image", "image": path, bytes, PIL image or array}, or
        {"type": "audio", "audio": path, bytes, array at 16 kHz or (array, rate)}. Options are the names of
        SamplingParams, `tools`, `use_audio_in_video` (read the sound of videos too), and `template_arguments`, a dict
        of arguments for the chat template; those that it reads (`enable_thinking`, ...) may also be given by name.
        `constraint=Constraint("json_schema", schema)` (or "regex", "lark"; `tilewright.types`) constrains the answer to
        a grammar. With `modalities=("text", "audio")` the answer is also spoken by `voice`, or the first of `voices`:
        `audio` is fp32 samples at `audio_rate` per second; the deltas of `stream` have them as they are generated.
        OpenAI's voice names stand for those in `voice_aliases`.
        """
        if messages and not isinstance(messages[0], Mapping):
            handles = [self.submit_chat(conversation, **options) for conversation in messages]
            return [_result(handle) for handle in handles]
        return _result(self.submit_chat(messages, **options))

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        **sampling: Any,
    ) -> Any:
        """Return the continuation of a prompt as a Completion; a list for a list of prompts, or for n > 1.

        A prompt is a text or token ids. `images`, `videos` and `audios` belong to its placeholders in order; for a list
        of prompts they are lists, one per prompt. Other options are the names of SamplingParams, `constraint` among
        them.
        """
        prompts: Any = prompt if prompt_token_ids is None else prompt_token_ids
        if prompts is None or (prompt is not None and prompt_token_ids is not None):
            raise RequestError("give either prompt or prompt_token_ids")
        key = "text" if prompt_token_ids is None else "token_ids"
        media: dict[str, Any] = {"images": images, "videos": videos, "audios": audios}
        if prompt_token_ids is not None and len(prompts) == 0:
            raise RequestError("prompt_token_ids has no tokens, expected at least 1")
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
            return _result(self.submit_prompt(**{key: prompts}, **media, **sampling))
        each = {name: _per_prompt(name, items, len(prompts)) for name, items in media.items()}
        handles = [
            self.submit_prompt(**{key: one}, **{name: items[i] for name, items in each.items()}, **sampling)
            for i, one in enumerate(prompts)
        ]
        return [_result(handle) for handle in handles]

    def stream(self, messages: Messages | None = None, **options: Any) -> Iterator[Delta]:
        """Yield the answer of `chat` or, without messages, of `generate`, as it is generated.

        Leaving the loop aborts the rest.
        """
        if messages is not None:
            handle = self.submit_chat(messages, **options)
        else:
            text, token_ids = options.pop("prompt", None), options.pop("prompt_token_ids", None)
            handle = self.submit_prompt(text=text, token_ids=token_ids, **options)
        try:
            yield from handle
        finally:
            if not handle.is_done:
                handle.abort()

    def submit_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[object] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_audio_in_video: bool = False,
        modalities: Sequence[str] | None = None,
        **options: Any,
    ) -> Handle:
        """Submit a conversation and return its Handle.

        `template_arguments` go to the chat template. `options` are names of SamplingParams, or template arguments by
        names that the template reads; any other name is refused.
        """
        sampling, arguments = self._sorted_options(options)
        arguments |= template_arguments or {}
        _check_template_arguments(arguments)
        sampling["voice"] = self._voice(modalities, sampling.get("voice"))
        processor, is_known = self.loaded.processor, self.loop.core.resources.media.is_known
        return self._submit(
            lambda budget: processor.chat(
                messages,
                tools=tools,
                is_known=is_known,
                budget=budget,
                use_audio_in_video=use_audio_in_video,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **arguments,
            ),
            sampling,
            has_media=has_media(messages),
            num_characters=self.text_limits.check_chat(messages, tools, arguments),
        )

    def _sorted_options(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the sampling parameters and the template arguments among options; RequestError for any other name."""
        sampling: dict[str, Any] = {}
        arguments: dict[str, Any] = {}
        template = self.loaded.processor.template
        for name, value in options.items():
            if name in _SAMPLING_NAMES:
                sampling[name] = value
            elif template is not None and template.takes(name):
                arguments[name] = value
            else:
                hint = did_you_mean(name, (*_SAMPLING_NAMES, *_CHAT_NAMES))
                raise RequestError(
                    f"unknown option {name!r:.100}, expected a sampling parameter or what the chat template reads{hint}"
                )
        return sampling, arguments

    def submit_prompt(
        self,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        **sampling: Any,
    ) -> Handle:
        """Submit a prompt and return the Handle of its continuation."""
        media = [
            *(_media_part("image", item) for item in images),
            *(_media_part("video", item) for item in videos),
            *(_media_part("audio", item) for item in audios),
        ]
        processor, is_known = self.loaded.processor, self.loop.core.resources.media.is_known
        return self._submit(
            lambda budget: processor.prompt(text, token_ids, media, is_known=is_known, budget=budget),
            sampling,
            has_media=bool(media),
            num_characters=self.text_limits.check_prompt(text, token_ids),
        )

    def read_logits(self, token_ids: Sequence[int], read: PromptReader) -> None:
        """Compute a prompt, and call `read` with the logits for every token but the first.

        read(i, logits) gets fp32 [R, V]: the logits from which tokens i, i + 1, ... of the prompt are predicted. It is
        called on the engine's thread, for parts of the prompt in order; the logits are overwritten after it returns.
        """
        inputs = self.loaded.processor.prompt(None, token_ids)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
        self.loop.submit(lambda: inputs, params, has_media=False, prompt_reader=read).result()

    def features(self, medium: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message part with the encoded features of an image, video or sound (docs/inputs.md).

        `medium` is a message part too, such as {"type": "image", "image": source}. Any engine of the same model accepts
        the result in its place and answers alike, without running its encoder.
        """
        processor, executor, own = self.loaded.processor, self.loop.core.runner, self.platform
        if not isinstance(processor, MediaProcessor) or not isinstance(executor, Executor):
            raise RequestError(f"{self.loaded.name} accepts text only, and has no features of media")
        with ops_backend.use(own.backend if own.place.is_host else "native", HOST):
            return features_part(processor, medium, lambda media: self.loop.call(lambda: encode_now(executor, media)))

    def _voice(self, modalities: Sequence[str] | None, voice: str | None) -> str | None:
        """Return the voice that speaks an answer: the requested one, or the model's first; None for text only."""
        unknown = set(modalities or ()) - {"text", "audio"}
        if unknown or "text" not in (modalities or ("text",)):
            raise RequestError(f"modalities is {list(modalities or ())!r:.100}, expected text, or text and audio")
        if modalities is None or "audio" not in modalities:
            return voice if modalities is None else None
        if self.loaded.speech is None:
            raise RequestError("modalities has audio, but this model does not speak", param="modalities")
        return voice or self.voices[0]

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the voices that can speak answers, the default first; empty if the model does not speak."""
        return () if self.loaded.speech is None else self.loaded.speech.voices

    @property
    def voice_aliases(self) -> Mapping[str, str]:
        """OpenAI's voice names (alloy, ...), each with the one of `voices` it stands for."""
        return voice_aliases(self.voices)

    @cached_property
    def text_limits(self) -> TextLimits:
        """Limits on the text of one request."""
        # The scheduler's max_context: the memory for keys and values may hold less than the model's context.
        return TextLimits(self.loop.core.scheduler.max_context, self.loaded.tokenizer.max_token_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, over all layers, on each rank."""
        return self._bytes_per_token(self.loaded.model.kv_spec)

    def _bytes_per_token(self, spec: KvSpec) -> int:
        return spec.bytes_per_token(self.loaded.dtype.itemsize, self._kv_byte_dtype)

    def costs(self) -> Costs:
        """Return the bytes and operations of the model's steps, with its keys and values as they are stored here."""
        return costs_of(self.loaded.model, self.loaded.dtype.itemsize, self._kv_byte_dtype)

    def memory(self) -> MemoryUse:
        """Return the engine's current memory use by purpose."""
        runner, resources = self.loop.core.runner, self.loop.core.resources
        spec, windows = self.loaded.model.kv_spec, resources.windows
        pools = [(spec.outside(tuple(windows)), resources.kv.pool)]
        pools += [(spec.in_window(window), cache.pool) for window, cache in windows.items()]
        page_bytes = [(self._bytes_per_token(part) * pool.page_size, pool) for part, pool in pools]
        weight_bytes = sum(self.loaded.report.bytes_by_format.values())
        now = read_resident()
        return MemoryUse(
            weight_bytes=weight_bytes,
            mapped_weight_bytes=weight_bytes if self.loaded.report.from_cache else 0,
            kv_bytes=sum(pool.num_pages * size for size, pool in page_bytes),
            kv_bytes_used=sum(pool.num_used * size for size, pool in page_bytes),
            kv_bytes_touched=sum(pool.num_touched * size for size, pool in page_bytes),
            scratch_bytes=runner.model_runner.scratch_bytes if isinstance(runner, Executor) else 0,
            feature_bytes=resources.media.features.size_bytes,
            resident_bytes=now.total,
            resident_file_bytes=now.file,
        )

    def stats(self) -> Stats:
        memory = self.memory()
        return dataclasses.replace(self.loop.stats(), **vars(memory), other_bytes=memory.other_bytes)

    def close(self) -> None:
        """Abort all requests and end the engine's threads."""
        if self._entry_check:
            self._entry_check.close()
        self._opener.close()  # first: the loop would wait for a prompt that waits for a decoder
        self.loop.close(drain=False)
        self._cleanup.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Return SamplingParams from names, with the checkpoint's recommendations as defaults."""
        for name in given:
            if name not in _SAMPLING_NAMES:
                raise RequestError(f"unknown sampling parameter {name!r:.100}{did_you_mean(name, _SAMPLING_NAMES)}")
        chosen = {
            **self.loaded.sampling_defaults,
            **{name: value for name, value in given.items() if value is not None},
        }
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(chosen.get(name), bool):
                chosen[name] = 0 if chosen[name] else None
        return SamplingParams(**chosen)

    def _submit(
        self,
        prepare: Callable[[TextBudget], ModelInputs],
        sampling: Mapping[str, Any],
        *,
        has_media: bool,
        num_characters: int,
    ) -> Handle:
        params = self.sampling_params(**sampling)
        aborted = threading.Event()
        budget = TextBudget(self.text_limits, aborted.is_set)
        is_long = num_characters > PIECE_CHARACTERS
        return self.loop.submit(lambda: prepare(budget), params, has_media=has_media, is_long=is_long, aborted=aborted)


_SAMPLING_NAMES = tuple(SamplingParams.__dataclass_fields__)
# Keywords of `Engine.submit_chat` that are not sampling parameters.
_CHAT_NAMES = tuple(
    name
    for name, parameter in inspect.signature(Engine.submit_chat).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)
_RESERVED_ARGUMENTS = {*_SAMPLING_NAMES, *_CHAT_NAMES, "messages", "is_known", "budget", "fetch"}


def _check_template_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise RequestError for a name that cannot be an argument of the chat template."""
    for name in arguments:
        if name in _RESERVED_ARGUMENTS or not str(name).isidentifier():
            raise RequestError(f"template_arguments has {name!r:.100}, which is no argument of a chat template")


def _on_backend(backend: str, device: Device, start: Callable[[], None]) -> Callable[[], None]:
    """Return the start function of a thread: it selects the thread's own backend, then calls `start`."""

    def begin() -> None:
        ops_backend.activate(backend, device)
        start()

    return begin


def _require_supported(own: Platform, options: EngineOptions) -> None:
    """Raise RequestError for options that only run on a CPU."""
    if own.place.is_host:
        return
    own.require_one_rank(options.tp)
    if options.quantize not in (None, "none"):
        raise RequestError(
            f"quantize is {options.quantize!r} and device {own.device}, expected none: weights are in bf16 or fp32 "
            "there"
        )
    if options.kv_cache_dtype != "auto":
        raise RequestError(f"kv_cache_dtype is {options.kv_cache_dtype!r} and device {own.device}, expected auto")


def _require_room(own: Platform, name: str | Path, options: EngineOptions) -> None:
    """Raise RequestError if a GPU lacks memory for the weights, or kernels for the checkpoint's quantised format."""
    if own.place.is_host:
        return
    checkpoint = open_checkpoint(name, options.mmproj)
    formats = {format[0] for tensor in checkpoint.shapes if (format := checkpoint.quantized_as(tensor)) is not None}
    if formats and options.quantize != "none":
        raise RequestError(
            f"{name} is quantised ({', '.join(sorted(formats))}), and device is {own.device}: expected "
            'quantize="none" (--quantize none), which widens its weights'
        )
    itemsize = 4 if options.dtype == "float32" else 2
    num_values = sum(math.prod(shape) for shape in checkpoint.shapes.values())
    own.require_room("the weights", num_values * itemsize)


def _can_replay(replay: bool, own: Platform, ranks: EngineRanks | None) -> bool:
    if not own.place.is_host:
        return replay
    if replay and own.backend != "native":
        _log.info("replay is for the native backend: steps run op by op on %s", own.backend)
    is_recordable = ranks is None or ranks.group.recordable
    return replay and own.backend == "native" and is_recordable


def _embedded_path() -> Path:
    _log.warning(embedded.notice('Engine("./Qwen3-VL-2B-Instruct")'))
    return embedded.path()


def _start_check(loaded: LoadedModel, loop: EngineLoop) -> EntryCheck | None:
    """Start checking mapped weights in the background; None if they were packed just now, or are checked already."""
    unchecked = loaded.report.unchecked
    return None if unchecked is None else EntryCheck(unchecked, loop.fail)


def _fit_context(loaded: LoadedModel, max_context: int | None) -> int:
    """Return the usable context length in tokens, and fit the model's rope to it."""
    longest = loaded.model.max_context
    if max_context is not None and max_context > longest:
        _log.warning(
            "max_context is %d, and %s supports %d tokens at most (its config's max_position_embeddings, extended by "
            "its rope scaling): %d is used",
            max_context,
            loaded.name,
            longest,
            longest,
        )
    fitting = min(max_context or longest, longest)
    loaded.model.fit_context(fitting)
    return fitting


def _per_prompt(name: str, items: Sequence[Any], num_prompts: int) -> Sequence[Any]:
    if not items:
        return [()] * num_prompts
    if len(items) != num_prompts:
        raise RequestError(f"{name} has {len(items)} entries, expected one list for each of the {num_prompts} prompts")
    return items


def _media_part(kind: MediaKind, item: Any) -> dict[str, Any]:
    """Return a medium as a message part; a video may be given as {"video": frames, "fps": of the frames}."""
    return {"type": kind, **item} if isinstance(item, Mapping) else {"type": kind, kind: item}


def _result(handle: Handle) -> Completion | list[Completion]:
    completions = handle.result()
    return completions[0] if len(completions) == 1 else completions
