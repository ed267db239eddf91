"""The keys of a job as ``qdsim keys`` lists them."""

from dataclasses import dataclass

import pytest

from qdsim.errors import BadInput
from qdsim.experiment import config, keys
from qdsim.experiment.keys import Key


def test_every_key_has_a_meaning_and_none_is_forgotten():
    """Each key that a job takes is listed once, with words; every section is there."""
    found = keys.keys_of()
    assert [key.name for key in found if not key.meaning] == []
    names = [key.name for key in found]
    assert len(set(names)) == len(names)
    sections = config.sections()
    for name, kind in sections.items():
        assert {f"{name}.{key}" for key in config._keys_of(kind)} <= set(names), name
    assert {name for name in config.Job.model_fields if name not in sections} <= set(names)


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("train.rounds", "whole number ≥ 1", "200"),
        ("train.participation", "number > 0, ≤ 1", "1.0"),
        ("synthetic.momentum", "number ≥ 0, < 1", "0.5"),
        ("unlearn.max_loss", "number > 0 or 'auto' or 'none'", "'auto'"),
        ("recover.augment", "true or false", "true"),
        ("model.width", "whole number ≥ 1, ≤ 4096", "128"),
        ("partition.kind", "'dirichlet' or 'official' or 'iid'", "'dirichlet'"),
        ("data.size", "whole number ≥ 1", "-"),
        ("name", "string", "required"),
        ("seeds", "list of whole number ≥ 0", "[0, 1, 2, 3, 4]"),
        ("requests", "list of table of kind, target", "[{kind = 'class', target = 9}]"),
        ("sweep", "table", "{}"),
    ],
)
def test_type_range_and_default(name, kind, default):
    """In TOML's words, as the paper and ARCHITECTURE.md's settings have them."""
    found, *_ = keys.keys_of(name)
    assert (found.kind, found.default) == (kind, default)


def test_a_key_declared_again_keeps_the_meaning_of_its_base():
    """One docstring a setting: ``relearn.rounds`` says what every phase's rounds say."""
    (relearn,) = keys.keys_of("relearn.rounds")
    assert relearn.meaning == "Rounds of the phase; 0 leaves it out."


@dataclass(frozen=True)
class Mine:
    """Settings of a method from outside."""

    depth: int = 2
    """How deep.

    Over two lines.
    """
    plain: str = "a"


def test_a_class_of_ones_own():
    """What it declares, with or without a docstring."""
    assert keys._declared(Mine, "mine.") == [
        Key("mine.depth", "whole number", "2", "How deep. Over two lines."),
        Key("mine.plain", "string", "'a'", ""),
    ]


def test_a_section_that_is_none():
    """The sections that there are, in one line."""
    with pytest.raises(BadInput, match=r"no section or key of a job; did you mean train\? there are name, .*train, un"):
        keys.keys_of("trian")
    with pytest.raises(BadInput, match=r"did you mean train\.rounds\?"):
        keys.keys_of("train.round")
    with pytest.raises(BadInput, match=r"no section or key of a job; there are name"):
        keys.keys_of("zzz")
