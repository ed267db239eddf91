"""``python -m analysis report RUNS... --out DIR``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from analysis import bench as benchmarks
from analysis import pack as packing
from analysis import page
from qdsim.errors import BadInput
from qdsim.store import letters

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
    try:
        with errors.status("", spinner="dots") as status:
            written = page.write(runs, out, tell=status.update)
    except BadInput as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(2) from None
    for problem in written.problems:
        errors.print(problem, markup=False)
    for line in written.lines:
        console.print(line, markup=False)


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
    letters.print_whatever_the_encoding()
    app()
