"""mini_ee: early-exit transformers from scratch. See README.md; the parts are imported by name."""

__version__ = "0.1.0"
