"""A reverse proxy with TLS that shows a local server below a path, as nginx does."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, ssl.SSLError):
        while content := await source.read(1 << 16):
            target.write(content)
            await target.drain()
    target.close()


class Proxy:
    """Passes every request on, without its prefix and with the header that names the prefix.

    Attributes:
        port: The port of the proxy.
    """

    def __init__(self, folder: Path, host: str, prefix: str, target: int) -> None:
        self.prefix, self.target, self.port = prefix, target, 0
        self._tasks: set[asyncio.Task[None]] = set()
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={host}"]
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate, key)

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        """Serve requests until an event."""
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").removesuffix("\r\n\r\n")
            first, *fields = head.split("\r\n")
            method, path, version = first.split(" ")
            assert path.startswith(self.prefix), path
            # One request for each connection, unless it becomes a websocket.
            if "upgrade: websocket" not in head.lower():
                fields = [each for each in fields if not each.lower().startswith("connection:")]
                fields.append("Connection: close")
            inner, outer = await asyncio.open_connection("127.0.0.1", self.target)
            place = path.removeprefix(self.prefix) or "/"
            lines = [f"{method} {place} {version}", f"X-Forwarded-Prefix: {self.prefix}", *fields]
            outer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            await asyncio.gather(_copy(reader, outer), _copy(inner, writer))
        writer.close()


@contextmanager
def start_proxy(folder: Path, host: str, prefix: str, target: int) -> Iterator[Proxy]:
    """Start a proxy in a thread.

    Args:
        folder: Where its certificate is written.
        host: The host name that users type.
        prefix: The path below which it shows the server.
        target: The port of the server.
    """
    proxy = Proxy(folder, host, prefix, target)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(proxy.serve(ready, stop),))
    thread.start()
    try:
        assert ready.wait(30)
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
