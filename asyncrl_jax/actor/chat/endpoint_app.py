"""Routes of the recording endpoint. See `endpoint`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from asyncrl_jax.actor.chat.endpoint import (
    MAX_BODY_BYTES,
    Endpoint,
    RefusedRequest,
    as_stream,
    chat_body,
    completion_body,
)
from asyncrl_jax.actor.chat.tool_calls import is_plain

CLOSE_LIMIT_S = 2  # for answers under way when the endpoint ends; one that waits for its client is cut off
HEAD_LIMIT_S = 30.0  # for a client to say what its first request is
BODY_LIMIT_S = 60.0  # for a client to send all of its request


class _Connection(H11Protocol):
    """Is closed if no request comes, and not taken where there are as many as the process can spare files for.

    So whoever has no key can keep nothing of the actor's for long.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self.loop.call_later(HEAD_LIMIT_S, self._end_unasked)

    def _end_unasked(self) -> None:
        asked: Any = self.cycle  # None before the first request, whatever its annotation says
        if asked is None:
            self.transport.abort()


def most_connections() -> int:
    """Half of the files that the process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class _Server(uvicorn.Server):
    """Leaves signals to the process that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: FastAPI) -> uvicorn.Server:
    """A server that runs inside another program's event loop."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        log_level="warning",
        lifespan="off",
        access_log=False,
        timeout_graceful_shutdown=CLOSE_LIMIT_S,
    )
    return _Server(config)


def make_app(endpoint: Endpoint) -> FastAPI:
    """The application that serves an endpoint's conversations."""
    app = FastAPI(title="asyncrl recording endpoint", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RefusedRequest)
    async def refused(_request: Request, error: RefusedRequest) -> Response:
        kind = "authentication_error" if error.status == 401 else "invalid_request_error"
        return _json({"error": {"message": str(error), "type": kind}}, error.status)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        endpoint.find(request.headers.get("authorization", ""))
        return {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "asyncrl"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        conversation = endpoint.find(request.headers.get("authorization", ""))
        body = await _read(request)
        messages, tools = body.get("messages"), body.get("tools") or []
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise RefusedRequest(400, "messages is a list of objects")
        if not isinstance(tools, list) or not all(map(_is_tool, tools)):
            raise RefusedRequest(400, "tools is a list of objects, each with a function that has a name")
        return _respond(
            chat_body(await conversation.chat(messages, tools, _max_tokens(body)), offered=bool(tools)), body
        )

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        conversation = endpoint.find(request.headers.get("authorization", ""))
        body = await _read(request)
        if not isinstance(body.get("prompt"), str):
            raise RefusedRequest(400, "prompt is one string")
        return _respond(completion_body(await conversation.complete(body["prompt"], _max_tokens(body))), body)

    return app


async def _read(request: Request) -> dict[str, Any]:
    """The body, checked.

    Raises:
      RefusedRequest: if it is too large, no JSON object, or asks for several answers.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise RefusedRequest(413, f"more than {MAX_BODY_BYTES} bytes")
        body = json.loads(bytes(data))
    except TimeoutError:
        raise RefusedRequest(408, f"the request did not come within {BODY_LIMIT_S:g} s") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, RefusedRequest):
            raise
        raise RefusedRequest(400, f"not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedRequest(400, "the body is an object")
    if not is_plain(body):
        raise RefusedRequest(400, "the body has half a character, or is nested too deeply")
    if body.get("n") not in (None, 1):
        raise RefusedRequest(400, f"n={body['n']!r:.40}: one answer a request; groups are made by the run")
    return body


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _max_tokens(body: dict[str, Any]) -> int:
    """Most tokens of the answer; 0 if the request does not say."""
    value = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RefusedRequest(400, f"max_tokens={value!r:.40} is no number of tokens")
    return value


def _respond(body: dict[str, Any], asked: dict[str, Any]) -> Response:
    if asked.get("stream"):
        return StreamingResponse(as_stream(body), media_type="text/event-stream")
    return _json(body, 200)


def _json(body: dict[str, Any], status: int) -> Response:
    """In ASCII: the policy may write what UTF-8 can't carry."""
    return Response(json.dumps(body), status, media_type="application/json")
