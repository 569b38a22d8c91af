"""`python -m kvrt` is the `kvrt` command."""

from kvrt.cli.main import main

if __name__ == "__main__":
    main()
