"""The files of the web page at `/`, read once into a fixed table: no path can reach another file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(self), microphone=(self), geolocation=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Cached, but revalidated each time: an upgrade shows at once, and unchanged files are not sent again.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """Return the file, or status 304 if the browser has it."""
        headers = {**_HEADERS, "ETag": self.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


# Files by URL path.
PAGE_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": _read(path)
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}


def page_response(request: Request) -> Response:
    """Return the file at a request's path; raise a 404 if there is none."""
    file = PAGE_FILES.get(request.scope["path"])
    if file is None:
        raise HTTPException(404)
    return file.response(request)
