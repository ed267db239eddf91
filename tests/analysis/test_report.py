"""The report of real runs: everything the paper has, in every format, and what is missing is said."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

import analysis
from analysis import load, recovery_steps, side_by_side
from analysis import report as reports
from analysis.__main__ import app
from analysis.outputs import Figure, Table
from qdsim.algorithms.stopping import SETTLED
from qdsim.experiment import config
from tests.analysis import texts
from tests.analysis.made import made_run
from tests.analysis.test_recipes import RECIPES
from tests.conftest import PROJECT
from tests.runs import run

TABLES = [
    "table1_methods",
    "table2_cifar10",
    "table3_svhn_100",
    "table4_client_noniid",
    "table4_client_iid",
    "table5_cifar10_20",
    "table5_mnist_20",
    "table6_overhead",
]
FIGURES = ["fig2_class_accuracy", "fig3_membership", "fig4_sequential", "fig5_finetune", "fig6_scale"]
QUICKDROP = {"unlearn": [(1.0, 0.0, 0.4)], "recover": [(2.0, 0.0, 0.6)], "relearn": [(2.0, 0.5, 0.6)]}
RETRAIN = {"unlearn": [(50.0, 0.0, 0.65)], "relearn": [(40.0, 0.5, 0.65)]}
TEN = {"kind": "official", "clients": 10, "alpha": 0.1}


def item(runs, stem):
    """The figures of one table of the report."""
    planned = reports.plan(load(runs))
    assert not [problem for problem in planned.problems if "a fault in analysis" in problem]
    tables = [i for section in planned.sections for i in section.items if isinstance(i, Table) and i.stem == stem]
    assert len(tables) == 1
    return tables[0].figures


def test_every_table_of_the_paper_is_there_in_three_formats(report):
    """Six tables, Tables 4 and 5 in their two halves."""
    for stem in TABLES:
        for end in (".csv", ".tex", ".md"):
            assert (report / f"{stem}{end}").stat().st_size > 0, stem + end


def test_every_figure_of_the_paper_is_there_and_is_a_picture(report):
    """Five figures, PNG and PDF, at least 1.5 inches high at 150 dots."""
    for stem in FIGURES:
        with Image.open(report / f"{stem}.png") as picture:
            assert picture.width >= 500
            assert picture.height >= 225
            assert len(picture.convert("L").resize((64, 64)).getcolors()) > 5, f"{stem} is blank"
        assert (report / f"{stem}.pdf").read_bytes().startswith(b"%PDF")


def test_no_words_of_a_figure_lie_on_each_other_or_are_cut_off(all_jobs):
    """Every figure of the report: titles, labels, ticks and legends, by their boxes on the canvas."""
    items = [item for section in reports.plan(load(all_jobs)).sections for item in section.items]
    figures = [item for item in items if isinstance(item, Figure)]
    assert len(figures) > 50
    assert [fault for figure in figures for fault in texts.faults(figure)] == []


def test_no_figure_is_there_twice(report):
    """Figures 2, 3 and 4 are those of their own jobs; another job has its own."""
    for stem in ("fig2_class_accuracy-classes", "fig4_sequential-classes", "fig3_membership-membership"):
        assert not (report / f"{stem}.png").exists()
    assert (report / "table2_cifar10-classes.png").exists()


def test_nothing_is_missing_when_all_jobs_were_run(report):
    """Each item was made, and nothing was wrong with the runs."""
    said = (report / "said.txt").read_text(encoding="utf-8")
    assert "not made" not in said
    assert re.search(r"^\d+ tables and \d+ figures from 15 runs$", said, re.MULTILINE)


def test_what_the_table_says_is_what_the_tables_of_the_run_hold(all_jobs, report):
    """Mean over both seeds of QuickDrop's R-Set accuracy after recovery, taken from the Parquet files by hand."""
    run = next(all_jobs.glob("table2_cifar10-*"))
    stages = pd.read_parquet(run / "tables" / "stages")
    own = stages[(stages["method"] == "quickdrop") & (stages["phase"] == "recover")]["retain_accuracy"]
    table = pd.read_csv(report / "table2_cifar10.csv")
    ours = table[(table["method"] == "quickdrop") & (table["column"] == "recover.retain_accuracy")].iloc[0]
    assert ours["mean"] == pytest.approx(own.mean())
    assert ours["sd"] == pytest.approx(own.std())
    assert ours["n"] == 2


def test_the_paper_is_compared_with_the_same_data_only(report, tmp_path):
    """The digits have no row in Table 2; CIFAR-10 has: 60 % less the paper's 70.48 %."""
    assert pd.read_csv(report / "table2_cifar10.csv")["paper"].isna().all()
    size = {"partition": TEN, "train": {"rounds": 200}}
    made_run(tmp_path, {"quickdrop": QUICKDROP, "retrain": RETRAIN}, job="table2_cifar10", **size)
    table = item(tmp_path, "table2_cifar10")
    found = table[(table["method"] == "quickdrop") & (table["column"] == "recover.retain_accuracy")].iloc[0]
    assert found["paper"] == pytest.approx(0.7048)
    assert found["difference"] == pytest.approx(0.6 - 0.7048)


def test_a_speedup_says_by_which_rule(report):
    """Every table of the paper that has one."""
    for stem in ("table2_cifar10", "table3_svhn_100", "table4_client_noniid", "table4_client_iid"):
        assert "retraining counted up to its first round within 1 point" in (report / f"{stem}.md").read_text(), stem


def test_fig5_counts_gradients_of_training_and_of_fine_tuning(all_jobs, report):
    """Three rounds of three steps are 9 gradients a client; F = 0 tunes nothing."""
    table = pd.read_csv(report / "fig5_finetune.csv")
    by = table.set_index(["label", "column"])["mean"]
    assert by[0, "train.gradients_per_client"] == 9
    assert by[0, "finetune.gradients_per_client"] == 0
    assert by[1, "finetune.gradients_per_client"] > 0


def test_fig6_has_the_line_of_sga_from_the_other_job(report):
    """Table 2's SGA-Or had the same seeds, partition and training."""
    assert "line of SGA-Or, on the real samples: mean of 1 seeds" in (report / "fig6_scale.md").read_text(
        encoding="utf-8"
    )


def test_relearning_is_as_many_times_faster_as_it_was(tmp_path):
    """Retraining's relearning 40 s against QuickDrop's 2 s: 20 times; the paper has 66.7, on MNIST with 20 clients."""
    twenty = {"data": {"dataset": "mnist"}, "partition": TEN | {"clients": 20}}
    made_run(tmp_path, {"quickdrop": QUICKDROP, "retrain": RETRAIN}, job="table5_mnist_20", **twenty)
    slower = {"unlearn": [(50.0, 0.0, 0.65)], "relearn": [(80.0, 0.5, 0.65)]}
    made_run(tmp_path, {"quickdrop": QUICKDROP, "retrain": slower}, job="another", partition=TEN)
    table = item(tmp_path, "relearning")
    found = table[table["column"] == "relearn.speedup"].set_index("job")
    assert found["mean"].to_dict() == {"table5_mnist_20": 20, "another": 40}
    assert found.loc["table5_mnist_20", "paper"] == 66.7
    assert pd.isna(found.loc["another", "paper"])
    assert found["row"].nunique() == 2


def test_distillation_is_paid_back_after_as_many_requests_as_it_costs(tmp_path):
    """Two clients matched for 3 s each, 6 s; a request costs 3 s instead of 5: 6 / 2 = 3 requests."""
    sga = {"unlearn": [(2.0, 0.0, 0.4)], "recover": [(3.0, 0.0, 0.6)]}
    made_run(tmp_path, {"quickdrop": QUICKDROP, "sga": sga})
    table = item(tmp_path, "made-payback")
    assert table.set_index("column")["mean"].to_dict() == {"matching_s": 6, "own_s": 3, "other_s": 5, "requests": 3}


def test_where_the_time_went_adds_up_to_the_round(tmp_path):
    """A round of 10 s, 7.5 of them steps, of which 3 + 3 of 10 s matching: 3, 4.5, 2.5 waiting, 1 evaluation beside."""
    from analysis import round_time

    results = load(made_run(tmp_path, {"quickdrop": QUICKDROP}))
    parts = round_time.split(results.rounds, results.clients).loc[("shared", "train")]
    expected = {"compute": 3.0, "matching": 4.5, "transfer": 2.5, "aggregation": 0, "evaluation": 1}
    assert parts.to_dict() == pytest.approx(expected)


def test_other_clients_than_the_papers_are_not_set_beside_it(tmp_path):
    """Table 2 has ten; two of them stand alone."""
    made_run(tmp_path, {"quickdrop": QUICKDROP, "retrain": RETRAIN}, job="table2_cifar10")
    assert item(tmp_path, "table2_cifar10")["paper"].isna().all()


@pytest.mark.parametrize("why", [{"profile": "smoke"}, {"note": "not SVHN's own data"}])
@pytest.mark.parametrize("stem", ["table2_cifar10", "table6_overhead", "relearning"])
def test_a_smoke_run_and_a_stand_in_for_the_data_are_not_set_beside_the_paper(tmp_path, why, stem):
    """The paper has values for these three tables, and the run is otherwise its experiment."""
    job, data = ("table5_mnist_20", "mnist") if stem == "relearning" else ("table2_cifar10", "cifar10")
    partition = TEN | {"clients": 20 if stem == "relearning" else 10}
    for out, own in ((tmp_path / "real", {}), (tmp_path / "other", why)):
        made_run(out, {"quickdrop": QUICKDROP, "retrain": RETRAIN}, job=job, partition=partition,
                 data={"dataset": data}, **own)  # fmt: skip
    assert item(tmp_path / "real", stem)["paper"].notna().any()
    assert item(tmp_path / "other", stem)["paper"].isna().all()


def test_table_6_counts_a_reused_training_once(tmp_path):
    """Two jobs with the same clocks of training are one measurement: 10 s, 6 of them matching, n = 1."""
    for job in ("table2_cifar10", "fig2_class_accuracy"):
        made_run(tmp_path, {"quickdrop": QUICKDROP}, job=job, partition=TEN)
    found = item(tmp_path, "table6_overhead").set_index("column")
    assert found["mean"].to_dict() == pytest.approx({"compute_s": 10, "matching_s": 6, "overhead": 0.6})
    assert set(found["n"]) == {1}
    assert found.loc["overhead", "paper"] == pytest.approx(0.55)


def test_table_1_has_the_storage_of_methods_of_one_level(all_jobs):
    """S2U serves clients only, and stores what the tables say: nothing."""
    table = item(all_jobs, "table1_methods")
    own = table[(table["method"] == "s2u")].set_index("column")["mean"]
    assert own["total.storage_bytes"] == 0
    assert own["class"] == "✗"
    assert own["client"] == "✓"


def test_a_sweep_of_two_methods_draws_the_curve_of_one(tmp_path):
    """SGA-Or in the sweep over s does not enter QuickDrop's means."""
    request = [{"kind": "class", "target": 3}]
    both = {"methods": ["quickdrop", "sga"], "sweep": {"synthetic.scale": [10, 100]}, "relearn": {"rounds": 0}}
    made = run(tmp_path, name="fig6_scale", requests=request, **both)
    stages = pd.read_parquet(made / "tables" / "stages")
    own = stages[(stages["method"] == "quickdrop") & (stages["phase"] == "recover")].set_index("cell")
    table = item(tmp_path, "fig6_scale")
    found = table[table["column"] == "final.retain_accuracy"].set_index("row")
    assert found.loc["10", "mean"] == own.loc["synthetic.scale=10", "retain_accuracy"]
    assert found.loc["100", "mean"] == own.loc["synthetic.scale=100", "retain_accuracy"]


def test_a_fault_in_one_figure_does_not_cost_the_page(tmp_path, monkeypatch):
    """The others are made, and the line says whose fault it is."""
    made_run(tmp_path / "runs", {"quickdrop": QUICKDROP})
    monkeypatch.setattr(reports.table1_methods, "make", lambda results: 1 / 0)
    ended = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    assert ended.exit_code == 0
    assert "Table 1: what each method can do: not made, a fault in analysis (ZeroDivisionError" in ended.output
    assert (tmp_path / "out" / "made-result.csv").exists()


def test_jobs_whose_names_meet_keep_their_files_apart(tmp_path):
    """x in two settings, and x-2: six experiments' files, none written twice."""
    made_run(tmp_path, {"quickdrop": QUICKDROP}, job="x")
    made_run(tmp_path, {"quickdrop": QUICKDROP}, job="x", run="2", train={"rounds": 9})
    made_run(tmp_path, {"quickdrop": QUICKDROP}, job="x-2")
    planned = reports.plan(load(tmp_path))
    named = [(type(i), i.stem) for section in planned.sections for i in section.items]
    assert len(named) == len(set(named))


def test_an_unfinished_run_of_the_job_is_what_the_report_asks_for(tmp_path):
    """To end, if it is running; to be resumed, if it was interrupted."""
    made_run(tmp_path, {"quickdrop": QUICKDROP}, job="table2_cifar10", state="running")
    made_run(tmp_path, {"quickdrop": QUICKDROP}, job="table3_svhn_100", state="interrupted")
    missing = dict(reports.plan(load(tmp_path)).missing)
    assert missing["Table 2: class-level unlearning"] == "table2_cifar10-1 to end"
    assert missing["Table 3: class-level unlearning with 100 clients"] == "qdsim run table3_svhn_100 --resume"


def test_two_settings_of_a_job_are_two_tables(tmp_path):
    """A laptop's and the paper's sizes are never averaged."""
    made_run(tmp_path, {"quickdrop": QUICKDROP, "retrain": RETRAIN}, job="table2_cifar10")
    made_run(tmp_path, {"quickdrop": QUICKDROP, "retrain": RETRAIN}, job="table2_cifar10", run="2", profile="laptop",
             train={"rounds": 1})  # fmt: skip
    planned = reports.plan(load(tmp_path))
    stems = [item.stem for item in planned.sections[-1].items if item.stem.startswith("table2")]
    assert stems == ["table2_cifar10-laptop", "table2_cifar10-full"]


def test_any_runs_are_set_beside_each_other(tmp_path):
    """The setting in which they differ, and what each method came to; the page begins with the two newest of a job."""
    made_run(tmp_path, {"retrain": RETRAIN, "quickdrop": QUICKDROP})
    made_run(tmp_path, {"quickdrop": QUICKDROP}, run="2", train={"rounds": 9})
    made_run(tmp_path, {"quickdrop": QUICKDROP}, job="another")
    found = side_by_side.make(load(tmp_path))
    assert sorted(found.runs) == ["another-1", "made-1", "made-2"]
    at = {run: found.runs.index(run) for run in found.runs}
    settings = dict(found.settings)
    assert [settings["train.rounds"][at[run]] for run in ("made-1", "made-2")] == ["2", "9"]
    assert [settings["methods"][at[run]] for run in ("made-1", "made-2")] == ["retrain, quickdrop", "quickdrop"]
    ((title, lines),) = found.groups
    assert title == "Forget class 9"
    values = {(method, measure): texts for method, measure, texts in lines}
    assert [values["QuickDrop", "R-Set (%)"][at[run]] for run in at] == ["60.00"] * 3
    assert [values["Retrain-Or", "R-Set (%)"][at[run]] for run in ("made-1", "made-2")] == ["65.00", ""]
    assert set(found.chosen) == {"made-1", "made-2"}


def test_one_run_alone_gets_a_table_curves_classes_and_the_page(all_jobs, tmp_path):
    """Whatever the job: here one that feeds a single table of the paper."""
    run = next(all_jobs.glob("table6_overhead-*"))
    ended = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path)])
    assert ended.exit_code == 0
    for name in ("result.csv", "result.tex", "result.md", "curves.png", "classes.png", "partition.png"):
        assert (tmp_path / f"table6_overhead-{name}").exists(), name
    assert (tmp_path / "index.html").exists()
    assert "not made: Table 2: class-level unlearning; it needs qdsim run table2_cifar10" in ended.output


def test_each_item_names_a_job_that_exists():
    """What the report says would supply it can be run."""
    for module in reports.PAPER:
        assert (PROJECT / "jobs" / f"{module.JOB}.toml").exists()
        assert config.load(PROJECT / "jobs" / f"{module.JOB}.toml", profile=None, overrides=[]).name == module.JOB


def test_a_run_that_is_going_on_is_shown_by_itself(tmp_path):
    """In no comparison, and named; its table and curves are made."""
    made_run(tmp_path, {"quickdrop": QUICKDROP}, job="table2_cifar10", state="running")
    planned = reports.plan(load(tmp_path))
    assert "Table 2: class-level unlearning" in [title for title, _ in planned.missing]
    own = planned.sections[0]
    assert own.title == "table2_cifar10 (CIFAR-10, 2 clients, α = 0.1, running)"
    assert "table2_cifar10-result" in [item.stem for item in own.items]


def test_no_run_at_all_is_a_users_mistake(tmp_path):
    """One line for the folder, one for the end, exit code 2."""
    ended = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "out")])
    assert ended.exit_code == 2
    assert "nothing to report" in ended.output
    assert not (tmp_path / "out").exists()


def test_the_report_imports_neither_torch_nor_ray():
    """A laptop with the tables needs no GPU libraries in memory."""
    code = "import analysis.__main__, sys; print(sorted({'torch', 'ray'} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
    assert said.stdout.strip() == "[]"


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.sources, self.links, self.ids = [], [], set()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.sources += [attributes[name] for name in ("src", "srcset") if name in attributes]
        self.links += [attributes["href"]] if "href" in attributes else []
        self.ids |= {attributes["id"]} if "id" in attributes else set()


def test_the_page_needs_nothing_but_itself(report):
    """Every picture is inlined, and every link leads into the page or to a file of the report."""
    text = (report / "index.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert len(page.sources) > 20
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert all(link[1:] in page.ids if link.startswith("#") else (report / link).is_file() for link in page.links)
    assert "table2_cifar10.csv" in page.links
    assert "url(" not in text


def test_the_page_begins_with_the_runs_and_each_experiment_with_its_verdict(report):
    """Runs, then their comparison, then the experiments: a sentence, the small table, and the wide one folded."""
    text = (report / "index.html").read_text(encoding="utf-8")
    marks = ['<section id="runs">', '<section id="compare">', "<nav", '<section id="s1">']
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    first = text[places[-1] : text.index('<section id="s2">')]
    order = [
        '<p class="verdict">',
        '<table class="headline',
        "F-Set: accuracy on test images of the class",
        "<details>",
    ]
    assert [first.index(mark) for mark in order] == sorted(first.index(mark) for mark in order)
    assert "Speed-up as run" in first[first.index("<details>") : first.index("</details>")]
    assert text.count('<p class="verdict">') == 15


LAID_OUT = """
<script>
window.addEventListener("load", () => {
  document.querySelectorAll("details").forEach(each => each.open = true);
  const wrong = [], boxes = [];
  if (document.documentElement.scrollWidth > innerWidth + 1) wrong.push("the page is wider than the window");
  for (const table of document.querySelectorAll("table.headline")) {
    const box = table.getBoundingClientRect();
    if (box.left < -1 || box.right > innerWidth + 1) wrong.push("a headline table is cut off at " + box.right);
  }
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const said = texts.currentNode.textContent.trim(), range = document.createRange();
    range.selectNodeContents(texts.currentNode);
    for (const box of said ? range.getClientRects() : []) if (box.width > 1) boxes.push([box, said.slice(0, 40)]);
  }
  boxes.sort((one, other) => one[0].top - other[0].top);
  boxes.forEach(([one, said], i) => {
    for (let j = i + 1; j < boxes.length && boxes[j][0].top < one.bottom - 4; j++) {
      const [other, beside] = boxes[j];
      const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      if (across > 2) wrong.push(said + " lies on " + beside);
    }
  });
  parent.postMessage(JSON.stringify({texts: boxes.length, width: innerWidth, wrong: wrong.slice(0, 5)}), "*");
});
</script>
"""
"""Opens all that is folded, then looks where things are, and tells the page around it."""
AROUND = """
<title></title><script>addEventListener("message", event => document.title = event.data)</script>
<iframe src="inner.html" style="border: 0; height: 2000px; width: WIDTHpx"></iframe>
"""
"""A browser without a screen has no window as narrow as a phone's."""


def seen_in_chromium(page, tmp_path, *options):
    """Return the tree of a page as a browser has it, and what its console says."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here: apt install chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--log-level=0",
               f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom", *options,
               page.as_uri()]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-500:]
    assert "CONSOLE" not in ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("width", "options"),
    [(1400, ()), (390, ("--blink-settings=preferredColorScheme=0",))],
    ids=["desk", "phone, dark"],
)
def test_the_page_fits_the_window_and_no_text_lies_on_another(report, tmp_path, width, options):
    """With all that is folded opened: headline tables are whole, wide ones scroll by themselves."""
    inner, page = tmp_path / "inner.html", tmp_path / "index.html"
    inner.write_text((report / "index.html").read_text(encoding="utf-8") + LAID_OUT, encoding="utf-8")
    page.write_text(AROUND.replace("WIDTH", str(width)), encoding="utf-8")
    tree = seen_in_chromium(page, tmp_path, "--window-size=1500,2000", *options)
    found = json.loads(html.unescape(re.search("<title>(.*?)</title>", tree)[1]))
    assert found["texts"] > 2000
    assert found["width"] == width
    assert found["wrong"] == []


def test_the_page_renders_in_a_browser_without_an_error(report, tmp_path):
    """Chromium, headless: the last section is in the tree and the console is silent."""
    assert '<section id="runs">' in seen_in_chromium(report / "index.html", tmp_path)


def test_latex_is_booktabs_and_escaped(report):
    """Rules, spans over the groups, and no bare percent sign or underscore in a cell."""
    text = (report / "table2_cifar10.tex").read_text(encoding="utf-8")
    for word in (r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule(lr)", r"\multicolumn"):
        assert word in text
    for tabular in text.split(r"\begin{tabular}")[1:]:
        body = [line for line in tabular.splitlines() if line.endswith(r"\\")]
        assert len(body) > 3
        assert len({line.count("&") for line in body[1:]}) == 1
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert all(not re.search(r"(?<!\\)[%_#]", line) for line in body)


def test_the_recipes_run_one_after_the_other(all_jobs):
    """On a real run with two seeds and three methods; each ends in a table with a number in it."""
    names = {"analysis": analysis, "results": analysis.load(next(all_jobs.glob("table2_cifar10-*")))}
    found = []
    for recipe in RECIPES:
        *lines, last = recipe.strip().splitlines()
        exec("\n".join(lines), names)
        found.append(eval(last, names))
    for value in found:
        assert isinstance(value, pd.DataFrame | pd.Series)
        assert value.notna().any().any() if isinstance(value, pd.DataFrame) else value.notna().any()
    means, times, curve, share, worst = found
    stages = names["results"].stages
    recovered = stages[(stages["method"] == "quickdrop") & (stages["phase"] == "recover")]["retain_accuracy"].mean()
    assert means.loc["quickdrop", ("retain_accuracy", "mean")] == pytest.approx(recovered)
    assert times["retrain"].tolist() == pytest.approx([1.0, 1.0])
    assert curve.shape == (3, 2)
    assert ((share > 0) & (share < 1)).all()
    assert len(worst) == 5


def test_the_speed_up_of_a_short_recovery_is_that_of_the_tables(all_jobs, report):
    """One step a round: samples of retraining over those of unlearning and of recovery up to the round that is chosen.

    That is the first whose loss has fallen by less than 5 %, or the last.
    """
    rounds = pd.read_parquet(next(all_jobs.glob("recovery_steps-*")) / "tables" / "rounds")
    own = rounds[(rounds["cell"] == "recover.steps=1") & (rounds["method"] == "quickdrop")].sort_values("round")
    unlearn, recover = own[own["phase"] == "unlearn"], own[own["phase"] == "recover"]
    losses = recover["start_loss"].tolist()
    settled = [n for n in range(1, len(losses)) if losses[n] > 0.95 * losses[n - 1]]
    chosen = settled[0] + 1 if settled else len(losses)
    spent = unlearn["samples"].sum() + recover["samples"].head(chosen).sum()
    stages = pd.read_parquet(next(all_jobs.glob("table2_cifar10-*")) / "tables" / "stages")
    retrained = stages[(stages["method"] == "retrain") & (stages["phase"] == "unlearn") & (stages["seed"] == 0)]
    assert recovery_steps.FALLS == SETTLED.falls == 0.05  # the analysis applies the engine's rule
    table = pd.read_csv(report / "recovery_steps.csv").set_index(["label", "column"])["mean"]
    assert table["T = 1", "round"] == chosen
    assert table["T = 1", "full.samples"] == pytest.approx(retrained["samples"].sum() / spent)
