"""``python -m analysis report RUNS... --out DIR``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from analysis import bench as benchmarks
from analysis import pack as packing
from analysis import page
from analysis import report as reports
from analysis.load import load
from qdsim.errors import BadInput
from qdsim.store.run_directory import printable

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


@app.callback()
def main() -> None:
    """Turn the Parquet tables of runs into the paper's tables and figures."""


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(help="Run directories, or folders that hold them; paths or URIs.")],
    out: Annotated[Path, typer.Option(help="Where to write; files of the same name are replaced.")] = Path("report"),
) -> None:
    """Make every table and figure that the runs cover, and one HTML page; works while a run is going on."""
    results = load(runs)
    if results.runs.empty:
        for problem in results.problems:
            errors.print(printable(problem), markup=False)
        errors.print("nothing to report: no run could be read", markup=False)
        raise typer.Exit(2)
    planned = reports.plan(results)
    try:
        with errors.status("", spinner="dots") as status:
            reports.write(planned, out, lambda title: status.update(title))
        (out / "index.html").write_text(page.render(planned, results), encoding="utf-8")
    except OSError as error:
        errors.print(f"--out = {out}: cannot be written to: {error.strerror}", markup=False)
        raise typer.Exit(2) from None
    for problem in planned.problems:
        errors.print(printable(problem), markup=False)
    tables, figures = reports.count(planned.sections)
    runs_said = f"{len(results.runs)} run{'' if len(results.runs) == 1 else 's'}"
    console.print(f"{tables} tables and {figures} figures from {runs_said}", markup=False)
    for title, fix in planned.missing:
        console.print(f"not made: {title}; it needs {fix}", markup=False)
    console.print(f"{out / 'index.html'}", markup=False)


@app.command()
def pack(
    runs: Annotated[list[Path], typer.Argument(help="Finished run directories.")],
    out: Annotated[Path, typer.Option(help="Where to write them.")],
) -> None:
    """Write runs as one Parquet file a table, without host names and paths: to be shared or kept."""
    for run in runs:
        try:
            console.print(str(packing.pack(run, out)), markup=False)
        except BadInput as error:
            errors.print(str(error), markup=False)
            raise typer.Exit(2) from None


@app.command()
def bench(
    folder: Annotated[Path, typer.Argument(help="Where qdsim bench has written.")],
    out: Annotated[Path, typer.Option(help="Where to write; files of the same name are replaced.")] = Path("report"),
) -> None:
    """Draw what qdsim bench has measured: bench.md, and a PNG and a PDF of each benchmark."""
    try:
        measured, ratios, machine = benchmarks.load(folder)
    except BadInput as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(2) from None
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.md").write_text(benchmarks.markdown(ratios, machine), encoding="utf-8")
    made = [path for figure in benchmarks.figures(measured) for path in figure.write(out)]
    for path in [out / "bench.md", *made]:
        console.print(str(path), markup=False)


if __name__ == "__main__":
    app()
