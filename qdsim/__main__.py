"""``python -m qdsim``."""

from qdsim.cli import main

if __name__ == "__main__":
    main()
