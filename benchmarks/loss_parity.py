"""Training with recipe mxfp8 against bf16: the loss gap and its spread over seeds, however it comes out.

Run:    python -m benchmarks.loss_parity                   # every run that is missing, one after another, and the report
        python -m benchmarks.loss_parity --minutes 9       # in pieces: saves and stops after 9 minutes; again continues
        python -m benchmarks.loss_parity --only mxfp8-1    # one run
        python -m benchmarks.loss_parity --report          # table and plot of the pairs that are finished
Writes: benchmarks/results/<machine>/loss_parity.jsonl (a line per finished run, with its curve), docs/<page>.md, docs/<page>.png

A run that has a line in that file is not run again, so the comparison can be put together on machines that keep nothing.
At scale, on one H200, a minute or two per run:
        python -m benchmarks.parity_text --out text
        python -m benchmarks.loss_parity --config benchmarks/loss-parity-307m.yaml --steps 768 --seeds 0 1 2 3 4 --jobs 3 \
          --also exact-0 wgrad-bf16-0 bf16-again-0 bf16-reordered-0 mxfp8-reordered-0 --checkpoint-every 0 \
          --machine h200 --page loss-parity-307m data.source=text/text

Each run is `train.py CONFIG` with another recipe and seed, on the same batches in the same order, on one device; where there are
several GPUs, jobs are spread over them. A seed sets the initial weights, so runs of one seed start from the same FP32
masters, and the gap is a difference of pairs. `mxfp8` is `moe.mx_mode` of the config on a CPU, `aligned` on a GPU; the
runs of BESIDE change one more thing, for the seeds that ask for it. A short run shows that nothing is broken; it cannot
show parity: on MoE models of a public size the state of the art is a gap of 0.05-0.2 % in held-out loss after tens of
billions of tokens. What a page says from the heading "Reading" on is written by hand, and kept.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import queue
import re
import signal
import statistics
import subprocess
import sys
import time

import numpy as np

from benchmarks import result_lines

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECIPES = ("bf16", "mxfp8")  # a pair
# Runs beside some pairs: recipe, and what they change.
BESIDE = {
    "exact": ("mxfp8", "mode exact"),
    "wgrad-bf16": ("mxfp8", "weight gradients from BF16 operands"),
    # Two that tell what a gap between other runs can mean.
    "bf16-again": ("bf16", "nothing: are two runs the same?"),
    "bf16-reordered": ("bf16", "nothing but the order of sums (half of `training.loss_chunk`)"),
    "mxfp8-reordered": ("mxfp8", "nothing but the order of sums"),
}
SMOOTH = 20  # steps in the running mean of the plot


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run. `recipe` is one of RECIPES or BESIDE; `extra` are overrides that all runs of a comparison share."""

    config: str
    recipe: str
    seed: int
    steps: int
    extra: tuple[str, ...]
    root: pathlib.Path
    checkpoint_every: int = 25
    commit: str = "unknown"

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.seed}"

    @property
    def folder(self) -> pathlib.Path:
        return self.root / self.name

    def trained(self) -> bool:
        return (self.folder / "summary.json").exists()

    def identity(self) -> dict:
        """What makes a line of the result file this run's. Where the text lay is not part of it; what it was is (`corpus`)."""
        extra = [override for override in self.extra if not override.startswith("data.source=")]
        return {
            "config": self.config,
            "overrides": extra,
            "recipe": self.recipe,
            "seed": self.seed,
            "steps": self.steps,
        }

    def overrides(self) -> list[str]:
        import jax

        recipe = BESIDE[self.recipe][0] if self.recipe in BESIDE else self.recipe
        return [
            f"recipe={recipe}",
            *(["moe.mx_mode=aligned"] if recipe == "mxfp8" and jax.default_backend() == "gpu" else []),
            f"training.seed={self.seed}",
            f"training.steps={self.steps}",
            f"run_dir={self.folder}",
            f"checkpoint.every_steps={self.checkpoint_every}",
            "checkpoint.keep=1",
            "log.tensorboard=false",
            "log.sample_tokens=0",
            *self.extra,
            *self._changes(),  # last: with an override of the same field it would not be this run
        ]

    def _changes(self) -> list[str]:
        """What makes a run of BESIDE another than the one of its recipe."""
        if self.recipe == "exact":
            return ["moe.mx_mode=exact"]
        if self.recipe == "wgrad-bf16":
            return ["moe.wgrad=bf16"]
        if self.recipe.endswith("-reordered"):
            from moejax.config_load import load

            return [f"training.loss_chunk={load(self.config, list(self.extra)).training.loss_chunk // 2}"]
        return []


def train(run: Run, seconds: float | None, environment: dict[str, str]) -> bool:
    """Runs or continues one run, for at most `seconds`. Returns whether it finished; raises if it failed."""
    run.folder.mkdir(parents=True, exist_ok=True)
    _note_conditions(run)
    command = [sys.executable, str(ROOT / "train.py"), run.config, *run.overrides()]
    print(f"{run.name}: {' '.join(command[1:])}", flush=True)
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | environment) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # train.py ends its step, saves and returns
            code = process.wait()
        except KeyboardInterrupt:  # the terminal interrupts both: train.py saves
            process.wait()
            raise
    if run.trained():
        return True
    if seconds is None or code not in (0, 143, -signal.SIGTERM):
        raise SystemExit(f"{run.name} ended with status {code} before its last step: see above")
    return False


def collect(runs: list[Run], path: pathlib.Path) -> dict[tuple[str, int], dict]:
    """The line of every finished run, from its folder or from the result file, where new ones are added.

    Raises:
      SystemExit: runs were trained on different texts.
    """
    stored = _read_lines(path)
    new = [_line(run) for run in runs if run.trained()]
    kept = [line for line in stored if not any(_same_run(line, other) for other in new)]
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in kept + new), encoding="utf-8")
    found = {}
    for run in runs:
        for line in kept + new:
            if "loss" in line and _same_run(line, run.identity()):  # lines of before had no curve
                found[run.recipe, run.seed] = line
    texts = {line["corpus"] for line in found.values()}
    if len(texts) > 1:
        raise SystemExit(
            f"{path}: runs of this comparison were trained on {len(texts)} different texts: {sorted(texts)}"
        )
    return found


def report(runs: list[Run], machine: str, page: str) -> None:
    """Table and plot of the pairs that are finished.

    Raises:
      SystemExit: no seed has both recipes.
    """
    path = result_file(machine)
    finished = collect(runs, path)
    if not _paired_seeds(finished):
        raise SystemExit(f"no seed has finished in both recipes; finished so far: {sorted(finished)}")
    missing = sorted(run.name for run in runs if (run.recipe, run.seed) not in finished)
    written = ROOT / "docs" / f"{page}.md"
    by_hand = re.search(r"^## Reading.*", written.read_text(), re.DOTALL | re.MULTILINE) if written.exists() else None
    text = table(finished, page, missing) + (f"\n{by_hand.group()}" if by_hand else "")
    plot(finished, ROOT / "docs" / f"{page}.png")
    written.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {path.relative_to(ROOT)}, docs/{page}.md, docs/{page}.png")


def result_file(machine: str) -> pathlib.Path:
    return ROOT / "benchmarks" / "results" / machine / "loss_parity.jsonl"


def table(finished: dict[tuple[str, int], dict], page: str, missing: list[str]) -> str:
    """The page `docs/<page>.md`, from the lines of the finished runs by recipe and seed; at least one pair is among them."""
    seeds = _paired_seeds(finished)
    pairs = {seed: {recipe: finished[recipe, seed] for recipe in RECIPES} for seed in seeds}
    first = pairs[seeds[0]]["bf16"]
    gaps = {key: [pairs[s]["mxfp8"][key] - pairs[s]["bf16"][key] for s in seeds] for key in _LOSSES}
    rows = [
        f"| {seed} | "
        + " | ".join(f"{pairs[seed][recipe][key]:.4f}" for key in _LOSSES for recipe in RECIPES)
        + " | "
        + " | ".join(f"{gaps[key][i]:+.4f} ({gaps[key][i] / pairs[seed]['bf16'][key]:+.2%})" for key in _LOSSES)
        + " |"
        for i, seed in enumerate(seeds)
    ]
    spread = {key: {recipe: _spread([pairs[s][recipe][key] for s in seeds]) for recipe in RECIPES} for key in _LOSSES}
    summary = "".join(
        f"* {title}: gap {_interval(gaps[key])}; over seeds bf16 {spread[key]['bf16']}, mxfp8 {spread[key]['mxfp8']}.\n"
        for key, title in _LOSSES.items()
    )
    unfinished = f"\n**Not finished yet:** {', '.join(missing)}.\n" if missing else ""
    for (recipe, seed), line in finished.items():
        if recipe in RECIPES and seed not in seeds:
            unfinished += (
                f"\nFinished without its pair: {recipe}, seed {seed}, held-out {line['heldout_nats_per_byte']:.4f}, "
                f"last steps {line['last_loss']:.4f}.\n"
            )
    at = [first["steps"] * quarter // 4 for quarter in (1, 2, 3, 4)]
    ordered = sorted(finished.items(), key=lambda item: (item[0][1], item[0][0] not in RECIPES, item[0][0]))
    curves = "".join(
        f"| {recipe}-{seed} | "
        + " | ".join(f"{np.mean(line['loss'][max(step - SMOOTH, 0) : step]):.4f}" for step in at)
        + " |\n"
        for (recipe, seed), line in ordered
    )
    lines = list(finished.values())
    commits = ", ".join(sorted({line["commit"] for line in lines}))
    backends = ", ".join(sorted({f"{line['recipe']}: {line['backend']}" for line in lines}))
    seconds = max(line["seconds"] for line in lines)
    return f"""# Loss: mxfp8 against bf16

`{first["config"]}`, {first["steps"]} steps, {first["tokens"]:,} tokens, the same batches in the same order; a seed sets
the initial weights. Made by `python -m benchmarks.loss_parity` on {first["machine"]} at commit {commits},
{first["date"][:10]}; expert backends {backends}; longest run {seconds:.0f} s of steps.

| seed | held-out bf16 | held-out mxfp8 | last steps bf16 | last steps mxfp8 | held-out gap | last-steps gap |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Losses are nats: per byte of held-out text, and per token as the mean of the last tenth of the steps. A gap is mxfp8 -
bf16 of the same seed, positive where mxfp8 is worse. Mean ± standard deviation over {len(seeds)} seeds:

{summary}{unfinished}{_beside(finished)}
Training loss on the way, means of {SMOOTH} steps:

| run | {" | ".join(f"step {step}" for step in at)} |
|---|---|---|---|---|
{curves}
{_parting(finished, ordered, first["steps"])}
In both recipes the router, norms, softmax, the combine, all reductions, weight gradients, masters and the optimizer's state are
FP32; embedding, attention, head and the residual stream are BF16. mxfp8 quantises the six products of the experts, all layers.

![Loss of the runs, and their difference from bf16 of the same seed, over the steps]({page}.png)

This length shows whether something is broken, not parity: public MoE runs of tens of billions of tokens report gaps of
0.05-0.2 % in held-out loss.
"""


def _beside(finished: dict[tuple[str, int], dict]) -> str:
    """Section on the runs beside the pairs, empty without any."""
    rows = ""
    for (recipe, seed), line in finished.items():
        if recipe not in BESIDE:
            continue
        base, change = BESIDE[recipe]
        cells = [f"| {recipe}-{seed} | {base}; {change} "]
        for key in _LOSSES:
            cells.append(f"| {line[key]:.4f} ")
            for other in RECIPES:
                twin = finished.get((other, seed))
                cells.append("| - " if twin is None else f"| {line[key] - twin[key]:+.4f} ")
        rows += "".join(cells) + "|\n"
    if not rows:
        return ""
    same = [
        (recipe, seed, _first_difference(line["loss"], finished["bf16", seed]["loss"]))
        for (recipe, seed), line in finished.items()
        if recipe == "bf16-again" and ("bf16", seed) in finished
    ]
    again = "".join(
        f"\n{recipe}-{seed} and bf16-{seed}: "
        + (
            "the same loss in every step.\n"
            if step is None
            else f"the fifth decimal of the loss first differs at step {step}.\n"
        )
        for recipe, seed, step in same
    )
    return f"""
Beside the pairs, differences from the runs of the same seed:

| run | recipe; change | held-out | - bf16 | - mxfp8 | last steps | - bf16 | - mxfp8 |
|---|---|---|---|---|---|---|---|
{rows}{again}"""


def _parting(finished: dict[tuple[str, int], dict], ordered: list, steps: int) -> str:
    """Where runs part: every run's mean difference from bf16 of its seed, and of every bf16 run from the first, by eighths."""
    edges = [steps * eighth // 8 for eighth in range(9)]
    first = min(seed for recipe, seed in finished if recipe == "bf16")
    rows = ""
    for (recipe, seed), line in ordered:
        other = ("bf16", first if recipe == "bf16" else seed)
        if other == (recipe, seed) or other not in finished:
            continue
        gap = np.array(line["loss"]) - np.array(finished[other]["loss"])
        means = " | ".join(f"{gap[a:b].mean():+.4f}" for a, b in zip(edges, edges[1:], strict=False))
        rows += f"| {recipe}-{seed} - {other[0]}-{other[1]} | {means} |\n"
    head = " | ".join(f"{a + 1}-{b}" for a, b in zip(edges, edges[1:], strict=False))
    return f"""Where runs part: mean difference of the training loss, by steps:

| runs | {head} |
|{"---|" * 9}
{rows}"""


def _first_difference(one: list[float], other: list[float]) -> int | None:
    return next((step for step, pair in enumerate(zip(one, other, strict=True), 1) if pair[0] != pair[1]), None)


def _paired_seeds(finished: dict[tuple[str, int], dict]) -> list[int]:
    return sorted({seed for _, seed in finished if all((recipe, seed) in finished for recipe in RECIPES)})


def plot(finished: dict[tuple[str, int], dict], path: pathlib.Path) -> None:
    """Training loss of every run, and its difference from bf16 of the same seed, as running means; runs beside the pairs dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    colours = {"bf16": "tab:blue", "mxfp8": "tab:orange"}
    labelled = set()
    for (recipe, seed), line in sorted(finished.items(), key=lambda item: (item[0][0] not in RECIPES, item[0])):
        curve = _running_mean(line["loss"])
        steps = np.arange(len(curve)) + SMOOTH
        base = BESIDE[recipe][0] if recipe in BESIDE else recipe
        style = {"linewidth": 1, "linestyle": "--" if recipe in BESIDE else "-"}
        left.plot(steps, curve, color=colours[base], label=None if base in labelled else base, **style)
        labelled.add(base)
        if recipe != "bf16" and ("bf16", seed) in finished:
            gap = curve - _running_mean(finished["bf16", seed]["loss"])
            right.plot(steps, gap, label=f"{recipe}, seed {seed}", **style)
    right.axhline(0, color="black", linewidth=0.6)
    left.set(xlabel="step", ylabel=f"training loss, nats per token (mean of {SMOOTH} steps)")
    right.set(xlabel="step", ylabel="difference from bf16 of the same seed, nats per token")
    left.legend()
    right.legend(fontsize="small")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


_LOSSES = {
    "heldout_nats_per_byte": "held-out, nats per byte",
    "last_loss": "last steps, nats per token",
}


def _line(run: Run) -> dict:
    """Result line of a trained run."""
    from moejax.training.metrics import read_records

    loss = [record["loss"] for record in read_records(run.folder / "metrics.jsonl")]
    summary = json.loads((run.folder / "summary.json").read_text())
    if len(loss) != run.steps or summary["steps"] != run.steps:
        raise SystemExit(f"{run.folder} holds {len(loss)} steps, expected {run.steps}: use the --steps it was run with")
    return {
        "bench": "loss_parity",
        **json.loads((run.folder / "conditions.json").read_text()),
        **run.identity(),
        "corpus": json.loads((run.folder / "data.json").read_text())["corpus"],
        "tokens": summary["tokens"],
        "heldout_nats_per_byte": summary["heldout_nats_per_byte"],
        "last_loss": float(np.mean(loss[-max(1, len(loss) // 10) :])),
        "seconds": summary["seconds"],
        "tokens_per_second": summary["tokens_per_second"],
        "loss": [round(value, 5) for value in loss],
    }


def _note_conditions(run: Run) -> None:
    """Where and from what a run started, kept beside it; a run that continues elsewhere keeps its first commit and adds
    the new.
    """
    from moejax.config_load import load
    from moejax.ops.spec import moe_spec

    path = run.folder / "conditions.json"
    commit = run.commit
    if path.exists():
        noted = json.loads(path.read_text())
        if commit not in noted["commit"].split("+"):
            path.write_text(json.dumps(noted | {"commit": f"{noted['commit']}+{commit}"}))
        return
    import jax

    config = load(run.config, run.overrides())
    noted = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": f"{_cpu_name()}, {os.cpu_count()} cores"
        if jax.default_backend() == "cpu"
        else jax.devices()[0].device_kind,
        "gpu": None if jax.default_backend() == "cpu" else jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "backend": moe_spec(config).backend,
        "notes": f"load average {os.getloadavg()[0]:.1f} at the start",
    }
    path.write_text(json.dumps(noted))


def _running_mean(values: list[float]) -> np.ndarray:
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, mode="valid")


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f} (one seed)"
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def _interval(gaps: list[float]) -> str:
    """Mean of paired gaps, their standard deviation, and what they say about the mean of all seeds (Student's t)."""
    if len(gaps) == 1:
        return f"{gaps[0]:+.4f} (one seed)"
    from scipy import stats

    mean, deviation = statistics.mean(gaps), statistics.stdev(gaps)
    error = deviation / len(gaps) ** 0.5
    reach = float(stats.t.ppf(0.975, len(gaps) - 1)) * error
    return f"{mean:+.4f} ± {deviation:.4f} (standard error {error:.4f}, 95 % interval {mean - reach:+.4f} to {mean + reach:+.4f})"


def _seats(jobs: int) -> "queue.Queue[dict[str, str]]":
    """For each of `jobs` runs at a time the environment that gives it one GPU, if there are several."""
    import jax

    gpus = len(jax.local_devices()) if jax.default_backend() == "gpu" else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    names = visible.split(",")
    seats: queue.Queue[dict[str, str]] = queue.Queue()
    for job in range(jobs):
        seats.put({"CUDA_VISIBLE_DEVICES": names[job % gpus]} if gpus > 1 else {})
    return seats


def _same_run(one: dict, other: dict) -> bool:
    return all(one.get(key) == other[key] for key in ("config", "overrides", "recipe", "seed", "steps"))


def _read_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=300, help=f"more than {SMOOTH}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", metavar="RECIPE-SEED", help="the runs to train, for example mxfp8-1")
    parser.add_argument("--minutes", type=float, help="stop and save after this long; the same command continues")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--runs", default="runs/loss-parity", help="folder of the run folders")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}core", help="folder under benchmarks/results")
    parser.add_argument("--page", default="loss-parity", help="name of the page under docs/")
    parser.add_argument(
        "--also", nargs="*", default=[], metavar="NAME-SEED", help=f"runs beside the pairs, of {', '.join(BESIDE)}"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps; 0: only at the end")
    parser.add_argument("--commit", default="", help="commit of the code; asked of git if empty")
    parser.add_argument("overrides", nargs="*", help="overrides for every run, for example moe.backend=xla")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}: expected at least 1")

    root = pathlib.Path(args.runs)
    root = (root if root.is_absolute() else ROOT / root) / f"{pathlib.Path(args.config).stem}-{args.steps}"
    commit = args.commit or result_lines.commit_of_code()
    # Seeds outermost: whatever the time allows, what is finished are whole pairs.
    runs = [
        Run(args.config, recipe, seed, args.steps, tuple(args.overrides), root, args.checkpoint_every, commit)
        for seed in dict.fromkeys(args.seeds)
        for recipe in (*RECIPES, *BESIDE)
        if recipe in RECIPES or f"{recipe}-{seed}" in args.also
    ]
    unknown = set(args.also) - {run.name for run in runs}
    if unknown:
        parser.error(
            f"--also names {', '.join(sorted(unknown))}: expected one of {', '.join(BESIDE)}, and a seed of --seeds"
        )
    if args.steps <= SMOOTH:
        parser.error(f"--steps is {args.steps}; the plot's running mean needs more than {SMOOTH}")
    unknown = set(args.only or ()) - {run.name for run in runs}
    if unknown:
        parser.error(f"no run is called {', '.join(sorted(unknown))}; there are {', '.join(run.name for run in runs)}")
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes

    seats = _seats(args.jobs)

    def run_one(run: Run) -> bool:
        left = None if deadline is None else deadline - time.monotonic()
        if run.trained() or (left is not None and left <= 1):
            return run.trained()
        seat = seats.get()
        try:
            return train(run, left, seat)
        finally:
            seats.put(seat)

    if not args.report:
        done_before = collect(runs, result_file(args.machine))
        wanted = [
            run
            for run in runs
            if (run.recipe, run.seed) not in done_before and (not args.only or run.name in args.only)
        ]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            done = list(pool.map(run_one, wanted))
        collect(runs, result_file(args.machine))
        if not all(done):
            unfinished = [run.name for run, finished in zip(wanted, done, strict=True) if not finished]
            print(f"not finished: {', '.join(unfinished)}; the same command continues")
            return
    report(runs, args.machine, args.page)


if __name__ == "__main__":
    main()
