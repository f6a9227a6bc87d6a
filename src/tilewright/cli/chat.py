"""`tilewright chat`: one answer, or a conversation in the terminal."""

from __future__ import annotations

import argparse
import functools
import logging
import select
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli.streams import read_piped_input
from tilewright.flags import engine as engine_flags
from tilewright.flags.options import positive
from tilewright.host import files
from tilewright.outputs.sound import FILE_FORMATS, encode, to_pcm16
from tilewright.types import Completion, RequestError

if TYPE_CHECKING:
    from tilewright.engine.engine import Engine

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
HELP = """/image FILE   attach an image to the next message
/video FILE   attach a video
/audio FILE   attach a sound
/clear        clear the conversation
/help         show this help
/exit         exit, as Ctrl-D does; Ctrl-C stops an answer

A pasted text is one message. To type several lines, end a line with \\ to
go on in the next one, or put the message between \"\"\" and \"\"\"."""
QUOTES = '"""'
FIRST_PROMPT, NEXT_PROMPT = "> ", "... "
PASTE_GAP_S = 0.02  # between the lines of one paste, if the terminal does not mark its ends


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `chat`."""
    parser = commands.add_parser(
        "chat",
        help="chat in the terminal, or print one answer",
        description="Prints the answer to PROMPT on standard output as it is generated, the rest on standard error. "
        "Without PROMPT, on a terminal: a conversation. Piped text goes before PROMPT, or is the prompt. "
        "Without -m: the embedded model.",
        epilog="""examples:
  tilewright image "a red circle left of a blue square" -o shapes.png
  tilewright chat "What is on it?" --image shapes.png      the embedded model, which is tiny
  tilewright chat "What colour is the banana?" --speak speech.wav     the embedded model for speech
  tilewright chat "What is said?" --audio speech.wav
  tilewright chat "What is a tile?" -m ./Qwen3-VL-2B-Instruct
  tilewright chat "What is on it?" -m MODEL --image photo.jpg --image other.png     images of yours
  tilewright chat "What happens here?" -m MODEL --video clip.mp4 --max-tokens 200
  tilewright chat "What is said?" -m ./Qwen3-Omni-30B-A3B-Instruct --audio speech.wav
  tilewright chat "Say hello." -m ./Qwen3-Omni-30B-A3B-Instruct --speak hello.wav
  git diff | tilewright chat "Write a commit message for this." -m MODEL
  tilewright chat - -m MODEL < question.txt                the prompt is in the file
  tilewright chat -m MODEL --temperature 0                 a conversation; /help lists its commands""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the message; -: read it from standard input")
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="an image; may be repeated")
    parser.add_argument("--video", action="append", default=[], metavar="FILE", help="a video; may be repeated")
    parser.add_argument("--audio", action="append", default=[], metavar="FILE", help="a sound; may be repeated")
    text = "read the sound of the videos too"
    parser.add_argument("--use-audio-in-video", action="store_true", help=text)
    parser.add_argument(
        "--speak", metavar="FILE", help="speak the answer to PROMPT too, into a .wav, .mp3, .opus, .flac or .aac"
    )
    parser.add_argument("--voice", metavar="NAME", help="the voice of --speak (default: the model's first)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("-q", "--quiet", action="store_true", help="no loading bar, no speeds, no notices")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    group = parser.add_argument_group("sampling", "The defaults are the checkpoint's recommendations.")
    group.add_argument("--max-tokens", type=positive, metavar="N", help="most tokens of an answer")
    group.add_argument("--temperature", type=float, metavar="T", help="0: always the most likely token")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens whose probabilities sum to P"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="sample from tokens at least P times as likely as the most likely one"
    )
    group.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="above 1: repeated tokens become less likely"
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="seed of the sampling: the same seed gives the same answer"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT; may be repeated")
    engine_flags.add_arguments(parser, max_sequences=1)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING, format="%(name)s: %(message)s")
    prompt = _prompt(options.prompt)
    media = [_part(kind, file) for kind in ("image", "video", "audio") for file in getattr(options, kind)]
    if options.use_audio_in_video:
        media = [{**part, "use_audio_in_video": True} if part["type"] == "video" else part for part in media]
    sampling = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    spoken = _spoken(options, has_prompt=prompt is not None)
    with engine_flags.open_engine(options, progress=sys.stderr.isatty() and not options.quiet) as engine:
        engine.sampling_params(**sampling)  # raises errors before the first line is typed
        more: dict[str, Any] = {"show_speed": not options.quiet, "media": media, "spoken": spoken}
        conversation = Conversation(engine, sampling, options.system, **more)
        if prompt is None:
            return converse(conversation, _read_line)
        return answer_once(conversation, prompt, options.speak and Path(options.speak))


def _prompt(given: str | None) -> str | None:
    """Return the prompt: `given`, piped in, or both joined; None for a conversation."""
    if given is None and sys.stdin.isatty():
        return None
    if given in (None, "-"):
        prompt = files.read_standard_input()
    else:
        piped = "" if sys.stdin.isatty() else read_piped_input()
        prompt = "\n\n".join(text for text in (piped, files.check_text(given or "", "the prompt")) if text)
    if not prompt:
        raise RequestError("the prompt is empty, expected some text")
    return prompt


def _spoken(options: argparse.Namespace, *, has_prompt: bool) -> dict[str, Any]:
    """Return arguments of `Engine.submit_chat` for a spoken answer; raise RequestError for an unusable file."""
    if options.speak is None:
        if options.voice is not None:
            raise RequestError("--voice is given, expected --speak with it")
        return {}
    format = Path(options.speak).suffix.removeprefix(".")
    if format not in FILE_FORMATS:
        endings = ", ".join(f".{name}" for name in FILE_FORMATS)
        raise RequestError(f"--speak is {options.speak}, expected a file that ends with one of {endings}")
    if not has_prompt:
        raise RequestError("--speak is given, expected PROMPT too: one answer is one file")
    files.check_output(Path(options.speak), "--speak")
    return {"modalities": ("text", "audio"), "voice": options.voice}


def _part(kind: str, file: str) -> dict[str, Any]:
    """Return a part of a message; raise RequestError if there is no such file."""
    return {"type": kind, kind: str(engine_flags.check_file(kind, file))}


@dataclass
class Conversation:
    """The turns so far, and the media for the next message."""

    engine: Engine
    sampling: dict[str, Any]
    system: str | None = None
    show_speed: bool = True
    media: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    spoken: dict[str, Any] = field(default_factory=dict)  # arguments for spoken answers; empty: text only

    def answer(self, text: str) -> Completion:
        """Answer `text` and the attached media, writing to standard output as text arrives. Ctrl-C ends it early.

        A RequestError leaves the conversation unchanged and drops the media.
        """
        media, self.media = self.media, []
        content: Any = [*media, {"type": "text", "text": text}] if media else text
        question = {"role": "user", "content": content}
        system = [{"role": "system", "content": self.system}] if self.system else []
        handle = self.engine.submit_chat([*system, *self.turns, question], **self.sampling, **self.spoken)
        try:
            for delta in handle:
                print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            handle.abort()
        except BaseException:  # the answer has no reader
            handle.abort()
            raise
        (completion,) = handle.result()
        print(flush=True)
        self.turns += [question, {"role": "assistant", "content": completion.text}]
        if self.show_speed:
            print(speeds(completion), file=sys.stderr)
        return completion


def speeds(completion: Completion) -> str:
    """Return the number of tokens and their speed as text."""
    count, timings = len(completion.token_ids), completion.timings
    if not count:
        return "0 tokens"
    first_s = timings.first_token_s
    first = f"{first_s:.2f} s" if first_s >= 0.1 else f"{first_s * 1000:.0f} ms"
    parts = [f"{count} token{'s' if count > 1 else ''}", f"TTFT {first}"]
    if count > 1 and timings.total_s > timings.first_token_s:
        parts.append(f"{(count - 1) / (timings.total_s - timings.first_token_s):.1f} tokens/s")
    return ", ".join(parts)


def answer_once(conversation: Conversation, prompt: str, sound_file: Path | None = None) -> int:
    """Write the answer, and its speech to a file if one is given."""
    completion = conversation.answer(prompt)
    if completion.finish_reason == "abort":
        raise KeyboardInterrupt  # the text stays on standard output; the exit status is that of an interrupt
    if sound_file is not None and completion.audio is not None and completion.audio_rate is not None:
        pcm16 = to_pcm16(completion.audio)
        files.write_bytes(sound_file, encode(pcm16, completion.audio_rate, sound_file.suffix.removeprefix(".")))
        if conversation.show_speed:
            print(f"{len(completion.audio) / completion.audio_rate:.1f} s of speech in {sound_file}", file=sys.stderr)
    return 0


@functools.cache
def _marks_pastes() -> bool:
    """Load GNU readline if it exists; return whether it delivers a paste as one line that contains line feeds."""
    try:
        import readline  # once imported, input() uses it for arrow keys and history
    except ImportError:
        return False
    if "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True


def _read_line(prompt: str) -> str:
    """Return a line from the terminal, or all lines of a paste; raise EOFError at the end."""
    if not sys.stdout.isatty():  # the answers go to a file; the prompt does not
        lines = [_read_plain_line(prompt)]
    elif _marks_pastes():
        return input(prompt)
    else:
        lines = [input(prompt)]
    while select.select([sys.stdin], [], [], PASTE_GAP_S)[0]:
        try:
            lines.append(_read_plain_line(""))
        except EOFError:
            break
    return "\n".join(lines)


def _read_plain_line(prompt: str) -> str:
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def whole_message(line: str, read_line: Callable[[str], str]) -> str:
    """Return the message that begins with `line`: a paste, quoted text, or lines that end with a backslash."""
    if "\n" in line:  # no syntax within a paste
        return line.strip()
    if line.startswith(QUOTES):
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(read_line(NEXT_PROMPT))
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip()
    while (len(line) - len(line.rstrip("\\"))) % 2:  # two backslashes are one backslash at the end of the text
        line = line[:-1] + "\n" + read_line(NEXT_PROMPT)
    return line.strip()


def converse(conversation: Conversation, read_line: Callable[[str], str]) -> int:
    """Answer messages until `read_line`, which is called with a prompt, raises EOFError or returns /exit."""
    print("/help for help, Ctrl-D to end", file=sys.stderr)
    while True:
        try:
            line = read_line(FIRST_PROMPT).strip(" \t")
            if line.rstrip() == "/exit":
                return 0
            if line.startswith("/") and "\n" not in line.rstrip():
                _run_command(conversation, line.rstrip())
            elif message := whole_message(line, read_line):
                conversation.answer(files.check_text(message, "the message"))
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:  # at the prompt: the message is dropped
            print(file=sys.stderr)
        except RequestError as error:
            print(f"tilewright: {error}", file=sys.stderr)


def _run_command(conversation: Conversation, line: str) -> None:
    command, _, rest = line.partition(" ")
    if command in ("/image", "/video", "/audio"):
        conversation.media.append(_part(command[1:], rest.strip().strip("'\"")))
        print(f"{len(conversation.media)} attached to the next message", file=sys.stderr)
    elif command == "/clear":
        conversation.turns.clear()
        conversation.media.clear()
        print("conversation cleared", file=sys.stderr)
    elif command == "/help":
        print(HELP, file=sys.stderr)
    else:
        raise RequestError(f"{command} is not a command, expected /image, /video, /audio, /clear, /help or /exit")
