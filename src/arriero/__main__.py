"""`python -m arriero` is the command `arriero`."""

from arriero.cli.main import main

if __name__ == "__main__":
    main()
