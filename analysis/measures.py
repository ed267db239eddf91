"""What each measure means, in a sentence where it stands."""

from collections.abc import Iterable

from analysis.outputs import Column

MEANINGS = {
    "forget_accuracy": "F-Set: accuracy on what is to be forgotten",
    "retain_accuracy": "R-Set: accuracy on the rest",
    "member_rate": "Member rate: the share of the training samples that a membership attack takes for samples "
    "that the model was trained on",
    "gap": "from retrained: how many points that share is from the one in the retrained model; the aim is 0",
    "auc": "AUC: how well the attack tells members from others; 0.5 is chance",
    "tpr_at_1pct_fpr": "TPR at 1 % FPR: the share of members found when one other sample in a hundred is taken for one",
    "rounds_run": "Rounds: how many the stage took",
    "converged_round": "to conv.: the first round within 1 point of the stage's last R-Set accuracy",
    "client_compute_s": "Time, client compute: seconds of computing, summed over the clients",
    "critical_path_s": "critical path: the seconds of each round's slowest client, summed over the rounds",
    "samples": "samples: how many went into gradients, repeated ones counted again",
    "data_size": "Data size: distinct samples that the stage works on",
    "storage_bytes": "Storage: what clients and server keep to be able to unlearn",
}
"""By the last part of a column's key."""


def meanings(columns: Iterable[Column]) -> list[str]:
    """Return what the measures of some columns mean, each once, in the order of the columns."""
    found = dict.fromkeys(MEANINGS.get(column.key.rpartition(".")[2], "") for column in columns)
    return [text for text in found if text]
