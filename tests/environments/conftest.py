import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # environments that processes import by name

if (
    importlib.util.find_spec("verifiers") is None
):  # `make test`; in the environment of `make test-environments` it is there
    collect_ignore_glob = ["test_*.py"]
