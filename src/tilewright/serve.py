"""`tilewright serve`: the flags of the server, and its life from start to drained end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright import config, embedded, engine_flags
from tilewright.event_loop import run_loop
from tilewright.host_memory import parse_bytes
from tilewright.types import RequestError

if TYPE_CHECKING:
    from tilewright.server.link.remote import RemoteBackend
    from tilewright.server.settings import ServerSettings

HOST = "127.0.0.1"
PORT = 8000
DRAIN_S = 60.0
CUT_S = 2.0  # for clients to be told that their answers are cut off

_log = logging.getLogger(__name__)


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `serve`."""
    parser = commands.add_parser(
        "serve",
        help="a server with OpenAI's interface",
        description="Serves MODEL to many clients at once, by OpenAI's interface, at http://127.0.0.1:8000/v1. "
        "Without MODEL, the small one that comes with the package.",
        epilog="""examples:
  tilewright serve                                    the embedded model, which is tiny
  tilewright serve ./Qwen3-VL-2B-Instruct
  tilewright serve Qwen/Qwen3-VL-2B-Instruct --port 9000
  TILEWRIGHT_API_KEY=secret tilewright serve MODEL --host 0.0.0.0
  tilewright serve MODEL --allow-files ~/Pictures     clients may name pictures that lie there
  curl http://127.0.0.1:8000/v1/models""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=engine_flags.MODEL_HELP)
    parser.add_argument("--host", default=HOST, help=f"address to listen on (default {HOST}: this machine alone)")
    parser.add_argument("--port", type=engine_flags.natural, default=PORT, help=f"default {PORT}; 0: any free one")
    parser.add_argument("--name", help="what the model is called by clients (default: its folder's name)")
    _add_limits(parser)
    _add_media(parser)
    group = parser.add_argument_group("log", "One line per request, on standard error.")
    group.add_argument("--log-format", choices=("text", "json"), help="default: text on a terminal, else json")
    group.add_argument("--log-content", action="store_true", help="log what is asked, which may be private")
    group.add_argument("-q", "--quiet", action="store_true", help="only warnings")
    group.add_argument("-v", "--verbose", action="store_true", help="tell what is going on")
    engine_flags.add_engine_arguments(parser)
    parser.set_defaults(run=run)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who may ask, and how much")
    group.add_argument(
        "--api-key", action="append", metavar="KEY",
        help="clients must send it; may be repeated. TILEWRIGHT_API_KEY does the same, unseen by other users",
    )  # fmt: skip
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL", help="a web page that may ask; *: any"
    )
    group.add_argument(
        "--allowed-host", action="append", metavar="NAME",
        help="a name the server answers to; *: any (default: those of this machine, or any where --host is not)",
    )  # fmt: skip
    group.add_argument(
        "--max-connections", type=engine_flags.positive, metavar="N",
        help="of all clients (default: what the limit on open files allows, at most 4096)",
    )  # fmt: skip
    group.add_argument(
        "--max-connections-per-address", type=engine_flags.positive, metavar="N",
        help="of one address (default: half of all)",
    )  # fmt: skip
    group.add_argument("--max-body", default="128MiB", metavar="SIZE", help="of one request (default 128MiB)")
    group.add_argument(
        "--max-queue", type=engine_flags.natural, default=256, metavar="N",
        help="answers that may wait beside those computed; more are refused with status 429 (default 256)",
    )  # fmt: skip
    group.add_argument("--request-timeout", type=_seconds, default=1800.0, metavar="S", help="default 1800")
    group.add_argument(
        "--drain-timeout", type=_seconds, default=DRAIN_S, metavar="S",
        help="what is being answered may take so long to finish when the server is told to end (default 60)",
    )  # fmt: skip


def _add_media(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pictures and videos that clients name or send")
    group.add_argument(
        "--allow-files", action="append", default=[], metavar="DIR", help="file:// URLs under DIR are read"
    )
    group.add_argument(
        "--allow-private-urls", action="store_true", help="also fetch from addresses of the local network"
    )
    group.add_argument("--media-timeout", type=_seconds, default=30.0, metavar="S", help="to fetch one (default 30)")
    group.add_argument("--max-media-bytes", metavar="SIZE", help="of one (default 64MiB)")
    group.add_argument(
        "--max-pixels", type=engine_flags.positive, metavar="N", help="of one picture (default 67108864)"
    )
    group.add_argument("--max-frames", type=engine_flags.positive, metavar="N", help="of one video (default 768)")
    group.add_argument("--max-duration", type=_seconds, metavar="S", help="of one video (default 600)")
    group.add_argument("--max-media", type=engine_flags.positive, metavar="N", help="of one request (default 32)")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds over 0")
    return value


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    from tilewright.server import log_lines
    from tilewright.server.link.remote import RemoteBackend

    is_json = options.log_format == "json" or (options.log_format is None and not sys.stderr.isatty())
    log_lines.configure(is_json, _log_level(options))
    _allow_many_connections()
    settings = make_settings(options)
    engine_flags.check_model(options.model)
    engine_options = engine_flags.engine_options(options)
    if options.model is None:
        _log.info(embedded.notice("tilewright serve ./Qwen3-VL-2B-Instruct"))
    listener = _listen(options.host, options.port)
    engine = {
        **engine_options,
        "progress": sys.stderr.isatty() and not options.quiet,
        "isolate_media": True,
        "media_limits": dataclasses.asdict(settings.media.limits),
    }
    level = logging.DEBUG if options.verbose else logging.WARNING
    backend = RemoteBackend(engine, log_level=level, log_is_json=is_json)
    with listener:
        status: int = run_loop(serve(settings, backend, listener, options.drain_timeout))
        return status


def make_settings(options: argparse.Namespace) -> ServerSettings:
    """The ServerSettings of the flags and the environment."""
    from tilewright.server.media.gate import MediaPolicy
    from tilewright.server.settings import LOOPBACK_HOSTS, MEDIA_LIMITS, ServerSettings

    changes = {
        "max_bytes": None if options.max_media_bytes is None else parse_bytes(options.max_media_bytes),
        "max_pixels": options.max_pixels,
        "max_frames": options.max_frames,
        "max_duration_s": options.max_duration,
        "max_items": options.max_media,
    }
    limits = dataclasses.replace(MEDIA_LIMITS, **{name: value for name, value in changes.items() if value is not None})
    folders = tuple(_folder(name) for name in options.allow_files)
    hosts = tuple(name.lower() for name in options.allowed_host or ())
    if options.allowed_host is None:
        hosts = LOOPBACK_HOSTS if options.host in LOOPBACK_HOSTS else ()
    api_keys = tuple(options.api_key or config.current().api_keys)
    for key in api_keys:
        if fault := config.api_key_fault(key):
            raise RequestError(f"an API key {fault}")
    return ServerSettings(
        served_name=options.name,
        api_keys=api_keys,
        cors_origins=tuple(_origin(text) for text in options.cors_origin),
        allowed_hosts=() if "*" in hosts else hosts,
        max_connections=options.max_connections,
        max_connections_per_address=options.max_connections_per_address,
        max_body_bytes=parse_bytes(options.max_body),
        max_queue=options.max_queue,
        request_timeout_s=options.request_timeout,
        media=MediaPolicy(
            limits,
            allow_private_addresses=options.allow_private_urls,
            folders=folders,
            timeout_s=options.media_timeout,
        ),
        logs_content=options.log_content,
    )


def _origin(text: str) -> str:
    """What browsers call the origin of a page: without a path, and no / at its end."""
    if text != "*" and not re.fullmatch(r"https?://[^\s/?#@]+", text):
        raise RequestError(f"--cors-origin is {text!r}, expected *, or such as https://tiles.example:8443")
    return text


def _folder(name: str) -> Path:
    path = Path(name).expanduser().resolve()
    if not path.is_dir():
        raise RequestError(f"--allow-files is {name!r}, which is no folder")
    return path


def _log_level(options: argparse.Namespace) -> int:
    return logging.WARNING if options.quiet else logging.DEBUG if options.verbose else logging.INFO


def _allow_many_connections() -> None:
    """Raises the limit on open files to what the system allows: many shells begin with 1,024, one per client."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port that is taken is known before a model is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
        ) from error


async def serve(settings: ServerSettings, backend: RemoteBackend, listener: socket.socket, drain_s: float) -> int:
    """Serves until a signal says to end, then finishes what is being answered."""
    import uvicorn

    from tilewright.server.app import ApiHandler, create_app
    from tilewright.server.connections import server_config
    from tilewright.server.link.remote import EngineRefused

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # ours do the same, and end the engine too

    handler = ApiHandler(settings, backend)
    # uvicorn cancels what is left; a little later than the handler ends it, which tells clients.
    options = {"timeout_graceful_shutdown": round(drain_s + CUT_S)}
    server = Server(server_config(create_app(handler), settings, handler.metrics, **options))
    loop = asyncio.get_running_loop()

    def end() -> None:
        server.force_exit = server.should_exit  # told twice, it ends at once
        if not server.should_exit:
            loop.call_later(drain_s, handler.cut)
        server.should_exit = True
        _log.info("ending: finishing what is being answered")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    num_keys = len(settings.api_keys)
    if num_keys:
        _log.info("clients must send %s", "the API key" if num_keys == 1 else f"one of {num_keys} API keys")
    elif settings.allowed_hosts == ():
        _log.warning("anybody who can reach %s may use it: there is no API key", url)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(backend.start())
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            _log.info("%s is ready: a page to talk to it at %s/, it answers at %s/v1", handler.model.name, url, url)
        await serving
    except EngineRefused as error:
        server.should_exit = True
        await serving
        raise RequestError(str(error)) from error
    finally:
        starting.cancel()
        await handler.gate.close()
        await backend.close()
    return 0
