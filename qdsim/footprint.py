"""What a run will take of its storage, estimated from the plan alone."""

from qdsim.plan import Cell, Plan, SeedPlan

PART_BYTES = 16_000
"""Of a Parquet part with a round's rows, nearly all of it its schema."""
TABLES_A_ROUND = 3
CLIENT_ROW_BYTES = 100
VALUES_A_PIXEL = 2
"""A synthetic image is stored with its velocity."""
FLOAT_BYTES = 4


def storage_bytes(plan: Plan) -> int:
    """Return about how many bytes a run writes: tables, models, trained states, and a checkpoint at its largest."""
    tables = models = states = checkpoint = 0
    for cell, seed_plan in plan.federations():
        model, sets = model_bytes(cell), synthetic_bytes(cell, seed_plan)
        first = model * cell.job.partition.clients
        states += model + first + sets
        # a file and the one that is about to replace it; of synthetic sets the last three, and the one being written
        checkpoint = max(checkpoint, 2 * 2 * model + first + 4 * sets)
        for phase in cell.training():
            tables += _rows_bytes(phase.stage.rounds, cell)
    for task in plan.tasks():
        models += model_bytes(task.cell)
        tables += sum(_rows_bytes(phase.stage.rounds, task.cell) for phase in task.phases())
    return tables + models + states + checkpoint


def _rows_bytes(rounds: int, cell: Cell) -> int:
    return rounds * (TABLES_A_ROUND * PART_BYTES + cell.job.partition.clients * CLIENT_ROW_BYTES)


def model_bytes(cell: Cell) -> int:
    """Return the size of the model's parameters."""
    return cell.model.num_params * FLOAT_BYTES


def synthetic_bytes(cell: Cell, seed_plan: SeedPlan) -> int:
    """Return what the synthetic sets of all clients take on disk; 0 where none are distilled."""
    if not cell.distils:
        return 0
    images = int(seed_plan.partition.synthetic_counts(cell.hyper.synthetic.scale).sum())
    return images * cell.model.channels * cell.model.size**2 * FLOAT_BYTES * VALUES_A_PIXEL
