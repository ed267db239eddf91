"""Runs of a job for each table and figure: small real ones, and made-up figures where only their shape matters."""

from pathlib import Path

import pytest

from qdsim.algorithms import distillation
from tests.analysis.made import made_run
from tests.runs import run

CLASS = [{"kind": "class", "target": 3}]
CLIENT = [{"kind": "client", "target": "random"}]
NO_RELEARN = {"rounds": 0}
STAGES = {"unlearn": [(5.0, 0.0, 0.4)], "recover": [(9.0, 0.0, 0.6)], "relearn": [(9.0, 0.5, 0.6)]}
MADE = {"quickdrop": STAGES, "retrain": {"unlearn": [(99.0, 0.0, 0.6)], "relearn": [(9.0, 0.5, 0.6)]}}


@pytest.fixture(scope="session")
def all_jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every job's shape: its methods, requests and sweep, on the digits, named as the job is."""
    out = tmp_path_factory.mktemp("runs")
    three = ["quickdrop", "retrain", "sga"]
    run(out, name="table2_cifar10", seeds=[0, 1], methods=three, requests=CLASS, synthetic={"gallery": 2})
    client = ["quickdrop", "retrain", "s2u"]
    run(out, name="table4_client_noniid", methods=client, requests=CLIENT, relearn=NO_RELEARN)
    run(out, name="fig2_class_accuracy", requests=CLASS, relearn=NO_RELEARN)
    two, both = ["quickdrop", "retrain"], ["loss_threshold", "entropy_svm"]
    run(out, name="fig3_membership", methods=two, requests=CLASS, membership=both, relearn=NO_RELEARN)
    order = [{"kind": "class", "target": c} for c in (5, 8)]
    run(out, name="fig4_sequential", requests=order, sequence=True, relearn=NO_RELEARN)
    few, tuned = {"clients": 2}, {"synthetic.finetune": [0, 1]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "FINETUNE_STEPS", 2)  # stand for fifty
        run(out, name="fig5_finetune", requests=CLASS, partition=few, sweep=tuned, relearn=NO_RELEARN)
    run(out, name="fig6_scale", requests=CLASS, sweep={"synthetic.scale": [10, 100]}, relearn=NO_RELEARN)
    few_steps = {"rounds": 4, "steps": 2}
    run(
        out,
        name="recovery_steps",
        requests=CLASS,
        sweep={"recover.steps": [1, 3]},
        recover=few_steps,
        relearn=NO_RELEARN,
    )
    matching = {"synthetic.matching": [True, False]}
    run(out, name="table6_overhead", requests=CLASS, sweep=matching, relearn=NO_RELEARN)
    alphas = {"partition.alpha": [0.5, 10.0]}
    run(out, name="client_alpha", methods=two, requests=CLIENT, sweep=alphas, relearn=NO_RELEARN)
    for job in ("table3_svhn_100", "table4_client_iid", "table5_cifar10_20", "table5_mnist_20", "ablation_matching"):
        made_run(out, MADE, job=job, data={"dataset": "digits"})
    return out


@pytest.fixture(scope="session")
def report(all_jobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of all of them."""
    from typer.testing import CliRunner

    from analysis.__main__ import app

    out = tmp_path_factory.mktemp("report")
    ended = CliRunner().invoke(app, ["report", str(all_jobs), "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    (out / "said.txt").write_text(ended.output, encoding="utf-8")
    return out
