"""Run directories with made-up figures, written as qdsim writes them: small ones to calculate by hand, and a large one.

``python -m tests.analysis.made OUT`` writes 100 clients x 200 rounds x 6 methods x 5 seeds.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qdsim.store.run_directory import Manifest, TableWriter, part_name

TITLES = {"quickdrop": "QuickDrop", "retrain": "Retrain-Or", "sga": "SGA-Or", "fump": "FU-MP"}
TITLES |= {"federaser": "FedEraser", "s2u": "S2U"}
Round = tuple[float, float, float]
"""Client compute in seconds, F-Set accuracy, R-Set accuracy."""


def config(job: str, seeds: Sequence[int], methods: Sequence[str], **changes: Any) -> dict[str, Any]:
    """Return the parts of a job's configuration that the analysis looks at."""
    return {
        "name": job,
        "seeds": list(seeds),
        "methods": list(methods),
        "requests": [{"kind": "class", "target": 9}],
        "sequence": False,
        "data": {"dataset": "cifar10", "root": "data"},
        "partition": {"kind": "dirichlet", "clients": 2, "alpha": 0.1},
        "train": {"rounds": 2},
        **changes,
    }


def made_run(
    out: Path,
    methods: Mapping[str, Mapping[str, Sequence[Round]]],
    *,
    job: str = "made",
    run: str = "1",
    seeds: Sequence[int] = (0,),
    state: str = "done",
    profile: str | None = None,
    shards: str = "p",
    clients: int = 2,
    matching_s: float = 3.0,
    received: int | None = None,
    per_seed_s: float = 0.0,
    hardware: Mapping[str, Any] | None = None,
    note: str = "",
    **changes: Any,
) -> Path:
    """Write a run in which each phase's rounds are given; a client's compute is an equal share of the round's.

    Training has one round of 10 s, of which each client spends ``matching_s`` on matching. ``per_seed_s`` is added to
    the seconds of each round, seed by seed: 0 for seed 0, once for seed 1.
    """
    run_dir = out / f"{job}-{run}"
    writer = TableWriter(run_dir)
    content = {
        "run_id": run_dir.name,
        "config": config(job, seeds, list(methods), **changes),
        "origin": {"profile": profile},
        "hardware": dict(hardware or {}),
        "data": {"note": note},
        "cells": [
            {
                "cell": "",
                "partitions": {str(s): f"{shards}{s}" for s in seeds},
                "requests": {str(s): ["class:9"] for s in seeds},
            }
        ],
        "methods": {
            m: {"title": TITLES[m], "class": True, "client": m != "fump", "relearn": m != "fump", "reasons": {}}
            for m in methods
        },
    }
    manifest = Manifest(run_dir, content)
    for seed in seeds:
        names = {"seed": seed, "cell": ""}
        rows = [
            {**names, "method": "shared", "request": "", "phase": "train", "round": 0}
            | {"client_id": i, "class": c, "num_samples": 10 * (i + 1), "num_synthetic": 1}
            for i in range(clients)
            for c in range(3)
        ]
        writer.append("partitions", f"seed-{seed}-shared", rows)
        _phase(writer, {**names, "method": "shared", "request": "", "phase": "train"}, [(10.0, 0.5, 0.5)], clients,
               matching_s, None)  # fmt: skip
        for method, phases in methods.items():
            for phase, rounds in phases.items():
                named = {**names, "method": method, "request": "class:9", "phase": phase}
                longer = [(compute + per_seed_s * seed, f, r) for compute, f, r in rounds]
                _phase(writer, named, longer, clients, 0.0, received)
    if state != "running":
        manifest.finish(state)
    return run_dir


def _phase(
    writer: TableWriter,
    named: dict[str, Any],
    rounds: Sequence[Round],
    clients: int,
    matching_s: float,
    received: int | None,
) -> None:
    part = part_name(named["cell"], named["seed"], named["method"], named["request"], named["phase"])
    trained = named["phase"] == "train"
    for number, (compute, f, r) in enumerate(rounds, start=1):
        here = {**named, "round": number}
        clocks = {"client_compute_s": compute, "critical_path_s": compute / clients, "wall_s": compute, "samples": 100}
        clocks |= {"wait_s": compute, "busy_s": 0.75 * compute, "aggregation_s": 0.0, "evaluation_s": 1.0}
        clocks |= {"gradients": 4, "participants_expected": clients}
        clocks["participants_received"] = clients if received is None else received
        scores = {"test_accuracy": r}
        if not trained:
            scores |= {"forget_accuracy": f, "retain_accuracy": r}
        writer.append("rounds", f"{part}-{number:05d}", [{**here, **clocks, **scores}])
        rows = [
            {**here, "client_id": i, "compute_s": compute / clients, "matching_s": matching_s} for i in range(clients)
        ]
        writer.append("clients", f"{part}-{number:05d}", rows)
        writer.append("classes", f"{part}-{number:05d}", [{**here, "class": c, "accuracy": r} for c in range(3)])
    last = rounds[-1]
    close = next(i for i, (_, _, r) in enumerate(rounds, start=1) if r >= last[2] - 0.01)
    stage = {
        **named,
        "round": len(rounds),
        "stop_reason": "rounds",
        "rounds_run": len(rounds),
        "converged_round": close,
        "forget_accuracy_start": 0.5,
        "retain_accuracy_start": 0.6,
        "client_compute_s": sum(c for c, _, _ in rounds),
        "critical_path_s": sum(c for c, _, _ in rounds) / clients,
        "samples": 100 * len(rounds),
        "gradients": 4 * len(rounds),
        "data_size": 1000,
        "storage_bytes": 2048,
        "storage_bytes_nominal": 4096,
        "test_accuracy": last[2],
    }
    if not trained:
        stage |= {"forget_accuracy": last[1], "retain_accuracy": last[2]}
    writer.append("stages", part, [stage])


def large(out: Path) -> Path:
    """Write 600,000 rows of clients, a part for each round as a run does."""
    rounds = [(10.0, 0.0, 0.7)] * 200
    methods = {method: {"unlearn": rounds[:100], "recover": rounds[:100]} for method in TITLES}
    return made_run(out, methods, job="large", seeds=range(5), clients=100)


if __name__ == "__main__":
    print(large(Path(sys.argv[1])))
