"""The report: every table and figure that the runs at hand cover, what is missing and which job supplies it."""

import multiprocessing
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

from analysis import (
    ablation_matching,
    by_method,
    client_alpha,
    fig2_class_accuracy,
    fig3_membership,
    fig4_sequential,
    fig5_finetune,
    fig6_scale,
    gallery,
    learning_curves,
    pareto,
    partition,
    payback,
    recovery_steps,
    relearning,
    result,
    round_time,
    sweep_figures,
    table1_methods,
    table2_cifar10,
    table3_svhn_100,
    table4_client_iid,
    table4_client_noniid,
    table5_cifar10_20,
    table5_mnist_20,
    table6_overhead,
    verdict,
)
from analysis.load import Results
from analysis.outputs import Figure, Missing, Table
from analysis.verdict import Verdict

PAPER: tuple[ModuleType, ...] = (
    table1_methods,
    table2_cifar10,
    table3_svhn_100,
    table4_client_noniid,
    table4_client_iid,
    table5_cifar10_20,
    table5_mnist_20,
    table6_overhead,
    fig2_class_accuracy,
    fig3_membership,
    fig4_sequential,
    fig5_finetune,
    fig6_scale,
    relearning,
    client_alpha,
    ablation_matching,
    recovery_steps,
)
"""What the paper has and what our jobs add, in the order of the report."""


def _class_items(results: Results, stem: str, title: str, notes: list[str]) -> list[Figure]:
    if fig4_sequential.in_sequence(results):
        return fig4_sequential.sequence_figure(results, stem, title, notes)
    return fig2_class_accuracy.class_figure(results, stem, title, notes)


Make = Callable[[Results, str, str, list[str]], Sequence[Table | Figure]]
EVERY: dict[str, tuple[str, str, Make]] = {
    "sweep": (
        "The sweep",
        "What became of accuracy on what is to be forgotten (F-Set), accuracy on the rest (R-Set) and cost as the "
        "swept setting changed.",
        sweep_figures.make,
    ),
    "result": ("The result in full", "", result.make),
    "curves": (
        "Learning curves",
        "Left: test accuracy in training. Then, from the request on: accuracy on the rest (R-Set) and on what is to be "
        "forgotten (F-Set), against the seconds that clients have computed.",
        learning_curves.make,
    ),
    "classes": (
        "Accuracy of each class",
        "Test accuracy of every class after each round, from the trained model on. The thick line is the class that is "
        "forgotten.",
        _class_items,
    ),
    "membership": (
        "Membership inference",
        "How often an attack takes samples for ones that the model was trained on. A model that has forgotten gives "
        "the answer of the retrained one.",
        fig3_membership.attack_items,
    ),
    "pareto": (
        "Accuracy against cost",
        "Large: means over seeds, small: each seed. Cheap methods are on the left.",
        pareto.make,
    ),
    "payback": (
        "When distillation is paid back",
        "Distillation makes training dearer and each request cheaper: after how many requests it has paid for itself.",
        payback.make,
    ),
    "partition": (
        "Who has which samples",
        "Training samples of each class at each client.",
        partition.make,
    ),
    "gallery": ("Synthetic images and the real ones they began as", "", gallery.make),
    "round_time": (
        "Where the time of a round went",
        "Seconds of a mean round, from the choice of its clients to the new model.",
        round_time.make,
    ),
}
"""What every experiment gets: its name, what it shows, and what makes it."""
SAME: dict[str, tuple[ModuleType, ...]] = {
    "classes": (fig2_class_accuracy, fig4_sequential),
    "membership": (fig3_membership,),
}
"""What the paper's own figure shows already, where an experiment is the one that it is of."""


MOST_WORKERS = 4
WORTH_WORKERS = 12
"""Figures from which on the second it takes to start a process is worth it."""


@dataclass
class Section:
    """One heading of the report with what was made under it."""

    title: str
    items: list[Table | Figure] = field(default_factory=list)
    files: list[list[Path]] = field(default_factory=list)
    name: str = ""
    about: str = ""
    """Of an experiment: the job, and what tells it from others."""
    verdict: Verdict | None = None
    caveats: list[str] = field(default_factory=list)
    """Why its numbers are to be taken with care."""


@dataclass
class Report:
    """What was made, what could not be made, and what was wrong with the runs."""

    sections: list[Section]
    missing: list[tuple[str, str]]
    """Title, and the command that would supply it."""
    problems: list[str]

    def failed(self, title: str, error: Exception) -> None:
        """Note what could not be made by a fault of ours: it must not cost the rest of the page."""
        line = str(error).splitlines()[0] if str(error) else ""
        self.problems.append(f"{title}: not made, a fault in analysis ({type(error).__name__}: {line})")


def plan(results: Results) -> Report:
    """Decide what can be made; nothing is drawn yet."""
    report = Report([], [], list(results.problems))
    paper = Section("The paper's tables and figures, and beyond")
    for module in PAPER:
        try:
            paper.items += module.make(results)
        except Missing as error:
            report.missing.append((module.TITLE, str(error)))
        except Exception as error:
            report.failed(module.TITLE, error)
    for stem, title, own in experiments(results):
        section = _section(report, stem, title, own)
        for name, (label, caption, make) in EVERY.items():
            if _shown(name, own, paper):
                continue
            try:
                made = make(own, f"{stem}-{name}", f"{label}: {title}", _notes(own))
                section.items += _labelled(made, label, caption)
            except Missing as error:
                report.missing.append((f"{label}: {title}", str(error)))
            except Exception as error:
                report.failed(f"{label}: {title}", error)
        report.sections.append(section)
    report.sections += [paper] if paper.items else []
    _name_apart(report.sections)
    return report


def _labelled(made: Sequence[Table | Figure], label: str, caption: str) -> list[Table | Figure]:
    """Name what was made; a table beside a figure of the same is that in numbers."""
    drawn = any(isinstance(item, Figure) for item in made)
    return [
        replace(item, label=f"{label}, in numbers" if drawn and isinstance(item, Table) else label, caption=caption)
        for item in made
    ]


def _section(report: Report, stem: str, title: str, own: Results) -> Section:
    """Begin an experiment's section with its verdict."""
    job = str(own.runs["job"].iloc[0])
    section = Section(title, name=job, about=title.removeprefix(job)[2:-1])
    section.caveats = [caveat for caveat in dict.fromkeys(own.runs["caveat"]) if caveat]
    try:
        section.verdict = verdict.make(own, f"{stem}-headline", title)
    except Exception as error:
        report.failed(f"Headline: {title}", error)
        return section
    table = section.verdict.table
    section.items += [replace(table, role="headline")] if table else []
    return section


def _notes(own: Results) -> list[str]:
    return [*by_method.warnings(own), *([] if own.runs["sound"].all() else ["not whole, see the end of the page"])]


def _shown(name: str, own: Results, paper: Section) -> bool:
    first = own.runs.iloc[0]
    titles = {f"{m.TITLE} ({by_method.describe(first)})" for m in SAME.get(name, ()) if first["job"] == m.JOB}
    return bool(first["sound"]) and any(item.title in titles for item in paper.items)


def experiments(results: Results) -> list[tuple[str, str, Results]]:
    """Group runs into experiments, a job in one setting: stem, title, runs. Runs that are not whole stand alone."""
    found = []
    for (job, _), group in results.runs.groupby(["job", "setting"], sort=False):
        whole = group[group["sound"].astype(bool)]
        parts = [list(whole["run_id"])] if len(whole) else []
        parts += [[run] for run in group.loc[~group["sound"].astype(bool), "run_id"]]
        for runs in parts:
            own = results.only(runs)
            first = own.runs.iloc[0]
            state = "" if first["state"] == "done" else f", {first['state']}"
            stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", str(job))
            found.append((stem, f"{job} ({by_method.describe(first)}{state})", own))
    titles = [title for _, title, _ in found]
    return [(stem, title if titles.count(title) == 1 else _with_run(title, own), own) for stem, title, own in found]


def _with_run(title: str, own: Results) -> str:
    return f"{title.removesuffix(')')}, {own.runs['run_id'].max()})"


def _name_apart(sections: Sequence[Section]) -> None:
    """Give each table and each figure a stem of its own, whatever the jobs are called."""
    taken: set[tuple[type, str]] = set()
    for section in sections:
        for i, item in enumerate(section.items):
            stem, number = item.stem, 1
            while (type(item), stem) in taken:
                number += 1
                stem = f"{item.stem}-{number}"
            taken.add((type(item), stem))
            section.items[i] = replace(item, stem=stem)


def write(report: Report, out: Path, tell: Callable[[str], None], *, most_workers: int = MOST_WORKERS) -> None:
    """Write everything into a folder, figures on several processes: a report may have a hundred of them.

    A process that is started imports the program's main module again: a script of the user's wants one worker.
    """
    out.mkdir(parents=True, exist_ok=True)
    figures = [item for section in report.sections for item in section.items if isinstance(item, Figure)]
    workers = min(most_workers, os.cpu_count() or 1) if len(figures) >= WORTH_WORKERS else 1
    context = multiprocessing.get_context("spawn")  # a fork would copy the reader's threads half-way through
    with ProcessPoolExecutor(workers, mp_context=context) if workers > 1 else nullcontext() as pool:
        drawn = {id(figure): pool.submit(figure.write, out) for figure in figures} if pool else {}
        for section in report.sections:
            kept: list[Table | Figure] = []
            for item in section.items:
                tell(item.title)
                try:
                    section.files.append(drawn[id(item)].result() if id(item) in drawn else item.write(out))
                    kept.append(item)
                except OSError:
                    raise
                except Exception as error:
                    report.failed(item.title, error)
            section.items = kept


def count(sections: Sequence[Section]) -> tuple[int, int]:
    """Return how many tables and figures there are."""
    items = [item for section in sections for item in section.items]
    return sum(isinstance(i, Table) for i in items), sum(isinstance(i, Figure) for i in items)
