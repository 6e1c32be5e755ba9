import pytest

from asyncrl_jax.actor.chat.tool_calls import MalformedCall, ToolCall, parse_tool_calls


def test_calls_are_found_in_order_wherever_they_stand():
    text = (
        'I think. <tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call> and <tool_call>{"name": "b"}</tool_call>.'
    )
    assert parse_tool_calls(text) == [ToolCall("a", {"x": 1}), ToolCall("b", {})]


def test_text_without_calls_has_none():
    assert parse_tool_calls("The answer is 4.") == []
    assert parse_tool_calls("") == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<tool_call>{}</tool_call>", "a call is"),
        ("<tool_call>[1]</tool_call>", "a call is"),
        ("<tool_call></tool_call>", "not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ('<tool_call>{"name": 3}</tool_call>', "a call is"),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "object"),
        ('<tool_call>{"name": "a"}', "no </tool_call>"),
    ],
)
def test_what_was_meant_as_a_call_and_is_none_says_why(body, problem):
    (call,) = parse_tool_calls(body)
    assert isinstance(call, MalformedCall)
    assert problem in call.problem


def test_a_call_that_never_ends_does_not_hide_the_next_one():
    first, second = parse_tool_calls('<tool_call>{"name": <tool_call>{"name": "b"}</tool_call>')
    assert isinstance(first, MalformedCall)
    assert second == ToolCall("b", {})
