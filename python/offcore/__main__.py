"""`python -m offcore` is `offcore`."""

from offcore.tools.cli.main import main

if __name__ == "__main__":
    main()
