"""Trains a mixture-of-experts language model: one config, one command.

    python train.py configs/quickstart.yaml
    python train.py configs/quickstart.yaml run_dir=runs/wide training.steps=200 moe.num_experts=32
    python train.py --help

Give the same command again after an interruption and the run continues; a finished run prints its summary. A recipe to copy
and edit: what is reusable is in `moejax.training`.
"""

import sys

import jax

from moejax.checkpoint import Checkpoints
from moejax.config import Config
from moejax.config_load import help_text, load
from moejax.data import open_dataset, train_iterator
from moejax.mesh import make_mesh
from moejax.training.compiling import compile_step, use_compile_cache
from moejax.training.errors import one_line_errors
from moejax.training.finish import finish
from moejax.training.loop import fit
from moejax.training.metrics import MetricLog, Progress
from moejax.training.report import summary_text
from moejax.training.run import RunFolder
from moejax.training.state import abstract_state, create_state, make_skeleton, parameter_counts, with_vocabulary
from moejax.training.step import make_step, needs_counting_pass, place_batch, split_batch


def main(arguments: list[str]) -> int:
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(f"{__doc__}\n{help_text()}")
        return 0 if arguments else 2
    path, *overrides = arguments
    with one_line_errors() as outcome:
        config = load(path, overrides)
        with RunFolder(config) as run:
            summary = run.summary()
            if summary and summary["steps"] >= config.training.steps:
                print(f"{run.path} has finished:\n{summary_text(summary)}\nreport: {run.path / 'report.html'}")
            else:
                with jax.set_mesh(make_mesh(config.mesh, config.moe.num_experts, axis_type=jax.sharding.AxisType.Auto)):
                    train(run, config)
    return outcome.exit_code


def train(run: RunFolder, config: Config) -> None:
    mesh = jax.sharding.get_mesh()
    dataset = open_dataset(config.data)
    run.keep_data(dataset)
    config = with_vocabulary(config, dataset.vocab_size)
    batches = train_iterator(dataset, config)
    use_compile_cache(config)
    skeleton = make_skeleton(config)

    # Where to start: at the newest checkpoint, or at the beginning.
    checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous)
    finished = checkpoints.latest()
    if finished is None:
        state = create_state(config, mesh)
    else:
        state, position = checkpoints.restore(abstract_state(config, mesh))
        batches.set_state(position)
        print(f"continuing {run.path} from step {finished}")

    total, active = parameter_counts(state.params, config)
    print(f"{total:,} parameters, {active:,} active per token; {mesh.size} {jax.default_backend()} device(s)")
    if needs_counting_pass(config):
        print("moe.balance.aux_scope=global with micro-batches: one more forward pass per step counts the experts")
    example = split_batch(next(train_iterator(dataset, config)), config.training.micro_batches)
    step, products = compile_step(make_step(skeleton, config), state, place_batch(example, mesh))
    print("expert products in the step:", ", ".join(f"{count} {precision}" for precision, count in products.items()))

    log = MetricLog(run.path, finished=finished or 0, tensorboard=config.log.tensorboard)
    progress = Progress(config.training.steps, finished or 0, config.log.every_steps)
    trained = fit(state, step, batches, checkpoints, log, progress, config, mesh)
    log.close()
    checkpoints.close()
    if trained is not None:
        finish(run, config, dataset, skeleton, trained)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
