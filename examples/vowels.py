"""An agent program written against the OpenAI client: it asks for vowels, twice, and is paid by the share it gets.

It knows nothing of this project: it is given the address of an endpoint and a key, as any such agent. A model that
knows nothing either learns it from scratch in a few minutes on two CPU cores:

    PYTHONPATH=examples asyncrl-local --preset=agent    # with the extra agents, and openai

What it learns is `reward, held-out` at the end of the run: a success would be an answer of vowels only, twice.
"""

import openai

VOWELS = "aeiou"


def share_of_vowels(text: str) -> float:
    """How much of a text is vowels; nothing, of an empty one."""
    return sum(letter in VOWELS for letter in text) / max(len(text), 8)


def play(seed: int, base_url: str, api_key: str, **_task: object) -> float:
    """Asks, shows what came, asks again; the reward is the mean share of vowels in both answers."""
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": f"vowels {seed % 1000}"}]
        first = client.chat.completions.create(model="policy", messages=messages, max_tokens=8).choices[0].message
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
        second = client.chat.completions.create(model="policy", messages=messages, max_tokens=8).choices[0].message
    return (share_of_vowels(first.content) + share_of_vowels(second.content)) / 2
