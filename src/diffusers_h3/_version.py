"""Version of the distribution, read by the build and by `diffusers-h3 --version`."""

__version__ = "0.1.0"
