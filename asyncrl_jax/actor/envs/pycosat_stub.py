"""Lets reasoning-gym be imported without its SAT solver, which has no wheel: import this before it.

It imports all of its tasks at once. Those that need the solver (zebra puzzles, of the ones here) fail when asked for.
"""

import importlib.util
import sys
import types

if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
    sys.modules["pycosat"] = types.ModuleType("pycosat")
