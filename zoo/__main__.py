"""``python -m zoo``, and the console script ``zoo``: they catch signals before they import anything else."""

from zoo import signals

__all__ = ["run"]


def run() -> None:
    """Run the ``zoo`` command."""
    signals.catch()
    from zoo.cli import run as run_command

    run_command()


if __name__ == "__main__":
    run()
