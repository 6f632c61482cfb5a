"""``python -m warploom``: the command line where the script ``warploom`` is not on PATH."""

from warploom.cli.main import main

if __name__ == "__main__":
    main()
