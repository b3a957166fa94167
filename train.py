"""Trains a mixture-of-experts language model: one config, one command.

    python train.py configs/quickstart.yaml
    python train.py configs/quickstart.yaml run_dir=runs/wide training.steps=200 moe.num_experts=32
    python train.py --help

Give the same command again after an interruption and the run continues; a finished run prints its summary. On several
machines or GPUs, start it once per GPU (docs/distributed.md). A recipe to copy and edit: what is reusable is in
`moejax.training`.
"""

import sys

import jax

from moejax.checkpoint import Checkpoints
from moejax.config import Config
from moejax.config_load import help_text, load
from moejax.data import open_dataset, train_iterator
from moejax.data.placement import local_rows, place_batch
from moejax.distributed import exit_process, processes
from moejax.mesh_plan import config_mesh
from moejax.training.compiling import compile_step, use_compile_cache
from moejax.training.errors import one_line_errors, print_page
from moejax.training.experts_line import experts_line
from moejax.training.finish import finish
from moejax.training.loop import Interrupts, fit
from moejax.training.metrics import MetricLog, Progress
from moejax.training.report import summary_text
from moejax.training.run import RunFolder
from moejax.training.state import abstract_state, create_state, make_skeleton, parameter_counts, with_vocabulary
from moejax.training.step import make_step, needs_counting_pass, split_batch
from moejax.training.watchdog import Watchdog, watched


def main(arguments: list[str]) -> int:
    if not arguments or "-h" in arguments or "--help" in arguments:
        print_page(f"{__doc__}\n{help_text()}")
        return 0 if arguments else 2
    path, *overrides = arguments
    with one_line_errors() as outcome:
        config = load(path, overrides)
        with processes(config.distributed), watched(config.distributed) as watchdog, RunFolder(config) as run:
            summary = run.summary()
            if summary and summary["steps"] >= config.training.steps:
                print(f"{run.path} has finished:\n{summary_text(summary)}\nreport: {run.path / 'report.html'}")
            else:
                with jax.set_mesh(config_mesh(config)):
                    outcome.exit_code = train(run, config, watchdog)
    return outcome.exit_code


def train(run: RunFolder, config: Config, watchdog: Watchdog) -> int:
    """Returns the exit code: 0, or that of the signal that interrupted the run."""
    mesh = jax.sharding.get_mesh()
    dataset = open_dataset(config.data)
    run.keep_data(dataset)
    config = with_vocabulary(config, dataset.vocab_size)
    rows = local_rows(config, mesh)
    batches = train_iterator(dataset, config, rows)
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
    state = jax.block_until_ready(state)  # programs that communicate must not run side by side

    total, active = parameter_counts(state.params, config)
    devices = f"{mesh.size} {jax.default_backend()} device(s)"
    if jax.process_count() > 1:
        devices += f" of {jax.process_count()} processes"
    print(f"{total:,} parameters, {active:,} active per token; {devices}")
    print(experts_line(config, mesh))
    if needs_counting_pass(config):
        print("moe.balance.aux_scope=global with micro-batches: one more forward pass per step counts the experts")
    first = split_batch(next(train_iterator(dataset, config, rows)), config.training.micro_batches)
    example = place_batch(first, mesh, config.training.global_batch // config.training.micro_batches)
    step, products = compile_step(make_step(skeleton, config), state, example)
    counts = ", ".join(f"{count} {precision}" for precision, count in products.items())
    print(f"expert products in the step: {counts} (two forward and four backward in each MoE layer)")

    log = MetricLog(run.path, finished=finished or 0, tensorboard=config.log.tensorboard, writes=run.writes)
    if log.missing > 0:
        print(
            f"{run.metrics} has no record of {log.missing} of the {finished} steps before: the summary will leave them out"
        )
    progress = Progress(config.training.steps, finished or 0, config.log.every_steps)
    interrupts = Interrupts()
    trained = fit(state, step, batches, checkpoints, log, progress, config, mesh, watchdog, interrupts)
    log.close()
    checkpoints.close()
    if trained is not None:
        finish(run, config, dataset, skeleton, trained, mesh, watchdog)
    return interrupts.exit_code


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
