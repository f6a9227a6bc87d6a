"""The page with a model that hears and speaks: sounds go along, recorded or as files, and answers are heard."""

import base64
import io
import wave

import pytest
from conftest import serving
from page_browser import answers, hand_over, send, until, wait_until_done
from speaking_backend import SAMPLES, SpeakingBackend

from tilewright.server.link.backend import AUDIO_RATE

WATCH = """
    window.played = 0;
    const start = AudioBufferSourceNode.prototype.start;
    AudioBufferSourceNode.prototype.start = function (at) {
        played += this.buffer.length;
        start.call(this, at);
    };
    window.shown = []; // files with an address; the page's policy lets nobody fetch from it
    const address = URL.createObjectURL;
    URL.createObjectURL = (file) => (shown.push(file), address.call(URL, file));
"""


@pytest.fixture
def speaking():
    backend = SpeakingBackend(accepts=("image", "audio"))
    with serving(lambda: backend) as running:
        yield running, backend


def test_a_recording_is_sent(speaking, visits):
    running, backend = speaking
    page = visits.open(running.url, permissions=["microphone"])
    page.get_by_role("button", name="Record a sound").click()
    page.get_by_text("Recording, 2 s").wait_for()
    page.get_by_role("button", name="Add recording").click()
    page.locator(".tray audio").wait_for()
    send(page, "What is it?")
    wait_until_done(page)
    sound, text = backend.requests[0].messages[0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    with wave.open(io.BytesIO(sound["audio"])) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        assert 1 < file.getnframes() / 16_000 < 15 and any(file.readframes(file.getnframes()))
    assert page.locator(".question audio").count() == 1


def test_a_microphone_that_is_refused(speaking, visits):
    page = visits.open(
        speaking[0].url,
        scripts=["navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', 'NotAllowedError') }"],
    )
    page.get_by_role("button", name="Record a sound").click()
    page.get_by_text("The microphone was refused.").wait_for()
    page.get_by_role("button", name="Cancel").click()
    assert page.locator(".tray").is_hidden()


def test_a_sound_file_is_sent_as_it_is(speaking, visits):
    running, backend = speaking
    page = visits.open(running.url)
    assert page.get_by_role("button", name="Add images and sound").count() == 1
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(AUDIO_RATE)
        sound.writeframes(SAMPLES.tobytes())
    hand_over(page, "drop", file.getvalue(), "tone.wav", "audio/wav")
    page.locator(".tray audio").wait_for()
    send(page, "What is it?")
    wait_until_done(page)
    assert backend.requests[0].messages[0]["content"][0]["audio"] == file.getvalue()


def test_an_answer_is_heard_and_kept(speaking, visits):
    running, backend = speaking
    page = visits.open(running.url, scripts=[WATCH])
    assert page.get_by_role("combobox", name="Voice").input_value() == ""
    page.get_by_role("combobox", name="Voice").select_option("bob")
    send(page, "Hello?")
    wait_until_done(page)
    assert backend.requests[-1].sampling["voice"] == "bob"
    assert page.evaluate("played") == len(SAMPLES)
    answers(page).locator("audio").wait_for()
    text = "shown.at(-1).arrayBuffer().then((bytes) => btoa(String.fromCharCode(...new Uint8Array(bytes))))"
    with wave.open(io.BytesIO(base64.b64decode(page.evaluate(text)))) as file:
        assert file.getframerate() == AUDIO_RATE and file.readframes(file.getnframes()) == SAMPLES.tobytes()
    page.reload()
    until(page, "document.querySelector('.answer audio')")
    assert page.get_by_role("combobox", name="Voice").input_value() == "bob"
    page.get_by_role("combobox", name="Voice").select_option("")
    send(page, "And now?")
    wait_until_done(page, 2)
    assert "voice" not in backend.requests[-1].sampling and page.locator(".answer audio").count() == 1
    assert [message["content"] for message in backend.requests[-1].messages] == ["Hello?", "Hello", "And now?"]


def test_models_that_neither_hear_nor_speak_have_no_buttons_for_it(scripted, visits):
    page = visits.open(scripted(accepts=("image",))[0].url)
    assert page.get_by_role("button", name="Record a sound").is_hidden()
    assert page.get_by_role("combobox", name="Voice").is_hidden()
