"""From the Parquet tables of runs to the paper's tables and figures. Imports neither torch nor ray."""

from analysis.load import Results, load

__all__ = ["Results", "load"]
