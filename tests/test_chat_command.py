import contextlib
import io
import os
import pty
import select
import subprocess
import sys
from types import SimpleNamespace

import pytest
from clips import write_clip
from PIL import Image
from tiny_checkpoint import write_text_model, write_vision_model

from tilewright import Engine, cli
from tilewright.cli import chat, streams
from tilewright.cli.chat import Conversation, converse, speeds
from tilewright.flags import engine as engine_flags
from tilewright.types import Completion, Timings

FLAGS = ["--no-pack-cache", "--max-tokens", "8", "--max-context", "512", "--temperature", "0"]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return str(write_text_model(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    return str(write_vision_model(tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photos") / "my photo.png"
    Image.effect_noise((32, 24), 90).convert("RGB").save(path)
    return str(path)


@pytest.fixture(scope="module")
def engine(vision_model):
    with Engine(vision_model, pack_cache=False, max_context=512, max_sequences=1) as engine:
        yield engine


def expected(engine, content, **more):
    return engine.chat([{"role": "user", "content": content}], max_tokens=8, temperature=0.0, **more).text


def test_the_answer_alone_is_on_stdout(vision_model, engine, photo, capsys):
    assert cli.main(["chat", "What is it?", "-m", vision_model, "--image", photo, *FLAGS]) == 0
    captured = capsys.readouterr()
    parts = [{"type": "image", "image": photo}, {"type": "text", "text": "What is it?"}]
    assert captured.out == expected(engine, parts) + "\n"
    assert "8 tokens, TTFT" in captured.err and "tokens/s" in captured.err


def test_a_video(vision_model, engine, tmp_path, capsys):
    clip = tmp_path / "clip.mp4"
    write_clip(clip, 25)
    assert cli.main(["chat", "What happens?", "-m", vision_model, "--video", str(clip), *FLAGS]) == 0
    parts = [{"type": "video", "video": str(clip)}, {"type": "text", "text": "What happens?"}]
    assert capsys.readouterr().out == expected(engine, parts) + "\n"


def test_quiet_says_nothing_else(text_model, capsys):
    assert cli.main(["chat", "Hello", "-m", text_model, "--quiet", *FLAGS]) == 0
    captured = capsys.readouterr()
    assert captured.out and not captured.err


def test_dash_reads_standard_input(text_model, capsys, monkeypatch):
    assert cli.main(["chat", "Hello", "-m", text_model, *FLAGS]) == 0
    printed = capsys.readouterr().out
    for arguments in (["-"], []):  # explicitly, or because it is not a terminal
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
        assert cli.main(["chat", *arguments, "-m", text_model, *FLAGS]) == 0
        assert capsys.readouterr().out == printed


@pytest.fixture
def piped(tmp_path, monkeypatch):
    """Puts a text where `command < file` has it."""

    def put(text):
        (tmp_path / "input").write_text(text)
        monkeypatch.setattr(sys, "stdin", (tmp_path / "input").open())

    yield put
    sys.stdin.close()


def test_what_is_piped_in_goes_before_the_prompt(piped):
    piped("a\n b\n\n")
    assert chat._prompt("Summarise.") == "a\n b\n\nSummarise."
    piped("")
    assert chat._prompt("Summarise.") == "Summarise."
    piped("a\n b\n")
    assert chat._prompt(None) == "a\n b"


def test_a_pipe_that_stays_silent_is_not_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(streams, "PIPE_WAIT_S", 0.01)
    read, write = os.pipe()
    with open(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert chat._prompt("Hello") == "Hello"
        assert "no standard input within 0.01 s" in capsys.readouterr().err
        os.write(write, b"late")
        os.close(write)
        assert chat._prompt("Hello") == "late\n\nHello"


def test_as_a_program(text_model):
    command = [sys.executable, "-m", "tilewright", "chat", "-", "-m", text_model, *FLAGS]
    done = subprocess.run(command, input=b"Hello", capture_output=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.endswith(b"\n"), done.stderr
    assert b"8 tokens" in done.stderr


def test_a_reader_that_leaves_is_no_error(text_model):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tilewright", "chat", "Hello", "-m", text_model, *FLAGS]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(write)
    assert done.returncode == 141 and b"Error" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Hello", "-m", "MODEL", "--temperature", "3"], "temperature is 3.0"),
        (["Hello", "-m", "MODEL", "--image", "nowhere.png"], "nowhere.png: there is no such file"),
        (["Hello", "-m", "MODEL", "--audio", "nowhere.wav"], "nowhere.wav: there is no such file"),
        (["Hello", "-m", "MODEL", "--image", "PHOTO"], "accepts text only"),
        (["Hello", "-m", "./nothing/here/now"], "does not exist"),
        (["", "-m", "MODEL"], "the prompt is empty"),
        (["x" * 600, "-m", "MODEL", "--max-context", "512"], "512"),
    ],
)
def test_users_errors_are_a_line(arguments, words, text_model, photo, capsys):
    named = [{"MODEL": text_model, "PHOTO": photo}.get(argument, argument) for argument in arguments]
    assert cli.main(["chat", "--no-pack-cache", *named]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("tilewright: ") and words in captured.err and captured.err.count("\n") == 1


def test_a_config_that_is_not_built_is_a_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "mystery"}')
    assert cli.main(["chat", "Hello", "-m", str(tmp_path), "--no-pack-cache"]) == 2
    assert capsys.readouterr().err.startswith("tilewright: ")


def said(lines):
    """What a terminal would give: the lines, then Ctrl-D. An exception among them is raised."""
    waiting = list(lines)

    def read_line(prompt):
        if not waiting:
            raise EOFError
        line = waiting.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    return read_line


@pytest.fixture
def conversation(engine):
    return Conversation(engine, {"max_tokens": 8, "temperature": 0.0})


def test_a_conversation_has_history(conversation, engine, capsys):
    conversation.system = "Be brief."
    assert converse(conversation, said(["One", "Two"])) == 0
    first, second = (turn["content"] for turn in conversation.turns if turn["role"] == "assistant")
    system, one = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}
    answered = {"role": "assistant", "content": first}
    messages = [system, one, answered, {"role": "user", "content": "Two"}]
    assert engine.chat(messages, max_tokens=8, temperature=0.0).text == second
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_images_go_with_the_next_message(conversation, engine, photo, capsys):
    assert converse(conversation, said([f"/image '{photo}'", "What?", "And?"])) == 0
    parts = [{"type": "image", "image": photo}, {"type": "text", "text": "What?"}]
    assert conversation.turns[0]["content"] == parts
    assert conversation.turns[2]["content"] == "And?"
    assert conversation.turns[1]["content"] == expected(engine, parts)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one\n\n  two\n"], "one\n\n  two"),  # a paste
        (['"""quoted"""\n\nx = 1'], '"""quoted"""\n\nx = 1'),  # a paste, in which nothing but its text counts
        (["/usr/bin\n/etc"], "/usr/bin\n/etc"),
        (["one \\", "two\\", " three"], "one \ntwo\n three"),
        (["a \\\\"], "a \\\\"),  # an even number of backslashes is text
        (['"""one"""'], "one"),
        (['"""', "  one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one', "/exit", 'a\n"""b"""\nc', 'two"""  '], 'one\n/exit\na\n"""b"""\nc\ntwo'),
    ],
)
def test_a_message_may_have_several_lines(lines, message):
    answered = []
    assert converse(SimpleNamespace(answer=answered.append), said([*lines, "Next"])) == 0
    assert answered == [message, "Next"]


def test_control_c_drops_a_message_that_is_not_finished():
    answered = []
    interrupted = ['"""one', KeyboardInterrupt(), "two \\", KeyboardInterrupt(), "three", '"""four']
    assert converse(SimpleNamespace(answer=answered.append), said(interrupted)) == 0
    assert answered == ["three"]


ECHO = """
import sys
if {without_readline}:
    sys.modules["readline"] = None
from tilewright.cli import chat, streams
class Echo:
    answer = staticmethod(lambda text: print(repr(text), flush=True))
with streams.guarded():
    chat.converse(Echo, chat._read_line)
"""


@pytest.mark.parametrize("without_readline", [False, True])
def test_a_paste_into_a_terminal_is_one_message(without_readline):
    """As terminals send it: between marks where readline asks for them, with carriage returns."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-c", ECHO.format(without_readline=without_readline)]
    shell = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env={**os.environ, "TERM": "xterm"}
    )
    os.close(follower)
    screen = b""

    def read_until(end):
        nonlocal screen
        while end not in screen:
            assert select.select([leader], [], [], 30)[0], screen
            screen += os.read(leader, 4096)
        screen = screen.partition(end)[2]

    read_until(b"> ")
    pasted = b"one\r  two\r\rthree"
    os.write(leader, pasted + b"\r" if without_readline else b"\x1b[200~" + pasted + b"\x1b[201~\r")
    read_until(rb"'one\n  two\n\nthree'")
    read_until(b"> ")
    os.write(leader, b"Next\r")
    read_until(b"'Next'")
    read_until(b"> ")
    os.write(leader, b"\x04")
    assert shell.wait(30) == 0
    os.close(leader)


def test_prompts_are_not_among_the_answers_in_a_file(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    monkeypatch.setattr(chat.select, "select", lambda *arguments: ([], [], []))
    assert chat._read_line("> ") == "Hello"
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "> ")
    with pytest.raises(EOFError):
        chat._read_line("> ")


def test_commands(conversation, capsys):
    lines = ["One", "/clear", "/help", "/image nowhere.png", "/dance", "", KeyboardInterrupt(), "Two", "/exit", "Three"]
    assert converse(conversation, said(lines)) == 0
    assert [turn["content"] for turn in conversation.turns if turn["role"] == "user"] == ["Two"]
    errors = capsys.readouterr().err
    for words in (
        "conversation cleared",
        "/video FILE",
        "image nowhere.png: there is no such file",
        "/dance is not a command",
    ):
        assert words in errors


def test_what_cannot_be_answered_is_not_kept(conversation, tmp_path, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    assert converse(conversation, said([f"/image {broken}", "What?", "One"])) == 0
    assert [turn["content"] for turn in conversation.turns if turn["role"] == "user"] == ["One"]
    assert "tilewright: image 1" in capsys.readouterr().err


class InterruptedHandle:
    """A request whose reader presses Ctrl-C after the first word."""

    def __init__(self):
        self.is_aborted = False

    def __iter__(self):
        yield SimpleNamespace(text="Once")
        raise KeyboardInterrupt

    def abort(self):
        self.is_aborted = True

    def result(self):
        assert self.is_aborted
        return [Completion("Once", (1,), "abort", 3, 0, Timings(0.0, 0.1, 0.2))]


def test_control_c_stops_the_answer_and_not_the_program(capsys):
    engine = SimpleNamespace(submit_chat=lambda messages, **sampling: InterruptedHandle())
    conversation = Conversation(engine, {})
    assert converse(conversation, said(["Tell me", "More"])) == 0
    assert [turn["content"] for turn in conversation.turns] == ["Tell me", "Once", "More", "Once"]
    assert capsys.readouterr().out == "Once\nOnce\n"


def test_control_c_ends_a_single_answer(monkeypatch, capsys):
    engine = SimpleNamespace(submit_chat=lambda messages, **sampling: InterruptedHandle(), sampling_params=dict)
    monkeypatch.setattr(engine_flags, "open_engine", lambda options, progress: contextlib.nullcontext(engine))
    assert cli.main(["chat", "Tell me", "-m", "model"]) == 130
    assert capsys.readouterr().out == "Once\n"


def test_speeds():
    assert speeds(Completion("", (), "abort", 1, 0, Timings(0, 0, 0))) == "0 tokens"
    assert speeds(Completion("a", (1,), "stop", 1, 0, Timings(0, 0.5, 0.5))) == "1 token, TTFT 0.50 s"
    many = Completion("a", tuple(range(11)), "stop", 1, 0, Timings(0, 0.5, 1.5))
    soon = Completion("a", (1,), "stop", 1, 0, Timings(0, 0.0124, 0.5))
    assert speeds(soon) == "1 token, TTFT 12 ms"
    assert speeds(many) == "11 tokens, TTFT 0.50 s, 10.0 tokens/s"
