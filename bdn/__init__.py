"""BDN puts model weights and datasets on GPU nodes before a job's first command runs."""

__version__ = "0.1.0"
