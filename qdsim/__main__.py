"""``python -m qdsim``."""

from qdsim.cli.commands import main

if __name__ == "__main__":
    main()
