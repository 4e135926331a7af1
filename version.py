"""The package's version, in a module light enough to import from anywhere."""

__version__ = "0.1.0"
