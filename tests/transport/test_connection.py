"""Connecting: an outage is waited out and named; everything else is one clear line, without the password."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import traceback
from collections.abc import Iterator

import pytest

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.connection import RedisUnavailable, connect

SECRET = "s3cret-that-must-not-show"


@contextlib.contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """URL of a server that gives one answer to everything."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer:
                    while peer.recv(4096):
                        peer.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        listener.shutdown(socket.SHUT_RDWR)


def refused(url: str, password: str | None = None, outage_s: float = 0.3) -> str:
    with pytest.raises(RedisUnavailable) as caught:
        connect(RedisConfig(url=url, outage_s=outage_s), password)
    everything = "".join(traceback.format_exception(caught.value))
    assert SECRET not in everything
    message = str(caught.value)
    assert url in message
    assert "\n" not in message
    return message


def test_a_wrong_or_missing_password(server):
    assert "refused" in refused(server.url, SECRET)
    assert "password_file" in refused(server.url)


def test_what_is_no_redis():
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        assert "not Redis" in refused(url)


def test_a_redis_that_is_too_old():
    info = b"redis_version:5.0.14\r\n"
    with answering(b"$%d\r\n%s\r\n" % (len(info), info)) as url:
        assert "5.0.14" in refused(url)


def test_nobody_there():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        message = refused(f"redis://127.0.0.1:{unused.getsockname()[1]}/0", SECRET)
    assert "unreachable" in message


def test_no_address():
    with pytest.raises(ValueError, match=r"redis\.url"):
        connect(RedisConfig(), None)


def test_the_password_is_in_no_repr(server, run):
    assert server.password not in repr(run.client)
    assert server.password not in repr(server)
    assert server.password not in repr(run.client.connection_pool)


def test_an_outage_is_waited_out_and_named(launch, dial, caplog):
    server = launch()
    client = dial(server, outage_s=30)
    client.set("before", 1)
    server.process.kill()
    server.process.wait()
    answers: list[object] = []
    waiting = threading.Thread(target=lambda: answers.append(client.get("before")))
    with caplog.at_level(logging.WARNING):
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        launch()
        waiting.join(20)
    assert answers == [b"1"]
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"waiting for Redis at {server.url} since ")
    assert last.startswith(f"Redis at {server.url} answers again after ")


def test_an_outage_beyond_the_limit_ends_the_wait(launch, dial):
    server = launch()
    client = dial(server, outage_s=0.3)
    server.stop()
    with pytest.raises(RedisUnavailable, match="unreachable"):
        client.get("x")
