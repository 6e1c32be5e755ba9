"""Tools of a real MCP server that the test starts."""

import asyncio
import collections
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl_jax.actor.chat.tool_calls import ToolCall
from asyncrl_jax.actor.tools.base import ToolBroken, ToolFailed, answer_calls
from asyncrl_jax.actor.tools.mcp_client import McpServer, mcp_tools

pytest.importorskip("mcp")

COMMAND = f"{sys.executable} {Path(__file__).with_name('mcp_server.py')}"


def children():
    return [
        child for child in psutil.Process().children(recursive=True) if "mcp_server.py" in " ".join(child.cmdline())
    ]


@pytest.fixture(scope="module")
def server():
    return McpServer(COMMAND, timeout_s=2.0)


@pytest.fixture(scope="module")
def tools(server):
    return mcp_tools([server])


def play(server, coroutine):
    async def run():
        try:
            return await asyncio.wait_for(coroutine, 60)
        finally:
            await server.close()

    result = asyncio.run(run())
    assert children() == []
    return result


def test_the_servers_tools_are_offered_with_their_schemas(tools):
    assert set(tools) == {"add", "environment", "fail", "sleep", "die"}
    assert tools["add"].description == "The sum of two whole numbers."
    assert tools["add"].parameters["properties"]["a"]["type"] == "integer"
    assert children() == []


def test_calls_are_answered_checked_and_counted_like_those_of_any_tool(server, tools):
    calls = [
        ToolCall("add", {"a": 2, "b": 40}),
        ToolCall("add", {"a": "two", "b": 1}),
        ToolCall("fail", {"text": "not today"}),
        ToolCall("sleep", {}),
    ]
    outcomes = collections.Counter()
    answers = play(
        server, answer_calls(calls, tools, max_calls=9, timeout_s=0.1, max_characters=1000, outcomes=outcomes)
    )
    (added, _), (wrong, _), (failed, _), (late, _) = answers
    assert added.content == "42"
    assert "argument 'a' is a integer" in wrong.content
    assert "error: " in failed.content  # what the tool raised stays on the server
    assert "no answer within 2 s" in late.content
    assert [right for _, right in answers] == [True, False, False, False]
    assert outcomes == {"add/ok": 1, "add/wrong_call": 1, "fail/failed": 1, "sleep/timeout": 1}


def test_nothing_of_the_actors_environment_reaches_the_server(server, tools, monkeypatch):
    monkeypatch.setenv("ASYNCRL_REDIS_PASSWORD", "hidden")
    assert "hidden" not in play(server, tools["environment"].call({}))


def test_a_server_that_dies_is_the_tools_fault_and_is_started_again(server, tools):
    async def script():
        with pytest.raises(ToolBroken):
            await tools["die"].call({})
        with pytest.raises(ToolFailed, match="x"):
            await tools["fail"].call({"text": "x"})
        return await tools["add"].call({"a": 1, "b": 1})

    assert play(server, script()) == "2"


@pytest.fixture(scope="module")
def rough():
    server = McpServer(f"{sys.executable} {Path(__file__).with_name('rough_mcp_server.py')}", timeout_s=2.0)
    return server, mcp_tools([server])


@pytest.mark.parametrize(("tool", "says"), [("no_content", "content"), ("other_than_it_said", "tructured")])
def test_an_answer_that_is_none_is_the_servers_fault_and_named(rough, tool, says):
    server, tools = rough
    outcomes = collections.Counter()
    options = {"max_calls": 1, "timeout_s": 1.0, "max_characters": 1000, "outcomes": outcomes}

    async def script():
        with pytest.raises(ToolBroken, match=says):
            await answer_calls([ToolCall(tool, {})], tools, **options)
        return await answer_calls([ToolCall("noisy", {"anything": [1]})], tools, **options)

    assert [message.content for message, _ in play(server, script())] == ["fine"]


def test_a_call_that_is_given_up_while_the_server_starts_leaves_the_connection_to_the_next():
    server = McpServer(f"{sys.executable} {Path(__file__).with_name('rough_mcp_server.py')} 1.0", timeout_s=2.0)

    async def script():
        given_up = asyncio.create_task(server.call("noisy", {}))
        await asyncio.sleep(0.3)
        next_one = asyncio.create_task(server.call("noisy", {}))
        await asyncio.sleep(0.1)
        given_up.cancel()
        return await next_one, await server.call("noisy", {}), len(children())

    assert play(server, script()) == ("fine", "fine", 1)


def test_a_call_of_a_connection_that_has_ended_leaves_the_next_connection_alone(server, tools):
    async def script():
        dying, late = await asyncio.gather(
            *(asyncio.create_task(tools[name].call({})) for name in ("die", "sleep")), return_exceptions=True
        )
        _, holding = await server._connected()
        for _ in range(3):
            await server._disconnect(asyncio.create_task(asyncio.sleep(0)))  # as a call of the ended one would
        return type(dying), type(late), holding.done(), await tools["add"].call({"a": 1, "b": 1})

    assert play(server, script()) == (ToolBroken, ToolBroken, False, "2")


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"tools.mcp=no-such-program"):
        McpServer("no-such-program --x").list_tools()
    with pytest.raises(ValueError, match=r"tools.mcp=.*exit"):
        McpServer(f"{sys.executable} -c 'exit(3)'").list_tools()


def test_two_servers_with_one_tool_are_refused():
    with pytest.raises(ValueError, match="another server offers"):
        mcp_tools([McpServer(COMMAND), McpServer(COMMAND)])
