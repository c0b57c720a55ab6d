"""``python -m squall`` is the ``squall`` command."""

from squall.cli.app import main

if __name__ == "__main__":
    main()
