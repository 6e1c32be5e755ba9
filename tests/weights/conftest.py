import numpy as np
import pytest

from asyncrl_jax.weights.manifest import Canary


def make_params(seed: int) -> dict[str, np.ndarray]:
    """A few leaves of several ranks and dtypes, a square matrix among them."""
    rng = np.random.default_rng(seed)
    return {
        "lm_head.weight": rng.normal(size=(31, 16)).astype(np.float32),
        "model.layers.0.mlp.experts.down_proj": rng.normal(size=(4, 16, 8)).astype(np.float32),
        "model.layers.0.self_attn.q_proj.weight": rng.normal(size=(16, 16)).astype(np.float32),
        "model.norm.weight": rng.normal(size=16).astype("bfloat16"),
        "scale": np.float32(rng.normal()).reshape(()),
    }


@pytest.fixture
def params() -> dict[str, np.ndarray]:
    return make_params(0)


@pytest.fixture
def canary() -> Canary:
    rng = np.random.default_rng(1)
    return Canary(rng.integers(0, 31, (3, 6)).astype(np.int32), -rng.exponential(size=(3, 5)).astype(np.float32))


@pytest.fixture
def make():
    return make_params
