"""fgpu-exporter: which pod uses how much of a shared GPU, how much it was given, and whether it takes more."""

__version__ = "0.1.0"
