"""Where the states of clients are found again, by hand."""

from pathlib import Path

from qdsim.algorithms.phase import RoundContext
from qdsim.federation.client_states import ClientStateStore, StateFolder, written_states

HERE, STORED = StateFolder(Path("here"), "run"), StateFolder(Path("stored"), "hash")


def paths(files):
    """Return where files lie."""
    return {client_id: str(file.path) for client_id, file in files.items()}


def at(round_number: int, phase: str = "train") -> RoundContext:
    return RoundContext(0, "", phase, round_number)


def test_before_training_there_is_nothing_to_read():
    """A new actor draws the initial sets again, so no file is needed."""
    assert ClientStateStore().files([0, 1]) == {}


def test_a_lost_clients_state_is_that_of_its_last_finished_step():
    """Round 2 of training, client 0 done and client 1 not: the files of round 2 and of round 1; 2 never took part."""
    states = ClientStateStore()
    states.keep_in(HERE)
    for ctx, clients in ((at(1), (0, 1)), (at(2), (0,))):
        assert states.destination() == HERE
        for client_id in clients:
            states.record(client_id, ctx)
    assert paths(states.files([0, 1, 2])) == {0: "here/0.0-00002.npz", 1: "here/1.0-00001.npz"}
    states.discard(0)  # its update was lost with the node that held it: the step is done again from round 1
    assert paths(states.files([0])) == {0: "here/0.0-00001.npz"}


def test_a_commit_names_the_states_of_its_own_round():
    """Round 2 is committed while client 0 has done round 3; client 1 took part in round 1 alone, 2 in none yet."""
    states = ClientStateStore()
    states.keep_in(HERE)
    for client_id, number in ((0, 1), (1, 1), (0, 2), (0, 3)):
        states.record(client_id, at(number))
    assert states.tags_until("train", 2) == {0: "0-00002", 1: "0-00001"}
    states.record(1, at(1, "finetune"))
    assert states.tags_until("finetune", 1) == {0: "0-00003", 1: "1-00001"}


def test_a_stored_training_is_where_the_rest_is_found():
    """Fine-tuning of a stored training: client 0 has refined its set, client 1 is as it was stored."""
    states = ClientStateStore()
    states.freeze(STORED)
    states.keep_in(HERE)
    states.record(0, at(1, "finetune"))
    assert paths(states.files([0, 1])) == {0: "here/0.1-00001.npz", 1: "stored/1.npz"}
    states.freeze(STORED)
    assert paths(states.files([0, 1])) == {0: "stored/0.npz", 1: "stored/1.npz"}


def test_a_resumed_run_goes_on_from_the_states_of_its_commit():
    """The tags of the commit stand for what the clients had written."""
    states = ClientStateStore()
    states.keep_in(HERE, {3: "0-00007"})
    assert paths(states.files([3, 4])) == {3: "here/3.0-00007.npz"}
    states.record(3, at(8))
    assert states.tags_until("train", 7) == {3: "0-00007"}


def test_states_that_are_written_nowhere_are_lost_with_their_actor():
    """Not before one has changed; and a commit says that it cannot be continued from."""
    states = ClientStateStore()
    assert not states.lost_with_actor
    assert states.destination() is None
    assert states.lost_with_actor
    states.record(0, at(1))
    assert states.tags_until("train", 1) is None


def test_each_state_says_whose_it_is():
    """The run's or the training's, which client's, and after which round of which training."""
    states = ClientStateStore()
    states.freeze(STORED)
    states.keep_in(HERE, {3: "0-00007"})
    files = states.files([3, 4])
    assert (files[3].owner, files[3].content) == ("run", "client 3 after 0-00007 in here")
    assert (files[4].owner, files[4].content) == ("hash", "client 4")


def test_a_copy_is_none_of_a_clients_states(tmp_path):
    """Or it would count among the three that stay."""
    for name in ("3.0-00001.npz", "3.0-00002.npz", "3.0-00002 (copy).npz", "30.0-00001.npz", "3.npz"):
        (tmp_path / name).touch()
    assert [path.name for path in written_states(StateFolder(tmp_path, "run"), 3)] == ["3.0-00001.npz", "3.0-00002.npz"]
