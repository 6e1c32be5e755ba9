import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for update_setup


@pytest.fixture(autouse=True)
def _no_silent_broadcast():
    with jax.numpy_rank_promotion("raise"):
        yield
