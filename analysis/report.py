"""The report: every table and figure that the runs at hand cover, what is missing and which job supplies it."""

import multiprocessing
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pandas as pd

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
    relearning,
    result,
    round_time,
    table1_methods,
    table2_cifar10,
    table3_svhn_100,
    table4_client_iid,
    table4_client_noniid,
    table5_cifar10_20,
    table5_mnist_20,
    table6_overhead,
)
from analysis.load import Results
from analysis.outputs import Figure, Missing, Table

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
)
"""What the paper has and what our jobs add, in the order of the report."""
EVERY: dict[str, tuple[str, ModuleType]] = {
    "result": ("Result", result),
    "curves": ("Learning curves", learning_curves),
    "pareto": ("Accuracy against cost", pareto),
    "payback": ("When distillation is paid back", payback),
    "partition": ("Who has which samples", partition),
    "gallery": ("Synthetic images and the real ones they began as", gallery),
    "round_time": ("Where the time of a round went", round_time),
}
"""What every experiment gets."""


MOST_WORKERS = 4
WORTH_WORKERS = 12
"""Figures from which on the second it takes to start a process is worth it."""


@dataclass
class Section:
    """One heading of the report with what was made under it."""

    title: str
    items: list[Table | Figure] = field(default_factory=list)
    files: list[list[Path]] = field(default_factory=list)


@dataclass
class Report:
    """What was made, what could not be made, and what was wrong with the runs."""

    sections: list[Section]
    missing: list[tuple[str, str]]
    """Title, and the command that would supply it."""
    problems: list[str]


def plan(results: Results) -> Report:
    """Decide what can be made; nothing is drawn yet."""
    sections, missing = [], []
    paper = Section("The paper's tables and figures, and beyond")
    for module in PAPER:
        try:
            paper.items += module.make(results)
        except Missing as error:
            missing.append((module.TITLE, str(error)))
    if paper.items:
        sections.append(paper)
    for stem, title, runs in experiments(results):
        section = Section(title)
        notes = by_method.warnings(results, runs)
        unfinished = runs[~runs["sound"]]
        if len(unfinished):
            notes = [*notes, f"not whole: {', '.join(unfinished['run_id'])}"]
        ids = list(runs["run_id"])
        for name, (label, module) in EVERY.items():
            section.items += module.make(results, f"{stem}-{name}", f"{label}: {title}", ids, notes)
            if name == "curves":
                section.items += _classes(results, stem, title, ids, notes)
        sections.append(section)
    return Report(sections, missing, results.problems)


def _classes(results: Results, stem: str, title: str, runs: list[str], notes: list[str]) -> list[Table | Figure]:
    """Return the per-class figure of an experiment, and its attacks where it asked for them."""
    items: list[Table | Figure] = []
    classes = results.classes[results.classes["run_id"].isin(runs)]
    served = classes[classes["method"] != "shared"]
    if len(served):
        sequence = served["request"].astype(str).str.match(r"\d+:").any()
        make = fig4_sequential.sequence_figure if sequence else fig2_class_accuracy.class_figure
        items.append(make(f"{stem}-classes", f"Accuracy of each class: {title}", classes, ["mean over seeds", *notes]))
    attacks = results.membership[results.membership["run_id"].isin(runs)]
    if len(attacks):
        items += fig3_membership.attack_items(f"{stem}-membership", f"Membership inference: {title}", attacks, notes)
    return items


def experiments(results: Results) -> list[tuple[str, str, pd.DataFrame]]:
    """Group runs into experiments: a job in one setting. Runs that are not whole stand alone."""
    found = []
    if results.runs.empty:
        return []
    for (job, _), group in results.runs.groupby(["job", "setting"], sort=False):
        whole = group[group["sound"]]
        parts = [whole] if len(whole) else []
        parts += [group[group["run_id"] == run] for run in group.loc[~group["sound"], "run_id"]]
        for runs in parts:
            state = "" if runs["sound"].all() else f", {runs.iloc[0]['state']}"
            found.append((str(job), f"{job} ({by_method.describe(runs.iloc[0])}{state})", runs))
    stems: dict[str, int] = {}
    named = []
    for job, title, runs in found:
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", job)
        stems[stem] = stems.get(stem, 0) + 1
        named.append((stem if stems[stem] == 1 else f"{stem}-{stems[stem]}", title, runs))
    return named


def write(report: Report, out: Path, tell: Callable[[str], None]) -> None:
    """Write everything into a folder, figures on several processes: a report may have a hundred of them."""
    out.mkdir(parents=True, exist_ok=True)
    items = [item for section in report.sections for item in section.items]
    figures = [item for item in items if isinstance(item, Figure)]
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if len(figures) >= WORTH_WORKERS else 1
    context = multiprocessing.get_context("spawn")  # a fork would copy the reader's threads half-way through
    with ProcessPoolExecutor(workers, mp_context=context) if workers > 1 else nullcontext() as pool:
        drawn = {id(figure): pool.submit(figure.write, out) for figure in figures} if pool else {}
        for section in report.sections:
            for item in section.items:
                tell(item.title)
                section.files.append(drawn[id(item)].result() if id(item) in drawn else item.write(out))


def count(sections: Sequence[Section]) -> tuple[int, int]:
    """Return how many tables and figures there are."""
    items = [item for section in sections for item in section.items]
    return sum(isinstance(i, Table) for i in items), sum(isinstance(i, Figure) for i in items)
