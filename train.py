"""Trains a mixture-of-experts language model: one config, one command.

    python train.py configs/quickstart.yaml
    python train.py configs/quickstart.yaml training.steps=200 moe.num_experts=32
    python train.py --help

Give the same command again after an interruption and the run continues; a finished run prints its summary. A recipe to copy
and edit: what is reusable is in `moejax.training`.
"""

import dataclasses
import sys

import jax

from moejax.checkpoint import Checkpoints
from moejax.config import Config
from moejax.config_load import help_text, load
from moejax.data import open_dataset, train_iterator
from moejax.training.compiling import compile_step, use_compile_cache
from moejax.training.errors import one_line_errors
from moejax.training.finish import finish
from moejax.training.loop import fit
from moejax.training.metrics import MetricLog, Progress
from moejax.training.report import summary_text
from moejax.training.run import RunFolder
from moejax.training.state import abstract_state, create_state, make_skeleton, parameter_counts
from moejax.training.step import make_step, needs_counting_pass, split_batch


def main(arguments: list[str]) -> int:
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(f"{__doc__}\n{help_text()}")
        return 0 if arguments else 2
    path, *overrides = arguments
    with one_line_errors() as outcome:
        train(load(path, overrides))
    return outcome.exit_code


def train(config: Config) -> None:
    with RunFolder(config.run_dir, config) as run:
        summary = run.summary()
        if summary and summary["steps"] >= config.training.steps:
            print(f"{run.path} has finished:\n{summary_text(summary)}\nreport: {run.path / 'report.html'}")
            return
        use_compile_cache(config)
        dataset = open_dataset(config.data)
        model = dataclasses.replace(config.model, vocab_size=dataset.vocab_size)
        config = dataclasses.replace(config, model=model)
        skeleton = make_skeleton(config)

        checkpoints = Checkpoints(
            run.checkpoints, keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous
        )
        finished = checkpoints.latest() or 0
        if checkpoints.latest() is None:
            state, position = create_state(config), {"next_index": 0}
        else:
            state, position = checkpoints.restore(abstract_state(config))
            print(f"continuing {run.path} from step {finished}")
        batches = train_iterator(dataset, config)
        batches.set_state(position)

        total, active = parameter_counts(state.params, config)
        print(
            f"{total:,} parameters, {active:,} active per token; {jax.device_count()} {jax.default_backend()} device(s)"
        )
        if needs_counting_pass(config):
            print("moe.balance.aux_scope=global with micro-batches: one more forward pass per step counts the experts")
        example = split_batch(next(train_iterator(dataset, config)), config.training.micro_batches)
        step = compile_step(make_step(skeleton, config), state, example)

        log = MetricLog(run.path, finished=finished, tensorboard=config.log.tensorboard)
        progress = Progress(config.training.steps, finished, config.log.every_steps)
        state = fit(state, step, batches, checkpoints, log, progress, config)
        log.close()
        checkpoints.close()
        if state is not None:
            finish(run, config, dataset, skeleton, state)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
