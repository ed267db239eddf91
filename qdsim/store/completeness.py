"""Is a run whole? One check for all who rely on it: resuming, ``show``, ``verify`` and the analysis.

That every part is the run's own and lies under the name of its rows is checked as it is read
(:func:`qdsim.store.run_directory.read_part`). Here rows are held against each other and against the manifest: none
twice, every round that a phase counts in all tables, every client that a round counts, and in a finished run all that
it was asked for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyarrow as pa

from qdsim.errors import BadInput
from qdsim.store import arrays, run_directory
from qdsim.store.run_directory import START_ANEW, Misplaced, identity_of, part_name, printable
from qdsim.store.storage import StoragePath
from qdsim.store.tables import COLUMNS, RENAMED_ATTACKS

PHASE = ["cell", "seed", "method", "request", "phase"]
"""What names a phase in every table."""
ROW = [*PHASE, "round", "client_id", "class", "attack", "subset"]
"""What names a row: those of them that its table has. Of ``images`` a client and class may have several."""


@dataclass(frozen=True)
class Examined:
    """The tables of a run as they are, and what is wrong with them."""

    tables: dict[str, pa.Table]
    problem: BadInput | None


def examine(run_dir: StoragePath) -> Examined:
    """Read all tables of a run, finished or not, and see whether it is whole; a damaged part is refused at once."""
    manifest = run_directory.read_manifest(run_dir)
    owner = identity_of(run_dir, manifest)
    found: dict[str, pa.Table] = {}
    problems: list[BadInput] = []
    for table in COLUMNS:
        parts = run_directory.read_parts(run_dir, table)
        for path, data in parts:
            try:
                run_directory.check_place(data, table, path.stem, owner)
            except Misplaced as error:
                problems.append(run_directory.misplaced(path, error))
        joined = run_directory.join(run_dir, table, parts)
        if joined is not None:
            found[table] = joined
    if not problems:
        problems = [BadInput("RUN", str(run_dir), f"it is not whole: {said}") for said in faults(manifest, found)]
    return Examined(found, problems[0] if problems else None)


def read(run_dir: StoragePath) -> dict[str, pa.Table]:
    """Return all tables of a run; refuse one that is not whole, with what is wrong in one line."""
    examined = examine(run_dir)
    if examined.problem is not None:
        raise examined.problem
    return examined.tables


def check_to_resume(run_dir: StoragePath) -> None:
    """Refuse to resume a run of which a part is damaged or another's, or rows of a finished round are gone."""
    manifest = run_directory.read_manifest(run_dir)
    owner = identity_of(run_dir, manifest)
    found: dict[str, pa.Table] = {}
    for table in COLUMNS:
        parts = []
        for path in run_directory.part_files(run_dir, table):
            try:
                parts.append(run_directory.read_part(path, table, owner))
                run_directory.check_columns(parts[-1], table)
            except Misplaced as error:
                raise run_directory.misplaced(path, error) from None
            except (OSError, ValueError, KeyError, pa.ArrowException) as error:
                raise arrays.damaged(path, error, START_ANEW) from None
        if parts:
            found[table] = pa.concat_tables(parts, promote_options="permissive")
    for said in faults(manifest | {"state": "interrupted"}, found):
        raise BadInput("RUN", str(run_dir), f"it is not whole: {said}; {START_ANEW}")


def faults(manifest: Mapping[str, Any], found: Mapping[str, pa.Table]) -> list[str]:
    """Say what is missing in a run's tables or there twice, a line for each; nothing where the run is whole."""
    said = [*_twice(found)]
    if "rounds" in found and "stages" in found:
        rounds, stages = _frame(found["rounds"]), _frame(found["stages"])
        said += _lost_rounds(found, rounds, stages)
        said += _lost_of_training(manifest, found, stages)
        if manifest.get("state") == "done":
            said += _lost_phases(rounds, stages)
            said += _unserved(manifest, stages)
            said += _lost_attacks(manifest, found, stages)
    elif manifest.get("state") == "done":
        said += [f"there is no table {table}" for table in ("rounds", "stages") if table not in found]
    return [printable(line).replace("\n", " ") for line in said]


def _frame(data: pa.Table) -> pd.DataFrame:
    kept = [*ROW, "rounds_run", "participants_received", "num_synthetic"]
    frame: pd.DataFrame = data.select([name for name in kept if name in data.column_names]).to_pandas()
    return frame


def _twice(found: Mapping[str, pa.Table]) -> Iterator[str]:
    for table, data in found.items():
        frame = _frame(data)
        again = frame[frame.duplicated([name for name in ROW if name in frame])]
        if len(again) and table != "images":
            yield f"table {table} has {len(again)} rows twice, first one of {_place(again.iloc[0])}"


def _place(row: Mapping[str, Any] | pd.Series) -> str:
    number = f", round {row['round']}" if row.get("round") else ""
    return part_name(*(row[name] for name in PHASE)) + number


def _lost_rounds(found: Mapping[str, pa.Table], rounds: pd.DataFrame, stages: pd.DataFrame) -> Iterator[str]:
    """Say which rounds that a finished phase counts are gone, and what of the other tables belongs to rounds there are.

    A round's row is written last, so where it is the others are as well.
    """
    a_round = [*PHASE, "round"]
    rounds = rounds.drop_duplicates(a_round)
    ended = stages.drop_duplicates(PHASE).set_index(PHASE)["rounds_run"]
    lost = ended - rounds.groupby(PHASE).size().reindex(ended.index).fillna(0)
    yield from _said_lost(lost, "rounds that table stages counts", "rounds")
    received = rounds.set_index(a_round)["participants_received"].fillna(0)
    for table, expected, what in (
        ("classes", received * 0 + 1, "rounds that table rounds has"),
        ("clients", received, "clients that table rounds counts"),
    ):
        rows = _frame(found[table]) if table in found else pd.DataFrame(columns=a_round)
        counted = rows.groupby(a_round).size().reindex(expected.index).fillna(0)
        yield from _said_lost(expected - counted, what, table)


def _said_lost(lost: "pd.Series[Any]", what: str, table: str) -> Iterator[str]:
    lost = lost.clip(lower=0)
    if lost.sum() > 0:
        first = dict(zip(map(str, lost.index.names), lost[lost > 0].index[0], strict=True))
        yield f"{lost.sum():.0f} {what} are not in table {table}, first of {_place(first)}"


def _lost_phases(rounds: pd.DataFrame, stages: pd.DataFrame) -> Iterator[str]:
    alone = set(rounds[PHASE].itertuples(index=False, name=None)) - set(
        stages[PHASE].itertuples(index=False, name=None)
    )
    if alone:
        yield f"{len(alone)} phases of table rounds have no row in table stages, first {part_name(*min(alone))}"


def _unserved(manifest: Mapping[str, Any], stages: pd.DataFrame) -> Iterator[str]:
    """Say which method has no row for a request; the last of a sequence may have left nothing to train on."""
    config = manifest.get("config") or {}
    served = set(stages[PHASE[:-1]].itertuples(index=False, name=None))
    lost = []
    for cell in manifest.get("cells") or []:
        for seed, requests in (cell.get("requests") or {}).items():
            asked = requests[:-1] if config.get("sequence") and len(requests) > 1 else requests
            for method in manifest.get("method_names") or config.get("methods") or []:
                key = (str(cell.get("cell", "")), int(seed), str(method))
                lost += [(*key, request) for request in asked if (*key, request) not in served]
    if lost:
        c, s, m, r = lost[0]
        yield f"done, but {m} of seed {s} {c} is not in table stages for {r}"


def _lost_of_training(
    manifest: Mapping[str, Any], found: Mapping[str, pa.Table], stages: pd.DataFrame
) -> Iterator[str]:
    """Say which federation's partition or images are missing: all, in a finished run; else those that serve requests.

    Both are written before a federation's first request, and not again where the run is resumed after it.
    """
    of_federation = ["cell", "seed"]
    trained = set(stages[stages["method"] != "shared"][of_federation].itertuples(index=False, name=None))
    if manifest.get("state") == "done":
        trained |= {
            (str(cell.get("cell", "")), int(seed))
            for cell in manifest.get("cells") or []
            for seed in (cell.get("partitions") or {})
        }
    split = _frame(found["partitions"]) if "partitions" in found else pd.DataFrame(columns=of_federation)
    lost = trained - set(split[of_federation].itertuples(index=False, name=None))
    if lost:
        yield f"table partitions has no rows of {_federation(min(lost))}"
    config = manifest.get("config") or {}
    gallery = (config.get("synthetic") or {}).get("gallery")
    if gallery and "synthetic.gallery" not in (config.get("sweep") or {}) and "num_synthetic" in split:
        distils = set(split[split["num_synthetic"] > 0][of_federation].itertuples(index=False, name=None))
        shown = _frame(found["images"]) if "images" in found else pd.DataFrame(columns=of_federation)
        unseen = (trained & distils) - set(shown[of_federation].itertuples(index=False, name=None))
        if unseen:
            yield f"table images has no rows of {_federation(min(unseen))}"


def _lost_attacks(manifest: Mapping[str, Any], found: Mapping[str, pa.Table], stages: pd.DataFrame) -> Iterator[str]:
    """Say which model that has forgotten was not attacked as the job asks."""
    config = manifest.get("config") or {}
    named = manifest.get("attack_names") or config.get("membership") or []
    attacks = {str(RENAMED_ATTACKS.get(name, name)) for name in named}
    keys = ["cell", "seed", "method", "request"]
    forgot = stages[(stages["method"] != "shared") & (stages["phase"] != "relearn")]
    if config.get("sequence"):  # its last request may leave no members to attack with
        last = [labels[-1] for cell in manifest.get("cells") or [] for labels in (cell.get("requests") or {}).values()]
        forgot = forgot[~forgot["request"].isin(last)]
    expected = {(*key, attack) for key in forgot[keys].itertuples(index=False, name=None) for attack in sorted(attacks)}
    attacked = _frame(found["membership"]) if "membership" in found else pd.DataFrame(columns=[*keys, "attack"])
    unattacked = expected - set(attacked[[*keys, "attack"]].itertuples(index=False, name=None))
    if unattacked:
        c, s, m, r, attack = min(unattacked)
        yield f"table membership lacks {attack} on {part_name(c, s, m, r, '')}"


def _federation(key: tuple[str, int]) -> str:
    return f"seed {key[1]} {key[0]}".rstrip()
