"""The differences between Linux, Windows and macOS, one file per concern; other packages check no platform.

Functions raise OSError, are independent of models, and import platform modules only on their platform.
"""
