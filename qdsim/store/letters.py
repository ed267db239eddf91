"""Letters of results and their titles that the encoding of a terminal may not have."""

import codecs
import sys
import unicodedata
from io import TextIOWrapper

PLAIN = {
    **{"±": "+-", "×": "x", "…": "...", "−": "-", "–": "-", "→": "->", "≥": ">=", "≤": "<=", "§": "Sec. "},
    **{"α": "alpha", "η": "eta", "θ": "theta", "μ": "mu", "ς": "sigma", "σ": "sigma", "Δ": "Delta"},
}
"""What stands for letters that a terminal's encoding has not."""


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """Return what is printed instead of letters that cannot be: alike, or their numbers."""
    assert isinstance(error, UnicodeEncodeError)
    found = ""
    for letter in error.object[error.start : error.end]:
        alike = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
        found += PLAIN.get(letter) or alike or letter.encode("ascii", "backslashreplace").decode()
    return found, error.end


def print_whatever_the_encoding() -> None:
    """Have nothing fail for a letter that the encoding of the output has not (LANG=C, PYTHONIOENCODING=ascii)."""
    codecs.register_error("qdsim", _plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="qdsim")
