"""The reverse proxies of docs/deploy.md, by the files of deploy/: only addresses and paths are replaced in them."""

import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import time

import pytest
from sources import ROOT
from test_guard import BODY, FORM, FORM_TYPE, send

from tilewright.server.http.guard import Guard
from tilewright.server.http.settings import ServerSettings

NAME = "llm.example.org"
NGINX = """
daemon off;
master_process off;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    {temporary}
    include {site};
}}
"""
CADDY = """
{{
    admin off
    local_certs
    skip_install_trust
    auto_https disable_redirects
    default_bind 127.0.0.1
    https_port {port}
    storage file_system {folder}
    servers {{
        protocols h1 h2
    }}
}}
import {site}
"""


def program(name):
    """Its path; skips the test where it is missing, but not in continuous integration."""
    path = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    if path is None:
        message = f"there is no {name} here"
        pytest.skip(message) if os.environ.get("CI", "").lower() in ("", "0", "false") else pytest.fail(message)
    return path


def replaced(file, **parts):
    """The text of a file of deploy/ with parts of it replaced, each of which is there."""
    text = (ROOT / "deploy" / file).read_text()
    for old, new in parts.items():
        assert old in text
        text = text.replace(old, new)
    return text


def nginx(folder, port, server_port):
    """(command, certificate that it shows)"""
    path = program("nginx")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}", "-days", "2", "-nodes"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command = [program("openssl"), "req", "-x509", *curve, *subject, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    site = folder / "site.conf"
    site.write_text(
        replaced(
            "nginx.conf",
            **{
                "listen 443 ": f"listen 127.0.0.1:{port} ",
                "http://127.0.0.1:8000;": f"http://127.0.0.1:{server_port};",
                f"/etc/letsencrypt/live/{NAME}/fullchain.pem": str(certificate),
                f"/etc/letsencrypt/live/{NAME}/privkey.pem": str(key),
            },
        )
    )
    built = subprocess.run([path, "-V"], capture_output=True, text=True, timeout=60).stderr
    modules = [name for name in ("fastcgi", "uwsgi", "scgi") if f"--without-http_{name}_module" not in built]
    temporary = [f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", *modules)]
    main = folder / "nginx.conf"
    main.write_text(NGINX.format(folder=folder, temporary=" ".join(temporary), site=site))
    return [path, "-e", "stderr", "-c", str(main)], certificate


def caddy(folder, port, server_port):
    site, main = folder / "site", folder / "Caddyfile"
    site.write_text(
        replaced("Caddyfile", **{"reverse_proxy 127.0.0.1:8000 ": f"reverse_proxy 127.0.0.1:{server_port} "})
    )
    main.write_text(CADDY.format(folder=folder, port=port, site=site))
    return [
        program("caddy"),
        "run",
        "--adapter",
        "caddyfile",
        "--config",
        str(main),
    ], folder / "pki/authorities/local/root.crt"


class Proxy:
    """A proxy that runs in front of a server, and connections to it."""

    def __init__(self, process, port, certificate):
        self.process = process
        self.port = port
        self.certificate = certificate

    def connect(self):
        context = ssl.create_default_context(cafile=self.certificate)
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        try:
            return context.wrap_socket(plain, server_hostname=NAME)
        except BaseException:
            plain.close()
            raise

    def wait(self):
        """Returns when it answers."""
        ends_s = time.monotonic() + 30
        while True:
            try:
                self.connect().close()
                return
            except (OSError, ssl.SSLError):  # Caddy makes its certificate first
                assert time.monotonic() < ends_s and self.process.poll() is None, "the proxy does not start"
                time.sleep(0.05)

    def request(self, path, body=None, *, content_type="application/json", method=None, host=None, **headers):
        """The response, of which the head is read."""
        connection = http.client.HTTPSConnection(NAME, self.port, timeout=60)
        connection.sock = self.connect()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"host": host or f"{NAME}:{self.port}", "content-type": content_type, **named}
        connection.request(method or ("GET" if body is None else "POST"), path, body, named)
        return connection.getresponse()


@contextlib.contextmanager
def running_proxy(make, folder, server_url):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command, certificate = make(folder, port, int(server_url.rsplit(":", 1)[1]))
    environment = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    proxy = Proxy(process, port, certificate)
    try:
        proxy.wait()
        yield proxy
    except BaseException:
        print((folder / "log").read_text())
        raise
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("make", [nginx, caddy])
def test_a_proxy_with_tls_in_front(held, tmp_path, monkeypatch, make):
    settings = ServerSettings(allowed_hosts=(NAME,))
    running, backend = held(settings=settings)
    seen = []
    check_host = Guard._check_host
    monkeypatch.setattr(
        Guard, "_check_host", lambda guard, headers: (seen.append(headers), check_host(guard, headers))[1]
    )
    with running_proxy(make, tmp_path, running.url) as proxy:
        # The page of the server, which sends its own origin; those of others, and the monitors of this machine.
        assert proxy.request("/").status == 200
        own, other = f"https://{NAME}:{proxy.port}", "https://else.example"
        for origin, site, status in (
            (own, "same-origin", 400),
            (own, None, 400),
            (other, "cross-site", 403),
            (other, None, 403),
        ):
            headers = {"origin": origin, **({"sec_fetch_site": site} if site else {})}
            response = proxy.request("/v1/audio/transcriptions", FORM, content_type=FORM_TYPE, **headers)
            assert (response.status, "origin_not_allowed" in response.read().decode()) == (status, status == 403)
        assert proxy.request("/metrics").status == 403
        assert send(f"{running.url}/metrics")[0] == 200 and send(f"{running.url}/health", host="localhost")[0] == 200

        # Tokens come one by one: the second piece is held back until the first is here.
        stream = proxy.request("/v1/chat/completions", json.dumps({**BODY, "stream": True}))
        text = ""
        while "Hello" not in text:
            text += stream.readline().decode()
        assert "there" not in text
        backend.release()
        assert "there" in stream.read().decode()

        # A body of the size that the server takes, which reads it whole and finds no JSON; and no more.
        size = settings.max_body_bytes
        response = proxy.request("/v1/completions", b"x" * size)
        assert response.status == 400 and "not JSON" in response.read().decode()
        if make is nginx:  # Caddy holds a head back until its body begins, and here none comes
            assert proxy.request("/v1/completions", method="POST", content_length=str(size + 1)).status == 413

        # A protocol that a later version may switch to: the question passes, the answer is a plain one today.
        upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec_websocket_version": "13"}
        assert proxy.request("/health", **upgrade).status == 200
        assert seen[-1]["upgrade"] == "websocket" and seen[-1]["connection"].lower() == "upgrade"
        assert seen[-1]["x-forwarded-proto"] == "https" and seen[-1]["host"] == f"{NAME}:{proxy.port}"
