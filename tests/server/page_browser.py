"""Chromium on the server's page, watched: nothing may go elsewhere, break the policy or end up as an error."""

import asyncio
import base64
import contextlib
import io
import os
import shutil
import threading
import time
from urllib.parse import urlsplit

import pytest
from conftest import ScriptedBackend
from PIL import Image

from tilewright.server.link.backend import AnswerDelta, Ended, Started
from tilewright.types import Timings

NAMES = ("chromium", "chromium-browser", "google-chrome")
MUST_HAVE = "TILEWRIGHT_TEST_CHROMIUM"  # "required": its absence is a failure, as continuous integration wants it
FLAGS = (
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--disable-background-networking",
    "--disable-component-update",
)
TIMEOUT_MS = 15_000
STORE_DELAY = "TILEWRIGHT_TEST_SLOW_STORE_MS"  # what the browser keeps comes so late in all tests: haste shows by that


@contextlib.contextmanager
def launched():
    """A Chromium; skips the tests where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        message = f"no Chromium here: none of {', '.join(NAMES)} is on the path"
        if os.environ.get(MUST_HAVE) == "required":
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


class Visits:
    """Pages of one test, each in a browser profile of its own, and what was seen to go wrong in them."""

    def __init__(self, browser) -> None:
        self._browser = browser
        self._contexts = []
        self.problems = []
        self.expected = []  # parts of what the console may say: browsers log each refused request as an error

    def open(self, url, *, wait=True, path="/", scripts=(), store_delay_ms=None, **options):
        """A page that shows `url`; with `wait`, when the model is known. What the browser keeps comes late."""
        context = self._browser.new_context(**{"viewport": {"width": 1000, "height": 700}, **options})
        self._contexts.append(context)
        for script in scripts:
            context.add_init_script(script)
        delay_store(context, int(os.environ.get(STORE_DELAY, "0")) if store_delay_ms is None else store_delay_ms)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        self.watch(page, url)
        page.goto(url + path)
        if wait:
            until(page, "document.querySelector('#model').value")
        return page

    def watch(self, page, url):
        def request(request):
            if (
                request.url.split(":")[0] not in ("data", "blob")
                and urlsplit(request.url).netloc != urlsplit(url).netloc
            ):
                self.problems.append(f"requested {request.url}")

        def console(message):
            if message.type in ("error", "warning"):
                self.problems.append(message.text)

        page.on("request", request)
        page.on("console", console)
        page.on("pageerror", lambda error: self.problems.append(f"raised {error}"))

    def close(self):
        for context in self._contexts:
            context.close()
        unexpected = [text for text in self.problems if not any(part in text for part in self.expected)]
        assert not unexpected, unexpected


def delay_store(context, delay_ms):
    """Lets each use of the browser's database begin later, all in their order, as on a slow or busy disk."""
    if not delay_ms:
        return
    begins = "const transaction = this.database.transaction"

    def slower(route):
        text = route.fetch().text()
        assert text.count(begins) == 1
        late = text.replace(begins, f"await new Promise((resolve) => setTimeout(resolve, {delay_ms}));\n    {begins}")
        route.fulfill(body=late, content_type="text/javascript")

    context.route("**/page/tables.js", slower)


class HeldBackend(ScriptedBackend):
    """Gives the first piece of an answer at once, the rest when `release` is called."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._rests = []
        self.has_asked = threading.Semaphore(0)

    def submit(self, request, listener):
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        loop = asyncio.get_running_loop()
        for event in (Started(3, self.opens_reasoning), AnswerDelta(0, self.pieces[0], 1)):
            loop.call_soon(listener, event)
        rest = [AnswerDelta(0, piece, 1) for piece in self.pieces[1:]]
        rest += [
            AnswerDelta(0, "", 1, "stop"),
            Ended(3, 0, len(self.pieces) + 1, Timings(0.0, 0.1, 0.2), bandwidth_share=0.4),
        ]
        self._rests.append((loop, listener, rest))
        self.has_asked.release()

        def abort():
            self.num_aborted += 1

        return abort

    def release(self):
        """Ends all requests so far."""
        rests, self._rests = self._rests, []
        for loop, listener, rest in rests:
            for event in rest:
                loop.call_soon_threadsafe(listener, event)


def png(width=64, height=48, colour="red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def hand_over(page, event, data, name="photo.png", kind="image/png"):
    """Drops or pastes a file onto the document, as the browser would."""
    page.evaluate(
        """async ([event, data, name, kind]) => {
            const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], name, { type: kind }));
            const options = { bubbles: true, cancelable: true };
            const made = event === "paste" ? new ClipboardEvent("paste", { ...options, clipboardData: transfer })
              : new DragEvent(event, { ...options, dataTransfer: transfer });
            document.body.dispatchEvent(made);
        }""",
        [event, base64.b64encode(data).decode(), name, kind],
    )


def send(page, text):
    """Writes a question and sends it by its key."""
    page.locator("#question").fill(text)
    page.locator("#question").press("Enter")


def answers(page):
    return page.locator(".answer")


def wait_for(page, holds, what):
    """Returns when `holds()`. Playwright's own waiting needs eval within the page, which is forbidden."""
    ends_s = time.monotonic() + TIMEOUT_MS / 1000
    while not holds():
        assert time.monotonic() < ends_s, f"{what} does not hold after {TIMEOUT_MS} ms"
        page.wait_for_timeout(20)


def until(page, expression, argument=None):
    """Returns when an expression holds in the page."""
    wait_for(page, lambda: page.evaluate(expression, argument), expression)


def kept(page, table="conversations"):
    """All rows of a table of the browser's database."""
    return page.evaluate(
        """(table) => new Promise((resolve) => {
          indexedDB.open("tilewright").onsuccess = ({ target: { result: database } }) => {
            database.transaction(table).objectStore(table).getAll().onsuccess = (event) => {
              database.close();
              resolve(event.target.result);
            };
          };
        })""",
        table,
    )


def until_kept(page, table, condition):
    """Returns when a condition holds for the rows that the browser keeps in a table."""
    wait_for(page, lambda: condition(kept(page, table)), f"what was said of {table}")


def wait_until_done(page, count=1):
    """Returns when so many answers are there and none is under way."""
    until(
        page,
        "count => document.querySelectorAll('.answer').length === count"
        " && !document.querySelector('.answer[aria-busy=true]') && document.querySelector('.send').title === 'Send'",
        count,
    )
