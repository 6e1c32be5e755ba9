"""Agents written against the official client, served by a policy that says given turns."""

import asyncio
import json
import threading

import numpy as np
import pytest

from asyncrl_jax.actor.chat import endpoint_app
from asyncrl_jax.actor.chat.endpoint import Answer, Endpoint
from asyncrl_jax.actor.chat.formats import ByteFormat
from asyncrl_jax.actor.chat.tokenizer import ByteTokenizer
from asyncrl_jax.actor.envs.agent import AgentEnvironments, agent_program
from asyncrl_jax.actor.episode import EpisodeConfig, EpisodeFailed, run_episode
from asyncrl_jax.config import EnvironmentConfig, RewardConfig
from asyncrl_jax.types import FinishReason, Task
from tests.actor.scripted import ScriptedPolicy

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

END = ByteTokenizer.TURN_END
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def chat_agent(seed, level, split, base_url, api_key):
    """Asks twice; the second question carries what was answered to the first."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": f"level {level}"}]
        first = await client.chat.completions.create(model="policy", messages=messages)
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "sure?"}]
        second = await client.chat.completions.create(model="policy", messages=messages, temperature=0.0)
        assert second.usage.completion_tokens == 4
        return float(second.choices[0].message.content == "yes")


def blocking_agent(seed, level, split, base_url, api_key):
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        stream = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "?"}], stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        return float(text == "yes")


async def tool_agent(seed, level, split, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": "add"}]
        asked = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        (call,) = asked.choices[0].message.tool_calls
        assert asked.choices[0].finish_reason == "tool_calls"
        result = str(json.loads(call.function.arguments)["a"] + 1)
        messages += [asked.choices[0].message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result}]
        done = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        return float(done.choices[0].message.content == "2")


async def completion_agent(seed, level, split, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        prompt = "1+1="
        answer = await client.completions.create(model="policy", prompt=prompt)
        prompt += answer.choices[0].text + ";2+2="
        answer = await client.completions.create(model="policy", prompt=prompt)
        return float(answer.choices[0].text == "4")


async def rewriting_agent(seed, level, split, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "b"}])
        return 1.0


async def silent_agent(seed, level, split, base_url, api_key):
    return 1.0


async def broken_agent(seed, level, split, base_url, api_key):
    raise KeyError("lost")


async def lying_agent(seed, level, split, base_url, api_key):
    await chat_agent(seed, level, split, base_url, api_key)
    return float("nan")


async def tireless_agent(seed, level, split, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": "?"}]
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]


async def short_agent(seed, level, split, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": "?"}]
        cut = await client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
        assert cut.choices[0].finish_reason == "length"
        messages += [cut.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        whole = await client.chat.completions.create(model="policy", messages=messages)
        return float((cut.choices[0].message.content, whole.choices[0].message.content) == ("abc", "yes"))


def _play(agent, *turns, max_turns=5, max_tokens=2000):
    async def main():
        endpoint = Endpoint("127.0.0.1", 0)
        source = AgentEnvironments(agent_program(f"{__name__}:{agent.__name__}"), 3, ByteFormat(), endpoint)
        policy = ScriptedPolicy(*[(*turn.encode(), END) for turn in turns])
        environment = EnvironmentConfig(max_turns=max_turns, max_tokens=max_tokens, call_timeout_s=20.0)
        config = EpisodeConfig(environment, RewardConfig())
        try:
            task = Task(source.name, "train", 2, 0)
            return await run_episode(policy, source(), task, seed=0, temperature=1.0, config=config), policy
        finally:
            await endpoint.close()
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert [task.get_name() for task in left if "agent" in task.get_name()] == []

    return asyncio.run(main())


def test_an_agent_is_trained_on_exactly_the_tokens_it_caused():
    trajectory, policy = _play(chat_agent, "maybe", "yes")
    heard = [ByteTokenizer().decode(tokens) for tokens in policy.heard]
    assert "user\nlevel 2" in heard[0]
    assert "user\nsure?" in heard[1]
    assert "level" not in heard[1]  # what was said is not said again
    sampled = trajectory.tokens[trajectory.loss_mask == 1].tolist()
    assert sampled == [*b"maybe", END, *b"yes", END]
    assert np.all(trajectory.behaviour_logprobs[trajectory.loss_mask == 1] == -np.array(sampled))
    assert trajectory.success
    assert trajectory.finish_reason == FinishReason.ANSWERED
    assert trajectory.reward_parts.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_a_blocking_client_and_a_stream_will_do():
    trajectory, _ = _play(blocking_agent, "yes")
    assert trajectory.success


NUM_TOGETHER = 48  # more than a pool of threads has
_together = threading.Barrier(NUM_TOGETHER, timeout=20)


def patient_agent(seed, level, split, base_url, api_key):
    """Goes on when all are there."""
    _together.wait()
    return blocking_agent(seed, level, split, base_url, api_key)


def test_orch_06_blocking_agents_wait_neither_for_each_other_nor_does_the_actor_for_them():
    async def run():
        endpoint = Endpoint("127.0.0.1", 0)
        try:
            source = AgentEnvironments(agent_program(f"{__name__}:patient_agent"), 3, ByteFormat(), endpoint)
            task = Task(source.name, "train", 2, 3)
            config = EpisodeConfig(EnvironmentConfig(max_tokens=2000), RewardConfig())
            playing = [
                run_episode(ScriptedPolicy((*b"yes", END)), source(), task, seed=0, temperature=1.0, config=config)
                for _ in range(NUM_TOGETHER)
            ]
            everyone = asyncio.gather(*playing)
            await asyncio.sleep(0.2)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 5) == "free"
            return await everyone
        finally:
            await endpoint.close()

    assert all(trajectory.success for trajectory in asyncio.run(run()))


def test_tools_are_offered_called_and_answered_as_the_client_knows_it():
    trajectory, policy = _play(tool_agent, CALL, "2")
    assert trajectory.success
    assert "add" in ByteTokenizer().decode(policy.heard[0])
    assert "tool\n2" in ByteTokenizer().decode(policy.heard[1])


def test_tok_04_an_end_of_turn_that_was_not_sampled_is_forced_and_not_trained_on():
    trajectory, policy = _play(short_agent, "abcdef", "yes")
    assert trajectory.success
    assert policy.heard[1][0] == END
    sampled = trajectory.tokens[trajectory.loss_mask == 1].tolist()
    assert sampled == [*b"abc", *b"yes", END]


def test_text_completions_grow_too():
    trajectory, policy = _play(completion_agent, "2", "4")
    assert trajectory.success
    assert policy.heard[1] == tuple(b";2+2=")


@pytest.mark.parametrize(
    ("agent", "complaint"),
    [
        (rewriting_agent, "do not begin with what was said"),
        (silent_agent, "without asking the policy"),
        (broken_agent, "lost"),
        (lying_agent, "no reward"),
    ],
)
def test_env_01_an_agent_that_fails_or_lies_costs_its_episode(agent, complaint):
    with pytest.raises(EpisodeFailed, match=complaint):
        _play(agent, "yes", "yes", "yes")


def test_an_agent_that_never_ends_is_ended_by_the_budget_of_turns_or_tokens():
    trajectory, policy = _play(tireless_agent, *["go on"] * 9, max_turns=3)
    assert trajectory.finish_reason == FinishReason.MAX_TURNS
    assert policy.num_open == 0
    trajectory, _ = _play(tireless_agent, *["go on"] * 9, max_tokens=60, max_turns=9)
    assert trajectory.finish_reason == FinishReason.LENGTH


def test_nobody_without_the_key_of_a_running_episode_is_served():
    async def main():
        endpoint = Endpoint("127.0.0.1", 0)
        await endpoint.start()
        with endpoint.conversation() as conversation:
            key = conversation.key
        body = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
        async with httpx.AsyncClient(base_url=endpoint.base_url) as client:
            statuses = []
            for headers in ({}, {"authorization": "Bearer x"}, {"authorization": f"Bearer {key}"}):
                statuses.append((await client.post("/chat/completions", json=body, headers=headers)).status_code)
                statuses.append((await client.get("/models", headers=headers)).status_code)
        await endpoint.close()
        return statuses

    assert asyncio.run(main()) == [401] * 6


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("chat/completions", b"{", 400),
        ("chat/completions", b"[1]", 400),
        ("chat/completions", b'{"messages": "hi"}', 400),
        ("chat/completions", b'{"messages": [{"role": "king", "content": "x"}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": 7}]}', 400),
        ("chat/completions", b'{"messages": [], "n": 4}', 400),
        ("chat/completions", b'{"messages": [], "max_tokens": "9"}', 400),
        ("chat/completions", b'{"messages": []}', 409),
        ("chat/completions", b'{"messages": [{"role": "assistant", "content": "x"}]}', 409),
        ("completions", b'{"prompt": ["a", "b"]}', 400),
        ("completions", b'{"prompt": ""}', 409),
        ("completions", b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}', 413),
        ("chat/completions", b"[" * 200_000, 400),
        ("chat/completions", b'{"messages": [], "n": "\\ud800"}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ("chat/completions", b'{"messages": [{"role": [], "content": "x"}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "x", "name": {"a": 1}}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": [1, 2]}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "tool_calls": 5}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "tool_calls": [5]}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "tool_calls": [{}]}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "tools": [5]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": true}', 400),
        ("chat/completions", b'{"messages": [], "x": ' + b"[" * 300 + b"]" * 300 + b"}", 400),
    ],
)
def test_hostile_requests_are_refused_with_a_reason(path, body, status):
    async def main():
        endpoint = Endpoint("127.0.0.1", 0)
        await endpoint.start()
        with endpoint.conversation() as conversation:
            headers = {"authorization": f"Bearer {conversation.key}"}
            async with httpx.AsyncClient(base_url=endpoint.base_url) as client:
                answer = await client.post(f"/{path}", content=body, headers=headers)
        await endpoint.close()
        return answer

    answer = asyncio.run(main())
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def _asked(*requests, said):
    """Statuses and bodies of requests to one conversation, each answered by what is said."""

    async def main():
        endpoint = Endpoint("127.0.0.1", 0)
        await endpoint.start()
        with endpoint.conversation() as conversation:

            async def answer():
                while True:
                    await conversation.next_request()
                    conversation.answer(Answer(said, "stop", 1, 1))

            answering = asyncio.create_task(answer())
            headers = {"authorization": f"Bearer {conversation.key}"}
            async with httpx.AsyncClient(base_url=endpoint.base_url, headers=headers) as client:
                answers = [await client.post(path, json=body) for path, body in requests]
            answering.cancel()
        await endpoint.close()
        return answers

    return asyncio.run(main())


def test_a_call_that_only_a_policy_could_write_is_a_text_to_the_agent():
    for call in ('{"name": "\\ud800"}', '{"name": "add", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}"):
        body = {"messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}
        (answer,) = _asked(("/chat/completions", body), said=f"<tool_call>{call}</tool_call>")
        assert answer.status_code == 200
        assert "tool_calls" not in answer.json()["choices"][0]["message"]


def test_messages_and_text_are_not_mixed_in_one_conversation():
    text = "/completions", {"prompt": "1+1="}
    chat = "/chat/completions", {"messages": [{"role": "user", "content": "?"}]}
    for requests in ([text, chat], [chat, text]):
        assert [answer.status_code for answer in _asked(*requests, said="2")] == [200, 409]


def test_a_request_that_never_comes_whole_holds_up_neither_the_others_nor_the_end(monkeypatch):
    monkeypatch.setattr(endpoint_app, "BODY_LIMIT_S", 0.2)

    async def main():
        endpoint = Endpoint("127.0.0.1", 0)
        await endpoint.start()
        port = int(endpoint.base_url.split(":")[2].split("/")[0])
        with endpoint.conversation() as conversation:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {conversation.key}\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
            first = await asyncio.wait_for(reader.readline(), 10)
            monkeypatch.setattr(endpoint_app, "BODY_LIMIT_S", 100.0)
            _, other = await asyncio.open_connection("127.0.0.1", port)
            other.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
            await asyncio.sleep(0.2)
        await asyncio.wait_for(endpoint.close(), 20)
        writer.close()
        other.close()
        return first

    assert b"408" in asyncio.run(main())


@pytest.mark.parametrize(("most", "head_limit_s"), [(5, 1000.0), (1000, 0.3)], ids=["many", "long"])
def test_connections_without_a_request_are_few_and_short(monkeypatch, most, head_limit_s):
    monkeypatch.setattr(endpoint_app, "most_connections", lambda: most)
    monkeypatch.setattr(endpoint_app, "HEAD_LIMIT_S", head_limit_s)

    async def main():
        endpoint = Endpoint("127.0.0.1", 0)
        await endpoint.start()
        port = int(endpoint.base_url.split(":")[2].split("/")[0])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        for _, writer in held[:3]:
            writer.write(b"POST /v1/chat")
        ended = [asyncio.create_task(reader.read()) for reader, _ in held]
        done, _ = await asyncio.wait(ended, timeout=2.0)
        for _, writer in held:
            writer.close()
        await asyncio.gather(*ended, return_exceptions=True)
        async with httpx.AsyncClient(base_url=endpoint.base_url) as client:
            served = (await client.get("/models")).status_code
        await endpoint.close()
        return len(done), served

    assert asyncio.run(main()) == (5 if most == 5 else 10, 401)


def test_a_port_in_use_is_an_error_and_not_a_hang():
    async def main():
        first = Endpoint("127.0.0.1", 0)
        await first.start()
        second = Endpoint("127.0.0.1", int(first.base_url.split(":")[2].split("/")[0]))
        try:
            with pytest.raises(RuntimeError, match="can't listen"):
                await second.start()
        finally:
            await first.close()

    asyncio.run(main())
