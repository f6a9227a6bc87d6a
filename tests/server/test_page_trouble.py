"""The page where things go wrong: haste, two tabs, a browser that keeps nothing, a server that does not answer."""

import asyncio
import re
from pathlib import Path

import pytest
from page_browser import answers, hand_over, kept, png, send, until, until_kept, wait_until_done

from tilewright.server.http.settings import ServerSettings
from tilewright.server.link import remote
from tilewright.server.link.backend import Failed
from tilewright.types import ContextLengthExceeded, EngineUnavailable

REFUSED = "Failed to load resource"
# Images are read when the test says so.
SLOW_IMAGES = """
  const read = createImageBitmap;
  const isOpen = new Promise((resolve) => (window.openGate = resolve));
  window.createImageBitmap = async (file) => {
    await isOpen;
    window.bitmap = await read(file);
    return window.bitmap;
  };
"""
# What the browser keeps of conversations and drafts is read when the test says so.
SLOW_STORE = """
  const get = IDBObjectStore.prototype.get;
  const isRead = new Promise((resolve) => (window.openStore = resolve));
  IDBObjectStore.prototype.get = function (key) {
    if (!["conversations", "drafts"].includes(this.name)) return get.call(this, key);
    const request = get.call(this, key);
    const late = {};
    request.onsuccess = () => isRead.then(() => late.onsuccess(Object.assign(late, { result: request.result })));
    return late;
  };
"""
FULL = """
  const put = IDBObjectStore.prototype.put;
  IDBObjectStore.prototype.put = function (...values) {
    if (this.name === "conversations") throw new DOMException("full", "QuotaExceededError");
    return put.apply(this, values);
  };
"""
BLOCKED = """
  for (const name of ["localStorage", "sessionStorage", "indexedDB", "BroadcastChannel"]) {
    Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
  }
"""
BUBBLES = "[...document.querySelectorAll('.bubble')].map((node) => node.textContent)"


def first_piece_came(page, index=0):
    until(page, f"document.querySelectorAll('.markdown')[{index}]?.textContent === 'Hello'")


def other_tab(visits, page, url):
    tab = page.context.new_page()
    visits.watch(tab, url)
    tab.goto(page.url)
    until(tab, "document.querySelector('#model').value")
    return tab


def test_an_address_keeps_no_model_away(scripted, visits):
    running, _ = scripted(("![" * 6000 + "](a)" * 6000,))
    page = visits.open(running.url)
    send(page, "Nest")
    wait_until_done(page)
    page.reload()
    answers(page).wait_for()
    until(page, "document.querySelector('#model').value")
    assert answers(page).count() == 1
    page.evaluate(
        """() => new Promise((resolve) => {
          indexedDB.open("tilewright").onsuccess = ({ target: { result: database } }) => {
            const transaction = database.transaction("conversations", "readwrite");
            transaction.objectStore("conversations").put({ id: "broken", messages: [{ id: "q", role: "user" }] });
            transaction.oncomplete = () => { database.close(); resolve(); };
          };
        })"""
    )
    page.goto(running.url + "/?c=broken")
    page.get_by_text("This conversation cannot be shown").wait_for()
    until(page, "document.querySelector('#model').value")


def test_one_editor_that_closes_when_another_question_is_sent(held, visits):
    running, backend = held()
    page = visits.open(running.url)
    send(page, "One")
    first_piece_came(page)
    backend.release()
    wait_until_done(page)
    for _ in range(2):
        page.locator("#question").press("ArrowUp")
    assert page.locator(".editor").count() == 1
    send(page, "Two")
    first_piece_came(page, 1)
    assert page.locator(".editor").count() == 0
    backend.release()
    wait_until_done(page, 2)
    assert page.evaluate(BUBBLES) == ["One", "Two"] and len(backend.requests) == 2


def test_the_sample_is_sent_once_and_where_it_was_clicked(held, visits):
    running, backend = held(accepts=("image",))
    page = visits.open(running.url)
    page.get_by_role("button", name="Try a sample image").dblclick()
    first_piece_came(page)
    backend.release()
    wait_until_done(page)
    page.keyboard.press("Control+Shift+O")
    page.locator(".welcome .sample img").wait_for()
    waiting = []
    page.route("**/page/sample.png", lambda route: waiting.append(route))
    page.get_by_role("button", name="Try a sample image").click()
    assert page.locator(".card:enabled").count() == 0
    page.locator(".conversations .title").click()
    until(page, "document.querySelector('.bubble')")
    waiting.pop().continue_()
    page.wait_for_timeout(200)
    assert page.evaluate(BUBBLES) == ["What's in this picture?"] and len(backend.requests) == 1
    assert len(kept(page, "files")) == 1


def test_a_question_waits_for_its_image(scripted, visits):
    running, backend = scripted(accepts=("image",))
    page = visits.open(running.url, scripts=[SLOW_IMAGES])
    hand_over(page, "drop", png())
    page.locator(".tray").get_by_text("Reading photo.png…").wait_for()
    send(page, "What is it?")
    page.get_by_text("sent when its files are read").wait_for()
    assert not backend.requests
    page.evaluate("openGate()")
    wait_until_done(page)
    assert [part["type"] for part in backend.requests[0].messages[0]["content"]] == ["image", "text"]
    assert page.evaluate("bitmap.width") == 0  # its pixels were given back
    send(page, "And now?")
    wait_until_done(page, 2)
    assert backend.requests[1].messages[-1]["content"] == "And now?"


def test_an_image_stays_with_the_question_it_was_added_to(scripted, visits):
    running, _ = scripted(accepts=("image",))
    page = visits.open(running.url, scripts=[SLOW_IMAGES])
    send(page, "First")
    wait_until_done(page)
    hand_over(page, "drop", png())
    page.locator(".tray").get_by_text("Reading").wait_for()
    page.keyboard.press("Control+Shift+O")
    page.locator(".welcome").wait_for()
    page.evaluate("openGate()")
    until(page, "window.bitmap?.width === 0")
    assert page.locator(".tray").is_hidden()
    page.get_by_role("button", name="First", exact=True).click()
    page.locator(".tray img").wait_for()


def test_what_is_written_stays_while_another_tab_sends(scripted, visits):
    running, _ = scripted()
    first = visits.open(running.url)
    send(first, "One")
    wait_until_done(first)
    second = other_tab(visits, first, running.url)
    first.locator("#question").fill("A long thought")
    send(second, "Two")
    wait_until_done(first, 2)
    assert first.locator("#question").input_value() == "A long thought"
    until(first, "document.querySelector('.send').title === 'Send'")
    first.reload()
    until(first, "document.querySelector('#question').value === 'A long thought'")


def test_two_tabs_that_send_at_once_lose_nothing(held, visits):
    running, backend = held()
    first = visits.open(running.url)
    send(first, "One")
    first_piece_came(first)
    backend.release()
    wait_until_done(first)
    second = other_tab(visits, first, running.url)
    send(first, "From the first")
    first_piece_came(first, 1)
    send(second, "From the second")
    first_piece_came(second, 1)
    backend.release()
    for tab in (first, second):
        wait_until_done(tab, 3)
        assert tab.evaluate(BUBBLES) == ["One", "From the first", "From the second"]
        assert answers(tab).locator(".markdown").all_inner_texts() == ["Hello there"] * 3
    (conversation,) = kept(first)
    assert [message["text"] for message in conversation["messages"]][::2] == first.evaluate(BUBBLES)
    first.get_by_role("button", name="Answer again").click()  # and what one takes out does not come back
    first_piece_came(first, 2)
    backend.release()
    wait_until_done(first, 3)
    assert len(kept(first)[0]["messages"]) == 6


def test_what_is_deleted_in_another_tab_does_not_come_back(held, visits):
    running, backend = held()
    first = visits.open(running.url)
    send(first, "One")
    first_piece_came(first)
    until(first, "document.querySelector('.conversations .title')")
    second = other_tab(visits, first, running.url)
    first.locator("#question").fill("Half written")
    second.locator(".title").hover()
    second.get_by_role("button", name="Delete One").click()
    second.get_by_role("button", name="Delete", exact=True).click()
    first.locator(".welcome").wait_for()
    until(first, "!document.querySelector('.conversations li')")
    first.wait_for_timeout(200)
    assert kept(first) == [] == kept(first, "titles")
    assert backend.num_aborted == 1  # nobody waits for it
    assert first.locator("#question").input_value() == "Half written"
    send(first, "Anew")
    first_piece_came(first)
    backend.release()
    wait_until_done(first)
    assert [row["title"] for row in kept(first, "titles")] == ["Anew"]


def test_a_key_that_no_header_can_carry_is_not_taken(scripted, visits):
    visits.expected.append(REFUSED)
    running, _ = scripted(settings=ServerSettings(api_keys=("secret",)))
    page = visits.open(running.url, wait=False)
    page.get_by_label("Key", exact=True).fill("ключ")
    page.keyboard.press("Enter")
    page.get_by_text("A key has letters, digits and signs of ASCII only.").wait_for()
    page.evaluate("sessionStorage.setItem('tilewright-api-key', 'ключ')")  # as an older page kept it
    page.reload()
    page.get_by_label("Key", exact=True).fill("secret")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#model').value")
    with page.expect_request("**/health") as sent:
        page.evaluate("import('/page/api.js').then(({ Api }) => new Api().health())")
    assert "authorization" not in sent.value.headers


@pytest.mark.parametrize(
    ("message", "pauses_s"),
    [
        ("the model is being loaded", (5, 10, 20)),
        ("the engine ended (signal 9) and is being restarted; send the request again", (5,)),
    ],
)
def test_retries_are_bounded(scripted, visits, message, pauses_s):
    assert (
        "send the request again" in Path(remote.__file__).read_text()
    )  # by which the page knows that the engine was lost
    visits.expected.append(REFUSED)
    running, backend = scripted()
    backend.error = EngineUnavailable(message)
    page = visits.open(running.url)
    sent = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.clock.install()
    send(page, "Ready?")
    for pause_s in pauses_s:
        page.get_by_text(f"Asking again in {pause_s} s.").wait_for()
        page.clock.run_for(pause_s * 1000 + 500)
    page.clock.resume()
    wait_until_done(page)
    assert len(sent) == len(pauses_s) + 1
    backend.error = None
    page.get_by_role("button", name="Try again").click()
    wait_until_done(page)
    assert answers(page).locator(".markdown").inner_text() == "Hello there"


def posted(page):
    """The bodies that the page sends, as they are sent."""
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    return bodies


def unsent(page):
    """For each question, whether it is marked as not sent."""
    marks = page.locator(".question .unsent")
    return [marks.nth(index).is_visible() for index in range(marks.count())]


def test_a_refused_file_does_not_end_the_conversation(vision_server, visits):
    visits.expected.append(REFUSED)
    page = visits.open(vision_server.url)
    page.evaluate("localStorage.setItem('tilewright-settings', JSON.stringify({ max_tokens: '2' }))")
    bodies = posted(page)
    hand_over(page, "drop", png(), "good.png")
    hand_over(page, "drop", b"no image", "broken.png")
    until(page, "document.querySelectorAll('.tray .preview:not(.unread)').length === 2")
    send(page, "What is it?")
    wait_until_done(page)
    assert answers(page).locator(".error").inner_text().startswith("“broken.png”: not an image")
    send(page, "And now?")
    wait_until_done(page, 2)
    assert answers(page).nth(1).locator(".error").is_hidden() and unsent(page) == [True, False]
    assert [message["content"] for message in bodies[-1]["messages"]] == ["And now?"]
    page.reload()
    page.get_by_role("button", name="Ask without broken.png").click()
    wait_until_done(page, 2)
    assert answers(page).nth(0).locator(".error").is_hidden() and unsent(page) == [False, False]
    (question,) = bodies[-1]["messages"]  # in its place, before the later one
    assert [part["type"] for part in question["content"]] == ["image_url", "text"]
    send(page, "And then?")
    wait_until_done(page, 3)
    contents = [message["content"] for message in bodies[-1]["messages"] if message["role"] == "user"]
    assert contents == [question["content"], "And now?", "And then?"]
    assert page.locator(".left-out").count() == 1
    texts = [message["text"] for message in kept(page)[0]["messages"] if message["role"] == "user"]
    assert texts == ["What is it?", "And now?", "And then?"]


def test_a_file_that_is_gone_is_left_out_by_name(scripted, visits):
    running, backend = scripted(accepts=("image",))
    page = visits.open(running.url)
    hand_over(page, "drop", png())
    page.locator(".tray img").wait_for()
    send(page, "What is it?")
    wait_until_done(page)
    page.evaluate(
        """() => new Promise((resolve) => {
          indexedDB.open("tilewright").onsuccess = ({ target: { result: database } }) => {
            const transaction = database.transaction("files", "readwrite");
            transaction.objectStore("files").clear();
            transaction.oncomplete = () => { database.close(); resolve(); };
          };
        })"""
    )
    page.reload()
    answers(page).wait_for()
    until(page, "document.querySelector('#model').value")
    send(page, "And now?")
    wait_until_done(page, 2)
    page.get_by_text("photo.png is not sent: the browser does not keep it any more.").wait_for()
    assert [message["content"] for message in backend.requests[-1].messages] == [
        "What is it?",
        "Hello there",
        "And now?",
    ]


def test_a_full_context_goes_on_without_the_oldest_turns(scripted, visits, monkeypatch):
    visits.expected.append(REFUSED)
    running, backend = scripted()
    answer = backend.submit

    def full(request, listener):
        if sum(len(message["content"]) for message in request.messages) > 400:
            failed = Failed("request", "the prompt has 200 tokens", "messages", ContextLengthExceeded.code)
            asyncio.get_running_loop().call_soon(listener, failed)
            return lambda: None
        return answer(request, listener)

    monkeypatch.setattr(backend, "submit", full)
    page = visits.open(running.url)
    for number, text in enumerate(("one", "two", "three")):
        send(page, f"{text} {'x' * 100}")
        wait_until_done(page, number + 1)
    send(page, f"four {'x' * 100}")
    wait_until_done(page, 4)
    assert answers(page).nth(3).locator(".error").is_visible() and unsent(page) == [False, False, False, True]
    page.get_by_role("button", name="Continue without the oldest turns").click()
    wait_until_done(page, 4)
    assert answers(page).nth(3).locator(".error").is_hidden() and unsent(page) == [True, False, False, False]
    page.reload()
    answers(page).nth(3).wait_for()
    until(page, "document.querySelector('#model').value")
    assert unsent(page) == [True, False, False, False]
    send(page, f"five {'x' * 280}")  # more than one round of leaving out
    wait_until_done(page, 5)
    page.get_by_role("button", name="Continue without the oldest turns").click()
    wait_until_done(page, 5)
    asked = [message["content"].split()[0] for message in backend.requests[-1].messages if message["role"] == "user"]
    assert asked == ["five"]
    send(page, "x" * 500)  # too long by itself: nothing is offered
    wait_until_done(page, 6)
    page.get_by_role("button", name="Continue without the oldest turns").click()
    wait_until_done(page, 6)
    assert answers(page).nth(5).locator(".error").is_visible()
    assert page.get_by_role("button", name="Continue without the oldest turns").count() == 0


@pytest.mark.parametrize("way", ["Escape", "backdrop", "Cancel"])
def test_the_key_is_asked_for_again_where_one_finds_it(scripted, visits, way):
    visits.expected.append(REFUSED)
    running, _ = scripted(settings=ServerSettings(api_keys=("secret",)))
    page = visits.open(running.url, wait=False)
    page.get_by_label("Key", exact=True).wait_for()
    if way == "Escape":
        page.keyboard.press("Escape")
    elif way == "backdrop":
        page.mouse.click(5, 5)
    else:
        page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").wait_for(state="detached")
    page.locator("#sidebar").get_by_role("button", name="API key").click()
    page.keyboard.press("Escape")
    page.locator("#banner").get_by_role("button", name="Enter the API key").click()
    page.get_by_label("Key", exact=True).fill("secret")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#model').value")
    assert page.locator("#banner").is_hidden()
    assert page.locator("#sidebar").get_by_role("button", name="API key").is_visible()  # to change it


def test_a_slip_of_the_mouse_loses_nothing_that_is_written(scripted, visits):
    running, _ = scripted()
    page = visits.open(running.url)
    dialog, field = page.get_by_role("dialog"), page.get_by_label("System prompt")
    page.get_by_role("button", name="Settings", exact=True).click()
    box = field.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 10)  # a selection that ends outside
    page.mouse.down()
    page.mouse.move(5, 5, steps=3)
    page.mouse.up()
    assert dialog.count() == 1
    page.mouse.click(5, 5)
    dialog.wait_for(state="detached")  # nothing was written
    page.get_by_role("button", name="Settings", exact=True).click()
    field.fill("Be kind.")
    page.mouse.click(5, 5)
    assert dialog.count() == 1 and field.input_value() == "Be kind."
    page.keyboard.press("Escape")
    assert dialog.count() == 0


def test_a_browser_that_blocks_site_data(scripted, visits):
    visits.expected.append(REFUSED)
    running, _ = scripted(settings=ServerSettings(api_keys=("secret",)))
    page = visits.open(running.url, scripts=[BLOCKED], wait=False)
    page.get_by_label("Key", exact=True).fill("secret")
    page.keyboard.press("Enter")
    page.get_by_text("This browser keeps nothing for this page").wait_for()
    until(page, "document.querySelector('#model').value")
    page.get_by_role("button", name="Theme: as the system").click()
    send(page, "Still?")
    wait_until_done(page)
    page.get_by_role("button", name="Still?", exact=True).wait_for()


def test_the_list_stays_under_the_hand_while_an_answer_comes(held, visits):
    running, backend = held()
    reads = """
      window.tablesRead = [];
      const getAll = IDBObjectStore.prototype.getAll;
      IDBObjectStore.prototype.getAll = function () { tablesRead.push(this.name); return getAll.call(this); };
    """
    page = visits.open(running.url, scripts=[reads])
    for text in ("First", "Second"):
        page.keyboard.press("Control+Shift+O")
        page.locator(".welcome").wait_for()
        send(page, text)
        first_piece_came(page)
        backend.release()
        wait_until_done(page)
    page.get_by_role("button", name="First", exact=True).click()
    send(page, "More")  # it goes to the top of the list
    first_piece_came(page, 1)
    until(page, "document.querySelector('.conversations .title').textContent === 'First'")
    page.get_by_role("button", name="First", exact=True).focus()
    page.evaluate("window.focused = document.activeElement")
    page.evaluate("tablesRead.length = 0")
    page.wait_for_timeout(1100)  # what came is kept once a second
    backend.release()
    wait_until_done(page, 2)
    until(page, "tablesRead.length")
    until(page, "document.querySelector('.conversations .title').textContent === 'First'")
    assert page.evaluate("document.activeElement === focused && focused.textContent") == "First"
    assert page.evaluate("tablesRead") == ["titles"]  # once, at the end


def test_haste_does_not_outrun_the_browsers_store(scripted, visits):
    running, backend = scripted()
    page = visits.open(running.url, store_delay_ms=400)
    for text in ("First", "Second"):
        send(page, text)
        wait_until_done(page)
        page.get_by_role("button", name=text, exact=True).wait_for()
        page.keyboard.press("Control+Shift+O")
        page.keyboard.type("x")  # the focus is there already
        page.keyboard.press("Backspace")
    page.get_by_role("button", name="First", exact=True).click()
    page.keyboard.type("More")
    page.keyboard.press("Enter")  # sent when its conversation is there, and to no other
    wait_until_done(page, 2)
    assert page.evaluate(BUBBLES) == ["First", "More"]
    assert [message["content"] for message in backend.requests[-1].messages] == ["First", "Hello there", "More"]
    page.get_by_role("button", name="Second", exact=True).click()
    page.get_by_role("button", name="First", exact=True).click()
    until(page, "document.querySelectorAll('.bubble').length === 2")
    page.get_by_role("button", name="Second", exact=True).click()
    page.go_back()  # before anything of it is read
    until(page, "document.querySelectorAll('.bubble').length === 2")
    page.wait_for_timeout(900)
    assert page.evaluate(BUBBLES) == ["First", "More"] and page.title() == "First · Tilewright"


def test_a_draft_that_comes_late_is_not_lost(scripted, visits):
    running, backend = scripted()
    page = visits.open(running.url)
    page.locator("#question").fill("Half written")
    until_kept(page, "drafts", lambda rows: [row["text"] for row in rows] == ["Half written"])
    page.add_init_script(SLOW_STORE)
    page.reload()
    until(page, "document.querySelector('#model').value")
    send(page, "In haste")
    page.evaluate("openStore()")
    until(page, "document.querySelector('#question').value === 'Half written'")
    wait_until_done(page)
    assert backend.requests[0].messages[0]["content"] == "In haste"
    until_kept(page, "drafts", lambda rows: [row["text"] for row in rows] == ["Half written"])


def test_a_conversation_that_is_gone_leaves_what_was_written_for_it(scripted, visits):
    running, backend = scripted()
    page = visits.open(running.url, path="/?c=gone", scripts=[SLOW_STORE])
    send(page, "Is it there?")
    page.evaluate("openStore()")
    page.locator(".welcome").wait_for()
    assert page.locator("#question").input_value() == "Is it there?" and not backend.requests
    assert page.evaluate("location.search") == ""


def test_what_an_older_page_kept_is_listed(scripted, visits):
    visits.expected.append(REFUSED)  # the icon of a script
    running, _ = scripted()
    page = visits.open(running.url, wait=False, path="/page/ids.js")
    page.evaluate(
        """() => new Promise((resolve) => {
          const request = indexedDB.open("tilewright", 1);
          request.onupgradeneeded = () => {
            for (const name of ["conversations", "drafts"]) request.result.createObjectStore(name, { keyPath: "id" });
            request.result.createObjectStore("files");
          };
          request.onsuccess = () => {
            const transaction = request.result.transaction("conversations", "readwrite");
            const question = { id: "q", role: "user", text: "From before", attachments: [] };
            transaction.objectStore("conversations").put({ id: "c", title: "", changedAt: 1, messages: [question] });
            transaction.oncomplete = () => { request.result.close(); resolve(); };
          };
        })"""
    )
    page.goto(running.url)
    page.get_by_role("button", name="From before", exact=True).click()
    assert page.locator(".bubble").inner_text() == "From before"


def test_what_could_not_be_kept_stays_until_a_reload(scripted, visits):
    running, _ = scripted()
    page = visits.open(running.url, scripts=[FULL])
    send(page, "No room")
    wait_until_done(page)
    page.get_by_text("The browser has no room left").wait_for()
    page.evaluate("document.querySelector('.skip').click()")
    page.wait_for_timeout(200)
    assert page.locator(".bubble").inner_text() == "No room" and re.search(r"\?c=\w+#question$", page.url)
    page.keyboard.press("Control+Shift+O")
    page.locator(".welcome").wait_for()
    page.go_back()
    until(page, "document.querySelector('.bubble')?.textContent === 'No room'")
    assert page.locator(".conversations .title").all_inner_texts() == ["No room"]
