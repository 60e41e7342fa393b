"""``python -m zoo``: the ``zoo`` command."""

from zoo.cli import run

if __name__ == "__main__":
    run()
