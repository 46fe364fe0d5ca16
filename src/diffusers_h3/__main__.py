"""`python -m diffusers_h3` is the command line `diffusers-h3`."""

from .cli import main


if __name__ == "__main__":
    main()
