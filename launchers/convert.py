"""asyncrl-convert: weights between Hugging Face directories and runs, and from dense models to mixtures of experts.

asyncrl-convert --source=SmolLM2 --output=SmolLM2-4x --upcycle=4     dense to experts
asyncrl-convert --source=runs/latest --output=exported               a run's newest version to Hugging Face
asyncrl-convert --source=exported --output=weights --publish         Hugging Face to a published version 0
"""

from pathlib import Path

from absl import flags

from asyncrl_jax.flags import exit_with, run_words

_SOURCE = flags.DEFINE_string("source", None, "Hugging Face directory, or directory of a run.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write.", required=True)
_VERSION = flags.DEFINE_integer("version", -1, "Published version of the run to read; -1: the newest.")
_CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "Read the checkpoint of this update instead; -1: the newest.")
_PUBLISH = flags.DEFINE_boolean("publish", False, "Write a published version 0 instead of a Hugging Face directory.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the weights in a Hugging Face directory.")
_TOKENIZER = flags.DEFINE_string("tokenizer_from", None, "Hugging Face directory whose tokenizer is taken along.")
_UPCYCLE = flags.DEFINE_integer("upcycle", 0, "Experts to make of each dense MLP; 0: none.")
_EXPERTS_PER_TOKEN = flags.DEFINE_integer("experts_per_token", 2, "Experts that serve a token, with --upcycle.")
_NOISE = flags.DEFINE_float("noise", 0.0, "Relative noise on the experts, with --upcycle.")
_SEED = flags.DEFINE_integer("seed", 0, "Of router and noise, with --upcycle.")


def main(argv: list[str]) -> None:
    """Reads, changes and writes."""
    if len(argv) > 1:
        exit_with(f"unexpected argument {argv[1]!r}: everything is given as --name=value")
    from asyncrl_jax.learner.convert import publish_weights, read_weights  # JAX: after the flags are known to be right
    from asyncrl_jax.models import save_params, upcycle

    source, output = Path(_SOURCE.value), Path(_OUTPUT.value)
    try:
        model, params = read_weights(source, version=_VERSION.value, checkpoint=_CHECKPOINT.value)
        if _UPCYCLE.value:
            experts = _UPCYCLE.value, _EXPERTS_PER_TOKEN.value
            params, model = upcycle(params, model, *experts, _SEED.value, noise=_NOISE.value)
        if _PUBLISH.value:
            publish_weights(output, model, params)
        else:
            is_hf = not (source / "weights").is_dir() and not (source / "checkpoints").is_dir()
            tokenizer = _TOKENIZER.value or (source if is_hf else None)
            save_params(model, params, output, dtype=_DTYPE.value, tokenizer_from=tokenizer)
    except ValueError as error:
        exit_with(str(error))


def run() -> None:
    """Console entry point."""
    run_words(main)


if __name__ == "__main__":
    run()
