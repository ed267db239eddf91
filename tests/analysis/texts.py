"""What can be told of a figure's words without looking at it: none outside the picture, no two on each other."""

from collections.abc import Iterator
from itertools import combinations

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from analysis import style
from analysis.outputs import Figure

SLACK = 1.0
"""Normalization that boxes may share: a box is a little larger than its letters."""


def faults(figure: Figure) -> list[str]:
    """Draw a figure and return each word that is cut off, and each pair that lies on each other."""
    with mpl.rc_context(style.RC):
        canvas = FigureCanvasAgg(figure.draw())
        canvas.draw()  # type: ignore[no-untyped-call]
    words = [w for w in _words(canvas.figure) if w.get_text().strip()]
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    boxes = [(w.get_text(), w.get_window_extent(renderer)) for w in words]
    wide, high = canvas.get_width_height()
    found = [
        f"{figure.stem}: {word!r} is cut off"
        for word, box in boxes
        if min(box.x0, box.y0) < -SLACK or box.x1 > wide + SLACK or box.y1 > high + SLACK
    ]
    for (one, a), (other, b) in combinations(boxes, 2):
        aside = min(a.x1, b.x1) - max(a.x0, b.x0) <= SLACK
        if not aside and min(a.y1, b.y1) - max(a.y0, b.y0) > SLACK:
            found.append(f"{figure.stem}: {one!r} lies on {other!r}")
    return found


def _words(artist: Artist) -> Iterator[Text]:
    if not artist.get_visible():
        return
    if isinstance(artist, Text):
        yield artist
    elif isinstance(artist, Axis):
        least, most = sorted(artist.get_view_interval())
        yield from (t.label1 for t in artist.get_major_ticks() if least <= t.get_loc() <= most)
        yield from (artist.label, artist.offsetText)
    else:
        for child in artist.get_children():
            yield from _words(child)
