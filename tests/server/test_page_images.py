"""The page's pane of images in a browser, in front of a process that makes fake ones."""

import contextlib

import pytest
from conftest import ScriptedBackend, serving
from fake_diffusion import NAME, fake_backend
from page_browser import kept, send, until, until_kept, wait_until_done
from test_page_access import check_contrast, check_names

REFUSED = "Failed to load resource"


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def make(gate=None, backend=None, **options):
            images = lambda: fake_backend(gate, **options)  # noqa: E731
            return stack.enter_context(serving(lambda: backend, make_diffusion=images))

        yield make


def draw(page, text):
    page.locator("#image-prompt").fill(text)
    page.locator("#image-prompt").press("Enter")


def until_drawn(page, count):
    until(
        page,
        "count => document.querySelectorAll('.drawn-image img').length === count"
        " && [...document.querySelectorAll('.drawn-image img')].every((image) => image.naturalWidth)"
        " && document.querySelector('.easel').hidden",
        count,
    )


def test_an_image_is_drawn_kept_and_asked_about(serve, gate, visits):
    chat = ScriptedBackend(accepts=("image",))
    page = visits.open(serve(gate, chat).url)
    page.get_by_role("button", name="Images", exact=True).click()
    assert page.url.endswith("?pictures") and page.title() == "Images · Tilewright"
    assert page.evaluate("document.activeElement.id") == "image-prompt"
    page.locator("#image-size").fill("32x16")
    page.locator("#image-seed").fill("7")
    draw(page, "a red tile")
    until(page, "document.querySelector('.easel .state')?.textContent === 'Step 1 of 4'")
    gate.open(1)
    until(page, "document.querySelector('.easel img')?.naturalWidth === 32")
    assert page.locator(".easel progress").evaluate("one => one.value") == 1
    assert page.get_by_role("button", name="Stop").is_enabled()
    gate.open(3)
    until_drawn(page, 1)
    assert page.locator(".drawn-image .caption").inner_text() == "a red tile"
    assert page.locator(".drawn-image .figures").inner_text().replace("\n", "").startswith("32 × 164 stepsseed 7")
    until(page, "document.querySelector('#image-size').placeholder === '64x48'")
    page.reload()
    until_drawn(page, 1)
    assert page.locator(".drawn-image img").get_attribute("alt") == "a red tile"
    page.get_by_role("button", name="Draw again").click()
    assert page.locator("#image-seed").input_value() == "7" and page.locator("#image-size").input_value() == "32x16"
    page.get_by_role("button", name="Ask about this image").click()
    page.locator(".tray img").wait_for()
    assert page.locator(".images").is_hidden()
    send(page, "What is it?")
    wait_until_done(page)
    image, text = chat.requests[-1].messages[0]["content"]
    assert image["image"].startswith(b"\x89PNG") and text == {"type": "text", "text": "What is it?"}
    page.go_back()
    until(page, "document.querySelector('.tray').hidden")


def test_stopping_and_what_is_wrong(serve, gate, visits):
    page = visits.open(serve(gate, ScriptedBackend()).url, path="/?pictures")
    until(page, "document.querySelector('#sidebar .current:not([hidden])') !== null")
    draw(page, "tile")
    until(page, "document.querySelector('.easel .state')?.textContent === 'Step 1 of 4'")
    page.keyboard.press("Escape")
    until(page, "document.querySelector('.easel').hidden")
    assert page.locator(".images .wrong").is_hidden() and page.locator(".drawn-image").count() == 0
    gate.open(4)  # the one that was stopped ends with one of these steps
    page.locator("#image-steps").fill("many")
    draw(page, "tile")
    assert page.locator(".images .wrong").inner_text() == "Steps is many, expected a whole number"
    page.locator("#image-steps").fill("")
    visits.expected.append(REFUSED)
    page.locator("#image-size").fill("33x16")
    draw(page, "tile")
    until(page, "document.querySelector('.images .wrong').textContent.includes('expected a multiple of 16')")
    page.locator("#image-size").fill("")
    draw(page, "crash")
    gate.open(2)
    until(page, "document.querySelector('.images .wrong').textContent.includes('the diffusion worker ended')")
    gate.open(4)
    draw(page, "tile")
    until_drawn(page, 1)
    assert page.get_by_role("button", name="Ask about this image").is_disabled()  # a model of text alone
    page.get_by_role("button", name="Delete image").click()
    until_kept(page, "pictures", lambda rows: not rows)
    assert page.locator(".drawn-image").count() == 0 and not kept(page, "files")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_server_of_images_alone_shows_them_at_once(serve, visits, theme):
    page = visits.open(serve().url, wait=False, color_scheme=theme)
    until(page, "document.querySelector('.images:not([hidden])') !== null")
    assert page.get_by_role("button", name="New conversation").is_hidden()
    draw(page, "a tile")
    until_drawn(page, 1)
    assert page.locator("#model").is_hidden() and NAME in page.locator(".images .hint").inner_text()
    check_names(page, 8)
    check_contrast(page)
    other = page.context.new_page()  # both tabs have the same gallery
    visits.watch(other, page.url)
    other.goto(page.url)
    until_drawn(other, 1)
    draw(page, "another tile")
    until_drawn(page, 2)
    until_drawn(other, 2)
