import importlib.util
import sys
from pathlib import Path

# For engine_setup and engine_contract; and for vLLM's child processes, which import the mutants by name.
sys.path[:0] = [str(Path(__file__).parents[1] / "actor"), str(Path(__file__).parent)]

if importlib.util.find_spec("vllm") is None:  # `make test`; in the environment of `make test-vllm` it is there
    collect_ignore_glob = ["test_*.py"]
