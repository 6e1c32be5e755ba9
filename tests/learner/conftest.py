import sys
from pathlib import Path

import jax
import pytest

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.server import start_server

sys.path.insert(0, str(Path(__file__).parent))  # for update_setup


@pytest.fixture(autouse=True)
def _no_silent_broadcast():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    started = start_server(tmp_path_factory.mktemp("redis"), RedisConfig())
    yield started
    started.stop()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("jit")


@pytest.fixture(scope="module")
def compile_once(compiled):
    """Every learner compiles the same step; later ones find it on disk."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(compiled))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
