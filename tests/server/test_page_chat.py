"""The page in a browser, in front of a script or a tiny model: what a user does, and what comes of it."""

import base64
import io
import json

import pytest
from clips import write_clip
from conftest import ScriptedBackend, serving
from page_browser import answers, hand_over, png, send, until, until_kept, wait_until_done
from PIL import Image

from tilewright.inputs.media import MediaLimits
from tilewright.server.http.settings import ServerSettings
from tilewright.server.link.backend import EngineFailure, ModelInfo
from tilewright.server.media.gate import MediaPolicy
from tilewright.types import EngineUnavailable
from tilewright.weights import embedded

REFUSED = "Failed to load resource"  # what Chromium's console says of a request that was answered with an error


def test_a_question_is_answered_as_it_comes(held, visits):
    running, backend = held(("Hello", " **there**,\n\n- a", "\n- b"))
    page = visits.open(running.url)
    assert page.locator(".welcome h2").inner_text() == "scripted" and page.locator(".card").count() == 3
    send(page, "Who is there?")
    until(page, "document.querySelector('.markdown').textContent === 'Hello'")
    assert page.locator(".send").get_attribute("aria-label") == "Stop"
    assert answers(page).get_attribute("aria-busy") == "true"
    assert page.locator("#announcer").inner_text() == ""  # not each token is read aloud
    backend.release()
    wait_until_done(page)
    assert answers(page).locator("strong").inner_text() == "there" and answers(page).locator("li").count() == 2
    figures = answers(page).locator(".figures").inner_text()
    assert "0.10 s to first token" in figures and "30 tokens/s" in figures and "4 tokens" in figures
    assert "40 % of the machine’s memory bandwidth" in figures
    assert page.locator("#announcer").inner_text().startswith("Answer: Hello there")
    (request,) = backend.requests
    assert request.messages == [{"role": "user", "content": "Who is there?"}]
    assert page.evaluate("document.activeElement.id") == "question"


def test_the_conversation_so_far_is_sent_along(scripted, visits):
    running, backend = scripted()
    page = visits.open(running.url)
    for number, text in enumerate(("One", "Two"), 1):
        send(page, text)
        wait_until_done(page, number)
    assert [message["content"] for message in backend.requests[-1].messages] == ["One", "Hello there", "Two"]


def test_stopping_keeps_what_came(held, visits):
    running, backend = held()
    page = visits.open(running.url)
    send(page, "Go on")
    until(page, "document.querySelector('.markdown').textContent === 'Hello'")
    page.keyboard.press("Escape")
    wait_until_done(page)
    assert answers(page).locator(".state").inner_text() == "Stopped"
    assert answers(page).locator(".markdown").inner_text() == "Hello"
    assert backend.num_aborted == 1
    send(page, "Again")  # and the button does the same
    until(page, "document.querySelectorAll('.markdown')[1]?.textContent === 'Hello'")
    page.get_by_role("button", name="Stop").click()
    wait_until_done(page, 2)


def test_answering_again_and_editing(scripted, visits):
    running, backend = scripted()
    page = visits.open(running.url)
    send(page, "First")
    wait_until_done(page)
    page.get_by_role("button", name="Answer again").click()
    wait_until_done(page)
    assert len(backend.requests) == 2 and backend.requests[0].messages == backend.requests[1].messages
    page.locator("#question").press("ArrowUp")
    editor = page.get_by_role("textbox", name="Edit question")
    assert editor.input_value() == "First"
    editor.fill("Second")
    editor.press("Enter")
    wait_until_done(page)
    assert backend.requests[2].messages == [{"role": "user", "content": "Second"}]
    assert page.locator(".question").count() == 1 and page.locator(".bubble").inner_text() == "Second"


@pytest.mark.parametrize("way", ["drop", "paste", "file"])
def test_an_image_is_answered(vision_server, visits, way):
    page = visits.open(vision_server.url)
    if way == "file":
        with page.expect_file_chooser() as chosen:
            page.get_by_role("button", name="Add images and video").click()
        chosen.value.set_files([{"name": "photo.png", "mimeType": "image/png", "buffer": png()}])
    else:
        hand_over(page, way, png())
    page.locator(".tray img").wait_for()
    body = {}
    page.on("request", lambda request: body.update(request.post_data_json or {}) if request.method == "POST" else None)
    page.evaluate("localStorage.setItem('tilewright-settings', JSON.stringify({ max_tokens: '4' }))")
    send(page, "What is it?")
    wait_until_done(page)
    assert answers(page).locator(".error").is_hidden() and "4 tokens" in answers(page).locator(".figures").inner_text()
    assert page.locator(".question .preview img").evaluate("image => image.naturalWidth") == 64
    image, text = body["messages"][0]["content"]
    assert image["type"] == "image_url" and text == {"type": "text", "text": "What is it?"}
    assert base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,")) == png()


def test_the_sample_image_and_removing_one(vision_server, visits):
    page = visits.open(vision_server.url)
    page.evaluate("localStorage.setItem('tilewright-settings', JSON.stringify({ max_tokens: '2' }))")
    hand_over(page, "drop", png())
    page.get_by_role("button", name="Remove photo.png").click()
    assert page.locator(".tray").is_hidden()
    page.get_by_role("button", name="Try a sample image").click()
    wait_until_done(page)
    assert page.locator(".question .preview img").count() == 1


def test_the_embedded_model_has_its_own_examples(scripted, visits):
    running, backend = scripted(name=embedded.MODEL_NAME, accepts=("image",))
    page = visits.open(running.url)
    assert "nothing of the world" in page.locator(".welcome .tiny").inner_text()
    page.get_by_role("button", name="Count").click()
    wait_until_done(page)
    page.keyboard.press("Control+Shift+O")
    page.get_by_role("button", name="What can you do?").click()
    wait_until_done(page)
    counted, question = (request.messages[0]["content"] for request in backend.requests)
    assert [part["type"] for part in counted] == ["image", "text"]
    assert counted[0]["image"] == embedded.demo_file("demo.png").read_bytes()
    assert question == "What can you do?" or question == [{"type": "text", "text": "What can you do?"}]


def test_a_video_is_answered(vision_server, visits, tmp_path):
    clip = tmp_path / "clip.webm"
    write_clip(clip, 10, codec="libvpx")  # of those that Chromium plays
    page = visits.open(vision_server.url)
    page.evaluate("localStorage.setItem('tilewright-settings', JSON.stringify({ max_tokens: '2' }))")
    page.locator("input[type=file]").set_input_files(clip)
    page.locator(".tray video").wait_for()
    send(page, "What happens?")
    wait_until_done(page)
    assert answers(page).locator(".error").is_hidden()
    assert page.locator(".question video").evaluate("video => video.videoWidth") == 64


def test_the_camera(scripted, visits):
    running, backend = scripted(accepts=("image",))
    page = visits.open(running.url, permissions=["camera"])
    page.get_by_role("button", name="Take a photo").click()
    page.get_by_role("button", name="Take photo").click()
    page.locator(".tray img").wait_for()
    send(page, "Who is it?")
    wait_until_done(page)
    image = backend.requests[0].messages[0]["content"][0]["image"]
    assert Image.open(io.BytesIO(image)).format == "JPEG"


def test_a_camera_that_is_refused(scripted, visits):
    running, _ = scripted(accepts=("image",))
    refuse = "navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('', 'NotAllowedError'))"
    page = visits.open(running.url, scripts=[refuse])
    page.get_by_role("button", name="Take a photo").click()
    page.get_by_text("The camera was refused.").wait_for()
    assert page.get_by_role("button", name="Take photo").is_disabled()
    page.get_by_role("button", name="Cancel").click()


def test_unsupported_files_are_refused_before_they_are_sent(scripted, visits):
    running, backend = scripted()
    page = visits.open(running.url)
    assert page.get_by_role("button", name="Add files").is_disabled()
    hand_over(page, "drop", png())
    assert "photo.png cannot be sent: scripted takes text only." in page.locator(".notice").inner_text()
    assert page.locator(".tray").is_hidden() and not backend.requests


def test_files_that_are_neither_are_refused(scripted, visits):
    running, _ = scripted(accepts=("image", "video"))
    page = visits.open(running.url)
    hand_over(page, "paste", b"%PDF", "paper.pdf", "application/pdf")
    page.get_by_text("paper.pdf cannot be sent: it is neither an image, a video nor a sound.").wait_for()


def test_text_with_an_image_of_it_is_pasted_as_text(scripted, visits):
    running, _ = scripted(accepts=("image",))
    page = visits.open(running.url)
    prevented = page.evaluate(
        """() => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(9)], "cells.png", { type: "image/png" }));
            transfer.setData("text/plain", "three cells");
            const event = new ClipboardEvent("paste", { bubbles: true, cancelable: true, clipboardData: transfer });
            return !document.querySelector("#question").dispatchEvent(event);
        }"""
    )
    assert not prevented and page.locator(".tray").is_hidden()


def test_a_file_that_the_browser_cannot_show_is_named_and_sent(scripted, visits):
    running, backend = scripted(accepts=("image",))
    page = visits.open(running.url)
    hand_over(page, "drop", b"II*\0 an image of another kind", "scan.tiff", "image/tiff")
    page.locator(".tray .named").get_by_text("scan.tiff").wait_for()
    send(page, "Read it")
    wait_until_done(page)
    assert backend.requests[0].messages[0]["content"][0]["image"] == b"II*\0 an image of another kind"


def test_answers_and_code_are_copied_as_they_were_written(scripted, visits):
    text = "Some **bold**:\n\n```python\nprint(1)\n```"
    running, _ = scripted((text,))
    page = visits.open(running.url, permissions=["clipboard-read", "clipboard-write"])
    send(page, "Write")
    wait_until_done(page)
    for place, button, copied in ((".answer > footer", "Copy answer", text), (".code", "Copy code", "print(1)")):
        page.get_by_role("button", name=button).click()
        page.locator(place).get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == copied


def test_another_tab_sees_what_changed(scripted, visits):
    running, _ = scripted()
    first = visits.open(running.url)
    send(first, "From the first")
    wait_until_done(first)
    second = first.context.new_page()
    visits.watch(second, running.url)
    second.goto(first.url)
    wait_until_done(second)
    send(second, "From the second")
    wait_until_done(second, 2)
    wait_until_done(first, 2)
    assert first.locator(".bubble").all_inner_texts() == ["From the first", "From the second"]
    assert first.title() == "From the first · Tilewright"


def test_an_image_over_the_limit_is_sent_smaller_with_a_note(scripted, visits):
    limits = MediaLimits(max_pixels=100 * 100, allow_paths=False)
    running, backend = scripted(settings=ServerSettings(media=MediaPolicy(limits)), accepts=("image",))
    page = visits.open(running.url)
    hand_over(page, "drop", png(400, 200))
    page.get_by_text("photo.png was over this server's limit and is sent smaller: 141 × 70").wait_for()
    send(page, "Small?")
    wait_until_done(page)
    image = backend.requests[0].messages[0]["content"][0]["image"]
    assert Image.open(io.BytesIO(image)).size == (141, 70)


def test_a_reload_keeps_conversations_files_and_drafts(scripted, visits):
    running, backend = scripted(("Kept",), accepts=("image",))
    page = visits.open(running.url)
    hand_over(page, "drop", png())
    page.locator(".tray img").wait_for()
    send(page, "Keep this")
    wait_until_done(page)
    page.locator("#question").fill("and this draft")
    hand_over(page, "drop", png(colour="blue"), "draft.png")
    page.locator(".tray img").wait_for()
    until_kept(page, "drafts", lambda rows: any(row["attachments"] for row in rows))
    page.reload()
    page.locator(".tray img").wait_for()
    assert page.locator("#question").input_value() == "and this draft"
    assert (
        page.locator(".bubble").inner_text() == "Keep this"
        and answers(page).locator(".markdown").inner_text() == "Kept"
    )
    page.locator(".question .preview img").wait_for()
    assert page.locator(".conversations .title").all_inner_texts() == ["Keep this"]
    page.locator("#question").press("Enter")
    wait_until_done(page, 2)
    assert len(backend.requests[1].messages) == 3  # the image is read again from what the browser keeps
    assert backend.requests[1].messages[0]["content"][0]["type"] == "image"


def test_an_answer_that_was_coming_is_stopped_by_a_reload(held, visits):
    running, _ = held()
    page = visits.open(running.url)
    send(page, "Go on")
    until(page, "document.querySelector('.markdown').textContent === 'Hello'")
    until(page, "document.querySelector('.conversations .title')")
    page.reload()
    answers(page).wait_for()
    assert answers(page).locator(".state").inner_text() == "Stopped"


def test_conversations_are_named_and_deleted(scripted, visits):
    running, _ = scripted()
    page = visits.open(running.url)
    titles = page.locator(".conversations .title")
    for text in ("About bread", "About wine"):
        send(page, text)
        wait_until_done(page)
        page.keyboard.press("Control+Shift+O")
        page.locator(".welcome").wait_for()
    assert titles.all_inner_texts() == ["About wine", "About bread"]
    page.get_by_role("button", name="About bread", exact=True).hover()
    page.get_by_role("button", name="Rename About bread").click()
    page.get_by_role("textbox", name="Title").fill("Bread <b>& butter</b>")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Bread <b>& butter</b>", exact=True).click()
    assert page.locator(".bubble").inner_text() == "About bread"
    page.go_back()
    page.locator(".welcome").wait_for()
    page.get_by_role("button", name="About wine", exact=True).hover()
    page.get_by_role("button", name="Delete About wine").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    until(page, "document.querySelectorAll('.conversations li').length === 1")
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete all").click()
    until(page, "!document.querySelector('.conversations li')")
    page.reload()
    page.locator(".welcome").wait_for()
    assert titles.count() == 0


def test_settings_arrive_in_the_request(scripted, visits):
    running, backend = scripted()
    page = visits.open(running.url)
    page.keyboard.press("Control+,")
    fields = {"Temperature": "3", "Top p": "0.9", "Top k": "20", "Longest answer": "7", "Seed": "-5"}
    for label, value in {**fields, "Stop at": "END\n\nSTOP", "System prompt": "Be kind."}.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_role("button", name="Save").click()
    assert "Temperature is 3, expected 0 to 2" in page.get_by_role("dialog").inner_text()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("button", name="Save").click()
    send(page, "Hi")
    wait_until_done(page)
    (request,) = backend.requests
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_tokens": 7, "seed": -5, "stop": ["END", "STOP"]}
    assert request.sampling == wanted and request.messages[0] == {"role": "system", "content": "Be kind."}
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Defaults").click()
    page.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Answer again").click()
    wait_until_done(page)
    assert backend.requests[1].sampling == {} and len(backend.requests[1].messages) == 1


def test_an_error_is_shown_in_its_place_with_a_retry(scripted, visits):
    running, backend = scripted()
    visits.expected.append(REFUSED)
    page = visits.open(running.url)
    backend.error = EngineFailure("the engine could not compute this request")
    send(page, "Will it work?")
    wait_until_done(page)
    assert answers(page).locator(".error p").inner_text() == "The engine could not compute this request."
    backend.error = None
    page.get_by_role("button", name="Try again").click()
    wait_until_done(page)
    assert answers(page).locator(".markdown").inner_text() == "Hello there"
    assert answers(page).locator(".error").is_hidden()


def test_a_mistake_of_the_user_is_shown_in_the_servers_words(chat_server, visits):
    visits.expected.append(REFUSED)
    page = visits.open(chat_server.url)
    send(page, "long " * 2000)
    wait_until_done(page)
    shown = answers(page).locator(".error p").inner_text()
    assert "maximum context length is 8192 tokens" in shown


def test_the_server_may_go_and_come_back(scripted, visits):
    visits.expected += [REFUSED, "net::ERR_"]
    with serving(ScriptedBackend) as running:
        page = visits.open(running.url)
        port = int(running.url.rpartition(":")[2])
    send(page, "Are you there?")
    page.get_by_text("The server cannot be reached. Asking again as soon as it answers.").wait_for()
    assert page.locator("#banner").inner_text() == "The server cannot be reached."
    with serving(ScriptedBackend, port=port):
        wait_until_done(page)
        assert answers(page).locator(".markdown").inner_text() == "Hello there"
        assert page.locator("#banner").is_hidden()


def test_an_engine_that_is_being_started_is_waited_for(scripted, visits):
    visits.expected.append(REFUSED)
    running, backend = scripted()
    backend.error = EngineUnavailable("the model is being loaded")
    page = visits.open(running.url)
    page.clock.install()
    send(page, "Ready?")
    page.get_by_text("The model is being loaded. Asking again in 5 s.").wait_for()
    page.clock.run_for(2000)
    page.get_by_text("Asking again in 3 s.").wait_for()
    backend.error = None
    page.clock.run_for(3500)
    page.clock.resume()
    wait_until_done(page)
    assert answers(page).locator(".markdown").inner_text() == "Hello there"


def test_too_many_wait_their_turn(held, visits):
    visits.expected.append(REFUSED)
    running, backend = held(settings=ServerSettings(max_queue=0))
    backend.model = ModelInfo("scripted", 4096, 1, None)
    page = visits.open(running.url)
    send(page, "First")
    until(page, "document.querySelector('.markdown').textContent === 'Hello'")
    page.keyboard.press("Control+Shift+O")
    page.locator(".welcome").wait_for()
    send(page, "Second")
    page.get_by_text("1 answers are in progress").wait_for()
    assert "Asking again in 1 s." in answers(page).locator(".error").inner_text()
    backend.release()
    assert backend.has_asked.acquire(timeout=15) and backend.has_asked.acquire(timeout=15)
    backend.release()
    wait_until_done(page)
    page.get_by_role("button", name="First", exact=True).click()
    assert answers(page).locator(".markdown").inner_text() == "Hello there"  # it came while it was not looked at


def test_an_answer_that_breaks_off_is_kept(scripted, visits):
    visits.expected.append(REFUSED)
    running, _ = scripted()
    page = visits.open(running.url)
    chunk = {"choices": [{"index": 0, "delta": {"content": "Half of"}, "finish_reason": None}]}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\n"),
    )
    send(page, "All of it?")
    wait_until_done(page)
    assert answers(page).locator(".markdown").inner_text() == "Half of"
    assert answers(page).locator(".error p").inner_text() == "The connection was lost in mid-answer."
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    wait_until_done(page)
    assert answers(page).locator(".markdown").inner_text() == "Hello there"


def test_the_key_is_requested_and_gone_with_the_tab(scripted, visits):
    visits.expected.append(REFUSED)
    running, _ = scripted(settings=ServerSettings(api_keys=("open sesame",)))
    page = visits.open(running.url, wait=False)
    for key, text in (("wrong", "This server wants an API key."), ("open sesame", "The server refused that key.")):
        page.get_by_role("dialog").get_by_text(text).wait_for()
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
    until(page, "document.querySelector('#model').value")
    send(page, "Hi")
    wait_until_done(page)
    kept = "[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie]"
    lasting, of_tab, cookie = page.evaluate(kept)
    assert "open sesame" in of_tab and "open sesame" not in lasting and cookie == ""


def test_a_full_disk_is_reported_and_the_conversation_continues(scripted, visits):
    running, backend = scripted()
    full = "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); };"
    page = visits.open(running.url, scripts=[full])
    send(page, "Room?")
    wait_until_done(page)
    page.get_by_text("The browser has no room left to keep this conversation.").wait_for()
    send(page, "And now?")
    wait_until_done(page, 2)
    assert len(backend.requests[1].messages) == 3


def test_a_browser_that_keeps_nothing(scripted, visits):
    running, _ = scripted()
    private = "indexedDB.open = () => { throw new DOMException('no', 'InvalidStateError'); };"
    page = visits.open(running.url, scripts=[private])
    page.get_by_text("This browser keeps nothing for this page").wait_for()
    send(page, "Still?")
    wait_until_done(page)
    assert page.locator(".conversations .title").all_inner_texts() == ["Still?"]


def test_reasoning_is_folded_away(scripted, visits, chat_folder):
    template = (chat_folder / "chat_template.jinja").read_text()
    running, _ = scripted(("<think>Let me <b>see", "</think>It is 4"), template=template)
    page = visits.open(running.url)
    send(page, "2 + 2?")
    wait_until_done(page)
    details = answers(page).locator("details")
    assert details.get_attribute("open") is None and details.locator("p").text_content() == "Let me <b>see"
    assert answers(page).locator(".markdown").inner_text() == "It is 4"


def test_the_page_follows_the_answer_unless_its_reader_scrolls(held, visits):
    running, backend = held(["line\n\n" * 60, *["line\n\n"] * 60])
    page = visits.open(running.url)
    scrolling = page.locator(".scrolling")
    distance = "node => node.scrollHeight - node.clientHeight - node.scrollTop"
    send(page, "Long")
    until(page, "document.querySelectorAll('.markdown p').length === 60")
    until(page, "(() => { const node = document.querySelector('.scrolling'); return node.scrollTop > 0; })()")
    assert scrolling.evaluate(distance) < 2
    scrolling.hover()
    page.mouse.wheel(0, -400)
    page.locator(".jump").wait_for()
    top = scrolling.evaluate("node => node.scrollTop")
    backend.release()
    wait_until_done(page)
    assert scrolling.evaluate("node => node.scrollTop") == top and answers(page).locator("p").count() >= 120
    page.locator(".jump").click()
    assert scrolling.evaluate(distance) < 2 and page.locator(".jump").is_hidden()
