"""`tilewright serve`: its flags, and the processes that it starts."""

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
from typing import TYPE_CHECKING, Any

from tilewright import config
from tilewright.diffusion.options import DiffusionOptions
from tilewright.flags import diffusion, engine, replicas
from tilewright.flags.options import add_options, given_options, natural, positive
from tilewright.host import files
from tilewright.host.memory import parse_bytes, require_start
from tilewright.process import run_loop
from tilewright.process.log import LogSettings
from tilewright.process.supervisor import ProcessRefused
from tilewright.types import RequestError
from tilewright.weights import embedded

if TYPE_CHECKING:
    from tilewright.server.http.settings import ServerSettings
    from tilewright.server.link.diffusion import DiffusionBackend
    from tilewright.server.link.remote import RemoteBackend
    from tilewright.server.replicas.backend import ReplicaBackend

DRAIN_S = 60.0
_IMAGE_OPTIONS = ("tp", "low_memory", "stream_layers")  # the image model's own; it shares others with the engine


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags about clients, limits and media."""
    _add_limits(parser)
    _add_media(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("clients and their limits")
    group.add_argument(
        "--api-key", action="append", metavar="KEY",
        help="a key that clients must send; may be repeated. TILEWRIGHT_API_KEY does the same without showing in ps",
    )  # fmt: skip
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help="an origin whose web pages may send requests; *: any (default: only the server's own)",
    )
    group.add_argument(
        "--allowed-host", action="append", metavar="NAME",
        help="a host name, other than localhost, that requests may use, such as a proxy's; *: any "
        "(default: none, or any if --host is not local)",
    )  # fmt: skip
    group.add_argument(
        "--max-connections", type=positive, metavar="N",
        help="open connections of all clients (default: as many as the limit on open files allows, at most 4096)",
    )  # fmt: skip
    group.add_argument(
        "--max-connections-per-address", type=positive, metavar="N",
        help="open connections from one address (default: half of all)",
    )  # fmt: skip
    group.add_argument(
        "--max-body", default="128MiB", metavar="SIZE", help="size of one request's body (default 128MiB)"
    )
    group.add_argument(
        "--max-queue", type=natural, default=256, metavar="N",
        help="answers that may wait in the queue; more are refused with status 429 (default 256)",
    )  # fmt: skip
    group.add_argument(
        "--max-image-queue", type=natural, default=16, metavar="N",
        help="requests for images and videos that may wait; more are refused with status 429 (default 16)",
    )  # fmt: skip
    group.add_argument(
        "--request-timeout", type=_seconds, default=1800.0, metavar="S", help="time for one answer (default 1800)"
    )
    group.add_argument(
        "--drain-timeout", type=_seconds, default=DRAIN_S, metavar="S",
        help="time for running answers to finish when the server shuts down (default 60)",
    )  # fmt: skip


def _add_media(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("images, videos and sounds in requests")
    group.add_argument(
        "--allow-files",
        action="append",
        default=[],
        metavar="DIR",
        help="allow file:// URLs of files in DIR; may be repeated",
    )
    group.add_argument("--allow-private-urls", action="store_true", help="also fetch URLs from private addresses")
    group.add_argument(
        "--allow-precomputed", action="store_true",
        help="also accept an encoder's inputs or features (image_features, ...) in place of media",
    )  # fmt: skip
    group.add_argument(
        "--media-timeout", type=_seconds, default=30.0, metavar="S", help="time to fetch one URL (default 30)"
    )
    group.add_argument("--max-media-bytes", metavar="SIZE", help="size of one item (default 64MiB)")
    group.add_argument(
        "--max-pixels",
        type=positive,
        metavar="N",
        help="pixels of one image or frame (default 67108864)",
    )
    group.add_argument("--max-frames", type=positive, metavar="N", help="frames of one video (default 768)")
    group.add_argument("--max-duration", type=_seconds, metavar="S", help="seconds of one video or sound (default 600)")
    group.add_argument("--max-media", type=positive, metavar="N", help="items in one request (default 32)")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds over 0")
    return value


def make_settings(options: argparse.Namespace) -> ServerSettings:
    """Return ServerSettings from the flags and the environment."""
    from tilewright.server.http.guard import host_name
    from tilewright.server.http.settings import LOOPBACK_HOSTS, MEDIA_LIMITS, ServerSettings
    from tilewright.server.media.gate import MediaPolicy

    changes = {
        "max_bytes": None if options.max_media_bytes is None else parse_bytes(options.max_media_bytes),
        "max_pixels": options.max_pixels,
        "max_frames": options.max_frames,
        "max_duration_s": options.max_duration,
        "max_items": options.max_media,
        "allow_precomputed": options.allow_precomputed,
    }
    limits = dataclasses.replace(MEDIA_LIMITS, **{name: value for name, value in changes.items() if value is not None})
    folders = tuple(_folder(name) for name in options.allow_files)
    hosts = tuple(host_name(name) for name in options.allowed_host or ())
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
        max_image_queue=options.max_image_queue,
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
    """Return an origin as browsers send it, without a path or a final /; raise RequestError for other texts."""
    if text != "*" and not re.fullmatch(r"(https?|[a-z]+-extension)://[^\s/?#@]+", text):
        raise RequestError(f"--cors-origin is {text!r}, expected *, or such as https://tiles.example:8443")
    return text


def _folder(name: str) -> Path:
    path = Path(name).expanduser().resolve()
    if not path.is_dir():
        raise RequestError(f"--allow-files is {name!r}, which is not a folder")
    return path


HOST = "127.0.0.1"
PORT = 8000
FINAL_ERRORS_S = 2.0  # time to send the errors of aborted answers

_log = logging.getLogger(__name__)


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `serve`."""
    parser = commands.add_parser(
        "serve",
        help="run an OpenAI-compatible server",
        description="Serves MODEL to many clients at once, with OpenAI's interface, at http://127.0.0.1:8000/v1, and "
        "optionally a second model that makes images. Without MODEL: small embedded models. A MODEL that makes "
        "images is served alone.",
        epilog="""examples:
  tilewright serve                                    the embedded model, which is tiny
  tilewright serve ./Qwen3-VL-2B-Instruct
  tilewright serve Qwen/Qwen3-VL-2B-Instruct --port 9000
  tilewright serve MODEL --image-model ./Z-Image-Turbo     chat and images
  tilewright serve ./Z-Image-Turbo                    images only
  TILEWRIGHT_API_KEY=secret tilewright serve MODEL --host 0.0.0.0
  tilewright serve MODEL --allow-files ~/Pictures     clients may use file:// URLs of images in it
  tilewright serve MODEL --replicas 2                 two engines; one that is lost is replaced
  tilewright serve MODEL --replicas 1:4 --ray-address HOST:6379    on the machines of a Ray cluster, by load
  curl http://127.0.0.1:8000/v1/models""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    engine.add_model_argument(parser, engine.MODEL_HELP, is_positional=True)
    parser.add_argument(
        "--image-model", metavar="MODEL",
        help="the model for images or videos: a folder in diffusers' layout or a hub id, loaded on first use; "
        "none: no images (default: the embedded one, if MODEL is left out)",
    )  # fmt: skip
    parser.add_argument(
        "--image-threads", type=positive, metavar="N",
        help="threads that make images (default: one per CPU, at a lower priority than chat)",
    )  # fmt: skip
    add_options(parser, DiffusionOptions, names=_IMAGE_OPTIONS, prefix="image")
    parser.add_argument("--host", default=HOST, help=f"address to listen on (default {HOST}: local clients only)")
    parser.add_argument("--port", type=natural, default=PORT, help=f"default {PORT}; 0: any free one")
    parser.add_argument("--name", help="the model's name for clients (default: its folder's name)")
    add_server_arguments(parser)
    group = parser.add_argument_group("log", "One line per request, on standard error.")
    group.add_argument("--log-format", choices=("text", "json"), help="default: text on a terminal, else json")
    group.add_argument("--log-content", action="store_true", help="log the content of requests, which may be private")
    group.add_argument("-q", "--quiet", action="store_true", help="only warnings")
    group.add_argument("-v", "--verbose", action="store_true", help="log more")
    engine.add_engine_arguments(parser)
    text = "engines behind this server, such as 2, or 1:4 to scale with the load; SIGHUP replaces them one by one"
    replicas.add_arguments(parser, replicas.count_or_range, text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    if options.replicas is None:
        require_start("tilewright serve")  # the engine's process has the same limits
    replicas.check(options)
    is_json = options.log_format == "json" or (options.log_format is None and not sys.stderr.isatty())
    log = LogSettings("json" if is_json else "text", _log_level(options))
    log.configure()
    log_of_children = dataclasses.replace(log, level=logging.DEBUG if options.verbose else logging.WARNING)
    _allow_many_connections()
    settings = make_settings(options)
    model, image_model = _models(options)
    listener = _listen(options.host, options.port)
    with listener:
        backend = None if model is None else _backend(options, _engine(options, model, settings), log_of_children)
        diffusion_backend = None if image_model is None else _diffusion(options, image_model, settings, log_of_children)
        status: int = run_loop(serve(settings, backend, diffusion_backend, listener, options.drain_timeout))
        return status


def _models(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """Return the model for text and the model for images; None if there is none."""
    image_model = None if options.image_model == "none" else options.image_model
    if options.model is not None and _is_pipeline(options.model):
        if options.image_model is not None:
            raise RequestError(
                f"{options.model} makes images, and --image-model is {options.image_model}: expected one of them"
            )
        return None, options.model
    engine.check_model(options.model, options.mmproj)
    diffusion.check_pipeline(image_model)
    if options.model is None:
        _log.info(embedded.notice("tilewright serve ./Qwen3-VL-2B-Instruct"))
        if options.image_model is None and embedded.has("tiny_draw"):
            image_model = str(embedded.path("tiny_draw"))
    return options.model or str(embedded.path()), image_model


def _is_pipeline(model: str) -> bool:
    return files.exists(Path(embedded.resolve(model)).expanduser() / "model_index.json")


def _engine(options: argparse.Namespace, model: str, settings: ServerSettings) -> dict[str, Any]:
    return {
        **engine.engine_options(options),
        "model": model,
        "progress": sys.stderr.isatty() and not options.quiet,
        "isolate_media": True,
        "media_limits": dataclasses.asdict(settings.media.limits),
    }


def _diffusion(options: argparse.Namespace, model: str, settings: ServerSettings, log: LogSettings) -> DiffusionBackend:
    """Return the diffusion worker, whose process the first request starts."""
    from tilewright.server.link.diffusion import DiffusionBackend

    given = given_options(DiffusionOptions, options, names=("dtype", "device", "backend", "pack_cache"))
    given |= given_options(DiffusionOptions, options, names=_IMAGE_OPTIONS, prefix="image")
    return DiffusionBackend(
        embedded.name_of(model),
        {"model": model, **given},
        dataclasses.asdict(settings.media.limits),
        max_queue=settings.max_image_queue,
        num_threads=options.image_threads,
        log=log,
    )


def _backend(
    options: argparse.Namespace, engine_arguments: dict[str, Any], log: LogSettings
) -> RemoteBackend | ReplicaBackend:
    """Return the backend: an engine in a process of its own, or several through Ray."""
    if options.replicas is None:
        from tilewright.server.link.remote import RemoteBackend

        return RemoteBackend(engine_arguments, log)
    from tilewright.server.replicas import ray_serving
    from tilewright.server.replicas.backend import ReplicaBackend

    ray_serving.connect(options.ray_address)
    from tilewright.server.replicas.ray_serving import RayReplicas, ReplicaSettings

    settings = ReplicaSettings(
        {**engine_arguments, "progress": False},
        options.replicas,
        options.replica_cpus,
        options.drain_timeout,
        log,
    )
    return ReplicaBackend(RayReplicas(settings))


def _log_level(options: argparse.Namespace) -> int:
    return logging.WARNING if options.quiet else logging.DEBUG if options.verbose else logging.INFO


def _allow_many_connections() -> None:
    """Raise the limit on open files to the maximum: many shells start with 1,024, and each client needs one."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, opened before the model is loaded so that a used port is reported at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
        ) from error


async def serve(
    settings: ServerSettings,
    backend: RemoteBackend | ReplicaBackend | None,
    diffusion_backend: DiffusionBackend | None,
    listener: socket.socket,
    drain_s: float,
) -> int:
    """Serve until SIGINT or SIGTERM, then finish the running answers; return the exit status."""
    import uvicorn

    from tilewright.server.api.handler import ApiHandler
    from tilewright.server.http.app import create_app
    from tilewright.server.http.connections import server_config
    from tilewright.server.replicas.backend import ReplicaBackend

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the handlers below end the engine too

    backends = [] if backend is None else [backend]
    handler = ApiHandler(settings, backends, [] if diffusion_backend is None else [diffusion_backend])
    # uvicorn cancels remaining requests, a little after the handler has sent errors for them.
    options = {"timeout_graceful_shutdown": round(drain_s + FINAL_ERRORS_S)}
    server = Server(server_config(create_app(handler), settings, handler.metrics, **options))
    loop = asyncio.get_running_loop()

    def end() -> None:
        if not server.should_exit:
            _log.info("shutting down: finishing the running answers")
            loop.call_later(drain_s, handler.shut_down)
        else:  # a second signal ends the answers too, and after a moment the clients that do not read the error
            _log.info("shutting down at once: running answers end with an error")
            handler.shut_down()
            loop.call_later(FINAL_ERRORS_S, setattr, server, "force_exit", True)
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    if isinstance(backend, ReplicaBackend):
        loop.add_signal_handler(signal.SIGHUP, backend.replace_all)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    num_keys = len(settings.api_keys)
    if num_keys:
        _log.info("clients must send %s", "the API key" if num_keys == 1 else f"one of {num_keys} API keys")
    elif settings.allowed_hosts == ():
        _log.warning("anyone who can reach %s can use it: no API key is set", url)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(_started(backend))
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            names = " and ".join(model["id"] for model in handler.model_objects())
            _log.info("%s is ready: the web page is at %s/, the API answers at %s/v1", names, url, url)
        await serving
    except ProcessRefused as error:
        server.should_exit = True
        await serving
        raise RequestError(str(error)) from error
    finally:
        starting.cancel()
        await handler.close()
        if backend is not None:
            await backend.close()
    return 0


async def _started(backend: RemoteBackend | ReplicaBackend | None) -> None:
    """Start the engine and wait until it is ready; return at once if there is none."""
    if backend is not None:
        await backend.start()
