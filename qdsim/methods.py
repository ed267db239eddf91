"""What each method can do: what jobs are checked against.

Apart from the methods' own files in ``algorithms/``: these need torch, and a job is checked before that is loaded.
"""

from dataclasses import dataclass, field
from typing import Any

ASKED = ("class", "client", "relearn")
"""What a method may be asked: to forget a class, to forget a client, to take it back."""


@dataclass(frozen=True)
class Method:
    """One method, as its paper describes it."""

    title: str
    """Its name in the paper."""
    uses_synthetic: bool = False
    """It works on synthetic sets, so training distils them."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why not, for each of ``ASKED`` that it cannot do."""

    def supports(self, asked: str) -> bool:
        """Tell whether it can do one of ``ASKED``."""
        return asked not in self.reasons

    def declared(self) -> dict[str, Any]:
        """Return what the manifest says of it."""
        return {"title": self.title, **{asked: self.supports(asked) for asked in ASKED}, "reasons": self.reasons}


DECLARED = {
    "quickdrop": Method("QuickDrop", uses_synthetic=True),
    "retrain": Method("Retrain-Or"),
    "sga": Method("SGA-Or"),
    "federaser": Method("FedEraser"),
    "fump": Method(
        "FU-MP",
        reasons={
            "client": "it prunes the channels that tell a class apart, and a client is no class",
            "relearn": "what it prunes stays pruned",
        },
    ),
    "s2u": Method(
        "S2U",
        reasons={"class": "it scales the updates of the client that leaves, and a class belongs to no single client"},
    ),
}
