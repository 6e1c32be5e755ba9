"""A real OpenEnv server: guess a number, `openenv_server.py <port>`."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Hint(Observation):
    text: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number = random.Random(seed).randrange(10**6)
        self._state = State(step_count=0)
        return Hint(text=f"a number that ends in {self._number % 1000:03}", done=False)

    def step(self, action, **kwargs):
        if action.text == "cheat":
            return Hint(text=str(self._number), reward=0.0, done=False)
        if action.text == "break":
            raise ValueError("broken")
        right = action.text == str(self._number)
        return Hint(text="right" if right else "wrong", reward=float(right), done=True)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
