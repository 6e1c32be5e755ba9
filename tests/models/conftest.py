import sys
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parent))  # hf_setup, whose checkpoints several tests share


@pytest.fixture(autouse=True)
def _no_silent_broadcast():
    with jax.numpy_rank_promotion("raise"):
        yield
