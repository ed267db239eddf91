"""What a job may be called, and which file that is."""

from pathlib import Path

import pytest

from qdsim.errors import BadInput
from qdsim.experiment import job_files
from tests.conftest import PROJECT


def test_every_job_of_the_project_is_shipped_under_its_stem():
    """In the order of their names, as they are listed."""
    assert job_files.shipped() == {path.stem: path for path in sorted((PROJECT / "jobs").glob("*.toml"))}
    assert "quickstart" in job_files.shipped()


def test_a_stem_means_the_shipped_job_in_any_folder(tmp_path, monkeypatch):
    """A folder of that name is not in its way."""
    monkeypatch.chdir(tmp_path)
    assert job_files.find(Path("quickstart")) == PROJECT / "jobs" / "quickstart.toml"
    (tmp_path / "quickstart").mkdir()
    assert job_files.find(Path("quickstart")) == PROJECT / "jobs" / "quickstart.toml"


def test_a_file_of_that_path_wins_over_a_stem(tmp_path, monkeypatch):
    """Whatever its ending; a file that is only called like the job with its ending is not meant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.toml").touch()
    assert job_files.find(Path("quickstart")) == PROJECT / "jobs" / "quickstart.toml"
    (tmp_path / "quickstart").touch()
    assert job_files.find(Path("quickstart")) == Path("quickstart")


@pytest.mark.parametrize("named", ["jobs/quickstart.toml", "quickstart.toml", "./jobs/quickstart", "/quickstart"])
def test_what_can_only_be_a_path_is_left_as_it_is(tmp_path, monkeypatch, named):
    """It is never taken for a stem, though it is not there; reading it says so."""
    monkeypatch.chdir(tmp_path)
    assert job_files.find(Path(named)) == Path(named)


@pytest.mark.parametrize(
    ("named", "hint"),
    [("tabel2_cifar10", "; did you mean table2_cifar10? jobs of qdsim: "), ("zzz", "; jobs of qdsim: ")],
)
def test_an_unknown_stem_is_told_what_there_is(tmp_path, monkeypatch, named, hint):
    """One line: a close one, if there is any, and all of them."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as caught:
        job_files.find(Path(named))
    said = str(caught.value)
    assert said.startswith(f"JOB = '{named}': no such file, and no job of that name{hint}ablation_matching, ")
    assert all(stem in said for stem in job_files.shipped())
    assert "\n" not in said


def test_the_path_of_a_checkout_tells_its_stem_elsewhere(tmp_path):
    """``jobs/quickstart.toml``, typed where there is no such folder."""
    said = str(job_files.missing(tmp_path / "jobs" / "quickstart.toml"))
    assert said.endswith("no job file there; the job that comes with qdsim is named quickstart")
    assert "comes with" not in str(job_files.missing(tmp_path / "jobs" / "mine.toml"))


def test_an_installed_package_has_its_jobs_inside(tmp_path, monkeypatch):
    """Where it has some, a folder called jobs beside it is somebody else's; a copy without any says so."""
    inside, beside = tmp_path / "qdsim" / "jobs", tmp_path / "jobs"
    monkeypatch.setattr(job_files, "PLACES", (inside, beside))
    assert job_files.shipped() == {}
    with pytest.raises(BadInput, match="jobs of qdsim: none"):
        job_files.find(Path("quickstart"))
    for folder, name in ((beside, "theirs"), (inside, "ours")):
        folder.mkdir(parents=True)
        (folder / f"{name}.toml").touch()
    assert job_files.shipped() == {"ours": inside / "ours.toml"}
