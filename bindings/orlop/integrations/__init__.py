"""Plug-ins for other tools; each imports its tool only when it is itself imported."""
