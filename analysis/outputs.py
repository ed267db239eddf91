"""A table or a figure of the report, and how it is written: CSV, LaTeX, Markdown and HTML; PNG and PDF."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import style

MISSING = "—"
PAGE_LETTERS, COLUMN_LETTERS, LABEL_LETTERS = 115, 55, 38
"""What fits across a page, a column of a two-column paper, and a row's label of 6 cm, in LaTeX's small type."""
PAGE_LINES = 60
"""What fits on a page, rules among them."""


class Missing(Exception):
    """A table or figure that the runs at hand do not cover; its text says what would."""


@dataclass(frozen=True)
class Column:
    """One column of a table: where its figure is found, and how it is written."""

    key: str
    label: str
    group: str = ""
    kind: str = "percent"
    """percent, points (a difference of percents), count, seconds, times, bytes, number or text."""

    @property
    def head(self) -> str:
        """The label with its unit."""
        unit = {"percent": "%", "points": "points", "seconds": "s"}.get(self.kind)
        return f"{self.label} ({unit})" if unit else self.label


@dataclass(frozen=True)
class Table:
    """Figures by row and column, each with mean, sd, n, the paper's value and the difference."""

    stem: str
    title: str
    columns: Sequence[Column]
    figures: pd.DataFrame
    """Long: ``row, column, mean, sd, n, paper, difference``; ``row`` is a label, in the order of the table."""
    row_label: str = "method"
    notes: Sequence[str] = ()
    label: str = ""
    """What it is called under its experiment's heading; by default the title."""
    caption: str = ""
    role: str = ""
    """headline: the first thing that the page says of an experiment; folded: it folds away."""

    def lines(self) -> list[list[str]]:
        """Return the rows as text: what we measured, then the paper's and the difference where it has any."""
        found = []
        for row, own in self.figures.groupby("row", sort=False):
            cells = {f.column: f for f in own.itertuples(index=False)}
            n = int(own["n"].max()) if own["n"].notna().any() else 0
            found.append([str(row), f"n = {n}" if n else "", *(_ours(c, cells.get(c.key), n) for c in self.columns)])
            if own["paper"].notna().any():
                found.append(["", "paper", *(_paper(c, cells.get(c.key)) for c in self.columns)])
            if own["difference"].notna().any():
                found.append(["", "difference", *(_difference(c, cells.get(c.key)) for c in self.columns)])
        return found

    def write(self, folder: Path) -> list[Path]:
        """Write CSV (one figure a row), LaTeX (booktabs) and Markdown."""
        paths = [folder / f"{self.stem}{end}" for end in (".csv", ".tex", ".md")]
        fractions = ("percent", "points")
        units = {column.key: "fraction" if column.kind in fractions else column.kind for column in self.columns}
        data = self.figures.assign(kind=self.figures["column"].map(units))
        data.rename(columns={"row": "label"}).to_csv(paths[0], index=False)
        paths[1].write_text(self.latex(), encoding="utf-8")
        paths[2].write_text(self.markdown(), encoding="utf-8")
        return paths

    def markdown(self) -> str:
        """Return a Markdown table with its title and notes."""
        head = [self.row_label, "", *(" ".join(filter(None, (c.group, c.head))) for c in self.columns)]
        rows = [head, ["---"] * len(head), *self.lines()]
        text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"**{self.title}**\n\n{text}\n{notes}\n"

    def latex(self) -> str:
        """Return a booktabs table that needs no package but booktabs.

        Of a wide one, parts stand under each other; where they are more than a page is long, it goes on in another.
        """
        parts = self._parts()
        fits = len(parts) == 1 and self._letters(self.columns) <= COLUMN_LETTERS
        kind = "table" if fits else "table*"  # with a star it spans both columns of a paper
        floats: list[list[str]] = []
        for tabular in (part._tabular() for part in parts):
            if floats and len(floats[-1]) + len(tabular) < PAGE_LINES:
                floats[-1] += [r"\par\medskip", *tabular]
            else:
                floats.append(tabular)
        notes = [rf"% {line}" for note in self.notes for line in note.splitlines()]
        lines = []
        for i, tabulars in enumerate(floats):
            caption = _tex(self.title) + (", continued" if i else "")
            lines += [rf"\begin{{{kind}}}", r"\centering", r"\small", r"\setlength{\tabcolsep}{4pt}"]
            lines += [rf"\caption{{{caption}}}", *tabulars, *([] if i else notes), rf"\end{{{kind}}}"]
        return "\n".join(lines) + "\n"

    def _tabular(self) -> list[str]:
        long = any(len(label) > LABEL_LETTERS for label in self.figures["row"].astype(str))
        label = "p{6cm}" if long else "l"
        lines = [rf"\begin{{tabular}}{{{label}l{'r' * len(self.columns)}}}", r"\toprule"]
        spans = self._spans()
        if any(group for group, _, _ in spans):
            heads = [rf"\multicolumn{{{last - first + 1}}}{{c}}{{{_tex(group)}}}" for group, first, last in spans]
            lines.append(" & & " + " & ".join(heads) + r" \\")
            lines.append(" ".join(rf"\cmidrule(lr){{{f + 3}-{t + 3}}}" for group, f, t in spans if group))
        head = [self.row_label, "", *(c.head for c in self.columns)]
        lines += [" & ".join(map(_tex, head)) + r" \\", r"\midrule"]
        lines += [" & ".join(map(_tex, row)) + r" \\" for row in self.lines()]
        return [*lines, r"\bottomrule", r"\end{tabular}"]

    def _parts(self) -> list["Table"]:
        """Return tables of some of the columns each, a page wide; a group is cut only where it must be."""
        pieces: list[list[Column]] = []
        for _, first, last in self._spans():
            group = list(self.columns[first : last + 1])
            if pieces and self._letters([*pieces[-1], *group]) <= PAGE_LETTERS:
                pieces[-1] += group
                continue
            pieces.append([])
            for column in group:
                if pieces[-1] and self._letters([*pieces[-1], column]) > PAGE_LETTERS:
                    pieces.append([])
                pieces[-1].append(column)
        return [self._only(piece) for piece in pieces]

    def _only(self, columns: Sequence[Column]) -> "Table":
        kept = self.figures["column"].isin([column.key for column in columns])
        return replace(self, columns=columns, figures=self.figures[kept])

    def _letters(self, columns: Sequence[Column]) -> int:
        """Return how wide these columns are in print, in letters; two more for the space between columns."""
        part = self._only(columns)
        rows = [[self.row_label, "", *(c.head for c in columns)], *part.lines()]
        wide = [max(len(cell) for cell in column) + 2 for column in zip(*rows, strict=True)]
        wide[0] = min(wide[0], LABEL_LETTERS)
        for group, first, last in part._spans():  # a long name over narrow columns widens them
            wide[2 + first] += max(0, len(group) + 2 - sum(wide[2 + first : 3 + last]))
        return sum(wide)

    def html(self) -> str:
        """Return the table for the page."""
        spans = "".join(
            f'<th scope="colgroup" colspan="{last - first + 1}">{_esc(group)}</th>'
            for group, first, last in self._spans()
        )
        groups = f'<tr class="groups"><td colspan="2"></td>{spans}</tr>' if any(c.group for c in self.columns) else ""
        head = "".join(
            f'<th scope="col">{_esc(text)}</th>' for text in [self.row_label, "", *(c.head for c in self.columns)]
        )
        body = ""
        for row in self.lines():
            css = {"paper": "paper", "difference": "paper"}.get(row[1], "ours")
            cells = "".join(f"<td>{_esc(cell)}</td>" for cell in row[1:])
            body += f'<tr class="{css}"><th scope="row">{_esc(row[0])}</th>{cells}</tr>'
        return f'<div class="scroll"><table><thead>{groups}<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def _spans(self) -> list[tuple[str, int, int]]:
        """Return runs of columns of one group: name, first, last."""
        spans: list[tuple[str, int, int]] = []
        for i, column in enumerate(self.columns):
            if spans and spans[-1][0] == column.group:
                spans[-1] = (column.group, spans[-1][1], i)
            else:
                spans.append((column.group, i, i))
        return spans


@dataclass(frozen=True)
class Figure:
    """A picture, drawn when it is written."""

    stem: str
    title: str
    draw: Callable[[], mpl_figure.Figure]
    notes: Sequence[str] = ()
    label: str = ""
    caption: str = ""
    has_photographs: bool = False
    """It shows images, whose colours stay as they are on a dark page."""

    def write(self, folder: Path) -> list[Path]:
        """Write PNG and PDF."""
        paths = [folder / f"{self.stem}.png", folder / f"{self.stem}.pdf"]
        with mpl.rc_context(style.RC):
            drawn = self.draw()
            drawn.savefig(paths[0], metadata={"Software": None})
            drawn.set_layout_engine("none")  # laid out once: what was found for the first file holds for the second
            drawn.savefig(paths[1], metadata={"CreationDate": None})
        return paths


def text(kind: str, value: float, signed: bool = False) -> str:
    """Write a figure as its kind is written."""
    if value is None or math.isnan(value):
        return MISSING
    sign = "+" if signed and value > 0 else ""
    if kind == "percent":
        return f"{sign}{100 * value:.2f}"
    if kind == "points":
        return f"{100 * value:+.2f}" if round(100 * value, 2) else "0.00"
    if kind == "bytes":
        return f"{sign}{_bytes(value)}"
    if kind == "count":
        return f"{sign}{value:,.0f}" if float(value).is_integer() else f"{sign}{value:,.1f}"
    if kind == "times" and abs(value) < 0.95:
        return f"{sign}{value:.2g}×"
    if kind == "times":
        return f"{sign}{value:,.1f}×" if abs(value) < 100 else f"{sign}{value:,.0f}×"
    if kind == "seconds":
        return f"{sign}{value:,.2f}" if abs(value) < 100 else f"{sign}{value:,.0f}"
    return f"{sign}{value:.3g}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def _ours(column: Column, figure: Any, n: int) -> str:
    if figure is None:
        return MISSING
    if column.kind == "text":
        return str(figure.mean)
    mean, sd = text(column.kind, figure.mean), figure.sd
    if mean == MISSING:
        return mean
    spread = "" if pd.isna(sd) else f" ± {text(column.kind, sd).strip('+×')}"
    return f"{mean}{spread}" if figure.n == n else f"{mean}{spread} (n = {figure.n:.0f})"


def _paper(column: Column, figure: Any) -> str:
    if figure is None or pd.isna(figure.paper):
        return MISSING
    value = figure.paper
    return str(value) if column.kind == "text" else text(column.kind, value)


def _difference(column: Column, figure: Any) -> str:
    if figure is None or column.kind == "text" or pd.isna(figure.difference):
        return MISSING
    return text(column.kind, figure.difference, signed=True)


def _esc(value: str) -> str:
    return html.escape(value)


TEX = {"\\": r"\textbackslash{}", "%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"}
TEX |= {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "—": "---",
    "α": r"$\alpha$",
}
TEX |= {
    "≤": r"$\leq$",
    "−": "$-$",
    "→": r"$\to$",
    "✓": "yes",
    "✗": "no",
    "ς": r"$\varsigma$",
    "·": r"$\cdot$",
    "§": r"\S{}",
}


def _tex(value: str) -> str:
    return "".join(TEX.get(character, character) for character in value)
