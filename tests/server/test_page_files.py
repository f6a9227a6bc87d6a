"""The page's files over HTTP: what is sent, to whom, and nothing else."""

import http.client
import json
import re
import urllib.parse

import pytest
from sources import PACKAGE

from tilewright.server.http.page_files import PAGE_FILES
from tilewright.server.http.settings import ServerSettings

FOLDER = PACKAGE / "server" / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def fetch(running, path, method="GET", **headers):
    """The response to a path as it is written: no client tidies it up."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(running.url).netloc, timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    response.content = response.read()
    connection.close()
    return response


@pytest.fixture
def running(scripted):
    return scripted()[0]


def test_every_file_is_sent_as_it_is(running):
    types = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
        "png": "image/png",
    }
    assert {"/", "/page/style.css", "/page/app.js", "/page/sample.png"} <= PAGE_FILES.keys()
    assert len(PAGE_FILES) == len(list(FOLDER.iterdir()))
    for path in PAGE_FILES:
        name = path.removeprefix("/page/").strip("/") or "index.html"
        response = fetch(running, path)
        assert response.status == 200 and response.content == (FOLDER / name).read_bytes()
        assert response.headers["content-type"].split(";")[0] == types[name.rpartition(".")[2]]
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["permissions-policy"] == "camera=(self), microphone=(self), geolocation=()"


def test_an_upgrade_is_seen_and_the_rest_is_not_sent_again(running):
    first = fetch(running, "/page/app.js")
    assert first.headers["cache-control"] == "no-cache" and re.fullmatch(r'"\w{32}"', first.headers["etag"])
    again = fetch(running, "/page/app.js", if_none_match=f'"old", W/{first.headers["etag"]}')
    assert again.status == 304 and again.content == b"" and again.headers["etag"] == first.headers["etag"]
    assert fetch(running, "/page/app.js", if_none_match='"old"').content == first.content
    tags = [file.etag for file in PAGE_FILES.values()]
    assert len(set(tags)) == len(tags)


def test_head_has_no_body(running):
    response = fetch(running, "/", "HEAD")
    assert response.status == 200 and response.content == b"" and response.headers["content-length"] != "0"
    assert fetch(running, "/", "POST").status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/page/", "/page", "/page/nothing.js", "/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py",
        "/page/%2e%2e%2fapp.py", "/page/..%5capp.py", "/page//etc/passwd", "/page/%2fetc%2fpasswd", "//page/app.js",
        "/page/app.js%00.png", "/index.html", "/page/index.html", "/app.js",
    ],
)  # fmt: skip
def test_nothing_else_is_sent(running, path):
    assert fetch(running, path).status == 404


def test_the_page_needs_no_key_but_its_requests_do(scripted):
    running, _ = scripted(settings=ServerSettings(api_keys=("secret",)))
    assert all(fetch(running, path).status == 200 for path in PAGE_FILES)
    assert fetch(running, "/v1/models").status == 401 and fetch(running, "/page/nothing.js").status == 401
    assert fetch(running, "/", host="evil.example").status == 403


def test_it_is_no_part_of_the_interface(running):
    assert not any(
        path == "/" or path.startswith("/page") for path in json.loads(fetch(running, "/openapi.json").content)["paths"]
    )


def test_its_files_are_one_line_of_the_metrics(running):
    fetch(running, "/page/app.js")
    fetch(running, "/page/style.css")
    text = fetch(running, "/metrics").content.decode()
    assert 'tilewright_requests_total{path="/",status="200"} 2.0' in text and "/page" not in text


def test_scripts_name_only_files_that_are_there():
    for path in FOLDER.glob("*.js"):
        text = path.read_text()
        assert all((FOLDER / name).exists() for name in re.findall(r'from "\./([^"]+)"', text)), path.name
        # What a model says is never markup.
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path.name
        )
    named = re.findall(r'(?:href|src)="([^"#]+)"', (FOLDER / "index.html").read_text())
    assert len(named) == 8 and all(f"/{path}" in PAGE_FILES for path in named)


def test_the_model_lists_its_input_modalities(vision_server, chat_server):
    model = json.loads(fetch(vision_server, "/v1/models").content)["data"][0]
    assert model["input_modalities"] == ["text", "image", "video"]
    assert model["limits"] == {
        "max_body_bytes": 128 * 2**20,
        "max_media_bytes": 64 * 2**20,
        "max_media_total_bytes": 128 * 2**20,
        "max_media": 32,
        "max_pixels": 2**26,
        "max_duration_s": 600.0,
    }
    assert json.loads(fetch(chat_server, "/v1/models").content)["data"][0]["input_modalities"] == ["text"]


def test_its_limits_are_those_of_the_settings(scripted):
    running, _ = scripted(settings=ServerSettings(max_body_bytes=1000))
    assert json.loads(fetch(running, "/v1/models").content)["data"][0]["limits"]["max_body_bytes"] == 1000
