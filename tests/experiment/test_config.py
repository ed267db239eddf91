"""Jobs are refused before anything starts, in one line that names key, value and what is allowed."""

import math
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from pydantic import ValidationError

from qdsim.errors import BadInput
from qdsim.experiment import config
from qdsim.models.convnet import ConvNet


def job_file(tmp_path: Path, text: str = "") -> Path:
    path = tmp_path / "job.toml"
    path.write_text(f'name = "job"\n{text}', encoding="utf-8")
    return path


def test_defaults_are_the_papers_values(tmp_path):
    """§4.1: K=200, T=50, batch 256, η 0.01, 0.02 and 0.01, 1 + 2 rounds, s=100, η_S=0.1, ς_S=1, α=0.1, F=0."""
    job = config.load(job_file(tmp_path))
    assert (job.train.rounds, job.train.steps, job.train.batch_size, job.train.lr) == (200, 50, 256, 0.01)
    assert (job.unlearn.rounds, job.unlearn.steps, job.unlearn.lr) == (1, 50, 0.02)
    assert (job.recover.rounds, job.recover.steps, job.recover.lr, job.recover.augment) == (2, 50, 0.01, True)
    assert (job.synthetic.scale, job.synthetic.lr, job.synthetic.steps, job.synthetic.finetune) == (100, 0.1, 1, 0)
    assert (job.partition.clients, job.partition.alpha, job.model.width, job.model.depth) == (10, 0.1, 128, 3)
    assert len(job.seeds) == 5
    assert all(s.participation == 1.0 for s in (job.train, job.unlearn, job.recover, job.relearn))


def test_the_ascent_stops_at_twice_the_loss_of_a_guess_by_default(tmp_path):
    """2 ln 10 for ten classes; ``none`` is the paper's literal step count, a number is itself."""
    path = job_file(tmp_path)
    assert config.load(path).hyperparameters(ConvNet(1, 28, 10)).max_loss == pytest.approx(2 * math.log(10))
    assert (
        config.load(path, overrides=["unlearn.max_loss=none"]).hyperparameters(ConvNet(1, 28, 10)).max_loss == math.inf
    )
    assert config.load(path, overrides=["unlearn.max_loss=3.5"]).hyperparameters(ConvNet(1, 28, 10)).max_loss == 3.5


def test_set_beats_profile_beats_file(tmp_path):
    """train.rounds: 7 in the file, 20 in the profile, 3 by --set."""
    path = job_file(tmp_path, '[data]\ndataset = "mnist"\n[train]\nrounds = 7\n')
    assert config.load(path).train.rounds == 7
    assert config.load(path, profile="laptop").train.rounds == 20
    assert config.load(path, profile="laptop", overrides=["train.rounds=3"]).train.rounds == 3


def test_set_reads_toml_else_a_string(tmp_path):
    """Lists, tables, numbers and booleans are TOML; a bare word is a string."""
    overrides = ["seeds=[4, 5]", 'requests=[{kind="client", target=3}]', "data.dataset=mnist", "train.lr=1e-3"]
    job = config.load(job_file(tmp_path), overrides=overrides)
    assert job.seeds == (4, 5)
    assert job.requests == (config.Request(kind="client", target=3),)
    assert (job.data.dataset, job.train.lr) == ("mnist", 1e-3)


def test_a_profile_leaves_the_experiment_alone(tmp_path):
    """Data set, clients, α, methods and requests stay as they are; phases that are off stay off."""
    path = job_file(tmp_path, "[partition]\nclients = 20\nalpha = 0.3\n[relearn]\nrounds = 0\n")
    plain = config.load(path)
    for profile in ("laptop", "smoke"):
        job = config.load(path, profile=profile)
        assert (job.data, job.partition, job.methods, job.requests) == (
            plain.data,
            plain.partition,
            plain.methods,
            plain.requests,
        )
        assert job.relearn.rounds == 0
        assert len(job.seeds) == 1
        assert job.cluster.clients_per_actor == 10


REFUSED = [
    ("train.round=3", "train.round = 3: unknown key; did you mean rounds?"),
    ("trian.rounds=3", "trian = {rounds = 3}: unknown key; did you mean train?"),
    ("train.rounds=ten", "train.rounds = 'ten': must be a whole number"),
    ("train.rounds=2.5", "train.rounds = 2.5: must be a whole number"),
    ("train.rounds=true", "train.rounds = true: must be a whole number"),
    ("train.rounds=0", "train.rounds = 0: must be at least 1"),
    ("train.participation=0", "train.participation = 0: must be more than 0"),
    ("train.participation=1.5", "train.participation = 1.5: must be at most 1"),
    ("train.lr=nan", "train.lr = nan: must be a finite number"),
    ("partition.alpha=-1", "partition.alpha = -1: must be more than 0"),
    ("partition.kind=even", "partition.kind = 'even': must be 'dirichlet', 'official' or 'iid'"),
    ("synthetic.momentum=1.0", "synthetic.momentum = 1.0: must be less than 1"),
    ("methods=[]", "methods = []: must be a list that is not empty"),
    ('methods=["magic"]', "methods = 'magic': no such method; allowed: quickdrop, retrain"),
    ("seeds=[1, 1]", "seeds = [1, 1]: each entry may be listed once"),
    ('requests=[{kind="client", target=30}]', "requests[0].target = 30: clients are numbered 0 to 9"),
    ('requests=[{kind="sample", target=3}]', "requests[0].kind = 'sample': must be 'class' or 'client'"),
    ('requests=[{kind="class", target=3, when=1}]', "requests[0].when = 1: unknown key"),
    ('membership=["balanced"]', "membership = ['balanced']: balanced is now loss_threshold"),
    ('membership=["entropy_svm", "literal"]', "membership = ['entropy_svm', 'literal']: literal is now entropy_svm"),
    ('membership=["x"]', "membership = 'x': no such attack; allowed: loss_threshold, entropy_svm"),
    ("foo-bar=1", "foo-bar = 1: unknown key; known here: name, about, seeds"),
    ("train.learning-rate=0.1", "train.learning-rate = 0.1: unknown key"),
    ("partition.min_size=0", "partition.min_size = 0: must be at least 1"),
    ("cluster.gpus_per_client=0.00001", "cluster.gpus_per_client = 1e-05: Ray counts GPUs in steps of 0.0001"),
    ("name=a/b", "name = 'a/b': must be made of letters, digits, dots"),
    ("seeds=3", "seeds = 3: must be a list, for example [0, 1]"),
    ("requests={}", "requests = {}: must be a list, for example [{kind = "),
    ('requests=["class:9"]', "requests[0] = 'class:9': must be a table, for example {kind = \"class\", target = 9}"),
    ('requests=[{kind="class"}]', "requests[0].target: is missing"),
    ('requests=[{kind="client", target="dog"}]', "requests[0].target = 'dog': clients have no names"),
    ('requests=[{kind="class", target=1.5}]', "requests[0].target = 1.5: must be a whole number or a string"),
    ("name={}", "name = {}: must be a string"),
    ("sequence=1", "sequence = 1: must be true or false"),
    ("data=digits", "data = 'digits': must be a section, [data] with keys below it"),
    ("data.size=None", "data.size = 'None': TOML has no such value: leave the key out"),
    ("unlearn.max_loss=None", "unlearn.max_loss = 'None': must be a number or 'auto' or 'none'"),
    ("partition.kind=none", "partition.kind = 'none': must be 'dirichlet', 'official' or 'iid'"),
    ("unlearn.max_loss=all", "unlearn.max_loss = 'all': must be a number or 'auto' or 'none'"),
    ("model.options=3", "model.options = 3: must be a table, {key = value}"),
    ("model.options={a=1}", "model.options = {a = 1}: convnet has none"),
    ("sga=3", "sga = 3: must be a section, [sga] with keys below it"),
    ("sweep=3", "sweep = 3: must be a section, [sweep] with keys below it"),
    ("sweep.train.lr=3", 'sweep."train.lr" = 3: must be a list'),
    (
        "sweep={train.lr=[0.1, 0.2]}",
        "sweep.train = {lr = [0.1, 0.2]}: a swept key stands in quotes, since it has a dot: "
        'sweep."train.lr" = [0.1, 0.2]',
    ),
    ("sweep={train={}}", "sweep.train = {}: must be a list"),
    ('sweep={"train.lr"=["fast"]}', "sweep.\"train.lr\" = 'fast': must be a number"),
    ('sweep={"train.lrr"=[1]}', 'sweep."train.lrr" = [1]: unknown key; did you mean lr?'),
    ("train.rounds.x=3", "train.rounds = {x = 3}: must be a whole number"),
    ("train..lr=3", "--set = 'train..lr': a key is SECTION.KEY"),
    ("batch_size=3", "batch_size = 3: unknown key; did you mean train.batch_size or unlearn.batch_size"),
    ("cluster.gpus_per_client=2.0", "cluster.gpus_per_client = 2.0: must be at most 1 or 'auto'"),
]


@pytest.mark.parametrize(("override", "text"), REFUSED, ids=[override for override, _ in REFUSED])
def test_wrong_values_are_refused_in_one_line(tmp_path, override, text):
    """Key, value and what is allowed, in one line."""
    with pytest.raises(BadInput) as caught:
        config.load(job_file(tmp_path), overrides=[override])
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    said = str(caught.value).lower()
    assert not [
        word for word in ("tuple", "dict", "nonetype", "literal[", "input should", "instance of") if word in said
    ]


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    """Missing, not TOML, not UTF-8: the path is named, and the jobs that are there."""
    there = job_file(tmp_path)
    with pytest.raises(BadInput, match=r"no such file; found: .*job\.toml"):
        config.load(tmp_path / "other.toml")
    there.write_text("name = ", encoding="utf-8")
    with pytest.raises(BadInput, match="is not TOML"):
        config.load(there)
    there.write_bytes(b'name = "\xff"')
    with pytest.raises(BadInput, match="cannot be read as UTF-8"):
        config.load(there)


def test_wrong_profiles_and_overrides_are_refused(tmp_path):
    """A profile that is none, a --set without a value, a --set below a plain key."""
    with pytest.raises(BadInput, match="allowed: laptop, smoke"):
        config.load(job_file(tmp_path), profile="phone")
    with pytest.raises(BadInput, match="write KEY=VALUE"):
        config.load(job_file(tmp_path), overrides=["train.rounds"])
    with pytest.raises(BadInput, match=r"name\.x = 1: name is no section: it is 'job'"):
        config.load(job_file(tmp_path), overrides=["name.x=1"])


def test_a_job_is_frozen(tmp_path):
    """Nothing changes a job after it was checked."""
    job = config.load(job_file(tmp_path))
    with pytest.raises(ValidationError):
        job.name = "another"
    with pytest.raises(FrozenInstanceError):
        job.train.rounds = 3


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "9" * 6000], ids=["brackets in brackets", "6,000 digits"])
def test_values_that_no_parser_takes_are_the_users_mistake(tmp_path, value):
    """In a job file and on the command line."""
    job = tmp_path / "job.toml"
    job.write_text(f'name = "job"\nseeds = {value}\n')
    with pytest.raises(BadInput, match="is not TOML"):
        config.load(job)
    job.write_text('name = "job"\n')
    with pytest.raises(BadInput, match="the value cannot be read"):
        config.load(job, overrides=[f"seeds={value}"])
