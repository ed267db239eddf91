"""A shorter one of ``python -m tests.crash``."""

import random

import pytest

from qdsim.store.verify import difference
from tests import crash


@pytest.mark.ray
@pytest.mark.slow
def test_killed_at_random_moments_and_resumed(tmp_path):
    """A client actor and the command, each killed once: nothing lost, nothing twice; FedAdam's state among it."""
    job = tmp_path / "crash.toml"
    text = crash.JOB.replace(', "federaser"', "").replace("rounds = 2,", "rounds = 0,")
    job.write_text(text + 'server = { kind = "adam" }\n', encoding="utf-8")
    assert crash.start(job, tmp_path / "undisturbed", "inline").wait(300) == 0
    strikes = [crash.Strike("client"), crash.Strike("command")]
    happened = crash.disturbed(job, tmp_path / "disturbed", strikes, random.Random(1), 4.0)
    assert len(happened.said) == 2, "the run was too short"
    assert not happened.wrong_codes
    (undisturbed,), (disturbed,) = ((tmp_path / name).glob("crash-*") for name in ("undisturbed", "disturbed"))
    assert difference(undisturbed, disturbed) is None
