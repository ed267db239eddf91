"""The commands: ``qdsim --help``. The only file that reads arguments, prints errors or exits."""

import os
import shlex
import signal
import sys
import tomllib
import traceback
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qdsim import __version__
from qdsim.errors import BadInput, CannotPlace, ClusterLost, Interrupted, QdsimError
from qdsim.store import letters, run_directory, storage

app = typer.Typer(
    help="Simulate federated unlearning with QuickDrop on Ray.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

PIPE_WIDTH = 200
BENCHMARKS = ("throughput", "overhead", "matching", "gradients", "startup", "memory", "scaling", "gpu-counts")
"""For --help: the suite itself brings torch."""

# declared for --help; main reads it from the arguments, since an error may come before they are parsed
DEBUG = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

JOB = Annotated[Path, typer.Argument(metavar="JOB", help="A job file, or the name of a job that qdsim jobs lists.")]
SET = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be repeated.")]
PROFILE = Annotated[str | None, typer.Option(help="A named set of overrides: laptop or smoke.")]
ENGINE = Annotated[Literal["ray", "inline"], typer.Option(help="inline: no Ray, this process only, on the CPU.")]
ADDRESS = Annotated[
    str | None,
    typer.Option(help="A running Ray cluster, for example auto; by default $RAY_ADDRESS, else one is started here."),
]
RUN = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, or latest: the newest in runs (DIR/latest: in DIR).")
]
SERVER = Annotated[
    str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The cluster's dashboard, for example http://HEAD:8265.")
]
CHAOS = Annotated[
    list[str] | None,
    typer.Option("--chaos", metavar="FAULT", help='A fault on purpose, for example "kill client 7 at train:3".'),
]
TRACK = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="tensorboard, wandb, mlflow or trackio, live; may be repeated."),
]
RESUME = Annotated[
    bool, typer.Option("--resume", help="Resume the newest run of this job under --out, if there is one.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"qdsim {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Simulate federated unlearning with QuickDrop on Ray."""


@app.command()
def run(
    job: JOB,
    overrides: SET = None,
    profile: PROFILE = None,
    out: Annotated[str, typer.Option(help="Where run directories are made: a path, or a URI such as s3://…")] = "runs",
    engine: ENGINE = "ray",
    address: ADDRESS = None,
    resume: RESUME = False,
    track: TRACK = None,
    chaos: CHAOS = None,
    debug: DEBUG = False,
) -> None:
    """Run a job: train, unlearn, recover, relearn; results stream into a new directory under --out."""
    from qdsim.api import display, functions

    done = functions.run(
        job,
        set=overrides,
        profile=profile,
        out=out,
        engine=engine,
        address=address,
        resume=resume,
        track=track or (),
        chaos=chaos or (),
    )
    display.print_result(Console(), done.path)


@app.command()
def resume(
    run: RUN,
    engine: ENGINE = "ray",
    address: ADDRESS = None,
    track: TRACK = None,
    chaos: CHAOS = None,
    debug: DEBUG = False,
) -> None:
    """Resume a run from its last commit, with the settings it has."""
    from qdsim.api import display, functions

    done = functions.resume(run, engine=engine, address=address, track=track or (), chaos=chaos or ())
    display.print_result(Console(), done.path)


@app.command()
def submit(
    job: JOB,
    address: SERVER,
    overrides: SET = None,
    profile: PROFILE = None,
    out: Annotated[str, typer.Option(help="As of run, but on the cluster: what all of its nodes share.")] = "runs",
    resume: RESUME = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end, and exit with its exit code.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Wait, and show its log meanwhile.")] = False,
    track: TRACK = None,
    chaos: CHAOS = None,
    debug: DEBUG = False,
) -> None:
    """Send a job and this code to a cluster and run it there; it keeps running when this command has ended."""
    from qdsim.experiment import config, job_files
    from qdsim.federation.chaos import Fault
    from qdsim.ray_engine import environment
    from qdsim.tracking.follow import check_trackers

    file = job_files.find(job)
    loaded = config.load(file, profile=profile, overrides=overrides)
    there = storage.named(out).absolute()  # a relative path would lie in the job's own, temporary folder
    arguments = ["--out", str(there), *(["--resume"] if resume else []), *(["--profile", profile] if profile else [])]
    arguments += [f"--set={text}" for text in overrides or []]
    arguments += [f"--chaos={Fault.parse(text)}" for text in chaos or []]
    # whether they are installed shows there
    arguments += [f"--track={name}" for name in check_trackers(track or (), installed=False)]
    environment.prepare_for_jobs(address)  # before Ray is imported
    from qdsim.ray_engine.jobs import JobServer

    server = JobServer(address)
    job_id = server.submit(file, arguments, say, loaded.outside())
    say(f"submitted {job_id}; its results go to {there} on the cluster")
    mode = "RAY_AUTH_MODE=token " if environment.sends_token() else ""
    say(f"  its log:  {mode}ray job logs --follow {job_id} --address {server.address}")
    say(f"  stop it:  qdsim stop {job_id} --address {server.address}")
    if not (wait or follow):
        return
    try:
        if follow:
            server.follow(job_id, lambda text: print(text, end="", flush=True))
        ended = server.wait(job_id)
    except Interrupted:
        say(f"the job {job_id} keeps running")
        raise
    if ended.exit_code and not follow:
        say("\n".join(server.last_lines(job_id)))
    say(f"{job_id} {ended.status}, exit code {ended.exit_code}")
    raise typer.Exit(ended.exit_code)


@app.command()
def stop(
    submission_id: Annotated[str, typer.Argument(metavar="SUBMISSION_ID", help="What qdsim submit has printed.")],
    address: SERVER,
    debug: DEBUG = False,
) -> None:
    """Stop a submitted job after its last commit, and wait for its end; submit it with --resume to continue."""
    from qdsim.ray_engine import environment

    environment.prepare_for_jobs(address)  # before Ray is imported
    from qdsim.ray_engine.jobs import STOP_WAIT_S, JobServer

    server = JobServer(address)
    ended, was_running = server.stop(submission_id)
    if not was_running:
        say(f"{submission_id} had ended before: {ended.status}, exit code {ended.exit_code}")
    elif ended.status != "stopped":
        say(f"{submission_id} ended by itself: {ended.status}, exit code {ended.exit_code}")
    elif any(line.startswith("qdsim: interrupted") for line in server.last_lines(submission_id)):
        say(f"{submission_id} stopped in order; submit the job with --resume to continue from its last commit")
    else:
        say(
            f"{submission_id} stopped before it had begun, or killed after {STOP_WAIT_S} s; --resume works all the same"
        )


@app.command()
def verify(
    first: Annotated[str, typer.Argument(metavar="A", help="A run directory, or latest.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    debug: DEBUG = False,
) -> None:
    """Compare two runs value by value, clocks and places aside: exit 0 if equal, else 1 with the first difference."""
    from qdsim.api import functions

    found = functions.verify(first, second)
    print(found or "equal")
    raise typer.Exit(1 if found else 0)


@app.command()
def plan(
    job: JOB,
    overrides: SET = None,
    profile: PROFILE = None,
    address: ADDRESS = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="Plan for a machine with so many GPUs instead.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Their model, for example a100, h100, t4 or rtx4090.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of each, for example 24GB; by default --gpu's.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPUs of that machine; 8 for each GPU by default.")] = None,
    memory: Annotated[str | None, typer.Option(help="Its memory; 64GB for each GPU by default.")] = None,
    doctor: Annotated[
        Path | None, typer.Option(help="A file of `qdsim doctor --out`: use what it measured of the GPUs.")
    ] = None,
    debug: DEBUG = False,
) -> None:
    """Say whether a job fits, where its clients are placed, and how long it will take; only a probe is run."""
    from qdsim.api import functions, plan_report

    found = functions.plan(
        job,
        set=overrides,
        profile=profile,
        address=address,
        gpus=gpus,
        gpu=gpu,
        gpu_memory=gpu_memory,
        cpus=cpus,
        memory=memory,
        doctor=doctor,
    )
    plan_report.print_plan_report(Console(), found.report, assumed=found.is_assumed)


@app.command()
def status(run: RUN, debug: DEBUG = False) -> None:
    """Say where a run is, from its files alone."""
    from qdsim.cli import watch

    watch.print_status(Console(), run_directory.find_run(run))


@app.command()
def top(run: RUN, debug: DEBUG = False) -> None:
    """Watch a run from its files alone, until it is over."""
    from qdsim.cli import watch

    watch.top(Console(), run_directory.find_run(run))


@app.command()
def show(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run directories, or latest: the newest in runs (DIR/latest: in DIR)."),
    ],
    debug: DEBUG = False,
) -> None:
    """Print the result table of a run, finished or not; of several: beside each other, with what differs."""
    from qdsim.api import display
    from qdsim.api import runs as several

    found = [run_directory.find_run(run) for run in runs]
    if len(found) == 1:
        display.print_result(Console(), found[0])
    else:
        display.print_comparison(Console(), several.compared(found))


@app.command(name="runs")
def list_runs(
    folder: Annotated[str, typer.Argument(metavar="[DIR]", help="A folder of runs: a path or a URI.")] = "runs",
    debug: DEBUG = False,
) -> None:
    """List the runs in a folder, newest first: state, job, date, and F-Set/R-Set of each method after recovery."""
    from qdsim.api import display, runs

    lines = runs.listed(storage.folder(folder))
    if not lines:
        raise BadInput("DIR", folder, "no run there")
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "job", "started (UTC)", "result"):
        table.add_column(column, overflow="fold", no_wrap=column == "started (UTC)")
    for line in lines:
        cells = (line.path.name, line.state, line.job, line.started_at, line.result)
        table.add_row(*(Text(run_directory.printable(cell)) for cell in cells))
    display.wide(Console(), PIPE_WIDTH).print(table)


@app.command()
def logs(
    run: RUN,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until the run is over.")] = False,
    debug: DEBUG = False,
) -> None:
    """Print what a run has said on the screen, with the times (UTC): phases, notes, how it ended."""
    from qdsim.cli import watch

    watch.print_log(run_directory.find_run(run), say, follow=follow)


@app.command()
def keys(
    section: Annotated[
        str | None,
        typer.Argument(metavar="[SECTION]", help="For example train, sga, or a method's package.module:NAME."),
    ] = None,
    debug: DEBUG = False,
) -> None:
    """List the keys of a job: type and range, default, meaning."""
    from qdsim.api import display
    from qdsim.experiment import keys as schema

    table = Table(box=None, pad_edge=False)
    for column in ("key", "type", "default", "meaning"):
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    found = schema.keys_of(section)
    if not found:
        say(f"{section} has no settings of its own")
        return
    for key in found:
        table.add_row(*(Text(text) for text in (key.name, key.kind, key.default, key.meaning)))
    display.wide(Console(), PIPE_WIDTH).print(table)


@app.command()
def export(
    run: RUN,
    to: Annotated[
        list[str], typer.Option("--to", metavar="NAME", help="tensorboard, wandb, mlflow or trackio; may be repeated.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where TensorBoard's and W&B's files go; by default the run directory.")
    ] = None,
    debug: DEBUG = False,
) -> None:
    """Send the rows of a run, finished or not, to a tracker; nothing is there twice, however often it is done."""
    from qdsim.api import functions

    for line in functions.export(run, to=to, out=out):
        say(line)


@app.command()
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNS...", help="Run directories, folders that hold them, or latest: the newest in runs."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where to write; files of the same name are replaced.")] = Path("report"),
    debug: DEBUG = False,
) -> None:
    """Make every table and figure that runs cover, and one HTML page of them; also while a run is going on."""
    from qdsim.api import report as reports

    with Console(stderr=True).status("", spinner="dots") as status:
        written = reports.write(runs, out, tell=status.update)
    for problem in written.problems:
        print(problem, file=sys.stderr)
    for line in written.lines:
        say(line)


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help=f"Which: {', '.join(BENCHMARKS)}; by default all."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the Parquet files go.")] = Path("bench"),
    flower: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Of an environment with torch, and flwr with its extra simulation."),
    ] = None,
    svhn: Annotated[str | None, typer.Option(metavar="DIR", help="Where SVHN's .mat files lie, for memory.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each thing is measured.")] = 3,
    debug: DEBUG = False,
) -> None:
    """Measure this machine: qdsim against a bare PyTorch loop, plain FedAvg and Flower, as ratios."""
    from qdsim.bench import suite

    suite.run(suite.chosen(names or []), rounds, flower, svhn, Console(), out)
    say(f"python -m analysis bench {out} draws it")


@app.command()
def doctor(
    address: ADDRESS = None,
    runs: Annotated[str, typer.Option(help="Where run directories are to go: that storage is tried.")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, with all numbers.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="One file to attach to a message; no paths, hosts or tokens are in it.")
    ] = None,
    debug: DEBUG = False,
) -> None:
    """Check this machine, Ray and each GPU by using them: exit 3 if something would stop a run."""
    from qdsim.doctor import report as reports
    from qdsim.doctor.examine import examine

    hints = Console(stderr=True)
    found = examine(address, runs, lambda text: hints.print(f"… {text}", style="dim", markup=False, highlight=False))
    if out is not None:
        storage.write(out, reports.as_file(found).encode())
    if as_json:
        print(found.as_json())
    else:
        Console().print(reports.table(found))
        say(reports.verdict(found))
    if out is not None and not as_json:
        say(f"written to {out}: attach it to a report")
    raise typer.Exit(found.exit_code)


@app.command()
def tune(
    job: JOB,
    over: Annotated[
        list[str],
        typer.Option(
            "--over", metavar="KEY=RANGE", help="For example train.lr=loguniform(0.001,0.1); may be repeated."
        ),
    ],
    metric: Annotated[
        str, typer.Option(help="[METHOD.]PHASE.COLUMN of the table stages, or several with + and - between them.")
    ],
    mode: Annotated[Literal["max", "min"], typer.Option(help="Whether much of it is good, or little.")] = "max",
    trials: Annotated[int, typer.Option(min=1, help="How many runs.")] = 10,
    search: Annotated[Literal["random", "optuna"], typer.Option(help="How values are proposed.")] = "random",
    concurrent: Annotated[int, typer.Option(min=1, help="How many trials run at a time.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the proposals.")] = 0,
    overrides: SET = None,
    profile: PROFILE = None,
    out: Annotated[str, typer.Option(help="Where the search makes its folder, and where .trained lies.")] = "runs",
    engine: ENGINE = "ray",
    address: ADDRESS = None,
    debug: DEBUG = False,
) -> None:
    """Search over keys of a job with Ray Tune: each trial is a run, and trials share what was trained."""
    from qdsim.api import functions
    from qdsim.tuning import search as searches

    found = searches.tune(
        job,
        over=over,
        metric=metric,
        mode=mode,
        trials=trials,
        search=search,
        concurrent=concurrent,
        seed=seed,
        set=overrides,
        profile=profile,
        out=out,
        engine=engine,
        address=address,
        tell=say,
    )
    table = Table(box=None, pad_edge=False)
    for name in found.trials.columns.drop("error"):
        table.add_column("metric" if name == metric else name, no_wrap=True)
    for row in found.trials.drop(columns="error").itertuples(index=False):
        table.add_row(*(f"{value:.6g}" if isinstance(value, float) else str(value) for value in row))
    Console().print(table)
    for error, count in found.trials["error"][found.trials["error"] != ""].value_counts().items():
        say(f"{count} failed: {error}")
    say(f"trials: {found.path / 'trials.csv'}")
    chosen = " ".join(f"--set {shlex.quote(text)}" for text in [*(overrides or []), *functions.as_texts(found.best)])
    say(f"the best: qdsim run {job} {f'--profile {profile} ' if profile else ''}{chosen}")


@app.command()
def jobs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Where job files lie; by default those that come with qdsim.")
    ] = None,
    debug: DEBUG = False,
) -> None:
    """List the jobs there are, as they can be run, and what each reproduces."""
    from qdsim.experiment import job_files

    files = job_files.shipped() if folder is None else {str(path): path for path in job_files.in_folder(folder)}
    if not files and folder is None:
        raise BadInput("DIR", None, "this copy of qdsim came without job files: name a folder that has some")
    if not files:
        raise BadInput("DIR", str(folder), "no *.toml there; without DIR the jobs that come with qdsim are listed")
    table = Table(box=None, pad_edge=False)
    table.add_column("job")
    table.add_column("what it reproduces")
    for name, file in files.items():
        try:
            about = str(tomllib.loads(file.read_text(encoding="utf-8")).get("about", ""))
        except (OSError, ValueError, RecursionError) as error:
            about = f"cannot be read: {error}"
        table.add_row(name, about)
    Console().print(table)


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise Interrupted(signum)


def main() -> None:
    """Run the command line; every error ends in one line of cause and its exit code."""
    letters.print_whatever_the_encoding()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN or signum != signal.SIGHUP:  # which nohup has ignored
            signal.signal(signum, _interrupt)
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)  # what a command exits with, it returns
    except Interrupted as stop:
        _fail(f"interrupted; {stop.resume} continues" if stop.resume else "interrupted", stop.exit_code)
    except ClusterLost as error:
        print(f"qdsim: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(error.exit_code)  # what Ray does at the end of a process would wait for it, and end it with code 1
    except CannotPlace as error:
        _print_nodes(error.nodes)
        _fail(str(error), error.exit_code)
    except QdsimError as error:
        _fail(str(error), error.exit_code)
    except Exception as error:
        failure = storage.as_failure(error)
        if failure is not None:
            _fail(str(failure), failure.exit_code)
        usage = getattr(error, "format_message", None)  # of typer's own errors: an unknown command or option
        if usage is not None:
            _fail(f"{str(usage()).rstrip('.')} (qdsim --help)", 2)
        cause = str(error).splitlines()[0] if str(error) else ""
        _fail(f"internal error, {type(error).__name__}: {cause} (--debug shows the traceback)", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _print_nodes(nodes: tuple[tuple[str, ...], ...]) -> None:
    """Show what each node of the cluster offers, and how many of the actors it would hold."""
    if nodes:
        table = Table(box=None, pad_edge=False)
        for column in ("node", "CPUs", "GPUs", "memory (GB)", "actors that fit"):
            table.add_column(column, justify="left" if column == "node" else "right")
        for row in nodes:
            table.add_row(*row)
        Console(stderr=True).print(table)


def _fail(cause: str, code: int) -> NoReturn:
    if "--debug" in sys.argv:
        traceback.print_exc()
    print(f"qdsim: {cause}", file=sys.stderr)
    sys.exit(code)
