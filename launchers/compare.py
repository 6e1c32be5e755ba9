"""asyncrl-compare: two runs side by side, as tables and as a picture."""

import sys
from pathlib import Path

from absl import flags as absl_flags

from asyncrl_jax.exit_codes import FINISHED, USER_ERROR
from asyncrl_jax.flags import check_output, run_words

_OUTPUT = absl_flags.DEFINE_string("output", "compare.png", "Picture to write; empty for none.")


def main(argv: list[str]) -> int:
    """Compares the two run directories named on the command line."""
    if len(argv) != 3:
        print("usage: asyncrl-compare RUN_DIR RUN_DIR [--output=compare.png]", file=sys.stderr)
        return USER_ERROR
    from rich.console import Console

    from asyncrl_jax.observe import compare

    try:
        check_output(_OUTPUT.value)
        first, second = (compare.read_run(Path(name)) for name in argv[1:])
    except ValueError as error:
        print(f"asyncrl-compare: error: {error}", file=sys.stderr)
        return USER_ERROR
    compare.print_comparison(Console(), first, second)
    if _OUTPUT.value:
        compare.draw(first, second).savefig(_OUTPUT.value, dpi=110)
        print(_OUTPUT.value)
    return FINISHED


def run() -> None:
    """Console entry point."""
    run_words(main)


if __name__ == "__main__":
    run()
